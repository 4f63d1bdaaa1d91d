"""A.X K1: DeepSeek-V3's layers with a norm after the experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jattn.llm.load.families.deepseek_v2 import NAMES
from jattn.llm.load.families.deepseek_v3 import DEEPSEEK_V3
from jattn.llm.load.families.family import Raw, mlp_layer_types
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.config_fields import SIZE_LIMITS
from torch_core.base.checks import check_int


def _dense_layers(raw: Raw) -> dict[str, Any]:
    """Returns the layers without experts of a file without mlp_layer_types."""
    first, every = (1 if raw.get(name) is None else raw[name] for name in _SPARSE)
    for name, value, least in zip(_SPARSE, (first, every), (0, 1), strict=True):
        check_int(name, value, least, SIZE_LIMITS["num_hidden_layers"])
    layers = range(raw["num_hidden_layers"])
    return {"moe.dense_layers": tuple(layer for layer in layers if layer < first or layer % every)}


def _no_correction(config: ModelConfig, layer: int) -> np.ndarray:
    return np.zeros(0 if config.moe is None else config.moe.num_experts, np.float32)


_SPARSE = ("first_k_dense_replace", "moe_layer_freq")
AXK1 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="AXK1ForCausalLM",
    model_type="axk1",
    # As the first files spell it.
    also_types=("AXK1",),
    keys={name: key for name, key in DEEPSEEK_V3.keys.items() if name != "first_k_dense_replace"},
    defaults={name: value for name, value in DEEPSEEK_V3.all_defaults.items() if name not in _SPARSE}
    | {"n_routed_experts": 192},
    options={**DEEPSEEK_V3.options, "moe.output_norm": True},
    derive=_dense_layers,
    write=mlp_layer_types,
    derived=dict.fromkeys(_SPARSE),
    inert={name: value for name, value in DEEPSEEK_V3.inert.items() if name != "moe_layer_freq"},
    names={**NAMES, "moe_output_norm": "post_mlp_layernorm"},
    # Published files have no corrections.
    computed={"moe.e_score_correction_bias": _no_correction},
    # Norms of layers without experts, which are not used.
    unread=r"model\.layers\.({layers}\..+|\d+\.post_mlp_layernorm\.weight)",
)
