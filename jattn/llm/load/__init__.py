"""Reads and writes Hugging Face model folders, and reads GGUF files: all is checked, nothing in them is ever run."""

from __future__ import annotations

from jattn.llm.load.adapter_save import save_adapter
from jattn.llm.load.chat_template import ChatTemplate
from jattn.llm.load.config import parse_config, render_config
from jattn.llm.load.families import Family, Key, known_families, register_family
from jattn.llm.load.generation import GenerationDefaults
from jattn.llm.load.model import embedded_model_folder, load_model
from jattn.llm.load.save import convert_model, save_model
from jattn.llm.load.sentence import SentenceModules
from jattn.llm.load.source import load_generation_defaults, load_sentence_modules, load_tokenizer
from jattn.llm.load.tokenizer import TextTokenizer

__all__ = [
    "ChatTemplate",
    "Family",
    "GenerationDefaults",
    "Key",
    "SentenceModules",
    "TextTokenizer",
    "convert_model",
    "embedded_model_folder",
    "known_families",
    "load_generation_defaults",
    "load_model",
    "load_sentence_modules",
    "load_tokenizer",
    "parse_config",
    "register_family",
    "render_config",
    "save_adapter",
    "save_model",
]
