"""dots.llm1 (arXiv:2506.05767): Qwen 3's attention and GLM-4.5's experts."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.family import BOTH_BIASES
from jattn.llm.load.families.glm_moe import EXPERT_KEYS, GLM4_MOE
from jattn.llm.load.families.qwen import above

_DOTS_DEFAULTS = {name: value for name, value in GLM4_MOE.all_defaults.items() if name in EXPERT_KEYS}
DOTS1 = replace(
    GLM4_MOE,
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    keys={**EXPERT_KEYS, "norm_topk_prob": "moe.norm_topk_prob", "attention_bias": BOTH_BIASES},
    defaults={
        **_DOTS_DEFAULTS,
        "attention_bias": False,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 0,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    options={**GLM4_MOE.options, "qk_norm": "head"},
    aliases={"num_local_experts": "n_routed_experts"},
    # transformers has the sigmoid with a correction, whatever these say.
    ignored=("scoring_func", "topk_method"),
    inert={"moe_layer_freq": 1},
    windows=above,
    rope_keys={},
    unread="",
)
