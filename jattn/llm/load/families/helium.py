"""Helium and InternLM 3: Llama with neighbours rotated and a late rounding, and with one switch for most biases."""

from __future__ import annotations

from jattn.llm.load.families.family import Family, Key

HELIUM = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    keys={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    defaults={"rms_norm_eps": 1e-8, "head_dim": 128, "rope_theta": 1e5},
    options={"norm_type": "rms_norm_wide"},
    rotates_neighbours=True,
)

INTERNLM3 = Family(
    architecture="InternLM3ForCausalLM",
    model_type="internlm3",
    keys={"qkv_bias": "attention_bias", "bias": Key(("attention_output_bias", "mlp_bias"))},
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "qkv_bias": False, "bias": False},
    aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    brings_code=True,
)
