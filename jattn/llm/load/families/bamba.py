"""Bamba: layers of Mamba-2, and attention in some."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Raw
from jattn.llm.load.families.mamba import (
    BAMBA_NAMES,
    EXPANSION,
    MAMBA_IGNORED,
    MAMBA_KEYS,
    MAMBA_TYPES,
    PROJECTION_BIASES,
    expansion,
    head_dim,
)
from jattn.llm.models.config import ModelConfig


def _attending(raw: Raw) -> list[str]:
    attending = raw.get("attn_layer_indices") or []
    return ["full_attention" if layer in attending else "mamba" for layer in range(raw["num_hidden_layers"])]


def _written(config: ModelConfig) -> dict[str, Any]:
    attending = [layer for layer in range(config.num_hidden_layers) if config.attends(layer)]
    return {"attn_layer_indices": attending, **expansion(config)}


BAMBA = Family(
    architecture="BambaForCausalLM",
    model_type="bamba",
    keys=MAMBA_KEYS | {"attention_bias": BOTH_BIASES, "mlp_bias": "mlp_bias", "mamba_proj_bias": PROJECTION_BIASES},
    defaults={**EXPANSION, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "layer_types": _attending},
    derive=head_dim,
    derived={"attn_layer_indices": None, **EXPANSION},
    absent=("layer_types",),
    ignored=MAMBA_IGNORED,
    layer_types=MAMBA_TYPES,
    write=_written,
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names=BAMBA_NAMES,
)
