"""DeepSeek-V3 (arXiv:2412.19437) with a correction bias, V3.2 (arXiv:2512.02556) with an indexer, and Youtu-LLM."""

from __future__ import annotations

import dataclasses
from typing import Any

from jattn.llm.load.families.deepseek_v2 import DEFAULTS, KEYS, LATENT_KEYS, NAMES
from jattn.llm.load.families.family import Family, Raw, mlp_layer_types
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

# Youtu-LLM (arXiv:2512.24618): V3's attention without experts.
YOUTU = Family(
    architecture="YoutuForCausalLM",
    model_type="youtu",
    keys={name: KEYS[name] for name in ("attention_bias", *LATENT_KEYS)},
    defaults={**DEFAULTS, "tie_word_embeddings": True},
    ignored=("embedding_initializer_range",),
    inert={"rope_interleave": True},
    brings_code=True,
)

# Of attention over chosen tokens, as transformers 5.23 writes it and as 5.17 does.
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")


def checked_layers(raw: Raw) -> dict[str, Any]:
    """Refuses layers of other types."""
    types = [[kind] * raw["num_hidden_layers"] for kind in _INDEXED]
    if raw.get("layer_types") not in (None, *types):
        raise Unsupported("layer_types", value=raw["layer_types"], wanted=f"this build has {shown(types[0])}")
    return {}


DEEPSEEK_V32 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    also_types=(),
    keys={**DEEPSEEK_V3.keys, **{name: f"latent.{name}" for name in ("index_n_heads", "index_head_dim", "index_topk")}},
    defaults={**DEEPSEEK_V3.all_defaults, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    derive=checked_layers,
    write=mlp_layer_types,
    layer_types=dict.fromkeys(_INDEXED, "attention"),
)
