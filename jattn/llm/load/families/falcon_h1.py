"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side in each layer, and factors of many products."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, Raw
from jattn.llm.load.families.mamba import BAMBA_NAMES, EXPANSION, MAMBA_IGNORED, MAMBA_KEYS, expansion, head_dim
from jattn.llm.models.config import ModelConfig


def _derived(raw: Raw) -> dict[str, Any]:
    """Returns the sizes and factors that several keys give."""
    size = raw["hidden_size"] // raw["num_attention_heads"] if raw.get("head_dim") is None else raw["head_dim"]
    norm = "before_gate" if raw["mamba_norm_before_gate"] else "gated"
    return head_dim(raw, raw["mamba_d_ssm"]) | {
        "mamba.norm": norm if raw["mamba_rms_norm"] else None,
        "attention_multipliers": (raw["attention_in_multiplier"], raw["attention_out_multiplier"]),
        "attention_scale": None if raw["key_multiplier"] == 1 else raw["key_multiplier"] * size**-0.5,
    }


def _written(config: ModelConfig) -> dict[str, Any]:
    sizes, scale, (first, last) = config.mamba, config.attention_scale, config.attention_multipliers
    return expansion(config) | {
        "mamba_d_ssm": None if sizes is None else sizes.num_heads * sizes.head_dim,
        "mamba_rms_norm": sizes is not None and sizes.norm is not None,
        "mamba_norm_before_gate": sizes is not None and sizes.norm != "gated",
        "attention_in_multiplier": first,
        "attention_out_multiplier": last,
        "key_multiplier": 1.0 if scale is None else float(f"{scale * config.head_dim**0.5:.15g}"),
    }


_DERIVED: dict[str, Any] = {
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"), 1.0),
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    **EXPANSION,
}
_INIT = tuple(f"time_step_{name}" for name in ("floor", "max", "min", "rank"))

FALCON_H1 = Family(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    keys=MAMBA_KEYS
    | {
        "attention_bias": BOTH_BIASES,
        "mlp_bias": "mlp_bias",
        "mamba_proj_bias": Key("mamba.use_bias", default=False),
        "projectors_bias": "mamba.out_bias",
        "embedding_multiplier": "embedding_multiplier",
        "lm_head_multiplier": "logits_scale",
        "mlp_multipliers": Key("mlp_multipliers", tuple, list, default=lambda raw: [1.0, 1.0]),
        "ssm_multipliers": Key("mamba.multipliers", tuple, lambda factors: factors and list(factors)),
        "ssm_in_multiplier": "mamba.in_multiplier",
        "ssm_out_multiplier": "mamba.out_multiplier",
    },
    defaults={
        **_DERIVED,
        "rms_norm_eps": 1e-5,
        "ssm_multipliers": lambda raw: [1.0] * 5,
        "layer_types": lambda raw: ["hybrid"] * raw["num_hidden_layers"],
    },
    derive=_derived,
    derived=_DERIVED,
    absent=("layer_types",),
    # Keys of training, and sizes that stand elsewhere.
    ignored=(*MAMBA_IGNORED, *_INIT, "mamba_use_mlp", "mlp_expansion_factor", "attn_layer_indices"),
    layer_types={"hybrid": "attention_mamba"},
    write=_written,
    names=BAMBA_NAMES,
)
