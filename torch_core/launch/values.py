"""Checks of what arrays hold, where the host can see it: lengths, offsets, block ids and slots."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from torch_core.attention.call import DenseCall, TableCall
from torch_core.base.errors import InvalidInput
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall
from torch_core.latent.call import LatentWriteCall
from torch_core.latent.sparse_call import IndexerCall
from torch_core.launch.call import Call

__all__ = ["check_values"]


def check_values(call: Call[Any], *, more_queries: bool = False) -> None:
    """Checks the values of a call's index arrays; its shapes and dtypes have been checked.

    On a device those values are out of reach: there they are checked where metadata is built.

    Args:
        call: of arrays in the host's memory that numpy can read (CPU tensors, JAX arrays on a CPU).
        more_queries: under a causal mask a sequence may have more query rows than keys; the first ones see nothing.

    Raises:
        InvalidInput: offsets that fall or exceed their array, a length that its table row cannot hold, a block or slot
            that the cache does not have, copies that meet; with the first bad index.
    """
    if isinstance(call, TableCall):
        query_lens = _check_starts("query_start_loc", call.query_start_loc, call.num_tokens, call.max_query_len)
        _check_tables(call, query_lens if call.spec.causal and not more_queries else None)
    elif isinstance(call, DenseCall):
        _check_starts("query_start_loc", call.query_start_loc, call.num_tokens, call.max_query_len)
        _check_starts("key_start_loc", call.key_start_loc, call.key.shape[0], call.max_key_len)
    elif isinstance(call, WriteCall):
        _check_slots(call.slot_mapping, call.num_blocks, call.block_size)
    elif isinstance(call, LatentWriteCall):
        _check_slots(call.slot_mapping, *call.latent_cache.shape[:2])
        _check_positions(call)
    elif isinstance(call, RotaryWriteCall):
        _check_slots(call.slot_mapping, call.kv_cache.shape[0], call.kv_cache.shape[2])
    elif isinstance(call, CopyCall):
        _check_copies(call)
    elif isinstance(call, IndexerCall):
        _check_tables(call, _check_starts("query_start_loc", call.query_start_loc, call.num_tokens, call.max_query_len))


def _check_starts(name: str, start_loc: Any, num_rows: int, max_len: int | None) -> list[int]:
    """Returns the lengths between cumulative offsets."""
    starts = start_loc.tolist()
    if not starts or starts[0] != 0:
        raise InvalidInput(f"{name} starts with {starts[:1]}; it must hold num_seqs + 1 offsets from 0 on.")
    lens = [end - start for start, end in pairwise(starts)]
    if lens and min(lens) < 0:
        first = next(seq for seq, length in enumerate(lens) if length < 0)
        raise InvalidInput(
            f"{name}[{first + 1}] is {starts[first + 1]}, less than {starts[first]} before it; offsets never fall."
        )
    if starts[-1] > num_rows:
        raise InvalidInput(f"{name}[-1] is {starts[-1]}; {name.partition('_')[0]} has only {num_rows} rows.")
    if max_len is not None and lens and max(lens) > max_len:
        first = next(seq for seq, length in enumerate(lens) if length > max_len)
        raise InvalidInput(f"sequence {first} has {lens[first]} rows in {name}; the stated maximum is {max_len}.")
    return lens


def _check_tables(call: TableCall[Any] | IndexerCall[Any], query_lens: list[int] | None) -> None:
    # Without the causal mask a sequence may have more query rows than keys: cross attention to a short input.
    lens, max_blocks, block_size = call.seq_lens.tolist(), call.block_tables.shape[1], call.block_size
    for seq, seq_len in enumerate(lens):
        if not 0 <= seq_len <= max_blocks * block_size:
            raise InvalidInput(
                f"seq_lens[{seq}] is {seq_len}; a row of block_tables holds 0 to {max_blocks} x {block_size} = "
                f"{max_blocks * block_size} tokens."
            )
        if query_lens is not None and query_lens[seq] > seq_len > 0:
            raise InvalidInput(
                f"sequence {seq} has {query_lens[seq]} query rows and seq_lens[{seq}] is {seq_len}; the new tokens are "
                "part of it, so it cannot be less."
            )
    if not lens or max(lens) == 0:
        return
    # As uint32 a negative id is large, so that one comparison finds both kinds of bad ones.
    tables = np.asarray(call.block_tables).view(np.uint32)[:, : -(-max(lens) // block_size)]
    bad = tables >= call.num_blocks
    if not bad.any():
        return
    for seq, seq_len in enumerate(lens):
        for column in np.flatnonzero(bad[seq, : -(-seq_len // block_size)]).tolist():
            raise InvalidInput(
                f"block_tables[{seq}, {column}] is {int(tables.view(np.int32)[seq, column])}; the cache has blocks 0 "
                f"to {call.num_blocks - 1}."
            )


def _check_slots(slot_mapping: Any, num_blocks: int, block_size: int) -> None:
    slots = np.asarray(slot_mapping)
    limit = num_blocks * block_size
    if slots.size and slots.max() >= limit:
        first = int((slots >= limit).argmax())
        raise InvalidInput(
            f"slot_mapping[{first}] is {slots[first]}; a cache of {num_blocks} blocks of {block_size} has "
            f"slots 0 to {limit - 1}."
        )


def _check_positions(call: LatentWriteCall[Any]) -> None:
    if call.positions is None or call.cos_sin_cache is None:
        return
    slots, limit = np.asarray(call.slot_mapping), call.cos_sin_cache.shape[0]
    positions = np.asarray(call.positions)[: len(slots)]
    bad = (slots >= 0) & ((positions < 0) | (positions >= limit))
    if bad.any():
        first = int(bad.argmax())
        raise InvalidInput(f"positions[{first}] is {positions[first]}; cos_sin_cache has positions 0 to {limit - 1}.")


def _check_copies(call: CopyCall[Any]) -> None:
    pairs = [(at, *pair) for at, pair in enumerate(call.block_mapping.tolist()) if min(pair) >= 0]
    num_blocks = call.kv_cache.shape[0]
    sources = {source for _, source, _ in pairs}
    targets: set[int] = set()
    for at, source, target in pairs:
        if max(source, target) >= num_blocks:
            raise InvalidInput(
                f"block_mapping[{at}] is ({source}, {target}); the cache has blocks 0 to {num_blocks - 1}."
            )
        if target in targets or (target in sources and target != source):
            raise InvalidInput(
                f"block_mapping[{at}] writes block {target}, which another pair reads or writes; give every "
                "destination once, and none that is a source."
            )
        targets.add(target)
