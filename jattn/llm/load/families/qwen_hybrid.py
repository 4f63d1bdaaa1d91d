"""Qwen3-Next and Qwen 3.5 (text): Gated DeltaNet in most layers, gated attention in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Whole, expert_names
from jattn.llm.load.families.qwen_moe import MOE_KEYS, MOE_NAMES, sparse_layers

#: Keys of the layers with a delta rule.
DELTA_KEYS = {
    "linear_num_value_heads": "delta_net.num_heads",
    "linear_num_key_heads": "delta_net.num_kv_heads",
    "linear_key_head_dim": "delta_net.key_dim",
    "linear_value_head_dim": "delta_net.value_dim",
    "linear_conv_kernel_dim": "delta_net.conv_size",
}
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_EXPERT_KEYS = {"num_experts": "moe.num_experts", "shared_expert_intermediate_size": "moe.shared_intermediate_size"}
_SHARED = expert_names("moe.shared_expert", "mlp.shared_expert") | {"moe.shared_expert_gate": "mlp.shared_expert_gate"}

QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    keys=DELTA_KEYS | MOE_KEYS | _EXPERT_KEYS | {"attention_bias": BOTH_BIASES},
    defaults=_DEFAULTS | {"norm_topk_prob": True},
    options={"norm_type": "gemma_rms_norm", "qk_norm": "head", "attn_output_gate": True},
    derive=sparse_layers,
    derived={"full_attention_interval": None},
    aliases={"num_local_experts": "num_experts"},
    default_types=lambda raw: [
        "linear_attention" if (layer + 1) % raw["full_attention_interval"] else "full_attention"
        for layer in range(raw["num_hidden_layers"])
    ],
    layer_types={"linear_attention": "linear_attention"},
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names=MOE_NAMES | _SHARED | {"linear_attn.in_proj": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")},
    # The layers that predict a second token.
    unread=r"mtp\..+",
)

# Keys, values, gates and step sizes come from matrices of their own.
QWEN3_5 = replace(
    QWEN3_NEXT,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    keys=DELTA_KEYS | {"attention_bias": BOTH_BIASES},
    defaults=_DEFAULTS,
    derive=None,
    inert={"attn_output_gate": True},
    ignored=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    names={"linear_attn.in_proj": tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))},
    whole=Whole(architecture="Qwen3_5ForConditionalGeneration", model_type="qwen3_5"),
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    keys={**QWEN3_5.keys}
    | _EXPERT_KEYS
    | {name: MOE_KEYS[name] for name in ("num_experts_per_tok", "moe_intermediate_size")},
    defaults=_DEFAULTS | {"intermediate_size": lambda raw: raw["moe_intermediate_size"]},
    names={**QWEN3_5.names, **MOE_NAMES, **_SHARED},
    whole=Whole(architecture="Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe"),
)
