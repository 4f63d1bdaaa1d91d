"""Which decode steps attend the prefixes that their sequences share once for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from jattn.llm.engine.device.program import Bucket
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.models.attention import Attention
from jattn.nn import PagedAttention
from torch_core.cache import LayerGroups
from torch_core.metadata import CommonAttentionMetadata, PackedLayout, prefix_groups, prefix_piece_tokens

_FEWEST_SEQUENCES = 2
# Groups are faster from a few sequences on; at most this number of pieces is considered.
_SEQUENCES_OF_A_PIECE = 4


@dataclass(frozen=True, slots=True)
class Cascade:
    """The choice for one model on one device.

    Attributes:
        piece_tokens: sequences that attend to a prefix as one.
        always: wherever blocks are shared; else if it should be faster.
        shape: inputs of that decision; see `torch_core.metadata.PrefixGroups.pays`.
    """

    piece_tokens: int
    always: bool
    shape: dict[str, Any]

    @classmethod
    def of(cls, model: nnx.Module, config: EngineConfig, groups: LayerGroups) -> Cascade | None:
        """Returns None if no step can profit.

        Prefixes are looked for in the tables of the first cache group, and attended once in its layers. Other layers
        attend as ever, so they may have windows.
        """
        layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
        device, wanted = jax.devices()[0], config.enable_cascade_attention
        if wanted is None:
            wanted = device.platform == "gpu"
        hidden = (
            config.batch_invariant,
            not config.enable_prefix_caching,
            # A piece consists of sequences; it has as many queries only if each sequence has one.
            config.num_speculative_tokens > 0,
            # No sequence has a whole prefix.
            config.decode_context_parallel_size > 1,
            config.max_num_seqs < _FEWEST_SEQUENCES,
        )
        if len(groups.groups) > 1 and groups.groups[0].sliding_window is None:
            layers = [layer for layer in layers if layer.sliding_window is None]
        biased = any(isinstance(module, Attention) and module.sees_distances for _, module in nnx.iter_modules(model))
        if not wanted or not layers or any(hidden) or biased or any(layer.sees_distances for layer in layers):
            return None
        first = layers[0]
        heads = {"num_query_heads": first.num_heads, "num_kv_heads": first.num_kv_heads}
        return cls(
            piece_tokens=prefix_piece_tokens(1, **heads),
            always=config.enable_cascade_attention is True,
            # A multiprocessor count is not JAX's to tell on every version; that of an H200 then.
            shape={**heads, "head_size": first.head_dim, "num_sms": getattr(device, "core_count", 132)},
        )

    def num_pieces(self, num_seqs: int) -> int:
        """Returns the number of pieces that a step of this number of sequences has room for; 0 if it is too small."""
        return num_seqs // _SEQUENCES_OF_A_PIECE + 1 if num_seqs >= _FEWEST_SEQUENCES else 0

    def shared(
        self, bucket: Bucket, metadata: CommonAttentionMetadata, layout: PackedLayout, bytes_per_element: int
    ) -> Bucket:
        """Writes the groups of a step into its buffer, if it has any; returns the bucket that it then is."""
        groups = prefix_groups(metadata, piece_tokens=self.piece_tokens, max_pieces=bucket.num_pieces)
        if groups is None or not (self.always or groups.pays(**self.shape, bytes_per_element=bytes_per_element)):
            return bucket
        layout["prefix_lens"].of(metadata.packed)[: len(groups.prefix_lens)] = groups.prefix_lens
        starts = layout["piece_starts"].of(metadata.packed)
        starts[: len(groups.piece_starts)] = groups.piece_starts
        starts[len(groups.piece_starts) :] = groups.piece_starts[-1]
        return replace(bucket, piece_tokens=self.piece_tokens)
