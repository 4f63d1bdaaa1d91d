"""GLM-4 (arXiv:2406.12793), and its later models with norms on both sides: neighbours rotated in half of each head."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.family import Family

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
    names={
        "mlp.gate_up_proj": "mlp.gate_up_proj",
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    },
)
