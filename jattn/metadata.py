"""The device side of one step's attention metadata: a pytree of int32 arrays that every layer shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_core.base.errors import InvalidInput
from torch_core.metadata import (
    CommonAttentionMetadata,
    EncoderRow,
    SequenceRowLike,
    build_common_metadata,
    group_fields,
)

_ARRAYS = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroups:
    """Neighbouring sequences that share a prefix, for a step of one new token each: each prefix is attended once.

    `torch_core.metadata.prefix_groups` finds them.

    Attributes:
        prefix_lens: int32[num_seqs]; tokens that a sequence shares with its group, whole blocks; 0 outside of groups.
        piece_starts: int32[pieces + 1]; first sequence of each piece, running up to the number of real sequences. A
            piece is within one group, or outside of all.
        piece_tokens: most sequences of a piece; static.
    """

    prefix_lens: jax.Array
    piece_starts: jax.Array
    piece_tokens: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class CrossMetadata:
    """The block tables and lengths of each sequence's encoder input, for cross attention.

    Attributes:
        block_tables: int32[num_seqs, max_encoder_blocks].
        seq_lens: int32[num_seqs]; encoder tokens of each sequence, 0 for padding.
    """

    block_tables: jax.Array
    seq_lens: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The batch of one step, as its attention ops need it.

    The sizes are padded: rows beyond the real sequences have `seq_lens` 0 and an empty query range, tokens beyond the
    real ones have slot -1. Nothing here is written by an op; the arrays may be reused by every layer.

    Attributes:
        block_tables: int32[num_seqs, max_blocks]; the blocks of each sequence in order. Entries past
            `ceil(seq_len / block_size)` may hold anything and are never read.
        seq_lens: int32[num_seqs]; tokens of each sequence after this step's were written.
        query_start_loc: int32[num_seqs + 1]; cumulative sum of the query lengths, starting with 0.
        slot_mapping: int32[num_tokens]; `block * block_size + offset` for each new token, -1 for padding.
        max_query_len: an upper bound on every query length; static, so part of the compiled shape.
        groups: sequences that share prefixes; None to attend each on its own.
        cross: the arrays of cross attention; None for a model without it.
        state_slots: int32[num_seqs]; slot of each sequence's recurrent state, -1 for padding; None for a model without
            such layers.
        defers_states: whether the ops of such layers return `jattn.ops.DeferredStates`, because proposed tokens may be
            rejected; static.
        peers: the memory in which a split model sums small arrays, this device's part of `jattn.parallel.Peers.table`;
            None for XLA's sums.
        block_size: tokens of the blocks that tables and slots were made for, which a layer compares with its cache's;
            static. None if that is not known.
        inputs: numbers of each sequence by name, [num_seqs]; see `jattn.llm.models.PagedSpec.inputs`.
        adapters: low-rank adapters of the tokens, a `jattn.llm.models.BatchAdapters`; None for none.
        result_rows: int32[n]; the tokens of which a model returns its results, where it can: see
            `jattn.llm.models.decoder_layer`. None for all.
    """

    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    slot_mapping: jax.Array
    max_query_len: int = field(metadata={"static": True})
    groups: PrefixGroups | None = None
    cross: CrossMetadata | None = None
    state_slots: jax.Array | None = None
    defers_states: bool = field(default=False, metadata={"static": True})
    peers: jax.Array | None = None
    block_size: int | None = field(default=None, metadata={"static": True})
    inputs: dict[str, jax.Array] = field(default_factory=dict)
    adapters: Any = None
    result_rows: jax.Array | None = None

    def of_all_rows(self) -> AttentionMetadata:
        """Returns the metadata of a layer before the last one, whose results all tokens need."""
        return self if self.result_rows is None else replace(self, result_rows=None)

    @property
    def sequences(self) -> dict[str, Any]:
        """The arrays of an attention op about the sequences, by its keywords."""
        names = ("block_tables", "seq_lens", "query_start_loc", "max_query_len")
        return {name: getattr(self, name) for name in names}

    @property
    def states(self) -> dict[str, Any]:
        """The keywords of an op of layers with a state, such as `jattn.ops.causal_conv1d`, about the sequences.

        Raises:
            InvalidInput: the metadata has no state slots.
        """
        if self.state_slots is None:
            wanted = "build it with num_slots, from rows that have a state_slot"
            raise InvalidInput("metadata", "has no state_slots", wanted)
        return {
            "query_start_loc": self.query_start_loc,
            "cache_indices": self.state_slots,
            "has_initial_state": self.seq_lens > jnp.diff(self.query_start_loc),
            "defer_states": self.defers_states,
        }

    @classmethod
    def of_fields(
        cls, fields: Mapping[str, jax.Array], *, max_query_len: int, cache_group: int = 0, cross: bool = False
    ) -> AttentionMetadata:
        """Returns a step's metadata from its uploaded arrays, which have the names of `metadata_layout`.

        Args:
            fields: the arrays of the packed buffer, by name.
            max_query_len: an upper bound on every query length.
            cache_group: the cache group whose tables and slots are taken.
            cross: take the arrays of cross attention, too.
        """
        tables, slots = group_fields(cache_group)
        return cls(
            block_tables=fields[tables],
            seq_lens=fields["seq_lens"],
            query_start_loc=fields["query_start_loc"],
            slot_mapping=fields[slots],
            max_query_len=max_query_len,
            cross=CrossMetadata(block_tables=fields["cross_block_tables"], seq_lens=fields["encoder_seq_lens"])
            if cross
            else None,
            state_slots=fields.get("state_slots"),
        )

    @classmethod
    def build(
        cls,
        rows: Sequence[SequenceRowLike],
        *,
        block_size: int,
        num_blocks: int,
        num_seqs: int | None = None,
        num_tokens: int | None = None,
        max_blocks: int | None = None,
        max_query_len: int | None = None,
        encoder_rows: Sequence[EncoderRow] | None = None,
        num_slots: int | None = None,
    ) -> AttentionMetadata:
        """Builds a step's metadata from its rows, checks every value on the host, and uploads it.

        Args:
            rows: one `SequenceRow` for each sequence, in the order in which their tokens are packed.
            block_size: tokens of one block.
            num_blocks: blocks of the pool, the null block 0 included.
            num_seqs, num_tokens, max_blocks: padded sizes, so that steps share a program; just enough when None.
            max_query_len: a static bound to keep; the longest row's new tokens when None.
            encoder_rows: blocks and length of each sequence's encoder input, for cross attention.
            num_slots: state slots of the pool, for layers with a state; the rows then have a `state_slot`.

        Raises:
            InvalidInput: a block id, a length or a shared block is wrong; the message names the row.
            RequestTooLong: the rows exceed a padded size or the bound.

        Example:
            >>> from torch_core.metadata import SequenceRow
            >>> rows = [SequenceRow([5, 2], 0, 6), SequenceRow([9], 3, 1)]
            >>> step = AttentionMetadata.build(rows, block_size=4, num_blocks=16, num_tokens=8)
            >>> step.slot_mapping.tolist(), step.max_query_len
            ([20, 21, 22, 23, 8, 9, 39, -1], 6)
        """
        common = build_common_metadata(
            rows,
            block_size=block_size,
            num_blocks=num_blocks,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_blocks=max_blocks,
            max_query_len=max_query_len,
            encoder_rows=encoder_rows,
            num_slots=num_slots,
        )
        return replace(cls.from_common(common), block_size=block_size)

    @classmethod
    def build_sharded(
        cls,
        shards: Sequence[Sequence[SequenceRowLike]],
        *,
        block_size: int,
        num_blocks: int,
        num_seqs: int | None = None,
        num_tokens: int | None = None,
        max_blocks: int | None = None,
        max_query_len: int | None = None,
        global_ids: bool = False,
    ) -> AttentionMetadata:
        """Builds the metadata of a step whose sequences are split over devices, one after the other.

        Every array has the devices' parts one after the other, padded equally, so that `PartitionSpec("dp")` splits the
        whole record. Inside `jax.shard_map` each device then has its own metadata, and any batch is served. Under plain
        jit the ops take one batch instead: `global_ids=True` counts blocks, slots and offsets through all parts, and
        asks for rows with `max_query_len` new tokens each.

        Args:
            shards: the rows of each device, with block ids of its own pool, 0 being its null block.
            block_size: tokens of one block.
            num_blocks: blocks of one device's pool.
            num_seqs, num_tokens, max_blocks, max_query_len: padded sizes of one device's part, as in `build`.
            global_ids: one batch for the ops to split themselves, rather than one for each device.

        Raises:
            InvalidInput: as in `build`, there is no shard, or with global_ids a row of another length.
            RequestTooLong: the rows of a shard exceed a padded size or the bound.

        Example:
            >>> from torch_core.metadata import SequenceRow
            >>> shards = [[SequenceRow([5], 3, 1)], [SequenceRow([2], 0, 1), SequenceRow([7], 1, 1)]]
            >>> step = AttentionMetadata.build_sharded(shards, block_size=4, num_blocks=8, global_ids=True)
            >>> step.slot_mapping.tolist(), step.query_start_loc.tolist()
            ([23, -1, 40, 61], [0, 1, 2, 3, 4])
        """
        if not shards:
            raise InvalidInput("shards", "is empty", "give the rows of each device, [] for one without")
        pool: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks}
        plain = [build_common_metadata(rows, **pool) for rows in shards]
        rows_each = max_query_len if max_query_len is not None else max(step.max_query_len for step in plain)
        num_seqs = max(step.num_seqs for step in plain) if num_seqs is None else num_seqs
        if global_ids:
            for shard, step in enumerate(plain):
                uneven = np.flatnonzero(step.query_lens != rows_each)
                if uneven.size:
                    raise InvalidInput(
                        f"row {uneven[0]} of shards[{shard}] has {step.query_lens[uneven[0]]} new tokens; for one "
                        f"batch that is split every row has max_query_len = {rows_each}. Pass global_ids=False, and "
                        "call the ops inside jax.shard_map."
                    )
            num_tokens = num_seqs * rows_each
        sizes: dict[str, Any] = {
            "num_seqs": num_seqs,
            "num_tokens": max(step.num_tokens for step in plain) if num_tokens is None else num_tokens,
            "max_blocks": max(step.block_tables.shape[1] for step in plain) if max_blocks is None else max_blocks,
            "max_query_len": rows_each,
        }
        built = [build_common_metadata(rows, **pool, **sizes) for rows in shards]
        arrays = {name: np.concatenate([getattr(step, name) for step in built]) for name in _ARRAYS}
        if global_ids:
            shard = np.arange(len(shards), dtype=np.int32).repeat(num_seqs)[:, None] * num_blocks
            tables, slots = arrays["block_tables"], arrays["slot_mapping"]
            arrays["block_tables"] = np.where(tables > 0, tables + shard, 0)
            arrays["slot_mapping"] = np.where(slots >= 0, slots + shard.repeat(rows_each) * block_size, slots)
            arrays["query_start_loc"] = np.arange(shard.size + 1, dtype=np.int32) * rows_each
        return cls(**jax.device_put(arrays), max_query_len=rows_each, block_size=block_size)

    @classmethod
    def from_common(cls, common: CommonAttentionMetadata) -> AttentionMetadata:
        """Uploads a step's record, as `torch_core.metadata.build_common_metadata` makes it, to JAX's default device."""
        # Copies: XLA's CPU backend would go on reading the buffer, into which the next step may be built.
        arrays = jax.device_put({name: getattr(common, name).copy() for name in _ARRAYS})
        if common.state_slots is not None:
            arrays["state_slots"] = jax.device_put(common.state_slots.copy())
        cross = None
        if (encoder := common.encoder) is not None:
            tables, seq_lens = jax.device_put((encoder.cross_block_tables.copy(), encoder.encoder_seq_lens.copy()))
            cross = CrossMetadata(block_tables=tables, seq_lens=seq_lens)
        return cls(**arrays, max_query_len=common.max_query_len, cross=cross)

    def of_layer(self, layer: int) -> tuple[AttentionMetadata, int]:
        """Returns a layer's metadata and the index of its cache array: this record, and the layer's own index."""
        return self, layer

    def check_blocks(self, name: str, block_size: int) -> None:
        """Refuses a cache, called `name`, whose blocks have not the size that tables and slots were made for."""
        if self.block_size not in (None, block_size):
            problem = f"is for blocks of {self.block_size} tokens and {name} of {block_size}"
            raise InvalidInput("metadata", problem, "build it with the cache's block_size")

    def positions(self, num_tokens: int) -> jax.Array:
        """Returns int32[num_tokens], the position of each new token in its sequence; values of padding are undefined.

        Example:
            >>> from torch_core.metadata import SequenceRow
            >>> rows = [SequenceRow([5], 2, 2), SequenceRow([9], 3, 1)]
            >>> step = AttentionMetadata.build(rows, block_size=4, num_blocks=16)
            >>> step.positions(3).tolist()
            [2, 3, 3]
        """
        starts, tokens = self.query_start_loc, jnp.arange(num_tokens, dtype=jnp.int32)
        sequence = self._sequence_of(num_tokens)
        first = self.seq_lens - jnp.diff(starts)
        return first[sequence] + tokens - starts[sequence]

    def of_tokens(self, values: jax.Array, num_tokens: int) -> jax.Array:
        """Returns the value of each new token's sequence; values of padding are undefined.

        Args:
            values: [num_seqs, ...], such as one of `inputs`.
            num_tokens: number of new tokens, padding included.

        Example:
            >>> from torch_core.metadata import SequenceRow
            >>> rows = [SequenceRow([5], 2, 2), SequenceRow([9], 3, 1)]
            >>> step = AttentionMetadata.build(rows, block_size=4, num_blocks=16)
            >>> step.of_tokens(jnp.array([7, 8]), 3).tolist()
            [7, 7, 8]
        """
        return values[self._sequence_of(num_tokens)]

    def _sequence_of(self, num_tokens: int) -> jax.Array:
        starts, tokens = self.query_start_loc, jnp.arange(num_tokens, dtype=jnp.int32)
        # A loop would be three launches for each of its turns on a GPU.
        found = jnp.searchsorted(starts, tokens, side="right", method="scan_unrolled")
        return jnp.minimum(found - 1, starts.size - 2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMetadata:
    """The metadata of a step over several cache groups, whose layers keep different parts of the past.

    Attributes:
        cache_groups: metadata of each cache group, with equal lengths and new tokens, and its own block tables and
            slots.
        layer_groups: the group of each layer with a cache; static.
        layer_arrays: the cache array of each: layers of different groups share one, each in the blocks of its group;
            static.
    """

    cache_groups: tuple[AttentionMetadata, ...]
    layer_groups: tuple[int, ...] = field(metadata={"static": True})
    layer_arrays: tuple[int, ...] = field(metadata={"static": True})

    @property
    def inputs(self) -> dict[str, jax.Array]:
        """Numbers of each sequence; see `AttentionMetadata`."""
        return self.cache_groups[0].inputs

    def of_tokens(self, values: jax.Array, num_tokens: int) -> jax.Array:
        """Returns the value of each new token's sequence; see `AttentionMetadata`."""
        return self.cache_groups[0].of_tokens(values, num_tokens)

    def of_layer(self, layer: int) -> tuple[AttentionMetadata, int]:
        """Returns a layer's metadata and the index of its cache array."""
        return self.cache_groups[self.layer_groups[layer]], self.layer_arrays[layer]
