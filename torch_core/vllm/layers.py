"""Views over several layers or tensors: common parameters, query shapes of drafts, backends of shared caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any

import numpy as np
from torch import Tensor

from torch_core.base.errors import InvalidInput
from torch_core.metadata import CommonAttentionMetadata, make_kv_sharing_fast_prefill_common_attn_metadata
from torch_core.vllm.backend import AttentionBackend
from torch_core.vllm.paged_impl import PagedAttentionImpl
from torch_core.vllm.registry import subclass_attention_backend

__all__ = [
    "PerLayerParameters",
    "create_fast_prefill_custom_backend",
    "get_per_layer_parameters",
    "infer_global_hyperparameters",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "subclass_attention_metadata",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerParameters:
    """The options of a layer that a plan made once for several layers depends on.

    Attributes:
        window_left: keys before the own position that are visible; -1 for all.
        logits_soft_cap: None for off.
        sm_scale: factor on the scores.
        has_sinks: the layer has sinks.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    has_sinks: bool = False


def get_per_layer_parameters(layers: Mapping[str, PagedAttentionImpl]) -> dict[str, PerLayerParameters]:
    """Returns the options of each layer by name."""
    return {
        name: PerLayerParameters(
            window_left=-1 if impl.spec.window_left is None else impl.spec.window_left,
            logits_soft_cap=impl.spec.logits_soft_cap,
            sm_scale=impl.spec.scale,
            has_sinks=impl.sinks is not None,
        )
        for name, impl in layers.items()
    }


def infer_global_hyperparameters(per_layer_params: Mapping[str, PerLayerParameters]) -> PerLayerParameters:
    """Returns the options that all layers share; InvalidInput when there is no layer, or two differ."""
    if not per_layer_params:
        raise InvalidInput("per_layer_params is empty; there is no layer to take the options from.")
    names = list(per_layer_params)
    first = per_layer_params[names[0]]
    for name in names[1:]:
        if per_layer_params[name] != first:
            raise InvalidInput(
                f"layers {names[0]} and {name} differ: {first} and {per_layer_params[name]}. Plan them apart."
            )
    return first


def reshape_query_for_spec_decode(query: Tensor, batch_size: int) -> Tensor:
    """Returns the query [num_tokens, num_heads, head_size] as [batch_size, tokens of each, num_heads, head_size]."""
    if query.dim() != 3 or batch_size < 1 or query.shape[0] % batch_size:
        raise InvalidInput(
            f"query has shape {tuple(query.shape)}; [num_tokens, num_heads, head_size] with num_tokens a multiple of "
            f"batch_size, {batch_size}, is needed."
        )
    return query.view(batch_size, query.shape[0] // batch_size, *query.shape[1:])


def reshape_attn_output_for_spec_decode(attn_output: Tensor) -> Tensor:
    """Returns an output [batch, tokens, num_heads, head_size] as [num_tokens, num_heads, head_size]."""
    if attn_output.dim() == 3:
        return attn_output
    if attn_output.dim() != 4:
        raise InvalidInput(f"attn_output has shape {tuple(attn_output.shape)}; it must have rank 3 or 4.")
    return attn_output.flatten(0, 1)


def subclass_attention_metadata(name_prefix: str, metadata_cls: type, fields: list[tuple[str, Any, Any]]) -> type:
    """Returns a frozen dataclass that extends a metadata class by fields of (name, type, default).

    Example:
        >>> from torch_core.vllm import PagedAttentionMetadata
        >>> subclass_attention_metadata("Tree", PagedAttentionMetadata, [("depth", int, 0)]).__name__
        'TreePagedAttentionMetadata'
    """
    return make_dataclass(
        name_prefix + metadata_cls.__name__, fields, bases=(metadata_cls,), frozen=True, kw_only=True, eq=False
    )


def create_fast_prefill_custom_backend(
    prefix: str, underlying_attn_backend: type[AttentionBackend]
) -> type[AttentionBackend]:
    """Returns a backend whose builder keeps only the queries whose logits are wanted.

    For layers behind the last one that writes a cache of its own; see
    `make_kv_sharing_fast_prefill_common_attn_metadata`. Its `build` takes `logits_indices`, int[n].
    """

    class FastPrefillAttentionBuilder(underlying_attn_backend.get_builder_cls()):  # type: ignore[misc]
        """Builds the metadata of the chosen query tokens."""

        def build(  # pyright: ignore[reportIncompatibleMethodOverride]
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
            *,
            logits_indices: np.ndarray,
            **options: Any,
        ) -> Any:
            """See the class that is extended."""
            chosen = make_kv_sharing_fast_prefill_common_attn_metadata(common_attn_metadata, logits_indices)
            return super().build(common_prefix_len, chosen, fast_build, **options)

    return subclass_attention_backend(prefix, underlying_attn_backend, FastPrefillAttentionBuilder)
