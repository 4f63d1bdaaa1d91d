"""The fields of a ModelConfig by kind: those that are parts with a config of their own, and those that are sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.parts import RopeScaling
from torch_core.base.limits import limits_of

#: The configs of the parts that a model may have, by their fields.
PARTS: Mapping[str, type[Any]] = MappingProxyType(
    {
        name: kind
        for name, hint in get_type_hints(ModelConfig).items()
        for kind in get_args(hint)
        if isinstance(kind, type) and is_dataclass(kind) and kind not in (ModelConfig, RopeScaling)
    }
)
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("num_key_value_heads", "head_dim", "max_position_embeddings")
#: The upper limits of the fields that are sizes.
SIZE_LIMITS = {name: int(limits_of(ModelConfig)[name].high or 0) for name in _SIZES}
