"""Nemotron-H (arXiv:2504.03624): each layer is one of Mamba-2, attention, a feed-forward part or experts."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import Family, Key, Raw
from jattn.llm.models.config import ModelConfig

_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_WRITTEN = {"mamba": "linear_attention", "attention": "full_attention"}


def _layer_types(raw: Raw) -> list[str]:
    return [_PATTERN[letter] for letter in raw.get("hybrid_override_pattern") or "ME*-"]


def _experts(raw: Raw) -> dict[str, Any]:
    """Returns the layers without experts."""
    types = raw["layer_types"]
    dense = tuple(layer for layer, kind in enumerate(types) if kind != "moe")
    return {"moe.dense_layers": dense} if len(dense) < len(types) else {"moe": None}


def _written(config: ModelConfig) -> dict[str, Any]:
    parts = ["moe" if config.is_sparse(layer) else "mlp" for layer in range(config.num_hidden_layers)]
    types = zip(config.layer_types or ("attention",) * len(parts), parts, strict=True)
    return {"layers_block_type": [_WRITTEN.get(kind, part) for kind, part in types]}


_SIZES = {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
_FIELDS = ("num_heads", "head_dim", "state_size", "num_groups", "conv_size")
_MOE = {"n_routed_experts": 8, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
_MOE_FIELDS = ("num_experts", "intermediate_size", "shared_intermediate_size")
_ROUTING = {"num_experts_per_tok": 2, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
_MAMBA = ("in_proj", "conv1d", "norm", "out_proj", "A_log", "D", "dt_bias")
_MIXER = {"mlp.up_proj": "up_proj", "mlp.down_proj": "down_proj", "self_attn.o_proj": "o_proj", "moe.router": "gate"}
# Of initial values, kernels, training and the prediction of a second token. transformers' time_step_min bounds the step
# sizes of its prompts alone; NVIDIA's and vLLM's code does not have it.
_IGNORED = """time_step_min time_step_max time_step_floor time_step_rank rescale_prenorm_residual use_mamba_kernels
mamba_ssm_cache_dtype chunk_size expand n_shared_experts moe_shared_expert_overlap mtp_layers_block_type
mtp_hybrid_override_pattern num_logits_to_keep rms_norm_eps norm_eps"""

NEMOTRON_H = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    keys={name: f"mamba.{field}" for name, field in zip(_SIZES, _FIELDS, strict=True)}
    | {name: f"moe.{field}" for name, field in zip(_MOE, _MOE_FIELDS, strict=True)}
    | {name: f"moe.{name}" for name in (*_ROUTING, "routed_scaling_factor")}
    | {"layer_norm_epsilon": "rms_norm_eps", "mlp_hidden_act": "hidden_act", "mlp_bias": "mlp_bias"}
    | {"use_bias": Key(("mamba.use_bias", "mamba.out_bias")), "time_step_limit": Key("mamba.dt_limit", tuple, list)}
    | {"use_conv_bias": "mamba.conv_bias"},
    defaults={"layer_types": _layer_types, "num_hidden_layers": lambda raw: len(raw["layer_types"]), "head_dim": 128}
    | {"layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "use_conv_bias": True, "use_bias": False}
    | {"time_step_limit": [0.0, float("inf")], "routed_scaling_factor": 1.0}
    | {**_SIZES, **_MOE, **_ROUTING},
    options={"norm_type": "rms_norm_wide", "gated_mlp": False, "single_branch": True, "position_embedding": "none"}
    | {"moe.scoring_func": "sigmoid", "moe.score_correction_bias": True, "moe.shared_expert_gate": False},
    derive=_experts,
    derived={"hybrid_override_pattern": None},
    absent=("layer_types",),
    aliases={"layers_block_type": "layer_types", "attention_head_dim": "head_dim"},
    inert={"mamba_hidden_act": "silu", "attention_bias": False, "moe_latent_size": None, "residual_in_fp32": False},
    ignored=(*_IGNORED.split(), "mamba_proj_bias"),
    layer_types={"linear_attention": "mamba", "mamba": "mamba", "mlp": "feed_forward", "moe": "feed_forward"},
    write=_written,
    names={"embed_tokens": "backbone.embeddings", "norm": "backbone.norm_f", "layer": "backbone.layers.{layer}."}
    | {"input_layernorm": "norm", "self_attn.qkv_proj": tuple(f"mixer.{name}_proj" for name in "qkv")}
    | {f"mamba.{name}": f"mixer.{name}" for name in _MAMBA}
    | {module: f"mixer.{name}" for module, name in _MIXER.items()}
    | {"moe.e_score_correction_bias": "mixer.gate.e_score_correction_bias"}
    | {f"moe.{name}": f"mixer.experts.{{expert}}.{name}" for name in ("up_proj", "down_proj")}
    | {f"moe.shared_expert.{name}": f"mixer.shared_experts.{name}" for name in ("up_proj", "down_proj")},
    # As transformers names them.
    also_spelled={"backbone.": "model."},
    prefix="backbone.",
    brings_code=True,
    unread=r"mtp\..+",
)
