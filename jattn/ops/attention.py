"""Attention on JAX arrays by keywords: over a paged cache, and over packed keys and values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeAlias, TypedDict, TypeVar

import jax
import jax.numpy as jnp

from jattn.metadata import PrefixGroups
from jattn.ops.arguments import MASK_OPTIONS, attention_spec
from jattn.ops.cascade import attend_groups
from jattn.ops.run import run
from torch_core.attention.call import AttentionCall, DenseCall, PagedCall, cache_fields
from torch_core.base.checks import call_named
from torch_core.base.errors import InvalidInput

_P = ParamSpec("_P")
_R = TypeVar("_R")
#: A call, and what runs it.
Request: TypeAlias = tuple[AttentionCall[jax.Array], Callable[[Any], dict[str, jax.Array]]]


#: The options beside the causal mask that ask for the positions of keys.
POSITIONAL = ("sliding_window", "attention_chunk", "alibi_slopes", "relative_bias")


class PagedOptions(TypedDict, total=False):
    """What a layer may hand on to `paged_attention` call by call."""

    alibi_slopes: jax.Array | None
    sinks: jax.Array | None
    mm_prefix_range: jax.Array | None
    relative_bias: jax.Array | None
    qq_bias: jax.Array | None
    seq_causal: jax.Array | None
    q_scale: float | jax.Array | None
    out_dtype: jax.typing.DTypeLike | None
    out_scale: float | jax.Array | None


def _paged(
    query: jax.Array,
    kv_cache: jax.Array | tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    max_query_len: int,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    attention_chunk: int | None = None,
    alibi_slopes: jax.Array | None = None,
    use_alibi_sqrt: bool = False,
    sinks: jax.Array | None = None,
    mm_prefix_range: jax.Array | None = None,
    relative_bias: jax.Array | None = None,
    qq_bias: jax.Array | None = None,
    seq_causal: jax.Array | None = None,
    q_scale: float | jax.Array | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    k_scale_cache: jax.Array | None = None,
    v_scale_cache: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    out_scale: float | jax.Array | None = None,
    kv_chunk_size: int | None = None,
    groups: PrefixGroups | None = None,
    implementation: str | None = None,
) -> Request:
    """Attends any mix of prefill, chunked prefill and decode rows to a paged KV cache.

    The new tokens' keys and values must be in the cache already (`write_kv_cache`); their queries are packed one
    sequence after the other. The mask is aligned bottom-right: the last query of a sequence stands at
    `seq_len - 1`. Under jit the values of metadata arrays are trusted; `torch_core.metadata` checks them on the host
    when it builds them. It has a gradient with every implementation, that of the cache included.

    Args:
        query: float[num_tokens, num_heads, head_size], or fp8 with q_scale. Rows past `query_start_loc[-1]` are
            padding.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], keys at index 0 of the second axis; or a pair
            of a key cache [num_blocks, block_size, num_kv_heads, head_size] and a value cache, whose head size may
            differ.
        block_tables: int32[num_seqs, max_blocks]. Entries past a sequence's last block are never followed.
        seq_lens: int32[num_seqs], tokens of each sequence including the new ones; 0 for a padded row.
        query_start_loc: int32[num_seqs + 1], running sum of the query lengths.
        max_query_len: static upper bound on the query lengths.
        scale: factor on the scores; head_size ** -0.5 by default.
        causal: hide keys after the query.
        sliding_window: W tokens, the query's own included, without `causal` as many to the right; or a pair
            (left, right) of further tokens to each side.
        logits_soft_cap: cap on the scores, `cap * tanh(score / cap)`.
        attention_chunk: a query sees its own chunk of this many positions only.
        alibi_slopes: float[num_heads].
        use_alibi_sqrt: the square-root form of ALiBi.
        sinks: float[num_heads], a logit without a value in each softmax denominator.
        mm_prefix_range: int32[num_seqs, ranges, 2], first and last position of spans of bidirectional attention.
        relative_bias: float[num_heads, 2 * D + 1], added by the distance `clip(key - query, -D, D)`.
        qq_bias: float[rows, rows], added to the scores between a sequence's new tokens; -inf hides.
        seq_causal: bool[num_seqs], overrides causal sequence by sequence.
        q_scale, k_scale, v_scale: real value = stored value * scale, for an fp8 query and a quantised cache. A number
            is part of the program, an array its argument.
        k_scale_cache, v_scale_cache: float32[num_blocks, block_size, num_kv_heads], such a scale for each token and
            head, as `write_kv_cache_per_token_head` stores them.
        out_dtype: of the output; the query's by default, bfloat16 for an fp8 query.
        out_scale: scale of an fp8 output, which then holds `result / out_scale`, saturated.
        kv_chunk_size: keys of one chunk of the split kernel, a power of two from 128: fixes a sequence's bits whatever
            the table's width.
        groups: sequences that share prefixes, for a step of one new token each: a prefix is then read once, where the
            mask does not depend on the distance to it.
        implementation: "triton", "torch", "xla", or None for the fastest that serves the call.

    Returns:
        float[num_tokens, num_heads, value_head_size]; padded rows and rows that see nothing are 0. The function with
        "lse" in its name also returns float32[num_tokens, num_heads]: the natural logarithm of each row's softmax
        denominator, sinks included; -inf for rows that see nothing; float64 for a float64 query. `merge_states` joins
        two such results.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here or does not serve the combination.

    Example:
        >>> import jax.numpy as jnp
        >>> cache = jnp.ones((2, 2, 4, 1, 8))  # 2 blocks of 4 tokens, of which a sequence has the second
        >>> table, lens, starts = jnp.array([[1]]), jnp.array([3]), jnp.array([0, 1])
        >>> paged_attention(jnp.ones((1, 2, 8)), cache, table, lens, starts, max_query_len=1).shape
        (1, 2, 8)
    """
    given = locals()
    del given["groups"]
    call, attend = request_of(PagedCall, **cache_fields(given.pop("kv_cache")), **given)
    if groups is not None:
        attend = functools.partial(attend_groups, groups=groups, implementation=implementation)
    return call, attend


def _dense(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_start_loc: jax.Array,
    key_start_loc: jax.Array | None = None,
    *,
    max_query_len: int,
    max_key_len: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    attention_chunk: int | None = None,
    alibi_slopes: jax.Array | None = None,
    use_alibi_sqrt: bool = False,
    sinks: jax.Array | None = None,
    mm_prefix_range: jax.Array | None = None,
    relative_bias: jax.Array | None = None,
    qq_bias: jax.Array | None = None,
    seq_causal: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_seeds: jax.Array | None = None,
    deterministic: bool = True,
    out_dtype: jax.typing.DTypeLike | None = None,
    out_scale: float | jax.Array | None = None,
    implementation: str | None = None,
) -> Request:
    """Attends packed queries to packed keys, sequence by sequence; the mask is aligned bottom-right.

    It has a gradient with every implementation; `docs/architecture.md` says which one runs.

    Args:
        query: float[num_tokens, num_heads, head_size].
        key: float[num_keys, num_kv_heads, head_size].
        value: float[num_keys, num_kv_heads, value_head_size].
        query_start_loc: int32[num_seqs + 1], running sum of the query lengths.
        key_start_loc: int32[num_seqs + 1], running sum of the key lengths; that of the queries by default.
        max_query_len, max_key_len: static upper bounds; max_key_len is max_query_len by default.
        scale, causal, sliding_window, logits_soft_cap, attention_chunk, alibi_slopes, use_alibi_sqrt, sinks,
            mm_prefix_range, qq_bias, seq_causal, out_dtype, out_scale, implementation: as in `paged_attention`.
        dropout_rate: static, the share of softmax weights that go, to a multiple of 2^-16; the others are divided by
            the share that stays. The LSE is without it.
        dropout_seeds: int32[num_seqs, num_heads, 2], any numbers; `jattn.dropout_seeds` draws them. Which weights go is
            a function of seed, query and key position (`torch_core.attention.dropout`), the same by every
            implementation.
        deterministic: static, gradients have the same bits every time; without it, some kernels are faster.

    Returns:
        float[num_tokens, num_heads, value_head_size]; padded rows and rows that see nothing are 0. The function with
        "lse" in its name also returns the natural-log LSE, float32[num_tokens, num_heads].

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here or does not serve the combination.

    Example:
        >>> import jax.numpy as jnp
        >>> query, key = jnp.ones((5, 4, 8)), jnp.ones((5, 2, 8))  # two sequences, of 2 and of 3 tokens
        >>> attention(query, key, key, jnp.array([0, 2, 5]), max_query_len=3).shape
        (5, 4, 8)
    """
    key_start_loc = query_start_loc if key_start_loc is None else key_start_loc
    max_key_len = max_query_len if max_key_len is None else max_key_len
    return request_of(DenseCall, **locals())


def request_of(
    call_class: type[AttentionCall[jax.Array]], *, implementation: str | None, out_dtype: Any, **given: Any
) -> Request:
    """Returns the call of an operation's keywords: the mask's options go into its spec, the others are its fields."""
    spec = attention_spec(given["query"], **{name: given.pop(name) for name in MASK_OPTIONS})
    attend = functools.partial(run, implementation=implementation)
    return call_class(**given, spec=spec, out_dtype=None if out_dtype is None else _name_of(out_dtype)), attend


def _name_of(out_dtype: Any) -> str:
    try:
        return jnp.dtype(out_dtype).name
    except TypeError:
        raise InvalidInput("out_dtype", value=out_dtype, wanted="it must be a dtype, such as jnp.bfloat16") from None


def operation(
    request: Callable[_P, Request], name: str, *, with_lse: bool, of: Callable[[dict[str, jax.Array]], _R]
) -> Callable[_P, _R]:
    """Returns the operation of that name which runs what its keywords request."""

    @functools.wraps(request)
    def attend(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        call, run_call = call_named(name, request, *args, **kwargs)
        return of(run_call(replace(call, with_lse=True) if with_lse else call))

    attend.__name__ = attend.__qualname__ = name
    returns = "tuple[jax.Array, jax.Array]" if with_lse else "jax.Array"
    attend.__annotations__ = {**attend.__annotations__, "return": returns}
    # help() and editors would go on to the function behind, which returns a request.
    signature = inspect.signature(request).replace(return_annotation=returns)
    attend.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return attend


def output(results: dict[str, jax.Array]) -> jax.Array:
    """Returns the output of an operation."""
    return results["out"]


def output_and_lse(results: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the output of an operation, and its log-sum-exp."""
    return results["out"], results["lse"]


def dense_call(*args: Any, **options: Any) -> DenseCall[jax.Array]:
    """Returns the call that `attention` would run."""
    return _dense(*args, **options)[0]  # type: ignore[return-value]


def paged_call(*args: Any, **options: Any) -> PagedCall[jax.Array]:
    """Returns the call that `paged_attention` would run."""
    return _paged(*args, **options)[0]  # type: ignore[return-value]


# One list of keywords for each operation: the functions differ in what they return.
paged_attention = operation(_paged, "paged_attention", with_lse=False, of=output)
paged_attention_with_lse = operation(_paged, "paged_attention_with_lse", with_lse=True, of=output_and_lse)
attention = operation(_dense, "attention", with_lse=False, of=output)
attention_with_lse = operation(_dense, "attention_with_lse", with_lse=True, of=output_and_lse)
