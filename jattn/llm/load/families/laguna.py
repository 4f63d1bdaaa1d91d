"""Laguna: gated attention, two numbers of heads, rotation by kind of layer, experts of sigmoid scores."""

from __future__ import annotations

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, expert_names
from jattn.llm.load.families.laguna_files import DERIVED, gate_name, sizes, written

LAGUNA = Family(
    architecture="LagunaForCausalLM",
    model_type="laguna",
    keys={
        "attention_bias": BOTH_BIASES,
        "num_experts": Key("moe.num_experts", default=256),
        "num_experts_per_tok": Key("moe.num_experts_per_tok", default=8),
        "moe_intermediate_size": Key("moe.intermediate_size", default=512),
        "shared_expert_intermediate_size": Key("moe.shared_intermediate_size", default=512),
        "moe_routed_scaling_factor": Key("moe.routed_scaling_factor", default=1.0),
    },
    defaults={
        "attention_bias": False,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 1e4},
        },
        **DERIVED,
    },
    options={
        "qk_norm": "head",
        "attn_gate_act": "softplus",
        "moe.scoring_func": "sigmoid",
        "moe.score_correction_bias": True,
        "moe.shared_expert_gate": False,
    },
    derive=sizes,
    write=written,
    derived=DERIVED,
    aliases={"num_local_experts": "num_experts"},
    # mlp_layer_types is read in their place.
    ignored=("decoder_sparse_step", "mlp_only_layers", "qkv_bias"),
    inert={"moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0, "norm_topk_prob": True},
    windows=lambda layer, raw: False,
    rope_keys={"rope_local_base_freq": "rope_parameters", "full_attention.partial_rotary_factor": "rope_parameters"},
    names={
        "self_attn.gate_proj": "self_attn.g_proj",
        "moe.router": "mlp.gate",
        "moe.e_score_correction_bias": "mlp.experts.e_score_correction_bias",
    }
    | expert_names("moe", "mlp.experts.{expert}")
    | expert_names("moe.shared_expert", "mlp.shared_expert"),
    names_of=gate_name,
    # transformers' module.
    also_spelled={".shared_expert.": ".shared_experts."},
    brings_code=True,
)
