"""K-EXAONE (arXiv:2601.01739): EXAONE 4's attention with norms before each branch, and DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.deepseek_v3 import DEEPSEEK_V3
from jattn.llm.load.families.family import Key
from jattn.llm.load.families.window_rope import EXAONE4

EXAONE_MOE = replace(
    EXAONE4,
    architecture="ExaoneMoeForCausalLM",
    model_type="exaone_moe",
    keys={
        **{name: DEEPSEEK_V3.keys[name] for name in ("n_group", "topk_group", "first_k_dense_replace")},
        **{name: f"moe.{name}" for name in ("norm_topk_prob", "num_experts", "num_experts_per_tok")},
        "num_shared_experts": Key("moe.n_shared_experts", default=1),
        "moe_intermediate_size": Key("moe.intermediate_size", default=1024),
        "routed_scaling_factor": Key("moe.routed_scaling_factor", default=2.5),
    },
    defaults={
        **EXAONE4.all_defaults,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    options={"qk_norm": "head", **DEEPSEEK_V3.options},
    aliases={"num_local_experts": "num_experts"},
    # Which layers have experts, once more.
    ignored=("is_moe_layer",),
    inert={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    names={**DEEPSEEK_V3.names, "moe.e_score_correction_bias": "mlp.e_score_correction_bias"},
    # The layers that predict a second token.
    unread=r"mtp\..+",
)
