"""Ministral 8B: Mistral with windows in some layers."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.llama import MISTRAL

MINISTRAL = replace(
    MISTRAL, architecture="MinistralForCausalLM", model_type="ministral", windows=lambda layer, raw: True, whole=None
)
