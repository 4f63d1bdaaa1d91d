"""Gemma 3 (arXiv:2503.19786; text) and EmbeddingGemma: norms on queries and keys, two bases of rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jattn.llm.load.families.family import Family, Raw, Whole, every
from jattn.llm.load.families.gemma import DEFAULTS, IGNORED, INERT, KEYS, NAMES, scale_of_gguf, scaled_embedding
from jattn.llm.load.families.gguf import Gguf
from torch_core.base.errors import Unsupported


def _pattern(layer: int, raw: Raw) -> bool:
    return every(raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6)))(layer, raw)


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    keys={name: key for name, key in KEYS.items() if name != "attn_logit_softcapping"},
    defaults=DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0},
    options={"norm_type": "gemma_rms_norm", "norm_placement": "both", "qk_norm": "head"},
    derive=scaled_embedding,
    # transformers reads the key and caps nothing.
    inert=INERT | {"attn_logit_softcapping": None},
    ignored=IGNORED,
    windows=_pattern,
    rope_keys={"rope_local_base_freq": "rope_local_base_freq"},
    names=NAMES,
    gguf=Gguf(architecture="gemma3", values=scale_of_gguf(62), norm_offset=1.0),
    whole=Whole(
        architecture="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
)


def _two_sided(raw: Raw) -> dict[str, Any]:
    """Refuses a model without a head whose tokens see the past alone."""
    if raw.get("use_bidirectional_attention") is not True:
        wanted = "this build reads Gemma3TextModel where it is true"
        raise Unsupported("use_bidirectional_attention", value=raw.get("use_bidirectional_attention"), wanted=wanted)
    return scaled_embedding(raw)


# EmbeddingGemma (arXiv:2509.20354): tokens see both sides; the window counts both.
EMBEDDING_GEMMA = replace(
    GEMMA3,
    architecture="Gemma3TextModel",
    keys={name: key for name, key in GEMMA3.keys.items() if name != "final_logit_softcapping"},
    defaults={name: value for name, value in GEMMA3.all_defaults.items() if name != "final_logit_softcapping"},
    options={**GEMMA3.options, "is_encoder": True},
    derive=_two_sided,
    derived={"use_bidirectional_attention": True},
    inert={"attn_logit_softcapping": None, "final_logit_softcapping": None},
    two_sided_window="sliding_window",
    names={**NAMES, "embed_tokens": "embed_tokens", "norm": "norm", "layer": "layers.{layer}."},
    prefix="",
    gguf=None,
    whole=None,
)
