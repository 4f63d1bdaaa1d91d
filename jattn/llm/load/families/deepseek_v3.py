"""DeepSeek-V3 (arXiv:2412.19437): sigmoid scores with a correction bias, experts in groups."""

from __future__ import annotations

from jattn.llm.load.families.deepseek import DEFAULTS, KEYS, NAMES
from jattn.llm.load.families.family import Family

DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    keys=KEYS | {"norm_topk_prob": "moe.norm_topk_prob"},
    defaults=DEFAULTS
    | {
        "n_group": 8,
        "topk_group": 4,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    options={"moe.scoring_func": "sigmoid", "moe.score_correction_bias": True},
    inert={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True},
    names=NAMES,
    brings_code=True,
    # The layer that predicts a second token; cut models have V3's own.
    unread=r"model\.layers\.(61|{layers})\..+",
)
