"""OLMo 2 and 3 (arXiv:2501.00656): norms after each branch, and on all heads of queries and of keys at once."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.family import BOTH_BIASES, Family, every

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
