"""Attention on JAX arrays by keywords: over a paged cache, and over packed keys and values.

Keywords and their meanings: `torch_core.attention.options`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, Unpack

import jax

from jattn.metadata import PrefixGroups
from jattn.ops import arguments
from jattn.ops.arguments import documented, refuse_traced
from jattn.ops.cascade import attend_groups
from jattn.ops.run import run
from torch_core.attention.call import AttentionCall, DenseCall, PagedCall
from torch_core.attention.checks import cache_fields
from torch_core.attention.options import DenseOptions, ScoreOptions
from torch_core.attention.options import PagedOptions as PagedKeywords
from torch_core.launch.public import operation

_C = TypeVar("_C", bound=AttentionCall[Any])
#: A call, and the function that runs it.
Request: TypeAlias = tuple[_C, Callable[[Any], dict[str, jax.Array]]]

#: The options, except the causal mask, that depend on the positions of keys.
POSITIONAL = ("sliding_window", "attention_chunk", "alibi_slopes", "relative_bias")


class CallOptions(ScoreOptions[jax.Array], total=False):
    """Keywords that a layer may pass to `attention` and `paged_attention` in each call."""

    sinks: jax.Array | None
    out_dtype: jax.typing.DTypeLike | None
    out_scale: float | jax.Array | None


class PagedOptions(CallOptions, total=False):
    """Keywords that a layer may pass to `paged_attention` in each call."""

    q_scale: float | jax.Array | None


@documented(PagedCall)
def _paged(
    query: jax.Array,
    kv_cache: jax.Array | tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    max_query_len: int,
    out_dtype: jax.typing.DTypeLike | None = None,
    groups: PrefixGroups | None = None,
    implementation: str | None = None,
    **options: Unpack[PagedKeywords[jax.Array]],
) -> Request[PagedCall[jax.Array]]:
    """Attends any mix of prefill, chunked prefill and decode rows to a paged KV cache.

    The new tokens' keys and values must be in the cache already (`write_kv_cache`); their queries are packed one
    sequence after the other. The mask is aligned bottom-right: the last query of a sequence is at position
    `seq_len - 1`. Under jit the values of metadata arrays are trusted; `torch_core.metadata` checks them on the host
    when it builds them. It has a gradient with every implementation, also with respect to the cache.

    Args:
        groups: sequences that share prefixes, for a step of one new token each: a prefix is then read once, if the mask
            does not depend on the distance to it.

    Returns:
        float[num_tokens, num_heads, value_head_size]; padded rows and rows that see nothing are 0. The function with
        "lse" in its name also returns float32[num_tokens, num_heads]: the natural logarithm of each row's softmax
        denominator, sinks included; -inf for rows that see nothing; float64 for a float64 query. `merge_states` joins
        two such results.

    Example:
        >>> import jax.numpy as jnp
        >>> cache = jnp.ones((2, 2, 4, 1, 8))  # 2 blocks of 4 tokens, of which a sequence has the second
        >>> table, lens, starts = jnp.array([[1]]), jnp.array([3]), jnp.array([0, 1])
        >>> paged_attention(jnp.ones((1, 2, 8)), cache, table, lens, starts, max_query_len=1).shape
        (1, 2, 8)
    """
    refuse_traced(options)
    call = PagedCall(
        query=query,
        **cache_fields(kv_cache),
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        out_dtype=arguments.dtype_name(out_dtype),
        **options,
    )
    if groups is not None:
        return call, functools.partial(attend_groups, groups=groups, implementation=implementation)
    return call, functools.partial(run, implementation=implementation)


@documented(DenseCall)
def _dense(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_start_loc: jax.Array,
    key_start_loc: jax.Array | None = None,
    *,
    max_query_len: int,
    max_key_len: int | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    **options: Unpack[DenseOptions[jax.Array]],
) -> Request[DenseCall[jax.Array]]:
    """Attends packed queries to packed keys, sequence by sequence; the mask is aligned bottom-right.

    It has a gradient with every implementation; `docs/explanation/architecture.md` says which one runs.

    Args:
        key_start_loc: int32[num_seqs+1]; cumulative sum of the key lengths, starting with 0; query_start_loc by
            default.
        max_key_len: upper bound on the key lengths, in tokens; max_query_len by default.
        dropout_seeds: int32[num_seqs, num_heads, 2]; any numbers; `jattn.dropout_seeds` draws them. Seed, query and key
            position choose the dropped weights (`torch_core.attention.dropout`), the same in every implementation. The
            lse does not depend on them.

    Returns:
        float[num_tokens, num_heads, value_head_size]; padded rows and rows that see nothing are 0. The function with
        "lse" in its name also returns the natural-log LSE, float32[num_tokens, num_heads].

    Example:
        >>> import jax.numpy as jnp
        >>> query, key = jnp.ones((5, 4, 8)), jnp.ones((5, 2, 8))  # two sequences, of 2 and of 3 tokens
        >>> attention(query, key, key, jnp.array([0, 2, 5]), max_query_len=3).shape
        (5, 4, 8)
    """
    refuse_traced(options)
    call = DenseCall(
        query=query,
        key=key,
        value=value,
        query_start_loc=query_start_loc,
        key_start_loc=query_start_loc if key_start_loc is None else key_start_loc,
        max_query_len=max_query_len,
        max_key_len=max_query_len if max_key_len is None else max_key_len,
        out_dtype=arguments.dtype_name(out_dtype),
        **options,
    )
    return call, functools.partial(run, implementation=implementation)


def output(request: Request[Any]) -> jax.Array:
    """Runs a request and returns its output."""
    call, attend = request
    return attend(call)["out"]


def output_and_lse(request: Request[Any]) -> tuple[jax.Array, jax.Array]:
    """Runs a request and returns its output and log-sum-exp."""
    call, attend = request
    results = attend(replace(call, with_lse=True))
    return results["out"], results["lse"]


def call_of(request: Request[_C]) -> _C:
    """Returns the call of a request, which does not run."""
    return request[0]


# One list of keywords for each operation: the functions differ in their results.
_BOTH = "tuple[jax.Array, jax.Array]"
paged_attention = operation(_paged, output, "paged_attention", returns="jax.Array")
paged_attention_with_lse = operation(_paged, output_and_lse, "paged_attention_with_lse", returns=_BOTH)
paged_call = operation(_paged, call_of, "paged_call", returns="PagedCall[jax.Array]")
attention = operation(_dense, output, "attention", returns="jax.Array")
attention_with_lse = operation(_dense, output_and_lse, "attention_with_lse", returns=_BOTH)
dense_call = operation(_dense, call_of, "dense_call", returns="DenseCall[jax.Array]")
