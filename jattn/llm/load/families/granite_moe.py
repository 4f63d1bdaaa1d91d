"""Granite with experts, of which all tokens may share one."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.family import Key
from jattn.llm.load.families.granite_hybrid import EXPERT_NAMES, SHARED_NAMES
from jattn.llm.load.families.llama import GRANITE

GRANITE_MOE = replace(
    GRANITE,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    keys={
        **{name: key for name, key in GRANITE.keys.items() if name != "mlp_bias"},
        "intermediate_size": Key(("moe.intermediate_size", "intermediate_size")),
        "num_local_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.num_experts_per_tok",
    },
    defaults={**GRANITE.all_defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    names=EXPERT_NAMES,
    # transformers' module.
    also_spelled={"router.layer.": "router."},
    experts_out_in=True,
    gguf=None,
)

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    keys={**GRANITE_MOE.keys, "shared_intermediate_size": "moe.shared_intermediate_size"},
    defaults={**GRANITE_MOE.all_defaults, "shared_intermediate_size": 0},
    options={"moe.shared_expert_gate": False},
    names={**EXPERT_NAMES, **SHARED_NAMES},
)
