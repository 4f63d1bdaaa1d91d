"""Paged and dense batches of the CUDA benchmarks, and the calls on them that several benchmarks time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import torch

from jattn import ops
from jattn.bench import measure, peers
from jattn.bench.session import Column
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.base.specs import AttentionSpec
from torch_core.launch.run import run

HEADS, KV_HEADS, BLOCK_SIZE = 32, 8, 16

#: (sequences, new tokens of each, tokens before them) of each part of a batch.
Parts = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step of a server over a paged cache: 32 query heads, 8 key/value heads, block 16.

    Attributes:
        query: [tokens, 32, head size].
        kv_cache: [blocks, 2, 16, 8, head size]; no two sequences share a block, and block 0 is unused.
        block_tables: int32 [sequences, blocks of the longest one].
        seq_lens: int32 [sequences].
        starts: query_start_loc, int32 [sequences + 1].
        out: bfloat16, of the query's shape.
        max_query_len: new tokens of the longest query.
        max_key_len: tokens of the longest sequence.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    out: torch.Tensor
    max_query_len: int
    max_key_len: int


def random_batch(
    parts: Parts,
    *,
    head_size: int = 128,
    query_dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    """Makes a batch of random numbers, its blocks in random order."""
    query_lens = [new for seqs, new, _ in parts for _ in range(seqs)]
    key_lens = [new + before for seqs, new, before in parts for _ in range(seqs)]
    blocks = [math.ceil(n / BLOCK_SIZE) for n in key_lens]
    shape = (sum(blocks) + 1, 2, BLOCK_SIZE, KV_HEADS, head_size)
    free = torch.randperm(sum(blocks), device="cuda").int() + 1
    tables = torch.zeros(len(blocks), max(blocks), device="cuda", dtype=torch.int32)
    for seq, part in enumerate(free.split(blocks)):
        tables[seq, : len(part)] = part
    query = torch.randn(sum(query_lens), HEADS, head_size, device="cuda", dtype=torch.bfloat16)
    return Batch(
        query=query.to(query_dtype),
        kv_cache=torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(cache_dtype),
        block_tables=tables,
        seq_lens=torch.tensor(key_lens, dtype=torch.int32, device="cuda"),
        starts=torch.tensor([0, *query_lens]).cumsum(0).int().cuda(),
        out=torch.empty_like(query),
        max_query_len=max(query_lens),
        max_key_len=max(key_lens),
    )


def cold_batches(parts: Parts, **options: Any) -> list[Batch]:
    """Makes as many batches as it takes to find each one's cache cold when its turn comes; see `random_batch`."""
    make = functools.partial(random_batch, parts, **options)
    first = make()
    return [first, *(make() for _ in range(1, measure.num_pools(first.kv_cache.nbytes)))]


def packed(batch: Batch) -> list[torch.Tensor]:
    """Returns the keys and the values one after the other, [tokens, 8, head size] each; of whole blocks only."""
    blocks = batch.kv_cache[batch.block_tables.flatten()]
    return [rows.flatten(0, 1).contiguous() for rows in blocks.unbind(1)]


def paged_call(batch: Batch) -> PagedCall[torch.Tensor]:
    """Returns the causal attention of a batch as a call with a new output."""
    return PagedCall(
        query=batch.query,
        kv_cache=batch.kv_cache,
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.starts,
        spec=AttentionSpec(scale=batch.query.shape[-1] ** -0.5),
        max_query_len=batch.max_query_len,
    )


def dense_call(batch: Batch) -> DenseCall[torch.Tensor]:
    """Returns the same attention over dense keys and values, of a batch without earlier tokens."""
    key, value = packed(batch)
    return DenseCall(
        query=batch.query,
        key=key,
        value=value,
        query_start_loc=batch.starts,
        key_start_loc=batch.starts,
        spec=AttentionSpec(scale=batch.query.shape[-1] ** -0.5),
        max_query_len=batch.max_query_len,
        max_key_len=batch.max_key_len,
    )


def ours(batch: Batch, scale: torch.Tensor | None = None) -> Callable[[], Any]:
    """Returns this project's call on a batch; `scale` is that of keys and values."""
    call = replace(paged_call(batch), out=batch.out, k_scale=scale, v_scale=scale)
    return lambda: run(call)


def fa3(found: Any, batch: Batch) -> Callable[[], Any]:
    """Returns the call of FlashAttention-3 on a batch; `found` is the result of `peers.load_peers`."""
    key, value = batch.kv_cache.unbind(1)
    query, options = batch.query, _bounds(batch)
    if key.dtype.itemsize == 1:
        # FlashAttention-3 multiplies fp8 by fp8: its query is e4m3 when its cache is.
        query = query.to(key.dtype)
        ones = torch.ones(len(batch.seq_lens), KV_HEADS, device="cuda")
        options |= {"q_descale": ones, "k_descale": ones, "v_descale": ones}
    return lambda: found.fa3(query, key, value, out=batch.out, **options)


