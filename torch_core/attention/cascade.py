"""Cascade attention: keys that all sequences share are attended once, the rest per sequence, and both are merged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxtyping import Int32

from torch_core.attention.call import PagedCall
from torch_core.attention.checks import check_static
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import FP8_DTYPES, ArraySpec
from torch_core.launch.call import A, Call, dtype_name


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Call[A]):
    """The prefix that all sequences of a batch share, and each sequence's own rest; field names are vLLM's.

    Attributes:
        prefix_block_table: the blocks of the prefix, once for each piece.
        prefix_kv_lens: the tokens of the prefix, once for each piece.
        cu_prefix_query_lens: cumulative sum of the queries of each piece: all queries of the batch, in its order.
        suffix_block_table: block ids after the prefix, for each sequence.
        suffix_kv_lens: number of these tokens; 0 for a padding row.
        max_prefix_query_len: an upper bound on the queries of a piece.
    """

    name: ClassVar[str] = "cascade_attention"

    prefix_block_table: Int32[A, "pieces prefix_blocks"]
    prefix_kv_lens: Int32[A, "pieces"]
    cu_prefix_query_lens: Int32[A, "pieces+1"]
    suffix_block_table: Int32[A, "num_seqs suffix_blocks"]
    suffix_kv_lens: Int32[A, "num_seqs"]
    max_prefix_query_len: int

    def check_statics(self) -> None:
        """Checks that the bound on the queries of a piece is an int."""
        check_static("max_prefix_query_len", self.max_prefix_query_len)


def shared_prefix(
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any,
    *,
    num_tokens: int,
    block_size: int,
    common_prefix_len: int,
    piece_tokens: int,
    library: Any,
    **placement: Any,
) -> SharedPrefix[Any]:
    """Splits a batch's tables and lengths at a prefix, on the device and without looking at a value.

    So no value is checked: of a batch on the host, `torch_core.metadata.common_prefix_length` is the longest prefix.

    Args:
        block_tables: int32 `[num_seqs, max_blocks]`; the first `common_prefix_len // block_size` columns must be equal:
            the first row's blocks are attended for all.
        seq_lens: int32 `[num_seqs]`; 0 for a padding row, and else no less than the prefix and the new tokens.
        query_start_loc: int32 `[num_seqs + 1]`.
        num_tokens: queries of the batch, padding included.
        block_size: tokens of a block.
        common_prefix_len: tokens of the prefix, whole blocks; see `torch_core.metadata.common_prefix_length`.
        piece_tokens: queries that attend to the prefix as one sequence; see
            `torch_core.metadata.prefix_piece_tokens`.
        library: `torch`, `jax.numpy` or `numpy`: whose arrays they are.
        **placement: options of its `arange`: `device=...` for torch.
    """
    blocks, pieces = common_prefix_len // block_size, -(-num_tokens // piece_tokens)
    ends = library.arange(pieces + 1, dtype=library.int32, **placement) * piece_tokens
    return SharedPrefix(
        prefix_block_table=library.broadcast_to(block_tables[:1, :blocks], (pieces, blocks)),
        prefix_kv_lens=library.full_like(ends[1:], common_prefix_len),
        # Padding queries belong to no piece, so that their rows become 0.
        cu_prefix_query_lens=library.minimum(ends, query_start_loc[-1]),
        suffix_block_table=block_tables[:, blocks:],
        suffix_kv_lens=(seq_lens - common_prefix_len).clip(min=0),
        max_prefix_query_len=piece_tokens,
    )


def cascade_calls(call: PagedCall[A], prefix: SharedPrefix[A]) -> tuple[PagedCall[A], PagedCall[A]]:
    """Returns the attention of all queries to the prefix, and that of each sequence to its own rest.

    Every query comes after the prefix, so the first call needs no mask: it is split into pieces, so that enough
    programs share the work for any batch.

    Raises:
        InvalidInput: an array of the prefix has another shape or dtype.
        Unsupported: a mask or bias that depends on the distance to the prefix: windows, chunks, ALiBi,
            relative_bias, ranges.
    """
    _check(prefix.map(lambda array: ArraySpec(tuple(array.shape), dtype_name(array))))
    spec = call.spec
    if found := call.sees_distances:
        raise Unsupported(f"cascade attention does not serve {found}; build the metadata with common_prefix_len=0.")
    # Half a result is not stored in 8 bits.
    exact = {} if call.result_dtype not in FP8_DTYPES else {"out": None, "out_dtype": None, "out_scale": None}
    suffix_call = replace(
        call, block_tables=prefix.suffix_block_table, seq_lens=prefix.suffix_kv_lens, with_lse=True, **exact
    )
    prefix_call = replace(
        suffix_call,
        block_tables=prefix.prefix_block_table,
        seq_lens=prefix.prefix_kv_lens,
        query_start_loc=prefix.cu_prefix_query_lens,
        max_query_len=prefix.max_prefix_query_len,
        spec=replace(spec, causal=False),
        out=None,
        out_dtype=suffix_call.result_dtype,
        # A sink counts once, and the new tokens, with their flags and bias, are in the suffix.
        sinks=None,
        seq_causal=None,
        qq_bias=None,
    )
    return prefix_call, suffix_call


def cascade_attention(
    call: PagedCall[A], prefix: SharedPrefix[A], run: Callable[[Call[A]], dict[str, A]]
) -> dict[str, A]:
    """Computes the result of `run(call)`, within rounding, but reads the prefix once for all sequences.

    Two softmaxes over disjoint keys merge by their log-sum-exp (Hydragen, arXiv 2402.05099; FlashInfer's cascade).

    Args:
        call: call of the whole sequences.
        prefix: the same sequences, split.
        run: runs a call, as `torch_core.ops.run` does.

    Returns:
        `out`, and `lse` if the call wants it.

    Raises:
        InvalidInput: as `run`, and as `cascade_calls`.
        Unsupported: as `run`, and as `cascade_calls`.
    """
    prefix_call, suffix_call = cascade_calls(call, prefix)
    before, own = run(prefix_call), run(suffix_call)
    merge = MergeCall(
        out_a=before["out"],
        lse_a=before["lse"],
        out_b=own["out"],
        lse_b=own["lse"],
        # Merged in place: for JAX, the written array is not the array that was passed.
        out=call.out if suffix_call.out is None else own["out"],
        out_scale=call.out_scale,
        out_dtype=call.result_dtype,
    )
    results = run(merge)
    return results if call.with_lse else {"out": results["out"]}


@functools.lru_cache(maxsize=1024)
def _check(prefix: SharedPrefix[ArraySpec]) -> None:
    prefix.check()
