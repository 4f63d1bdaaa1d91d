"""Cohere 2 and EXAONE 4: rotary embedding in the layers with a window alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jattn.llm.load.families.family import Raw, every
from jattn.llm.load.families.norms import COHERE, OLMO2


def slides(layer: int, raw: Raw) -> bool:
    """Returns whether a layer has the window by sliding_window_pattern: a number, or a text such as "LLLG"."""
    pattern = raw.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return pattern[layer % len(pattern)] == "L" and layer != raw["num_hidden_layers"] - 1
    return bool(pattern) and every(pattern)(layer, raw)


def without_rope_in_full_layers(raw: Raw) -> dict[str, Any]:
    """Returns the layers without a window, which have no rotary embedding either; none of a model without windows."""
    if raw.get("sliding_window") is None:
        return {}
    types, count = raw.get("layer_types"), raw["num_hidden_layers"]
    full = [not slides(layer, raw) for layer in range(count)]
    if isinstance(types, list):
        full = [kind == "full_attention" for kind in types]
    return {"nope_layers": tuple(layer for layer, sees_all in enumerate(full) if sees_all)}


# Command R7B and A: rotation in the layers with a window alone.
COHERE2 = replace(
    COHERE,
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    keys={name: key for name, key in COHERE.keys.items() if name != "use_qk_norm"},
    defaults={
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 10000.0,
    },
    derive=without_rope_in_full_layers,
    ignored=(
        *("order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing", "head_dim"),
        *("use_gated_activation", "use_parallel_block", "use_parallel_embedding"),
    ),
    inert={"use_qk_norm": False},
    absent=("head_dim",),
    windows=slides,
)

# EXAONE 4 (arXiv:2507.11407): OLMo 2's norms, by head for queries and keys; rotation in layers with a window alone.
EXAONE4 = replace(
    OLMO2,
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    keys={},
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    options={**OLMO2.options, "norm_type": "rms_norm", "qk_norm": "head"},
    derive=without_rope_in_full_layers,
    windows=slides,
)
