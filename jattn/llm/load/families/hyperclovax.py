"""HyperCLOVA X SEED Think (arXiv:2506.22403): Granite whose branches may have a norm on both sides."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.family import Key
from jattn.llm.load.families.llama import GRANITE

HYPERCLOVAX = replace(
    GRANITE,
    architecture="HyperCLOVAXForCausalLM",
    model_type="hyperclovax",
    keys={
        **GRANITE.keys,
        "logits_scaling": "logits_scale",
        "use_post_norm": Key(
            "norm_placement", lambda used: "both" if used else "before", lambda place: place == "both"
        ),
    },
    defaults={
        "use_post_norm": True,
        "attention_multiplier": lambda raw: (
            (raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]) ** -0.5
        ),
    },
    names={"attention_output_norm": "post_norm1", "mlp_output_norm": "post_norm2"},
    brings_code=True,
    gguf=None,
)
