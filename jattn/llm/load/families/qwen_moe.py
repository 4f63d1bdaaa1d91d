"""Qwen 2 and 3 with experts."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Key, Raw, expert_names
from jattn.llm.load.families.gguf import Gguf
from jattn.llm.load.families.qwen import NO_WINDOW, above


def sparse_layers(raw: Raw) -> dict[str, Any]:
    """Returns the layers without experts."""
    dense = set(raw.get("mlp_only_layers") or ())
    step = raw.get("decoder_sparse_step") or 1
    dense |= {layer for layer in range(raw["num_hidden_layers"]) if (layer + 1) % step}
    return {"moe.dense_layers": tuple(sorted(dense))}


MOE_KEYS = {
    "num_experts_per_tok": "moe.num_experts_per_tok",
    "moe_intermediate_size": "moe.intermediate_size",
    "norm_topk_prob": "moe.norm_topk_prob",
    "mlp_only_layers": Key("moe.dense_layers", write=list),
}
MOE_NAMES = {"moe.router": "mlp.gate"} | expert_names("moe", "mlp.experts.{expert}")

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    keys=MOE_KEYS | {"attention_bias": BOTH_BIASES, "num_experts": "moe.num_experts"},
    defaults=NO_WINDOW | {"norm_topk_prob": False},
    options={"qk_norm": "head"},
    derive=sparse_layers,
    aliases={"num_local_experts": "num_experts"},
    ignored=("qkv_bias", "shared_expert_intermediate_size", "use_qk_norm"),
    windows="all",
    names=MOE_NAMES,
    # llama.cpp always normalises here, and never in Qwen 2.
    gguf=Gguf(architecture="qwen3moe", values={"norm_topk_prob": True}, pre_tokenizer="qwen2"),
)

QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    keys=MOE_KEYS
    | {
        "num_experts": "moe.num_experts",
        "shared_expert_intermediate_size": "moe.shared_intermediate_size",
        "qkv_bias": "attention_bias",
    },
    defaults=NO_WINDOW | {"norm_topk_prob": False, "qkv_bias": True},
    derive=sparse_layers,
    windows=above,
    names=MOE_NAMES
    | expert_names("moe.shared_expert", "mlp.shared_expert")
    | {"moe.shared_expert_gate": "mlp.shared_expert_gate"},
    gguf=Gguf(architecture="qwen2moe", pre_tokenizer="qwen2"),
)
