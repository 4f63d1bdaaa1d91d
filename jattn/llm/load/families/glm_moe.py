"""GLM-4.5 (arXiv:2508.06471) with experts, and GLM-4.7-Flash over latents."""

from __future__ import annotations

import dataclasses

from jattn.llm.load.families.deepseek_v2 import KEYS, LATENT_KEYS, NAMES
from jattn.llm.load.families.deepseek_v3 import DEEPSEEK_V3
from jattn.llm.load.families.family import Family, Key, mlp_layer_types

EXPERT_KEYS = {name: key for name, key in KEYS.items() if name not in (*LATENT_KEYS, "attention_bias")}
#: The layer that predicts a second token.
NEXT = r"model\.layers\.{layers}\..+"

GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    keys={
        **EXPERT_KEYS,
        "norm_topk_prob": Key("moe.norm_topk_prob", default=True),
        "attention_bias": Key("attention_bias", default=False),
        "use_qk_norm": Key("qk_norm", lambda used: "head" if used else None, lambda kind: kind is not None),
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
    },
    options={"moe.scoring_func": "sigmoid", "moe.score_correction_bias": True},
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names=NAMES,
    unread=NEXT,
)


GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    also_types=(),
    keys={name: key for name, key in DEEPSEEK_V3.keys.items() if name != "first_k_dense_replace"},
    defaults={
        **DEEPSEEK_V3.all_defaults,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
    },
    # Unless mlp_layer_types says otherwise.
    derive=lambda raw: {"moe.dense_layers": (0,)},
    write=mlp_layer_types,
    ignored=("first_k_dense_replace", "partial_rotary_factor"),
    brings_code=False,
    unread=NEXT,
)
