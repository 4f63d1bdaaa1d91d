"""Hy3: norms on queries and keys before their rotation, sigmoid scores with a correction, a shared expert."""

from __future__ import annotations

from jattn.llm.load.families.deepseek_v2 import without_experts
from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, expert_names, mlp_layer_types
from jattn.llm.load.families.glm_moe import NEXT

HY_V3 = Family(
    architecture="HYV3ForCausalLM",
    model_type="hy_v3",
    keys={
        "attention_bias": BOTH_BIASES,
        "num_experts": Key("moe.num_experts", default=192),
        "num_experts_per_tok": Key("moe.num_experts_per_tok", default=8),
        "num_shared_experts": Key("moe.n_shared_experts", default=1),
        "moe_intermediate_size": Key("moe.intermediate_size", default=1536),
        "router_scaling_factor": Key("moe.routed_scaling_factor", default=2.826),
    },
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 11158840.0},
    options={"qk_norm": "head", "moe.scoring_func": "sigmoid", "moe.score_correction_bias": True},
    # Unless mlp_layer_types says otherwise.
    derive=lambda raw: {"moe.dense_layers": without_experts(raw, 1)},
    write=mlp_layer_types,
    derived={"first_k_dense_replace": None},
    aliases={"num_local_experts": "num_experts", "expert_hidden_dim": "moe_intermediate_size"},
    # Of roundings between operations.
    ignored=("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"),
    inert=dict.fromkeys(("qk_norm", "route_norm", "moe_router_enable_expert_bias", "moe_router_use_sigmoid"), True),
    names={"moe.router": "mlp.router.gate", "moe.e_score_correction_bias": "mlp.expert_bias"}
    | expert_names("moe", "mlp.experts.{expert}")
    | expert_names("moe.shared_expert", "mlp.shared_mlp"),
    # transformers' modules.
    also_spelled={".router.gate.": ".gate.", ".shared_mlp.": ".shared_experts."},
    unread=NEXT,
)
