"""Segments: documents packed into one sequence, which attend to themselves only; kernels get them as offsets.

Each segment becomes a sequence of its own, so no kernel needs another mask. Padding becomes two sequences, its queries
without keys and its keys without queries: it costs nothing, and its contents are not read. The number of sequences
follows from shapes and `max_segments`, the offsets are computed where the arrays are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from torch_core.attention.checks import check_static
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import A, Call

# Segments of a sequence where the caller names no bound: the kernels' search for a tile's sequence takes time for each.
_FEW_SEGMENTS = 32
_MEAN_LEN = 512
# Arrays that belong to whole sequences.
_OF_SEQUENCES = ("dropout_seeds", "mm_prefix_range", "qq_bias", "seq_causal")


@dataclass(frozen=True, kw_only=True)
class SegmentFields(Call[A]):
    """The fields of dense attention that divide its sequences into segments.

    Attributes:
        segment_ids: id of each query's segment (a document of a packed row); a query sees the keys of its sequence with
            its id, and masks count positions from the first token of a segment. The tokens of a segment follow each
            other. Ids of 0 and below are padding: its output is 0, and its contents are not read.
        key_segment_ids: the same for keys, with the same segments in the same order; None for segment_ids.
        max_segments: upper bound on the segments of a sequence, in the mean of the batch; padding between two segments
            counts as two. None for 32, or one for each 512 tokens of max_query_len if these are more. Segments that do
            not fit are refused; where values are unknown (under jit, on CUDA), all outputs that see keys are NaN.
        max_segment_len: upper bound on the length of a segment, in tokens; None for max_query_len and max_key_len.
    """

    segment_ids: Int32[A, "num_tokens"] | None = None
    key_segment_ids: Int32[A, "num_keys"] | None = None
    max_segments: int | None = None
    max_segment_len: int | None = None

    def check_statics(self) -> None:
        """Checks that the bounds of segments are ints."""
        super().check_statics()
        for name in ("max_segments", "max_segment_len"):
            if (bound := getattr(self, name)) is not None:
                check_static(name, bound)

    def check_options(self) -> None:
        """Checks that options of segments have segments, and that no array belongs to whole sequences."""
        super().check_options()
        if self.segment_ids is None:
            given = [name for name in _OPTIONS if getattr(self, name) is not None]
            if given:
                raise InvalidInput(given[0], "is given without segment_ids", "pass both, or leave it out")
            return
        arrays = self.arrays()
        if self.key_segment_ids is None and arrays["key"].shape[0] != arrays["query"].shape[0]:
            problem = f"is missing for {arrays['key'].shape[0]} keys of {arrays['query'].shape[0]} queries"
            raise InvalidInput("key_segment_ids", problem, "pass the ids of the keys")
        clash = [name for name in _OF_SEQUENCES if name in arrays]
        if clash:
            fix = "make each segment a sequence: pass its offsets in query_start_loc"
            raise Unsupported(f"{clash[0]} with segment_ids, since it belongs to whole sequences; {fix}.")

    def for_kernels(self, library: Any) -> Any:
        """Returns the call with its segments as sequences."""
        return self if self.segment_ids is None or self.is_empty else by_offsets(self, library)

    def check_values(self) -> None:
        """Checks that each segment is one run of tokens, and that segments are within their bounds."""
        super().check_values()
        if self.segment_ids is not None:
            _check_values(self)


_OPTIONS = ("key_segment_ids", "max_segments", "max_segment_len")


class Offsets(NamedTuple):
    """The offsets of segments and padding as sequences, and whether all of them fit."""

    query_start_loc: Any
    key_start_loc: Any
    fit: Any


def by_offsets(call: Any, library: Any) -> Any:
    """Returns a dense call with segments as one whose sequences are these segments, or NaN for those that do not fit.

    Args:
        call: a dense call with segment ids, or its backward call.
        library: `torch` or `jax.numpy`, whose arrays the call has; None for a call of specs.
    """
    call.check()
    changes: dict[str, Any] = dict.fromkeys(("segment_ids", *_OPTIONS))
    if call.max_segment_len is not None:
        changes["max_query_len"] = min(call.max_query_len, call.max_segment_len)
        changes["max_key_len"] = min(call.max_key_len or call.max_segment_len, call.max_segment_len)
    if library is None:
        offsets = Offsets(*[ArraySpec((_num_seqs(call) + 1,), "int32")] * 2, fit=None)
        sinks = ArraySpec((call.num_heads,), "float32") if call.sinks is None else call.sinks
    else:
        offsets = segment_offsets(call, library)
        sinks = marked_sinks(call, offsets.fit, library)
    if "out" in (*call.outputs(), *call.written):
        changes["sinks"] = sinks
    starts = {"query_start_loc": offsets.query_start_loc, "key_start_loc": offsets.key_start_loc}
    return type(call).of({**call.__dict__, **changes, **starts})


def marked_sinks(call: Any, fit: Any, library: Any) -> Any:
    """Returns the sinks of a call, NaN if its segments do not fit: all rows that see keys are then NaN.

    This needs no pass over the output. A sink of -inf is none.
    """
    sinks = call.sinks
    if sinks is None:
        sinks = library.full((call.num_heads,), -library.inf, dtype=library.float32, **_device(call, library))
    return library.where(fit, sinks, library.nan)


def segment_offsets(call: Any, library: Any) -> Offsets:
    """Returns the offsets of a call's segments; shapes follow from the call's shapes and bounds alone."""
    arange = functools.partial(library.arange, dtype=library.int32, **_device(call, library))
    as_int32 = functools.partial(library.asarray, dtype=library.int32)
    own, num_seqs, total = call.key_segment_ids is None, call.num_seqs, _num_seqs(call)
    query_rows, key_rows = (
        (starts[None, 1:] <= arange(ids.shape[0])[:, None]).sum(1)
        for ids, starts in ((call.segment_ids, call.query_start_loc), (_key_ids(call), call.key_start_loc))
    )
    query_real = (call.segment_ids > 0) & (query_rows < num_seqs)
    if own:
        # The examples of a vmap end with rows whose queries and keys belong to different sequences: padding.
        query_real = query_real & (query_rows == key_rows)
        pads = ~query_real
        starting = _first(call.segment_ids, query_rows, query_real, library)
        ends = library.cumsum(as_int32(starting) + 2 * as_int32(pads & _changes(pads, library)), 0)
        query_seqs, key_seqs = ends - 1 - as_int32(pads), ends - 1
        num_segments = as_int32(starting.sum())
        between = ((ends[-1] - num_segments) // 2 - num_seqs - 1).clip(0)
        fit = num_segments + 2 * between <= num_seqs * _max_segments(call)
    else:
        key_real = (call.key_segment_ids > 0) & (key_rows < num_seqs)
        queries = library.cumsum(as_int32(_first(call.segment_ids, query_rows, query_real, library)), 0)
        keys = library.cumsum(as_int32(_first(call.key_segment_ids, key_rows, key_real, library)), 0)
        # Three sequences each: padding of queries, padding of keys, the segment.
        query_seqs, key_seqs = 3 * queries - as_int32(query_real), 3 * keys + 1 - 2 * as_int32(key_real)
        fit = (queries[-1] <= num_seqs * _max_segments(call)) & (queries[-1] == keys[-1])
    # Segments without a sequence join the last one, which is NaN as all others are.
    query_starts, key_starts = (
        (seqs.clip(max=total - 1)[None] < arange(total + 1)[:, None]).sum(1) for seqs in (query_seqs, key_seqs)
    )
    query_lens, key_lens = query_starts[1:] - query_starts[:-1], key_starts[1:] - key_starts[:-1]
    live = (query_lens > 0) & (key_lens > 0)

    def of_first(array: Any, starts: Any) -> Any:
        return array[library.where(live, starts[:-1], 0)]

    # A segment is one run of tokens if no two runs of a sequence have an id.
    ids, rows = of_first(call.segment_ids, query_starts), of_first(query_rows, query_starts)
    twins = live[None] & (ids[:, None] == ids[None]) & (rows[:, None] == rows[None])
    unfit = (query_lens > _longest(call, call.max_query_len)) | (key_lens > _longest(call, call.max_key_len))
    unfit = unfit | (twins.sum(1) > 1)
    if own:
        lens = [starts[1:] - starts[:-1] for starts in (call.query_start_loc, call.key_start_loc)]
        differ = (lens[0] != lens[1]) | (call.query_start_loc[1:] != call.key_start_loc[1:])
        fit = fit & ~(differ & (lens[0] > 0) & (lens[1] > 0)).any()
    else:
        unfit = unfit | (of_first(call.key_segment_ids, key_starts) != ids) | (of_first(key_rows, key_starts) != rows)
    fit = fit & ~(live & unfit).any()
    return Offsets(as_int32(query_starts), as_int32(key_starts), fit)


def _first(ids: Any, rows: Any, real: Any, library: Any) -> Any:
    """Returns which tokens are the first of their run of equal ids within a sequence."""
    return real & (_changes(ids, library) | _changes(rows, library) | _changes(real, library))


def _changes(array: Any, library: Any) -> Any:
    return library.concatenate([array[:1] == array[:1], array[1:] != array[:-1]])


def _device(call: Any, library: Any) -> dict[str, Any]:
    # torch makes new arrays on the host unless told otherwise.
    return {"device": call.segment_ids.device} if library.__name__ == "torch" else {}


def _key_ids(call: Any) -> Any:
    return call.segment_ids if call.key_segment_ids is None else call.key_segment_ids


def _max_segments(call: Any) -> int:
    if call.max_segments is not None:
        return call.max_segments
    return min(call.max_query_len, max(_FEW_SEGMENTS, call.max_query_len // _MEAN_LEN))


def _longest(call: Any, of_sequence: int | None) -> int:
    """Returns the bound on the length of a segment; `of_sequence` is that of a sequence."""
    bounds = (of_sequence, call.max_segment_len, max(call.num_tokens, call.key.shape[0]))
    return min(bound for bound in bounds if bound is not None)


def _num_seqs(call: Any) -> int:
    """Returns the number of sequences that a call's segments and padding have room for."""
    segments = call.num_seqs * _max_segments(call)
    # Equal ids: one sequence for a segment and two for padding, which lies at the ends of sequences.
    return segments + 2 * (call.num_seqs + 1) if call.key_segment_ids is None else 3 * segments + 2


