"""OLMo Hybrid: Gated DeltaNet with norms before it in most layers, OLMo 3's attention in the others."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Raw
from jattn.llm.load.families.qwen_hybrid import DELTA_KEYS


def _layer_types(raw: Raw) -> list[str]:
    types = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(raw["num_hidden_layers"])]
    return types if "full_attention" in types else [*types[:-1], "full_attention"]


def _without_rope(raw: Raw) -> dict[str, Any]:
    """Returns the position embedding: none where the file says null for the base."""
    rope = raw.get("rope_parameters") or {}
    return {"position_embedding": "none"} if "rope_theta" in rope and rope["rope_theta"] is None else {}


_INIT = ("a_log_max", "a_log_min", "dt_init_floor", "dt_max", "dt_min")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")

OLMO_HYBRID = Family(
    architecture="OlmoHybridForCausalLM",
    model_type="olmo_hybrid",
    keys=DELTA_KEYS | {"attention_bias": BOTH_BIASES, "linear_allow_neg_eigval": "delta_net.allow_neg_eigval"},
    defaults={
        "linear_num_value_heads": lambda raw: raw["num_attention_heads"],
        "linear_num_key_heads": lambda raw: raw["num_attention_heads"],
        "linear_key_head_dim": lambda raw: int(0.75 * raw["hidden_size"] / raw["linear_num_key_heads"]),
        "linear_value_head_dim": lambda raw: 2 * raw["linear_key_head_dim"],
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    options={
        "norm_type": "rms_norm_wide",
        "norm_placement": "after",
        "state_norm_placement": "before",
        "qk_norm": "all",
        # Of flash-linear-attention's layer, in every model.
        "delta_net.norm_eps": 1e-5,
    },
    derive=_without_rope,
    absent=("head_dim",),
    ignored=tuple(f"linear_{name}" for name in _INIT),
    default_types=_layer_types,
    layer_types={"linear_attention": "linear_attention"},
    names={
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
        "linear_attn.in_proj": tuple(f"linear_attn.{name}" for name in _PROJECTIONS),
        "linear_attn.conv1d": tuple(f"linear_attn.{name}_conv1d" for name in "qkv"),
        "linear_attn.norm": "linear_attn.o_norm",
        "linear_attn.out_proj": "linear_attn.o_proj",
    },
    # transformers writes the norms of its attention layers so.
    also_spelled={"post_attention_layernorm": "feedforward_layer_norm"},
)
