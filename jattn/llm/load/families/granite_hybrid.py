"""Granite 4: layers of Mamba-2, and attention without positions in some; experts, of which all tokens share one."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import Family, Key, Raw
from jattn.llm.load.families.llama import GRANITE
from jattn.llm.load.families.mamba import (
    EXPANSION,
    MAMBA_IGNORED,
    MAMBA_KEYS,
    MAMBA_TYPES,
    PROJECTION_BIASES,
    expansion,
    head_dim,
)
from jattn.llm.models.config import ModelConfig


def _derived(raw: Raw) -> dict[str, Any]:
    """Returns the width of the feed-forward part of a model without experts: that of the shared one."""
    own = {"intermediate_size": raw["shared_intermediate_size"]}
    return head_dim(raw) | own | ({} if raw["num_local_experts"] else {"moe": None})


def _written(config: ModelConfig) -> dict[str, Any]:
    if config.moe is not None:
        return expansion(config)
    sizes = dict.fromkeys(("intermediate_size", "shared_intermediate_size"), config.intermediate_size)
    return {"num_local_experts": 0, **sizes, **expansion(config)}


_POSITIONS = {"rope": "rope"}
_SHARED = {"gate_up_proj": "shared_mlp.input_linear", "down_proj": "shared_mlp.output_linear"}
_EXPERTS = "block_sparse_moe"
SHARED_NAMES = {f"moe.shared_expert.{name}": where for name, where in _SHARED.items()}
EXPERT_NAMES = {
    "moe.router": f"{_EXPERTS}.router.layer",
    "moe.gate_up_proj": f"{_EXPERTS}.input_linear.weight",
    "moe.down_proj": f"{_EXPERTS}.output_linear.weight",
}

GRANITE_MOE_HYBRID = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    keys=MAMBA_KEYS
    | {name: key for name, key in GRANITE.keys.items() if name != "mlp_bias"}
    | {
        "mamba_proj_bias": PROJECTION_BIASES,
        "intermediate_size": Key(("moe.intermediate_size", "intermediate_size")),
        "shared_intermediate_size": "moe.shared_intermediate_size",
        "num_local_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.num_experts_per_tok",
        "position_embedding_type": Key(
            "position_embedding", lambda kind: _POSITIONS.get(kind, "none"), lambda kind: _POSITIONS.get(kind, "nope")
        ),
    },
    defaults=EXPANSION
    | {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}
    | {"position_embedding_type": lambda raw: "nope", "layer_types": lambda raw: ["mamba"] * raw["num_hidden_layers"]},
    options={"moe.shared_expert_gate": False},
    derive=_derived,
    derived=EXPANSION,
    ignored=MAMBA_IGNORED,
    inert={"normalization_function": "rmsnorm"},
    layer_types=MAMBA_TYPES,
    write=_written,
    names={**{f"mlp.{name}": where for name, where in _SHARED.items()}, **SHARED_NAMES, **EXPERT_NAMES},
    # transformers\' module.
    also_spelled={"router.layer.": "router."},
    experts_out_in=True,
)
