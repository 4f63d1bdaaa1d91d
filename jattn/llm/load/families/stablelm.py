"""StableLM 2 (arXiv:2402.17834) and Persimmon: layer norms, also on each head of queries and keys."""

from __future__ import annotations

from jattn.llm.load.families.family import BIASES, WITHOUT_GATE, Family, Key
from jattn.llm.load.families.phi import QK_LAYERNORM

# Attention and feed-forward side by side after one norm, or one after the other.
STABLELM = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    keys={
        "use_qkv_bias": Key("attention_bias", default=False),
        "layer_norm_eps": Key("rms_norm_eps", default=1e-5),
        "qk_layernorm": Key("qk_norm", lambda used: "per_head" if used else None, bool, default=False),
        "use_parallel_residual": Key("parallel_block", lambda used: "shared_norm" if used else None, bool),
    },
    defaults={"use_parallel_residual": False, "partial_rotary_factor": 0.25},
    options={"norm_type": "layer_norm", "norm_bias": True},
    absent=("head_dim",),
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names={
        "self_attn.q_norm": "self_attn.q_layernorm.norms.{head}",
        "self_attn.k_norm": "self_attn.k_layernorm.norms.{head}",
    },
)

PERSIMMON = Family(
    architecture="PersimmonForCausalLM",
    model_type="persimmon",
    keys={"layer_norm_eps": "rms_norm_eps", "qk_layernorm": QK_LAYERNORM},
    defaults={"layer_norm_eps": 1e-5, "hidden_act": "relu2", "qk_layernorm": True, "partial_rotary_factor": 0.5},
    options=WITHOUT_GATE | BIASES | {"qk_norm_bias": True},
    absent=("head_dim", "num_key_value_heads"),
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names={
        "norm": "model.final_layernorm",
        "self_attn.qkv_proj": "self_attn.query_key_value",
        "self_attn.o_proj": "self_attn.dense",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    order={"self_attn.qkv_proj": "by_group"},
)