def fa4(found: Any, batch: Batch) -> Callable[[], Any]:
    """Returns the call of FlashAttention-4 on a batch; `found` is the result of `peers.load_fa4`."""
    key, value = batch.kv_cache.unbind(1)
    options = {
        "cu_seqlens_q": batch.starts,
        "max_seqlen_q": batch.max_query_len,
        "max_seqlen_k": batch.max_key_len,
        "seqused_k": batch.seq_lens,
        "page_table": batch.block_tables,
    }
    return lambda: found.flash_attn_varlen_func(batch.query, key, value, causal=True, **options)


def vllm_triton(found: Any, batch: Batch, **options: Any) -> Callable[[], Any]:
    """Returns the call of vLLM's Triton kernels on a batch, with options of their own; `found` as in `fa3`."""
    key, value = batch.kv_cache.unbind(1)
    options |= _bounds(batch)
    return lambda: found.vllm_unified(batch.query, key, value, batch.out, **options)


def _bounds(batch: Batch) -> dict[str, Any]:
    return {
        "cu_q": batch.starts,
        "max_q": batch.max_query_len,
        "max_k": batch.max_key_len,
        "seq_lens": batch.seq_lens,
        "block_table": batch.block_tables,
    }


def dense_ours(call: DenseCall[torch.Tensor]) -> Callable[[], Any]:
    """Returns this project's dense call, into an output of its own."""
    call = replace(call, out=_dense_output(call))
    return lambda: run(call)


def dense_sdpa(backend: str, call: DenseCall[torch.Tensor]) -> Callable[[], Any]:
    """Returns the same attention by torch's scaled_dot_product_attention; see `peers.sdpa`."""
    rows = dense_rows(call)
    return lambda: peers.sdpa(backend, *rows, causal=True)


def dense_batch(call: DenseCall[torch.Tensor]) -> list[torch.Tensor]:
    """Returns query, keys and values of sequences of one length, [sequences, length, heads, head size] each."""
    return [x.unflatten(0, (-1, call.max_query_len)) for x in (call.query, call.key, call.value)]


def dense_rows(call: DenseCall[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the same as [sequences, heads, length, head size]."""
    return [x.transpose(1, 2) for x in dense_batch(call)]


def dense_fa3(found: Any, call: DenseCall[torch.Tensor]) -> Callable[[], Any]:
    """Returns the same attention by FlashAttention-3; `found` as in `fa3`."""
    starts, length, out = call.query_start_loc, call.max_query_len, _dense_output(call)
    bounds = {"cu_q": starts, "cu_k": starts, "max_q": length, "max_k": length}
    return lambda: found.fa3(call.query, call.key, call.value, out=out, **bounds)


def dense_fa4(found: Any, call: DenseCall[torch.Tensor]) -> Callable[[], Any]:
    """Returns the same attention by FlashAttention-4; `found` as in `fa4`."""
    rows = dense_batch(call)
    return lambda: found.flash_attn_func(*rows, causal=True)


def _dense_output(call: DenseCall[torch.Tensor]) -> torch.Tensor:
    return call.query.new_empty(*call.query.shape[:2], call.value_head_size)


def dense_in_jax(attend: Callable[..., Any]) -> Column:
    """Returns the column of a JAX function `attend(query, key, value, starts, length)` on dense calls."""

    def timed(calls: list[DenseCall[torch.Tensor]]) -> float:
        def step(query: Any, *arrays: Any) -> Any:
            return attend(query, *arrays, calls[0].max_query_len)

        same_size = calls[0].value_head_size == calls[0].query.shape[-1]
        tensors = [(call.key, call.value, call.query_start_loc) for call in calls]
        return measure.chained_us(
            step if same_size else measure.fed(step), calls[0].query, tensors, rotations=4, rounds=5
        )

    return timed


def ours_in_jax(query: Any, key: Any, value: Any, starts: Any, length: int) -> Any:
    """Runs this project's JAX function for `dense_in_jax`."""
    return ops.attention(query, key, value, starts, max_query_len=length, implementation="triton")


def segments_in_jax(query: Any, key: Any, value: Any, segment_ids: Any, length: int) -> Any:
    """Runs it on one packed row, of segments of that length."""
    total = query.shape[0]
    bounds = {"max_query_len": total, "max_segments": total // length, "max_segment_len": length}
    starts = jnp.array([0, total], jnp.int32)
    return ops.attention(query, key, value, starts, segment_ids=segment_ids, **bounds, implementation="triton")
