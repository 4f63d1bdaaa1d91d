"""Decoders whose norms stand elsewhere than Llama's: Command R, OLMo, GLM."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, every

# Command R: attention and feed-forward side by side after one layer norm, neighbours rotated, scaled logits.
COHERE = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    keys={
        "attention_bias": BOTH_BIASES,
        "layer_norm_eps": "rms_norm_eps",
        "logit_scale": "logits_scale",
        "use_qk_norm": Key("qk_norm", lambda used: "per_head" if used else None, lambda kind: kind is not None),
    },
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500000.0},
    options={"norm_type": "layer_norm", "parallel_block": "shared_norm"},
    rotates_neighbours=True,
)

# OLMo 2 and 3 (arXiv:2501.00656): norms after each branch, and on all heads of queries and of keys at once.
OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    keys={"attention_bias": BOTH_BIASES},
    defaults={"rms_norm_eps": 1e-5},
    options={"norm_type": "rms_norm_wide", "norm_placement": "after", "qk_norm": "all"},
    names={"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
)

OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_local_base_freq": 5e5, "sliding_window": 4096},
    windows=every(4),
    rope_keys={"rope_local_base_freq": "rope_parameters"},
)

# GLM-4 (arXiv:2406.12793), and its later models with norms on both sides: neighbours rotated in half of each head.
GLM = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    keys={"attention_bias": "attention_bias"},
    defaults={"rms_norm_eps": 1.5625e-7, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names={"mlp.gate_up_proj": "mlp.gate_up_proj"},
    rotates_neighbours=True,
)

GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    options={"norm_placement": "both"},
    names={**GLM.names, "attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"},
)
