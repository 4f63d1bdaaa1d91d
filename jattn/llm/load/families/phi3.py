"""Phi-3 (arXiv:2404.14219): fused projections, longrope, a share of each head that rotates."""

from __future__ import annotations

from jattn.llm.load.families.family import Family

PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    inert={"lm_head_bias": False},
    ignored=("full_attn_mod", "interpolate_factor"),
    windows="all",
    brings_code=True,
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names={"self_attn.qkv_proj": "self_attn.qkv_proj", "mlp.gate_up_proj": "mlp.gate_up_proj"},
)
