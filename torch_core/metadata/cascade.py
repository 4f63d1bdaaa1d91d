"""Cascade attention: finding the prefixes that sequences share, and deciding whether to attend them once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torch_core.base.checks import check_heads
from torch_core.base.errors import InvalidInput
from torch_core.metadata.common import CommonAttentionMetadata

_MIN_PREFIX_TOKENS = 256
_MIN_REQS = 2
_OUTPUT_BYTES = 2
# Rows (queries times query heads of one key/value head) of the tile for long queries, how many such tiles a device
# takes at once, and the rows up to which queries count as short.
_LARGE_TILE_ROWS = 128
_FILLING_TILES = 128
_SHORT_QUERY_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeCosts:
    """The cost model of cascade attention on one kind of device; from measurements, not from data sheets.

    The defaults fit 147 measurements on an H200 (2 to 256 sequences, prefixes of 256 to 8192 tokens, five head
    geometries, suffixes of 64 and 1024 tokens, with a warm and a cold L2 cache): cascade is never chosen where it was
    slower, and never left out where it gained a fifth or more.

    Attributes:
        bytes_per_us: rate at which attention reads the cache.
        flops_per_us_per_sm: rate of one multiprocessor over the shared prefix.
        merge_bytes_per_us: output per microsecond of the partial results, their merge and the second attention.
        overhead_us: fixed cost of the second attention and the merge, in microseconds.
        margin: cascade is used when it should take at most this fraction of the plain time.
    """

    bytes_per_us: float = 4.5e6
    flops_per_us_per_sm: float = 3.0e6
    merge_bytes_per_us: float = 1.0e5
    overhead_us: float = 7.0
    margin: float = 0.6


def common_prefix_length(metadata: CommonAttentionMetadata) -> int:
    """Returns how many leading tokens all sequences share block by block, and had computed before the step.

    Blocks are equal when their ids are: sequences with equal text in different blocks share nothing. Only whole
    blocks count, and no token of the step's own queries does, so that every query is after the prefix.

    Example:
        >>> from torch_core.metadata import SequenceRow, build_common_metadata
        >>> rows = [SequenceRow([5, 6, 7], 9, 1), SequenceRow([5, 6, 8], 8, 3)]
        >>> common_prefix_length(build_common_metadata(rows, block_size=4, num_blocks=16))
        8
    """
    reqs = metadata.num_reqs
    if reqs < 2:
        return 0
    computed = metadata.seq_lens[:reqs] - metadata.query_lens[:reqs]
    limit = int(computed.min()) // metadata.block_size
    tables = metadata.block_tables[:reqs, :limit]
    if limit == 0 or (tables[:, 0] != tables[0, 0]).any():
        return 0
    differs = (tables != tables[0]).any(axis=0)
    shared = int(np.argmax(differs)) if differs.any() else limit
    return shared * metadata.block_size


def prefix_piece_tokens(num_tokens: int, *, num_query_heads: int, num_kv_heads: int) -> int:
    """Returns how many queries attend to a shared prefix as one sequence.

    All of them, when their tiles alone fill a device: long queries read a prefix best in the largest tiles. Otherwise
    they are split into pieces that count as short queries, whose keys are split among further thread blocks. The pieces
    follow from the padded batch, so a captured graph has the same ones for every step.

    `num_tokens` are the queries of the batch, padding included.

    Example:
        >>> prefix_piece_tokens(64, num_query_heads=32, num_kv_heads=8)
        16
        >>> prefix_piece_tokens(2048, num_query_heads=32, num_kv_heads=8)
        2048
    """
    group = num_query_heads // num_kv_heads
    tiles = num_kv_heads * -(-num_tokens * group // _LARGE_TILE_ROWS)
    return num_tokens if tiles >= _FILLING_TILES else max(1, _SHORT_QUERY_ROWS // group)


def use_cascade_attention(
    common_prefix_len: int,
    query_lens: np.ndarray,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    bytes_per_element: float,
    num_sms: int,
    use_alibi: bool = False,
    use_sliding_window: bool = False,
    use_local_attention: bool = False,
    dcp_world_size: int = 1,
    costs: CascadeCosts | None = None,
) -> bool:
    """Returns whether attending the shared prefix once and merging should be faster than the plain way.

    The plain way reads the prefix once per sequence. Cascade reads it once, takes at least the time of the prefix's
    multiplications, and merges two partial results. It cannot serve masks that depend on the distance to the query
    (ALiBi, windows, chunks), nor a prefix that is spread over ranks.

    Args:
        common_prefix_len: tokens of the prefix; see `common_prefix_length`.
        query_lens: int[reqs], new tokens of each sequence.
        num_query_heads, num_kv_heads, head_size: sizes of the layer.
        bytes_per_element: bytes per element of the cache.
        num_sms: multiprocessors of the device.
        use_alibi, use_sliding_window, use_local_attention: options of the layer.
        dcp_world_size: number of ranks that share each sequence.
        costs: rates of the device; None for those of an H200.

    Raises:
        InvalidInput: the prefix is negative or the heads do not divide.

    Example:
        >>> shape = dict(num_query_heads=32, num_kv_heads=8, head_size=128, bytes_per_element=2, num_sms=132)
        >>> use_cascade_attention(8192, np.ones(64), **shape), use_cascade_attention(512, np.ones(4), **shape)
        (True, False)
    """
    if common_prefix_len < 0:
        raise InvalidInput("common_prefix_len", value=common_prefix_len, wanted="it cannot be negative")
    check_heads("num_query_heads", num_query_heads, num_kv_heads)
    if use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1:
        return False
    if common_prefix_len < _MIN_PREFIX_TOKENS or len(query_lens) < _MIN_REQS or num_sms < 1:
        return False
    queries = int(np.sum(query_lens))
    return _pays(
        len(query_lens) * common_prefix_len,
        common_prefix_len,
        queries,
        queries * common_prefix_len,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        bytes_per_element=bytes_per_element,
        num_sms=num_sms,
        costs=costs or CascadeCosts(),
    )


class PrefixGroups(NamedTuple):
    """The shared prefixes of a decode step.

    Attributes:
        prefix_lens: int32[reqs], tokens that a sequence shares with its group, whole blocks; 0 outside of groups.
        piece_starts: the first sequence of each piece and, at the end, their number: the sequences of a piece are of
            one group, or of none, and attend to their prefix as one.
    """

    prefix_lens: np.ndarray
    piece_starts: list[int]

    def pays(
        self, *, num_query_heads: int, num_kv_heads: int, head_size: int, bytes_per_element: float, num_sms: int
    ) -> bool:
        """Returns whether attending each prefix once should be faster; see `use_cascade_attention`."""
        read_once = int(self.prefix_lens[self.piece_starts[:-1]].sum())
        return _pays(
            int(self.prefix_lens.sum()),
            read_once,
            len(self.prefix_lens),
            int(self.prefix_lens.sum()),
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            bytes_per_element=bytes_per_element,
            num_sms=num_sms,
            costs=CascadeCosts(),
        )


def prefix_groups(metadata: CommonAttentionMetadata, *, piece_tokens: int, max_pieces: int) -> PrefixGroups | None:
    """Finds neighbouring sequences whose tables begin with the same blocks.

    Args:
        metadata: metadata of a step with one new token for each sequence.
        piece_tokens: most sequences of a piece.
        max_pieces: most pieces.

    Returns:
        The groups; None without groups, or with more than `max_pieces`.

    Example:
        >>> from torch_core.metadata import SequenceRow, build_common_metadata
        >>> rows = [SequenceRow([1, 2, 3], 9, 1), SequenceRow([1, 2, 4], 8, 1), SequenceRow([5], 1, 1)]
        >>> found = prefix_groups(build_common_metadata(rows, block_size=4, num_blocks=8), piece_tokens=4, max_pieces=4)
        >>> found.prefix_lens.tolist(), found.piece_starts
        ([8, 8, 0], [0, 2, 3])
    """
    reqs, block_size = metadata.num_reqs, metadata.block_size
    tables = metadata.block_tables[:reqs]
    if reqs < 2 or not (tables[1:, 0] == tables[:-1, 0]).any():
        return None
    full = metadata.compute_num_computed_tokens()[:reqs] // block_size
    alike = tables[1:] == tables[:-1]
    shared = np.where(alike.all(1), tables.shape[1], alike.argmin(1))
    groups = _grouped(np.minimum(shared, np.minimum(full[1:], full[:-1])).tolist())
    prefix_lens, starts = np.zeros(reqs, np.int32), []
    for first, end, blocks in groups:
        prefix_lens[first:end] = blocks * block_size
        starts += range(first, end, piece_tokens)
    if len(starts) > max_pieces or not prefix_lens.any():
        return None
    return PrefixGroups(prefix_lens, [*starts, reqs])


def _grouped(shared: list[int]) -> list[tuple[int, int, int]]:
    """Returns (first, end, blocks) of groups and of the sequences between, from the blocks that neighbours share."""
    groups: list[tuple[int, int, int]] = []
    first, blocks = 0, 0
    for index, common in enumerate(shared):
        # A neighbour that shares less than half of the prefix would cost the group more than it brings.
        if blocks and 2 * common >= blocks:
            blocks = min(blocks, common)
        elif blocks:
            groups.append((first, index + 1, blocks))
            first, blocks = index + 1, 0
        elif common:
            groups += [(first, index, 0)] if index > first else []
            first, blocks = index, common
    return [*groups, (first, len(shared) + 1, blocks)]


def _pays(
    plain_tokens: int,
    cascade_tokens: int,
    num_queries: int,
    num_pairs: int,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    bytes_per_element: float,
    num_sms: int,
    costs: CascadeCosts,
) -> bool:
    """Returns whether reading prefixes once and merging should be faster than the plain way.

    The plain way reads `plain_tokens` of prefixes, once per sequence; cascade reads `cascade_tokens`, once per piece,
    for `num_pairs` of a query and a token of its prefix, and merges the results of `num_queries`.
    """
    token_us = 2 * num_kv_heads * head_size * bytes_per_element / costs.bytes_per_us
    flops = 4 * num_pairs * num_query_heads * head_size
    once = max(flops / (costs.flops_per_us_per_sm * num_sms), cascade_tokens * token_us)
    merge = num_queries * num_query_heads * head_size * _OUTPUT_BYTES / costs.merge_bytes_per_us
    return once + merge + costs.overhead_us <= costs.margin * plain_tokens * token_us
