"""DeepSeek-V2 (arXiv:2405.04434; Lite too) and V3 (arXiv:2412.19437): latents, shared experts, groups of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jattn.load.families.family import BOTH_BIASES, Family, Key
from torch_core.checks import check_int, shown
from torch_core.errors import Unsupported

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3"]


def _first_layers(count: Any) -> tuple[int, ...]:
    check_int("config.json: first_k_dense_replace", count, 0, 512)
    return tuple(range(count))


def _or_one(groups: Any) -> Any:
    return 1 if groups is None else groups


def _groups(raw: Mapping[str, Any]) -> dict[str, Any]:
    method = raw["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported(f"topk_method is {shown(method)}; this build has greedy and group_limited_greedy.")
    return {"moe.n_group": 1, "moe.topk_group": 1} if method == "greedy" else {}


_KEYS = {
    "attention_bias": BOTH_BIASES,
    "n_group": Key("moe.n_group", _or_one),
    "topk_group": Key("moe.topk_group", _or_one),
    "n_routed_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.num_experts_per_tok",
    "moe_intermediate_size": "moe.intermediate_size",
    "n_shared_experts": "moe.n_shared_experts",
    "routed_scaling_factor": "moe.routed_scaling_factor",
    "first_k_dense_replace": Key("moe.dense_layers", _first_layers, len),
} | {
    name: f"latent.{name}"
    for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
}
_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": lambda raw: raw["qk_rope_head_dim"],
}
_NAMES = {
    "moe.router": "mlp.gate",
    "moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "moe.gate_up_proj": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "moe.down_proj": "mlp.experts.{expert}.down_proj",
    "moe.shared_expert.gate_up_proj": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "moe.shared_expert.down_proj": "mlp.shared_experts.down_proj",
}

DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    # Where topk_method is "greedy", n_group means nothing.
    keys={"topk_method": Key("moe.n_group", lambda _: 1, lambda n: "greedy" if n == 1 else "group_limited_greedy")}
    | _KEYS,
    defaults=_DEFAULTS
    | {"topk_method": "greedy", "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    options={"moe.norm_topk_prob": False},
    derive=_groups,
    inert={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    names=_NAMES,
    brings_code=True,
)

DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    keys=_KEYS | {"norm_topk_prob": "moe.norm_topk_prob"},
    defaults=_DEFAULTS
    | {
        "n_group": 8,
        "topk_group": 4,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    options={"moe.scoring_func": "sigmoid", "moe.score_correction_bias": True},
    inert={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True},
    names=_NAMES,
    brings_code=True,
    # The layer that predicts a second token; transformers does not read it either.
    unread=r"model\.layers\.61\..+",
)
