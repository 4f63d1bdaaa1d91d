"""Ling 3: Kimi Delta Attention with gates of full rank in most layers, latents with gated heads in the others."""

from __future__ import annotations

from jattn.llm.load.families.bailing_files import DERIVED, layer_types, parts, written
from jattn.llm.load.families.family import Family, expert_names
from jattn.llm.load.families.kimi import KIMI_LINEAR

_ATTENTION = ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
_JOINED = ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj", "b_proj")


BAILING_HYBRID = Family(
    architecture="BailingHybridForCausalLM",
    model_type="bailing_hybrid",
    keys={name: key for name, key in KIMI_LINEAR.keys.items() if name != "q_lora_rank"},
    defaults={
        "model_max_length": 262144,
        "num_expert_group": 8,
        "topk_group": 4,
        "num_experts": 512,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 768,
        "routed_scaling_factor": 2.5,
        "rope_theta": 6e6,
        "linear_num_heads": lambda raw: raw["num_attention_heads"],
        "linear_head_dim": lambda raw: raw["head_dim"] or 128,
        "linear_conv_kernel_dim": lambda raw: raw["short_conv_kernel_size"],
        **DERIVED,
    },
    options={
        "moe.scoring_func": "sigmoid",
        "moe.score_correction_bias": True,
        "latent.head_gate": True,
        "kimi_delta.full_rank_gates": True,
    },
    derive=parts,
    write=written,
    derived=DERIVED,
    absent=("head_dim",),
    aliases=KIMI_LINEAR.aliases,
    ignored=("mtp_loss_scaling_factor",),
    default_types=layer_types,
    layer_types=KIMI_LINEAR.layer_types,
    names={
        "embed_tokens": "model.word_embeddings",
        **{f"self_attn.{name}": f"attention.{name}" for name in _ATTENTION},
        "self_attn.gate_proj": "attention.g_proj",
        **dict.fromkeys(("self_attn.o_proj", "kda.out_proj"), "attention.dense"),
        "kda.in_proj": tuple(f"attention.{name}" for name in _JOINED),
        "kda.conv1d": tuple(f"attention.{name}_conv1d" for name in "qkv"),
        "kda.norm": "attention.o_norm",
        **{f"kda.{name}": f"attention.{name}" for name in ("dt_bias", "A_log")},
        "moe.router": "mlp.gate",
        "moe.e_score_correction_bias": "mlp.gate.expert_bias",
    }
    | expert_names("moe", "mlp.experts.{expert}")
    | expert_names("moe.shared_expert", "mlp.shared_experts"),
    # transformers' modules.
    also_spelled={
        ".word_embeddings.": ".embed_tokens.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.f_proj.": ".self_attn.forget_gate.f_proj.",
        ".attention.": ".self_attn.",
    },
    # The layer that predicts a second token.
    unread=r"model\.layers\.{layers}\..+",
    brings_code=True,
)
