"""How files of Ling 3 spell their layers."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.deepseek_v2 import without_experts
from jattn.llm.load.families.family import Raw, mlp_layer_types
from jattn.llm.models.config import ModelConfig

#: Keys of the file that only functions read.
DERIVED: dict[str, Any] = {
    "head_dim": None,
    "first_k_dense_replace": None,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
}
DERIVED |= {"layer_group_size": 6, "short_conv_kernel_size": 4}


def parts(raw: Raw) -> dict[str, Any]:
    """Returns the size of a rotated key, the bound of the decays, and the layers without experts."""
    return {
        "head_dim": raw["qk_rope_head_dim"],
        "kimi_delta.lower_bound": raw["kda_lower_bound"] if raw["kda_safe_gate"] else None,
        "moe.dense_layers": without_experts(raw, 2, raw["num_hidden_layers"]),
    }


def written(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of the file that those fields came from."""
    bound = None if config.kimi_delta is None else config.kimi_delta.lower_bound
    own = {} if bound is None else {"kda_lower_bound": bound}
    return {**mlp_layer_types(config), **own, "kda_safe_gate": bound is not None, "head_dim": config.head_dim}


def layer_types(raw: Raw) -> list[str]:
    """Returns the types of a file without them: attention in the last layer of each group."""
    layers, group = range(raw["num_hidden_layers"]), raw["layer_group_size"]
    return ["linear_attention" if (layer + 1) % group else "full_attention" for layer in layers]
