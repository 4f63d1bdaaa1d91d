"""Nemotron, Apertus (arXiv:2509.14233), Arcee and Jais 2: plain feed-forward parts."""

from __future__ import annotations

from jattn.llm.load.families.family import BOTH_BIASES, WITHOUT_GATE, Family

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

JAIS2 = Family(
    architecture="Jais2ForCausalLM",
    model_type="jais2",
    keys={"attention_bias": BOTH_BIASES, "mlp_bias": "mlp_bias", "layer_norm_eps": "rms_norm_eps"},
    defaults={"attention_bias": True, "mlp_bias": True, "layer_norm_eps": 1e-5, "hidden_act": "relu2"},
    options=WITHOUT_GATE,
)
