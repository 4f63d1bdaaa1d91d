"""Reads and writes Hugging Face model folders: checked JSON, safetensors only, nothing from a folder is ever run."""

from __future__ import annotations

from jattn.load.chat_template import ChatTemplate
from jattn.load.config import parse_config, render_config
from jattn.load.model import embedded_model_folder, load_model, save_model
from jattn.load.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
    "TextTokenizer",
    "embedded_model_folder",
    "load_model",
    "load_tokenizer",
    "parse_config",
    "render_config",
    "save_model",
]
