"""Phi 1 and 2 (arXiv:2309.05463) with plain feed-forward parts side by side, and Phi-3.5-MoE with SparseMixer."""

from __future__ import annotations

from jattn.llm.load.families.family import BIASES, BOTH_BIASES, WITHOUT_GATE, Family, Key
from jattn.llm.load.families.mixtral import MIXTRAL

#: Norms on each head of queries and keys, if there are any.
QK_LAYERNORM = Key("qk_norm", lambda used: "head" if used else None, bool)

PHI = Family(
    architecture="PhiForCausalLM",
    model_type="phi",
    keys={"layer_norm_eps": "rms_norm_eps", "qk_layernorm": QK_LAYERNORM},
    defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "qk_layernorm": False, "partial_rotary_factor": 0.5},
    options=WITHOUT_GATE | BIASES | {"parallel_block": "shared_norm", "lm_head_bias": True, "qk_norm_bias": True},
    absent=("head_dim",),
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names={
        "norm": "model.final_layernorm",
        "self_attn.o_proj": "self_attn.dense",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    },
    brings_code=True,
)

PHIMOE = Family(
    architecture="PhimoeForCausalLM",
    model_type="phimoe",
    keys={
        "attention_bias": BOTH_BIASES,
        "lm_head_bias": Key("lm_head_bias", default=False),
        "num_local_experts": Key("moe.num_experts", default=16),
        "num_experts_per_tok": Key("moe.num_experts_per_tok", default=2),
        "router_jitter_noise": Key("moe.sparsemixer_eps", default=0.01),
    },
    defaults={"rms_norm_eps": 1e-5, "attention_bias": False, "rope_theta": 1e6},
    options={"norm_type": "layer_norm", "norm_bias": True, "moe.scoring_func": "sparsemixer"},
    derive=lambda raw: {"moe.intermediate_size": raw["intermediate_size"]},
    ignored=("input_jitter_noise",),
    windows="all",
    rope_keys={"short_mscale": "short_mscale"},
    names=MIXTRAL.names,
    # transformers' module.
    also_spelled={"block_sparse_moe.gate.": "mlp.router."},
    brings_code=True,
)
