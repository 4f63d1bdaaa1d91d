"""Kimi Linear (arXiv:2510.26692): Kimi Delta Attention in most layers, latents without positions in the others."""

from __future__ import annotations

from jattn.llm.load.families.deepseek_v2 import LATENT_KEYS
from jattn.llm.load.families.family import Family, Key, expert_names, mlp_layer_types
from jattn.llm.load.families.kimi_files import ALSO_SPELLED, OF_OBJECT, layer_types, of_object, parts
from jattn.llm.load.families.mixtral import MIXTRAL

_JOINED = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
_ALONE = ("f_b_proj", "g_b_proj", "dt_bias", "A_log")

KIMI_LINEAR = Family(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    keys=LATENT_KEYS
    | {
        "q_lora_rank": "latent.q_lora_rank",
        "model_max_length": Key("max_position_embeddings", default=1 << 20),
        "moe_renormalize": Key("moe.norm_topk_prob", default=True),
        "num_expert_group": Key("moe.n_group", default=1),
        "topk_group": Key("moe.topk_group", default=1),
        "num_experts": Key("moe.num_experts", default=256),
        "num_experts_per_token": Key("moe.num_experts_per_tok", default=8),
        "num_shared_experts": Key("moe.n_shared_experts", default=1),
        "moe_intermediate_size": Key("moe.intermediate_size", default=1024),
        "routed_scaling_factor": Key("moe.routed_scaling_factor", default=2.446),
        "linear_num_heads": "kimi_delta.num_heads",
        "linear_head_dim": "kimi_delta.head_dim",
        "linear_conv_kernel_dim": "kimi_delta.conv_size",
    },
    defaults={
        "rms_norm_eps": 1e-5,
        **{key: lambda raw, name=name: of_object(raw, name) for key, name in OF_OBJECT.items()},
    },
    options={"position_embedding": "none", "moe.scoring_func": "sigmoid", "moe.score_correction_bias": True},
    derive=parts,
    write=mlp_layer_types,
    derived={"linear_attn_config": None, "first_k_dense_replace": None},
    absent=("head_dim",),
    aliases={
        "max_position_embeddings": "model_max_length",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
    },
    # Set by other keys, and rotation that no layer does.
    ignored=("head_dim", "rope_theta", "rope_scaling", "use_grouped_topk"),
    inert={"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"},
    default_types=layer_types,
    layer_types={"linear_attention": "kimi_delta_attention"},
    names={
        **MIXTRAL.names,
        "moe.e_score_correction_bias": "block_sparse_moe.gate.e_score_correction_bias",
        "kda.in_proj": tuple(f"self_attn.{name}" for name in _JOINED),
        "kda.conv1d": tuple(f"self_attn.{name}_conv1d" for name in "qkv"),
        "kda.norm": "self_attn.o_norm",
        "kda.out_proj": "self_attn.o_proj",
        **{f"kda.{name}": f"self_attn.{name}" for name in _ALONE},
    }
    | expert_names("moe.shared_expert", "block_sparse_moe.shared_experts"),
    shapes={"kda.A_log": (1, 1, -1, 1)},
    also_spelled=ALSO_SPELLED,
    brings_code=True,
)
