"""MiMo-V2-Flash (arXiv:2601.02780): windows with sinks and twice the key heads, values with heads of their own."""

from __future__ import annotations

from jattn.llm.load.families.family import Family, Key, expert_names
from jattn.llm.load.families.glm_moe import GLM4_MOE
from jattn.llm.load.families.mimo_files import layer_types, respelled, sizes, written


def _one(factor: float | None) -> float:
    return 1.0 if factor is None else factor


_MOE_KEYS = ("n_group", "topk_group", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")

MIMO_V2_FLASH = Family(
    architecture="MiMoV2FlashForCausalLM",
    model_type="mimo_v2_flash",
    keys={
        **{name: GLM4_MOE.keys[name] for name in (*_MOE_KEYS, "norm_topk_prob")},
        "routed_scaling_factor": Key("moe.routed_scaling_factor", _one, default=1.0),
        "attention_bias": Key("attention_bias", default=False),
        "v_head_dim": Key("value_head.head_dim", default=128),
        "attention_value_scale": Key("value_head.scale", _one, default=0.707),
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 192,
        "num_key_value_heads": 4,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "sliding_window": 129,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.334},
        },
    },
    options={"attention_sinks": True, "moe.scoring_func": "sigmoid", "moe.score_correction_bias": True},
    derive=sizes,
    write=written,
    aliases={"num_local_experts": "n_routed_experts"},
    inert={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": 0, "use_qk_norm": False},
    windows=lambda layer, raw: layer_types(raw)[layer] == "sliding_attention",
    rope_keys={"rope_local_base_freq": "rope_parameters", "full_attention.partial_rotary_factor": "rope_parameters"},
    names={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj"),
        "self_attn.sinks": "self_attn.attention_sink_bias",
        "moe.router": "mlp.gate",
        "moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    }
    | expert_names("moe", "mlp.experts.{expert}"),
    # The layers that predict further tokens.
    unread=r"model\.mtp\..+",
    respelled=respelled,
    brings_code=True,
)
