"""Cohere 2 with experts (North): parallel layers, some of the first ones without experts."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.cohere2_moe_files import DERIVED, has_window, layers, written
from jattn.llm.load.families.deepseek_v2 import NAMES
from jattn.llm.load.families.window_rope import COHERE2

COHERE2_MOE = replace(
    COHERE2,
    architecture="Cohere2MoeForCausalLM",
    model_type="cohere2_moe",
    keys={
        **COHERE2.keys,
        "intermediate_size": "moe.intermediate_size",
        "prefix_dense_intermediate_size": "intermediate_size",
        "num_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.num_experts_per_tok",
        "num_shared_experts": "moe.n_shared_experts",
        "norm_topk_prob": "moe.norm_topk_prob",
        "expert_selection_fn": "moe.scoring_func",
    },
    defaults={
        **COHERE2.defaults,
        **DERIVED,
        "prefix_dense_intermediate_size": lambda raw: raw["intermediate_size"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "norm_topk_prob": True,
        "expert_selection_fn": "softmax",
        "head_dim": 128,
    },
    derive=layers,
    write=written,
    derived=DERIVED,
    absent=(),
    aliases={"num_local_experts": "num_experts"},
    ignored=tuple(name for name in COHERE2.ignored if name != "head_dim"),
    windows=has_window,
    names=NAMES,
)
