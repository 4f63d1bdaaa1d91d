"""Partial results in scratch: chunks of keys and parts of gradients, and the launches that merge them."""

from __future__ import annotations

from dataclasses import dataclass

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.call import TableCall
from torch_core.attention.kernels.partials.kernel import attention_combine_kernel, sum_parts_kernel
from torch_core.attention.operands import cache_constexprs, count, make_launch, padded
from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, power_of_two
from torch_core.launch.plan import ABSENT, Argument, LaunchPlan, Pointer

#: The buffers: accumulated rows, their maxima in units of log 2, and the sums of their weights.
PARTIALS = ("partial_out", "partial_max", "partial_sum")
#: Keys of a chunk at least.
MIN_CHUNK = 128
#: Shared memory of a merging program, which uses none: those that begin early crowd on the multiprocessors that are
#: free, and wait for one another there.
MERGE_ROOM = 48 << 10
#: Where a multiprocessor has less, a merge with room would wait for the end of a chunk's program.
LARGE_SHARED_MEMORY = 200_000
_COMBINE_CHUNKS = 32
# Merging programs from which on one has several heads.
_MERGES = 2048
_PARTS_BLOCK = 1024
# Scratch that is always read completely: waiting for the lengths first takes longer.
_READ_AHEAD_BYTES = 1 << 21


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of keys of a call.

    Attributes:
        size: keys of a chunk, counted from key 0 of each sequence; with `least` at most.
        number: chunks that one sequence can have.
        max_query: query rows that one sequence can have.
        least, few: a sequence has up to `few` chunks of about `least` keys or more where these are more, and its chunks
            are equal. With None its last one is shorter.
        runs: about the programs of a batch and head that have keys: each takes a run of chunks, as many as that needs.
            With None it takes one.
        shared: chunks that run at a time, those that read as fast as memory gives, and room for all sequences: an
            uneven batch has chunks by the lengths of all, see `uneven_chunk`. With None it has not.
    """

    size: int
    number: int
    max_query: int
    least: int | None = None
    few: int = 1
    runs: int | None = None
    shared: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, call: TableCall[ArraySpec], size: int, max_query: int) -> Chunks:
        """Returns the chunks of a call, by the table's width and the static window."""
        number = ceil_div(call.table_tokens, size)
        seen = [n for n in (call.spec.window_left, call.spec.attention_chunk) if n is not None]
        if seen:
            number = min(number, ceil_div(min(seen) + max_query, size) + 1)
        return cls(size, max(1, number), max_query)

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of the buffers in the operation; none if each sequence has one chunk."""
        return PARTIALS if self.number > 1 else ()

    def scratch(self, call: TableCall[ArraySpec]) -> tuple[tuple[str, ArraySpec], ...]:
        """Returns the buffers: row `sequence * max_query + query row`, chunk of the sequence, head."""
        rows = (call.num_seqs * self.max_query, self.number, call.num_heads)
        shapes = ((*rows, call.value_head_size), rows, rows)
        return tuple((name, ArraySpec(shape, "float32")) for name, shape in zip(self.buffers, shapes, strict=False))

    def arguments(self) -> dict[str, Argument]:
        """Returns the arguments of the kernels."""
        partials = {name: Pointer(name) for name in self.buffers}
        return {**dict.fromkeys(PARTIALS, ABSENT), **partials, "max_chunks": count(self.number)}


def rounded_chunk(keys: int) -> int:
    """Returns `keys` or a few more, so that chunks have few different sizes."""
    step = max(MIN_CHUNK, power_of_two(keys) // 8)
    return ceil_div(keys, step) * step


def heads_of_merge(rows: int, num_heads: int, most: int) -> int:
    """Returns the heads of a merging program, at most `most`: of many rows, most have one chunk, nothing to merge."""
    heads = 1
    while heads < most and num_heads % (2 * heads) == 0 and rows * num_heads >= 2 * heads * _MERGES:
        heads *= 2
    return heads


def combine_launch(
    call: TableCall[ArraySpec],
    chunks: Chunks,
    *,
    min_chunks: int,
    heads: int = 1,
    dependent: bool = False,
    room: int = 0,
) -> LaunchPlan:
    """Plans the merge of the rows of sequences with at least `min_chunks` chunks, of `heads` heads in a program.

    A `dependent` one begins while its chunks are still made, which pays if their kernel lets it begin early.
    """
    value_padded = padded(call.value_head_size)
    # A thread holds 128 elements of the rows that are merged at a time, at any width.
    block = min(_COMBINE_CHUNKS, power_of_two(chunks.number))
    rows = call.num_seqs * chunks.max_query
    scratch = 4 * rows * chunks.number * call.num_heads * call.value_head_size
    return make_launch(
        attention_combine_kernel,
        call,
        (rows, call.num_heads // heads),
        {
            **cache_constexprs(call),
            "CHUNK": chunks.size,
            "LEAST": chunks.least,
            "FEW": chunks.few,
            "SHARED": chunks.shared,
            "MIN_CHUNKS": min_chunks,
            "MAX_QUERY": chunks.max_query,
            "BLOCK_CHUNKS": block,
            "AHEAD": heads == 1 and chunks.shared is None and chunks.number <= block and scratch <= _READ_AHEAD_BYTES,
            "HEADS": heads,
            "NUM_HEADS": call.num_heads,
            "DEPENDENT": dependent,
        },
        arguments=chunks.arguments(),
        # One warp holds the chunks of a row: its sums need no exchange through shared memory.
        num_warps=1 if value_padded <= 128 else 2 if value_padded <= 256 else 4,
        num_stages=1,
        dependent=dependent,
        room=room,
        hot=True,
    )


def sum_parts_launch(call: DenseBackwardCall[ArraySpec], name: str, part: str, num_parts: int) -> LaunchPlan:
    """Plans the sum of the scratch `part`, [num_heads, num_parts], into the output `name`, [num_heads]."""
    return LaunchPlan(
        kernel=sum_parts_kernel,
        grid=(call.num_heads,),
        arguments=(("parts", Pointer(part)), ("result", Pointer(name)), ("num_parts", count(num_parts))),
        constexprs=(("BLOCK", _PARTS_BLOCK),),
        writes=(name,),
    )
