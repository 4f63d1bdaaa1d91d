"""Nemotron, Apertus (arXiv:2509.14233) and Arcee with plain feed-forward parts; StableLM 2 and Persimmon."""

from __future__ import annotations

from jattn.llm.load.families.family import BIASES, BOTH_BIASES, WITHOUT_GATE, Family, Key
from jattn.llm.load.families.phi import QK_LAYERNORM

NEMOTRON = Family(
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    keys={"attention_bias": BOTH_BIASES, "mlp_bias": "mlp_bias", "norm_eps": "rms_norm_eps"},
    defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    options={"norm_type": "layer_norm_1p", "norm_bias": True, "gated_mlp": False},
    aliases={"layer_norm_eps": "norm_eps"},
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
)

APERTUS = Family(
    architecture="ApertusForCausalLM",
    model_type="apertus",
    keys={"attention_bias": BOTH_BIASES},
    defaults={
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 12e6,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    options={"gated_mlp": False, "qk_norm": "head"},
    ignored=("post_norm", "qk_norm"),
    names={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
    shapes={"mlp.act_fn.beta": (), "mlp.act_fn.eps": ()},
)

ARCEE = Family(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    keys={"attention_bias": BOTH_BIASES, "mlp_bias": "mlp_bias"},
    defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    options={"gated_mlp": False},
)

# Two norms in one place: side by side after one norm, or one after the other.
STABLELM = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    keys={
        "use_qkv_bias": "attention_bias",
        "layer_norm_eps": "rms_norm_eps",
        "qk_layernorm": Key("qk_norm", lambda used: "per_head" if used else None, bool),
        "use_parallel_residual": Key("parallel_block", lambda used: "shared_norm" if used else None, bool),
    },
    defaults={
        "use_qkv_bias": False,
        "layer_norm_eps": 1e-5,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "partial_rotary_factor": 0.25,
    },
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
