"""Decoders whose norms or rotations are elsewhere than Llama's: Command R, OLMo, GLM, EXAONE, Helium, InternLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, Raw, every


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


# Command R: attention and feed-forward side by side after one layer norm, neighbours rotated, scaled logits.
COHERE = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    keys={
        "attention_bias": BOTH_BIASES,
        "layer_norm_eps": "rms_norm_eps",
        "logit_scale": "logits_scale",
        "use_qk_norm": Key("qk_norm", lambda used: "per_head" if used else None, lambda kind: kind is not None),
    },
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500000.0},
    options={"norm_type": "layer_norm", "parallel_block": "shared_norm"},
    rotates_neighbours=True,
)

# OLMo 2 and 3 (arXiv:2501.00656): norms after each branch, and on all heads of queries and of keys at once.
OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    keys={"attention_bias": BOTH_BIASES},
    defaults={"rms_norm_eps": 1e-5},
    options={"norm_type": "rms_norm_wide", "norm_placement": "after", "qk_norm": "all"},
    names={"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
)

OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_local_base_freq": 5e5, "sliding_window": 4096},
    windows=every(4),
    rope_keys={"rope_local_base_freq": "rope_parameters"},
)

# GLM-4 (arXiv:2406.12793), and its later models with norms on both sides: neighbours rotated in half of each head.
GLM = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    keys={"attention_bias": "attention_bias"},
    defaults={"rms_norm_eps": 1.5625e-7, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names={"mlp.gate_up_proj": "mlp.gate_up_proj"},
    rotates_neighbours=True,
)

GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    options={"norm_placement": "both"},
    names={**GLM.names, "attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"},
)

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

# Granite's and Llama's kin with one difference: neighbours rotated and a late rounding; one switch for all biases.
HELIUM = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    keys={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    defaults={"rms_norm_eps": 1e-8, "head_dim": 128, "rope_theta": 1e5},
    options={"norm_type": "rms_norm_wide"},
    rotates_neighbours=True,
)

INTERNLM3 = Family(
    architecture="InternLM3ForCausalLM",
    model_type="internlm3",
    keys={"qkv_bias": "attention_bias", "bias": Key(("attention_output_bias", "mlp_bias"))},
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "qkv_bias": False, "bias": False},
    aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    brings_code=True,
)
