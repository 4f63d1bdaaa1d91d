"""Qwen 2 and 3."""

from __future__ import annotations

from jattn.llm.load.families.family import BOTH_BIASES, Family, Raw
from jattn.llm.load.families.gguf import Gguf

#: The keys of Qwen's files without windows.
NO_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


def above(layer: int, raw: Raw) -> bool:
    """Returns whether a layer has the window: those above the first max_window_layers do."""
    return layer >= raw["max_window_layers"]


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults=NO_WINDOW,
    options={"attention_bias": True},
    windows=above,
    gguf=Gguf(architecture="qwen2", pre_tokenizer="qwen2"),
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    keys={"attention_bias": BOTH_BIASES},
    defaults=NO_WINDOW | {"head_dim": 128},
    options={"qk_norm": "head"},
    windows=above,
    gguf=Gguf(architecture="qwen3", pre_tokenizer="qwen2"),
)