def _check_values(call: Any) -> None:
    own = call.key_segment_ids is None
    starts = [np.asarray(x) for x in (call.query_start_loc, call.key_start_loc)]
    if own and not np.array_equal(starts[0], starts[1]):
        raise InvalidInput("key_start_loc", "differs from query_start_loc", "pass key_segment_ids, the ids of the keys")
    queries, num_pads = _checked_runs(
        "segment_ids", call.segment_ids, starts[0], _longest(call, call.max_query_len), call
    )
    found, bound = len(queries), _max_segments(call)
    if own:
        # Padding at the ends of sequences has room.
        found += 2 * max(0, num_pads - call.num_seqs - 1)
    else:
        keys, _ = _checked_runs(
            "key_segment_ids", call.key_segment_ids, starts[1], _longest(call, call.max_key_len), call
        )
        differ = [pair for pair in zip_longest(queries, keys) if pair[0] != pair[1]]
        if differ:
            row, segment = differ[0][0] or differ[0][1]
            problem = f"and segment_ids differ at segment {segment} of sequence {row}"
            raise InvalidInput("key_segment_ids", problem, "both have the same segments in the same order")
    if found > bound * call.num_seqs:
        problem = f"has {found} segments in {call.num_seqs} sequences, more than max_segments = {bound} each"
        raise InvalidInput("segment_ids", problem, f"pass max_segments={-(-found // call.num_seqs)}")


