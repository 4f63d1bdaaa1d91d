"""The common parts of DeepSeek-V2 and V3: latents, shared experts, groups of experts."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Key
from torch_core.base.checks import check_int


def _first_layers(count: Any) -> tuple[int, ...]:
    check_int("config.json: first_k_dense_replace", count, 0, 512)
    return tuple(range(count))


def _or_one(groups: Any) -> Any:
    return 1 if groups is None else groups


KEYS = {
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
DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": lambda raw: raw["qk_rope_head_dim"],
}
NAMES = {
    "moe.router": "mlp.gate",
    "moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "moe.gate_up_proj": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "moe.down_proj": "mlp.experts.{expert}.down_proj",
    "moe.shared_expert.gate_up_proj": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "moe.shared_expert.down_proj": "mlp.shared_experts.down_proj",
}
