"""Cohere 2 with experts (North): parallel layers, some of the first ones without experts."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.cohere2_moe_files import DERIVED, has_window, layers, written
from jattn.llm.load.families.deepseek_v2 import NAMES
from jattn.llm.load.families.family import Key
from jattn.llm.load.families.window_rope import COHERE2

COHERE2_MOE = replace(
    COHERE2,
    architecture="Cohere2MoeForCausalLM",
    model_type="cohere2_moe",
    keys={
        **COHERE2.keys,
        "intermediate_size": "moe.intermediate_size",
        "prefix_dense_intermediate_size": Key("intermediate_size", default=lambda raw: raw["intermediate_size"]),
        "num_experts": Key("moe.num_experts", default=8),
        "num_experts_per_tok": Key("moe.num_experts_per_tok", default=2),
        "num_shared_experts": Key("moe.n_shared_experts", default=0),
        "norm_topk_prob": Key("moe.norm_topk_prob", default=True),
        "expert_selection_fn": Key("moe.scoring_func", default="softmax"),
    },
    # A file that leaves the strategy out means another one than those that are written here.
    defaults={**COHERE2.all_defaults, **DERIVED, "head_dim": 128, "shared_expert_combination_strategy": "average"},
    derive=layers,
    write=written,
    derived=DERIVED,
    absent=(),
    aliases={"num_local_experts": "num_experts"},
    ignored=tuple(name for name in COHERE2.ignored if name != "head_dim"),
    windows=has_window,
    names=NAMES,
)
