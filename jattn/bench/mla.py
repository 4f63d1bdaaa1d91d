"""Decode steps of multi-head latent attention over a paged cache, next to FlashMLA and vLLM's Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from jattn import ops
from jattn.bench import measure, peers
from jattn.bench.batch import dense_fa3, dense_fa4, dense_in_jax, dense_ours, dense_sdpa, ours_in_jax
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport, Row
from jattn.bench.runner import Benchmark, Mode, sizes
from jattn.bench.session import Column, Session, in_graph, with_ours
from torch_core.attention.call import DenseCall
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec, packed_latent_bytes
from torch_core.latent.call import LatentCall
from torch_core.latent.packed import pack_latents
from torch_core.launch.run import run as run_call
from torch_core.vllm.mla import compute_num_kv_splits

#: Sequences and tokens of each, in the rows of the default table.
SHAPES = ("1x8192", "8x8192", "64x2048", "128x4096")
HEADS = (16, 128)
#: Prompts: tokens of one sequence in each row, and all of them together.
LENGTHS = (1024, 2048, 4096, 8192, 16384)
TOTAL_TOKENS = 16384
#: Prompts: heads of queries, keys and values, and their elements.
PROMPT_HEADS, KEY_SIZE, VALUE_SIZE = 16, 192, 128
RANK, ROPE, BLOCK = 512, 64, 64
SCALE = 192**-0.5
# Bytes of a token by the format of the cache.
_ROW_BYTES = {"bfloat16": 2 * (RANK + ROPE), "fp8": RANK + ROPE, "packed": packed_latent_bytes(RANK, ROPE)}


def run(
    *,
    shapes: Sequence[str] = SHAPES,
    heads: Sequence[int] = HEADS,
    cache: Literal["bfloat16", "fp8", "packed"] = "bfloat16",
    peers: Path | None = None,
    no_jax: bool = False,
) -> BenchReport:
    """Measures every shape with every number of heads: rank 512, rotary keys of 64, bfloat16 queries, block 64.

    Args:
        shapes: "SEQUENCESxTOKENS" of each row.
        heads: query heads.
        cache: "bfloat16"; "fp8" for an e4m3 cache with one scale; "packed" for FlashMLA's packed rows. FlashMLA has no
            dense kernel for the last two.
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.
        no_jax: leave out the JAX call.
    """
    if min(heads) < 1:
        raise InvalidInput(f"--heads has {min(heads)}; each must be at least 1.")
    session = Session("mla", peers)
    for num_seqs, tokens in map(sizes, shapes):
        for num_heads in heads:
            read = num_seqs * tokens * _ROW_BYTES[cache]
            operations = 2.0 * num_seqs * tokens * num_heads * (2 * RANK + ROPE)
            bound = max(read / session.copy, operations / session.matmul) * 1e6
            first = _latents(num_seqs, tokens, num_heads, cache)
            others = range(1, measure.num_pools(first.latent_cache.nbytes))
            session.add(
                Row(f"{num_seqs} x {tokens}, {num_heads} heads", bound, {}),
                _columns(session.peers, cache, not no_jax),
                [first, *(_latents(num_seqs, tokens, num_heads, cache) for _ in others)],
                required=(OURS,),
            )
    return session.report(f"latent attention, decode, {cache} cache", compared=with_ours)


def _latents(num_seqs: int, tokens: int, num_heads: int, cache: str) -> LatentCall[torch.Tensor]:
    """Returns one decode step: a query row for each sequence, blocks of 64 in random order after the null block 0."""
    blocks = num_seqs * -(-tokens // BLOCK)
    query = torch.randn(num_seqs, num_heads, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    latents = torch.randn(blocks + 1, BLOCK, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    if cache == "packed":
        latents = pack_latents(*latents.flatten(0, 1).split([RANK, ROPE], dim=-1)).unflatten(0, (-1, BLOCK))
    return LatentCall(
        query=query,
        latent_cache=latents.to(torch.float8_e4m3fn) if cache == "fp8" else latents,
        kv_lora_rank=RANK,
        block_tables=(torch.randperm(blocks, device="cuda").int() + 1).view(num_seqs, -1),
        seq_lens=torch.full((num_seqs,), tokens, device="cuda", dtype=torch.int32),
        query_start_loc=torch.arange(num_seqs + 1, device="cuda", dtype=torch.int32),
        spec=AttentionSpec(scale=SCALE),
        max_query_len=1,
        out=torch.empty_like(query[..., :RANK]).contiguous(),
        k_scale=torch.ones(1, device="cuda") if cache == "fp8" else None,
    )


def _columns(found: Any, cache: str, jax_columns: bool) -> dict[str, Column]:
    columns = {OURS: in_graph(lambda call: lambda: run_call(call))}
    if found is not None and cache == "bfloat16":
        columns["FlashMLA"] = in_graph(lambda call: _flash_mla(found, call))
    if found is not None and cache != "packed":
        columns["vLLM Triton"] = in_graph(lambda call: _vllm(found, call))
    if jax_columns:
        columns[f"{OURS} in JAX"] = _ours_in_jax
    return columns


def _flash_mla(found: Any, call: LatentCall[torch.Tensor]) -> Callable[[], Any]:
    query, cache = call.query[:, None], call.latent_cache[:, :, None]
    # It plans its work by the first call's lengths and is told to keep that plan.
    plan, _ = found.get_mla_metadata()
    return lambda: found.flash_mla(
        query, cache, call.block_tables, call.seq_lens, RANK, plan, softmax_scale=SCALE, causal=False
    )


def _vllm(found: Any, call: LatentCall[torch.Tensor]) -> Callable[[], Any]:
    num_seqs, num_heads, _ = call.query.shape
    num_sms = torch.cuda.get_device_properties(call.query.device).multi_processor_count
    splits = compute_num_kv_splits(int(call.seq_lens[0]), num_sms)
    logits = torch.empty(num_seqs, num_heads, splits, RANK + 1, device="cuda", dtype=torch.float32)
    lse, one = torch.empty(num_seqs, num_heads, device="cuda"), torch.ones(1, device="cuda")
    cache = call.latent_cache[:, :, None]
    return lambda: found.vllm_mla(
        call.query, cache, cache[..., :RANK], call.out, lse, call.block_tables, call.seq_lens, logits, splits,
        SCALE, BLOCK, k_scale=one, v_scale=one, is_mla=True,
    )  # fmt: skip


def _ours_in_jax(calls: list[LatentCall[torch.Tensor]]) -> float:
    def attend(query: Any, *arrays: Any) -> Any:
        return ops.mla_attention(
            query, *arrays, kv_lora_rank=RANK, max_query_len=1, scale=SCALE, implementation="triton"
        )

    arrays = [(call.latent_cache, call.block_tables, call.seq_lens, call.query_start_loc) for call in calls]
    rotations = max(1, 16 // len(calls))
    return measure.chained_us(measure.fed(attend), calls[0].query, arrays, rotations=rotations)


def run_prefill(*, lengths: Sequence[int] = LENGTHS, peers: Path | None = None, no_jax: bool = False) -> BenchReport:
    """Measures 16k tokens in sequences of each length: 16 heads, bfloat16, causal.

    Args:
        lengths: tokens of one sequence in each row; each divides 16384.
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.
        no_jax: leave out the JAX call and cuDNN through JAX.
    """
    session = Session("mla", peers)
    columns = _prefill_columns(session.peers, not no_jax)
    for length in lengths:
        # Half of the square is masked: two operations for each product of it.
        operations = float(TOTAL_TOKENS * length * PROMPT_HEADS * (KEY_SIZE + VALUE_SIZE))
        row, calls = session.rate_row(str(length), operations), [prompt_call(length) for _ in range(2)]
        session.add(row, columns, calls, required=(OURS,))
    return session.report("latent attention, prompts, heads of 192 and values of 128, TFLOP/s", compared=with_ours)


def prompt_call(length: int) -> DenseCall[torch.Tensor]:
    """Returns the causal attention of random prompts, 16k tokens in sequences of one length.

    Every head has keys and values of its own, as expanded latents have.
    """
    query, key, value = (
        torch.randn(TOTAL_TOKENS, PROMPT_HEADS, size, device="cuda", dtype=torch.bfloat16)
        for size in (KEY_SIZE, KEY_SIZE, VALUE_SIZE)
    )
    starts = torch.arange(0, TOTAL_TOKENS + 1, length, device="cuda", dtype=torch.int32)
    return DenseCall(
        query=query,
        key=key,
        value=value,
        query_start_loc=starts,
        key_start_loc=starts,
        spec=AttentionSpec(scale=KEY_SIZE**-0.5),
        max_query_len=length,
        max_key_len=length,
    )


def _prefill_columns(found: Any, jax_columns: bool) -> dict[str, Column]:
    columns = {OURS: in_graph(dense_ours), "cuDNN SDPA": in_graph(lambda call: dense_sdpa("cudnn", call))}
    if found is not None:
        columns["FA3"] = in_graph(lambda call: dense_fa3(found, call))
        if (fa4 := peers.load_fa4()) is not None:
            columns["FA4"] = in_graph(lambda call: dense_fa4(fa4, call))
    if jax_columns:
        columns[f"{OURS} in JAX"] = dense_in_jax(ours_in_jax)
        columns["cuDNN in JAX"] = dense_in_jax(peers.cudnn)
    return columns


PREFILL = Benchmark(
    "mla-prefill",
    "Prompts of multi-head latent attention in the plain form, keys of 192 and values of 128 elements, next to peers.",
    run_prefill,
    draw=draw_fractions,
)
BENCHMARK = Benchmark(
    "mla", __doc__, run, modes=(Mode("--prefill", PREFILL, "--prefill has 16 heads and no cache"),), draw=draw_fractions
)
