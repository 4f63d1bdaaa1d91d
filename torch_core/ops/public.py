"""The public operations: arguments are checked here, then the tensors' device decides who computes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from torch_core import cpu
from torch_core.errors import InvalidInput, Unsupported
from torch_core.ops import check
from torch_core.specs import AttentionSpec

__all__ = [
    "attention",
    "attention_with_lse",
    "copy_blocks",
    "merge_states",
    "paged_attention",
    "paged_attention_with_lse",
    "write_kv_cache",
]


def paged_attention(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    out: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Returns the output of `paged_attention_with_lse` alone; the arguments are the same."""
    arrays = (query, kv_cache, block_tables, seq_lens, query_start_loc)
    options.update(k_scale=k_scale, v_scale=v_scale, alibi_slopes=alibi_slopes, sinks=sinks)
    if _on_cpu("query", query):
        check.check_paged_attention(*arrays, max_query_len=max_query_len, out=out, causal=spec.causal, **options)
        return cpu.paged_attention(*arrays, spec=spec, out=out, **options)
    return _accelerated(query).paged_attention(*arrays, spec=spec, max_query_len=max_query_len, out=out, **options)


def paged_attention_with_lse(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    out: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attends any mix of prefill, chunked prefill, speculative and decode rows over a paged cache.

    The exact semantics are those of `torch_core.reference.paged_attention_with_lse`. Keys and values of the new
    tokens must be in the cache already. The mask is aligned bottom-right. Table entries after the last block of a
    sequence and slots that no row sees may hold anything. A row's result does not depend on the other sequences.

    Args:
        query: float32, bfloat16 or float16 `[num_tokens, num_heads, head_size]`; rows at and after
            `query_start_loc[-1]` are padding. fp8 with `q_scale`.
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_size]`, or a pair of a key cache
            `[num_blocks, block_size, num_kv_heads, head_size]` and a value cache. Only read.
        block_tables: int32 `[num_seqs, max_blocks]`.
        seq_lens: int32 `[num_seqs]`, tokens in the cache; 0 for a padding row.
        query_start_loc: int32 `[num_seqs + 1]`.
        spec: the static options.
        max_query_len: an upper bound on the query lengths; it never changes a result.
        out: like the result, written in place and returned; None makes one.
        k_scale: stored key * k_scale = real key; a number or a one-element float32 tensor; None for 1.
        v_scale: the same for values.
        alibi_slopes: float `[num_heads]`.
        sinks: float `[num_heads]`, a logit without a value in every softmax; the lse includes it.
        **options: what fewer models need: `q_scale`, `k_scale_cache`, `v_scale_cache`, `mm_prefix_range`, `qq_bias`
            and `seq_causal`, as in the reference; `out_scale` for an fp8 `out`, which then holds `result / out_scale`.

    Returns:
        The output `[num_tokens, num_heads, value_head_size]` in the query's dtype (bfloat16 for fp8), and the natural
        log-sum-exp, float32 `[num_tokens, num_heads]`. Rows that see no key, padding rows too, give zeros and -inf.

    Raises:
        InvalidInput: ranks, shapes, dtypes or devices that do not fit; on the CPU also lengths and block ids out of
            range (on CUDA those values live on the device and are not looked at).
        Unsupported: tensors that require a gradient; a device or a combination without an implementation.

    Example:
        >>> import torch
        >>> cache = torch.zeros(2, 2, 4, 1, 2)
        >>> cache[1, 1, :3] = 5.0
        >>> block_tables, seq_lens, query_start_loc = (
        ...     torch.tensor(x, dtype=torch.int32) for x in ([[1]], [3], [0, 1]))
        >>> out, lse = paged_attention_with_lse(torch.ones(1, 1, 2), cache, block_tables, seq_lens, query_start_loc,
        ...                                     spec=AttentionSpec(scale=1.0), max_query_len=1)
        >>> out.round(decimals=4).tolist(), round(lse.exp().item(), 4)
        ([[[5.0, 5.0]]], 3.0)
    """
    arrays = (query, kv_cache, block_tables, seq_lens, query_start_loc)
    options.update(k_scale=k_scale, v_scale=v_scale, alibi_slopes=alibi_slopes, sinks=sinks)
    if _on_cpu("query", query):
        check.check_paged_attention(*arrays, max_query_len=max_query_len, out=out, causal=spec.causal, **options)
        return cpu.paged_attention_with_lse(*arrays, spec=spec, out=out, **options)
    accelerated = _accelerated(query)
    return accelerated.paged_attention_with_lse(*arrays, spec=spec, max_query_len=max_query_len, out=out, **options)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    max_key_len: int,
    out: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Returns the output of `attention_with_lse` alone; the arguments are the same."""
    arrays = (query, key, value, query_start_loc, key_start_loc)
    limits = {"max_query_len": max_query_len, "max_key_len": max_key_len}
    options.update(alibi_slopes=alibi_slopes, sinks=sinks)
    if _on_cpu("query", query):
        check.check_attention(*arrays, **limits, out=out, **options)
        return cpu.attention(*arrays, spec=spec, out=out, **options)
    return _accelerated(query).attention(*arrays, spec=spec, **limits, out=out, **options)


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    max_key_len: int,
    out: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attends packed sequences of unequal length: encoders, cross attention, prefill without a cache.

    The exact semantics are those of `torch_core.reference.attention_with_lse`. Keys need not be as many as queries;
    the mask is aligned bottom-right.

    Args:
        query: float32, bfloat16 or float16 `[num_tokens, num_heads, head_size]`.
        key: `[num_keys, num_kv_heads, head_size]`.
        value: `[num_keys, num_kv_heads, value_head_size]`.
        query_start_loc: int32 `[num_seqs + 1]`.
        key_start_loc: int32 `[num_seqs + 1]`.
        spec: the static options.
        max_query_len: an upper bound on the query lengths; it never changes a result.
        max_key_len: the same for the key lengths.
        out: like the result, written in place and returned; None makes one.
        alibi_slopes: float `[num_heads]`.
        sinks: float `[num_heads]`, a logit without a value in every softmax; the lse includes it.
        **options: `mm_prefix_range`, `qq_bias`, `seq_causal` and `out_scale`, as in `paged_attention_with_lse`.

    Returns:
        The output and the natural log-sum-exp; see `paged_attention_with_lse`.

    Raises:
        InvalidInput: as `paged_attention_with_lse`.
        Unsupported: as `paged_attention_with_lse`.
    """
    arrays = (query, key, value, query_start_loc, key_start_loc)
    limits = {"max_query_len": max_query_len, "max_key_len": max_key_len}
    options.update(alibi_slopes=alibi_slopes, sinks=sinks)
    if _on_cpu("query", query):
        check.check_attention(*arrays, **limits, out=out, **options)
        return cpu.attention_with_lse(*arrays, spec=spec, out=out, **options)
    return _accelerated(query).attention_with_lse(*arrays, spec=spec, **limits, out=out, **options)


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    """Stores new keys and values in the cache, in place.

    The exact semantics are those of `torch_core.reference.write_kv_cache`: token t goes to slot `slot_mapping[t]`
    (block * block_size + offset), a negative slot writes nothing, fp8 and int8 caches saturate.

    Args:
        key: `[num_tokens, num_kv_heads, head_size]`.
        value: `[num_tokens, num_kv_heads, value_head_size]`.
        kv_cache: as in `paged_attention_with_lse`; written in place.
        slot_mapping: int32 `[rows]`, `rows <= num_tokens`; tokens after it are padding.
        k_scale: an element is stored as `real / scale`; a number or a one-element float32 tensor; None for 1.
        v_scale: the same for values.
        k_scale_cache: float32 `[num_blocks, block_size, num_kv_heads]`: scales are found per token and head, and
            written here.
        v_scale_cache: the same for values.

    Raises:
        InvalidInput: ranks, shapes, dtypes, devices or, on the CPU, slots that do not fit; both kinds of scale.
        Unsupported: a device without an implementation.

    Example:
        >>> import torch
        >>> cache = torch.zeros(2, 2, 4, 1, 1)
        >>> slots = torch.tensor([5, -1], dtype=torch.int32)
        >>> write_kv_cache(torch.ones(2, 1, 1), torch.ones(2, 1, 1) * 2, cache, slots)
        >>> cache[1, :, :, 0, 0]
        tensor([[0., 1., 0., 0.],
                [0., 2., 0., 0.]])
    """
    arrays = (key, value, kv_cache, slot_mapping)
    options = {
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_scale_cache": k_scale_cache,
        "v_scale_cache": v_scale_cache,
    }
    if _on_cpu("key", key):
        check.check_write_kv_cache(*arrays, **options)
        return cpu.write_kv_cache(*arrays, **options)
    return _accelerated(key, "cuda_cache").write_kv_cache(*arrays, **options)


def copy_blocks(kv_caches: Tensor | Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copies whole blocks inside each cache array, in place: the copy of copy-on-write.

    Args:
        kv_caches: one array whose first axis is the block, or several, one per layer.
        block_mapping: int32 `[num_pairs, 2]` of source and destination; a pair with a negative entry copies nothing.
            No destination may be another pair's source or destination.

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit; on the CPU also blocks out of range and destinations
            that another pair reads or writes.
        Unsupported: a device without an implementation.

    Example:
        >>> import torch
        >>> cache = torch.tensor([[0.0], [1.0], [2.0]])
        >>> copy_blocks(cache, torch.tensor([[1, 2]], dtype=torch.int32))
        >>> cache.flatten().tolist()
        [0.0, 1.0, 1.0]
    """
    if _on_cpu("block_mapping", block_mapping):
        check.check_copy_blocks(kv_caches, block_mapping)
        return cpu.copy_blocks(kv_caches, block_mapping)
    return _accelerated(block_mapping, "cuda_cache").copy_blocks(kv_caches, block_mapping)


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    out_scale: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges two attention results over disjoint sets of keys into the result over their union.

    The exact semantics are those of `torch_core.reference.merge_states`: a state with lse -inf (or +inf) is empty and
    its output is not read; two empty states give zeros and -inf.

    Args:
        out_a: `[num_tokens, num_heads, head_size]`.
        lse_a: float32 `[num_tokens, num_heads]`, natural logarithm.
        out_b: as `out_a`.
        lse_b: as `lse_a`.
        out: like the merged output, written and returned; it may be `out_a` or `out_b`. None makes one.
        out_scale: for an fp8 `out`, which then holds `result / out_scale`, saturated.

    Returns:
        The merged output in the dtype of `out_a` (or `out`), and the merged lse.

    Raises:
        InvalidInput: ranks, shapes, dtypes or devices that do not fit.
        Unsupported: a device without an implementation.

    Example:
        >>> import torch
        >>> one, two, lse = torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0), torch.zeros(1, 1)
        >>> merge_states(one, lse, two, lse)[0].item()
        1.5
    """
    if _on_cpu("out_a", out_a):
        check.check_merge_states(out_a, lse_a, out_b, lse_b, out=out, out_scale=out_scale)
        return cpu.merge_states(out_a, lse_a, out_b, lse_b, out=out, out_scale=out_scale)
    accelerated = _accelerated(out_a, "cuda_cache")
    return accelerated.merge_states(out_a, lse_a, out_b, lse_b, out=out, out_scale=out_scale)


def _on_cpu(name: str, tensor: Tensor) -> bool:
    device = getattr(tensor, "device", None)
    if device is None:
        raise InvalidInput(f"{name} is a {type(tensor).__name__}; it must be a torch tensor.")
    return device.type == "cpu"


def _accelerated(tensor: Tensor, module: str = "cuda") -> ModuleType:
    """Returns a module of the CUDA implementation, which imports Triton; nothing on the CPU's way does."""
    if tensor.device.type != "cuda":
        raise Unsupported(f"the tensors are on {tensor.device}; there are implementations for cpu and cuda only.")
    return import_module(f"torch_core.run.{module}")
