"""DeepSeek-V3.2 (arXiv:2512.02556): V3 with an indexer that chooses the tokens of each query."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.llm.load.families.deepseek_v3 import DEEPSEEK_V3
from jattn.llm.load.families.family import Key
from torch_core.base.checks import shown
from torch_core.base.errors import Unsupported

# Of attention over chosen tokens, as transformers 5.23 writes it and as 5.17 does.
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")


def _checked_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
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
    keys={
        **DEEPSEEK_V3.keys,
        **{name: Key(f"latent.{name}") for name in ("index_n_heads", "index_head_dim", "index_topk")},
    },
    defaults={**DEEPSEEK_V3.defaults, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    derive=_checked_layers,
    layer_types=_INDEXED,
)
