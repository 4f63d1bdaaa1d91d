"""Mellum 2 and Flint: Qwen 3's layers of experts with windows in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jattn.llm.load.families.family import Raw, expert_names, mlp_layer_types
from jattn.llm.load.families.qwen_moe import MOE_NAMES, QWEN3_MOE, sparse_layers
from jattn.llm.load.families.window_rope import without_rope_in_full_layers

# Mellum 2: a base of rotation by kind of layer.
MELLUM = replace(
    QWEN3_MOE,
    architecture="MellumForCausalLM",
    model_type="mellum",
    keys={name: key for name, key in QWEN3_MOE.keys.items() if name != "mlp_only_layers"},
    defaults={
        "head_dim": 128,
        "norm_topk_prob": True,
        "sliding_window": 1024,
        "rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}},
    },
    derive=lambda raw: {},
    write=mlp_layer_types,
    ignored=("mtp_layer_types", "mtp_mlp_layer_types"),
    windows=lambda layer, raw: False,
    rope_keys={"rope_local_base_freq": "rope_parameters"},
    gguf=None,
    # The layer that predicts a second token.
    unread=r"mtp\..+",
)


def _slides(layer: int, raw: Raw) -> bool:
    return layer > 1 and layer % 4 != 1 and layer != raw["num_hidden_layers"] - 1


def _layers(raw: Raw) -> dict[str, Any]:
    types = [
        "sliding_attention" if _slides(layer, raw) else "full_attention" for layer in range(raw["num_hidden_layers"])
    ]
    own = {"layer_types": types, "mlp_only_layers": [0, 1]}
    given = own | {name: value for name, value in raw.items() if name not in own or value is not None}
    return sparse_layers(given) | without_rope_in_full_layers(given)


# Flint: sinks, rotation in the layers with a window alone, sigmoid scores, a shared expert without a gate.
FLINT = replace(
    QWEN3_MOE,
    architecture="FlintForCausalLM",
    model_type="flint",
    keys={**QWEN3_MOE.keys, "shared_expert_intermediate_size": "moe.shared_intermediate_size"},
    defaults={"head_dim": 128, "norm_topk_prob": True, "sliding_window": 513, "shared_expert_intermediate_size": 1024},
    options={
        "norm_type": "rms_norm_wide",
        "qk_norm": "head",
        "attention_sinks": True,
        "moe.scoring_func": "sigmoid",
        "moe.shared_expert_gate": False,
    },
    derive=_layers,
    ignored=(),
    windows=_slides,
    names={
        **MOE_NAMES,
        **expert_names("moe.shared_expert", "mlp.shared_expert"),
        "self_attn.sinks": "self_attn.softmax_offset",
    },
    gguf=None,
)
