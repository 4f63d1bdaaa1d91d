"""DeepSeek-V3 (arXiv:2412.19437) with a correction bias, and V3.2 (arXiv:2512.02556) with an indexer."""

from __future__ import annotations

import dataclasses
from typing import Any

from jattn.llm.load.families.deepseek_v2 import DEFAULTS, KEYS, NAMES
from jattn.llm.load.families.family import Family, Raw, Whole
from jattn.llm.load.families.llama import YARN
from torch_core.base.checks import shown
from torch_core.base.errors import Unsupported

DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    keys=KEYS | {"norm_topk_prob": "moe.norm_topk_prob"},
    defaults=DEFAULTS
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
    # Kimi K2 has V3's architecture.
    also_types=("kimi_k2",),
    names=NAMES,
    brings_code=True,
    # The layer that predicts a second token; cut models have V3's own.
    unread=r"model\.layers\.(61|{layers})\..+",
)

# Of attention over chosen tokens, as transformers 5.23 writes it and as 5.17 does.
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")


def checked_layers(raw: Raw) -> dict[str, Any]:
    """Refuses layers of experts in another order, and layers without an indexer."""
    dense, count = raw["first_k_dense_replace"], raw["num_hidden_layers"]
    served = {
        "mlp_layer_types": [["dense" if layer < dense else "sparse" for layer in range(count)]],
        "layer_types": [[kind] * count for kind in _INDEXED],
    }
    for name, types in served.items():
        if raw.get(name) not in (None, *types):
            raise Unsupported(name, value=raw[name], wanted=f"this build has {shown(types[0])}")
    return {}


DEEPSEEK_V32 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    also_types=(),
    keys={**DEEPSEEK_V3.keys, **{name: f"latent.{name}" for name in ("index_n_heads", "index_head_dim", "index_topk")}},
    defaults={**DEEPSEEK_V3.defaults, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    derive=checked_layers,
    layer_types=dict.fromkeys(_INDEXED, "attention"),
)


def _one_group(raw: Raw) -> dict[str, Any]:
    """Refuses groups, whose ranks here are by their best expert and there by their best two."""
    for name in ("n_group", "topk_group"):
        if raw[name] not in (None, 1):
            raise Unsupported(name, value=raw[name], wanted="this build has 1 there")
    return {}


# Mistral Small 4: V3's layers with softmax scores, and queries that grow with their position.
MISTRAL4 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="Mistral4ForCausalLM",
    model_type="mistral4",
    also_types=(),
    defaults={
        **DEEPSEEK_V3.defaults,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "rope_scaling": {**YARN, "factor": 128.0, "original_max_position_embeddings": 8192},
    },
    options={},
    derive=lambda raw: _one_group(raw) | {"head_dim": raw["qk_rope_head_dim"]},
    absent=("head_dim",),
    # Of the whole head, and the share of it that rotates.
    ignored=("head_dim", "partial_rotary_factor"),
    inert={"moe_layer_freq": 1, "rope_interleave": True},
    rope_keys={"llama_4_scaling_beta": "llama_4_scaling_beta"},
    names={**NAMES, "moe.gate_up_proj": "mlp.experts.gate_up_proj", "moe.down_proj": "mlp.experts.down_proj"},
    experts_out_in=True,
    brings_code=False,
    whole=Whole(architecture="Mistral3ForConditionalGeneration", model_type="mistral3"),
)
