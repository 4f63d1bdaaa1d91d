"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, Raw, expert_names

#: The keys of Qwen's files without windows.
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


def _above(layer: int, raw: Raw) -> bool:
    """Returns whether a layer has the window: those above the first max_window_layers do."""
    return layer >= raw["max_window_layers"]


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults=_NO_WINDOW,
    options={"attention_bias": True},
    windows=_above,
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    keys={"attention_bias": BOTH_BIASES},
    defaults=_NO_WINDOW | {"head_dim": 128},
    options={"qk_norm": "head"},
    windows=_above,
)


def _sparse_layers(raw: Raw) -> dict[str, Any]:
    dense = set(raw.get("mlp_only_layers") or ())
    step = raw.get("decoder_sparse_step") or 1
    dense |= {layer for layer in range(raw["num_hidden_layers"]) if (layer + 1) % step}
    return {"moe.dense_layers": tuple(sorted(dense))}


_MOE_KEYS = {
    "num_experts_per_tok": "moe.num_experts_per_tok",
    "moe_intermediate_size": "moe.intermediate_size",
    "norm_topk_prob": "moe.norm_topk_prob",
    "mlp_only_layers": Key("moe.dense_layers", write=list),
}
_MOE_NAMES = {"moe.router": "mlp.gate"} | expert_names("moe", "mlp.experts.{expert}")

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    keys=_MOE_KEYS | {"attention_bias": BOTH_BIASES, "num_experts": "moe.num_experts"},
    defaults=_NO_WINDOW | {"norm_topk_prob": False},
    options={"qk_norm": "head"},
    derive=_sparse_layers,
    aliases={"num_local_experts": "num_experts"},
    ignored=("qkv_bias", "shared_expert_intermediate_size", "use_qk_norm"),
    windows="all",
    names=_MOE_NAMES,
)

QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    keys=_MOE_KEYS
    | {
        "num_experts": "moe.num_experts",
        "shared_expert_intermediate_size": "moe.shared_intermediate_size",
        "qkv_bias": "attention_bias",
    },
    defaults=_NO_WINDOW | {"norm_topk_prob": False, "qkv_bias": True},
    derive=_sparse_layers,
    windows=_above,
    names=_MOE_NAMES
    | expert_names("moe.shared_expert", "mlp.shared_expert")
    | {"moe.shared_expert_gate": "mlp.shared_expert_gate"},
)
