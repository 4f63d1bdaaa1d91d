"""VaultGemma (arXiv:2510.15001): Gemma 2 without the norms after each branch."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.gemma import GEMMA2, NAMES

VAULT_GEMMA = replace(
    GEMMA2,
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    options={"norm_type": "gemma_rms_norm"},
    inert={},
    names={"post_attention_layernorm": NAMES["post_attention_layernorm"]},
    gguf=None,
)
