"""OLMo 2 (arXiv:2501.00656): norms behind each branch, and on all heads of queries and of keys at once."""

from __future__ import annotations

from jattn.load.families.family import BOTH_BIASES, Family

__all__ = ["OLMO2"]

OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    keys={"attention_bias": BOTH_BIASES},
    defaults={"rms_norm_eps": 1e-5},
    options={"norm_type": "rms_norm_wide", "norm_placement": "after", "qk_norm": "all"},
    names={"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
)
