"""Reads and writes Hugging Face model folders: checked JSON, safetensors only, nothing from a folder is ever run."""

from __future__ import annotations

from jattn.llm.load.chat_template import ChatTemplate
from jattn.llm.load.config import parse_config, render_config
from jattn.llm.load.families import Family, Key, known_families, register_family
from jattn.llm.load.generation import GenerationDefaults, load_generation_defaults
from jattn.llm.load.model import embedded_model_folder, load_model
from jattn.llm.load.save import save_model
from jattn.llm.load.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
    "Family",
    "GenerationDefaults",
    "Key",
    "TextTokenizer",
    "embedded_model_folder",
    "known_families",
    "load_generation_defaults",
    "load_model",
    "load_tokenizer",
    "parse_config",
    "register_family",
    "render_config",
    "save_model",
]
