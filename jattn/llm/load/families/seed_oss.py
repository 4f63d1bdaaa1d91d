"""Seed-OSS: Llama with a switch for each projection's bias."""

from __future__ import annotations

from jattn.llm.load.families.family import Family

SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    keys={
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_output_bias",
        "mlp_bias": "mlp_bias",
    },
    defaults={"attention_bias": True, "head_dim": 128},
)