def _checked_runs(
    name: str, given: Any, starts: np.ndarray, longest: int, call: Any
) -> tuple[list[tuple[int, int]], int]:
    """Returns the segments as (sequence, id), in order, and the number of runs of padding."""
    ids = np.asarray(given)
    rows = np.searchsorted(starts[1:], np.arange(len(ids)), side="right")
    real = (ids > 0) & (rows < call.num_seqs)
    first = _first(ids, rows, real, np)
    pads = ~real & _changes(real, np)
    begins = np.flatnonzero(first | pads)
    lens, is_real = np.diff(begins, append=len(ids)), first[begins]
    segments: dict[tuple[int, int], None] = {}
    for begin, length in zip(begins[is_real].tolist(), lens[is_real].tolist(), strict=True):
        row, segment = int(rows[begin]), int(ids[begin])
        if (row, segment) in segments:
            problem = f"is {segment}, an id that sequence {row} has before another one"
            raise InvalidInput(f"{name}[{begin}]", problem, "the tokens of a segment follow each other: use another id")
        if length > longest:
            problem = f"has {length} tokens of segment {segment}, more than {longest}"
            raise InvalidInput(f"{name}[{begin}]", problem, "raise max_segment_len")
        segments[row, segment] = None
    return list(segments), int(pads.sum())
