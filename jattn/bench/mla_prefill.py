"""Prompts of multi-head latent attention in the plain form, keys of 192 and values of 128 elements, next to peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from jattn.bench import dense
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport
from jattn.bench.runner import Benchmark
from jattn.bench.session import Column, Session, in_graph
from torch_core.attention.call import DenseCall
from torch_core.base.specs import AttentionSpec

#: Tokens of one sequence in each row.
LENGTHS = (1024, 2048, 4096, 8192, 16384)
#: Heads of queries, keys and values, and their elements.
HEADS, KEY_SIZE, VALUE_SIZE = 16, 192, 128
_TOTAL_TOKENS = 16384


def run(*, lengths: Sequence[int] = LENGTHS, peers: Path | None = None, no_jax: bool = False) -> BenchReport:
    """Measures 16k tokens in sequences of each length: 16 heads, bfloat16, causal.

    Args:
        lengths: tokens of one sequence in each row; each divides 16384.
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.
        no_jax: leave out the JAX call and cuDNN through JAX.
    """
    session = Session("mla", peers)
    for length in lengths:
        # Half of the square is masked: two operations for each product of it.
        operations = float(_TOTAL_TOKENS * length * HEADS * (KEY_SIZE + VALUE_SIZE))
        session.add(
            session.rate_row(str(length), operations),
            _columns(session.peers, not no_jax),
            [prompt_call(length) for _ in range(2)],
            required=(OURS,),
        )
    return session.report(
        "latent attention, prompts, heads of 192 and values of 128, TFLOP/s",
        compared=lambda name: None if name == OURS else OURS,
    )


def prompt_call(length: int) -> DenseCall[torch.Tensor]:
    """Returns the causal attention of random prompts, 16k tokens in sequences of one length.

    Every head has keys and values of its own, as expanded latents have.
    """
    query, key, value = (
        torch.randn(_TOTAL_TOKENS, HEADS, size, device="cuda", dtype=torch.bfloat16)
        for size in (KEY_SIZE, KEY_SIZE, VALUE_SIZE)
    )
    starts = torch.arange(0, _TOTAL_TOKENS + 1, length, device="cuda", dtype=torch.int32)
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


def _columns(found: Any, jax_columns: bool) -> dict[str, Column]:
    columns = {OURS: in_graph(dense.ours), "cuDNN SDPA": in_graph(lambda call: dense.sdpa("cudnn", call))}
    if found is not None:
        columns["FA3"] = in_graph(lambda call: dense.fa3(found, call))
    if jax_columns:
        columns[f"{OURS} in JAX"] = dense.in_jax(dense.attend)
        columns["cuDNN in JAX"] = dense.in_jax(dense.cudnn)
    return columns


BENCHMARK = Benchmark("mla-prefill", __doc__, run, draw=draw_fractions)
