"""Decode steps of two ranks that share sequences, each on a GPU: replayed from a CUDA graph, collectives included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import spawn

from tests.support.ranks import of_rank
from torch_core.base.specs import KVCacheSpec
from torch_core.metadata import CommonAttentionMetadata, SequenceRow, build_common_metadata, metadata_layout
from torch_core.vllm import (
    AttentionScales,
    BuilderConfig,
    ContextParallel,
    DistributedGroup,
    StepBuffers,
    StepGraphs,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("__import__('torch').cuda.device_count() < 2", reason="needs two GPUs"),
]

RANKS, SEQS, STEPS = 2, 6, 20
HEADS, KV_HEADS, HEAD, BLOCK, NUM_BLOCKS, MAX_BLOCKS = 8, 2, 64, 16, 64, 9
SPEC = KVCacheSpec(num_kv_heads=KV_HEADS, head_size=HEAD, block_size=BLOCK, dtype="float32")
SIZES: dict[str, Any] = {
    "block_size": BLOCK * RANKS,
    "num_blocks": NUM_BLOCKS,
    "num_seqs": SEQS,
    "num_tokens": SEQS,
    "max_blocks": MAX_BLOCKS,
    "max_query_len": 1,
}


def test_replays_with_other_lengths_are_the_eager_steps_and_their_ranks_heads_of_the_whole(
    tmp_path: Path, seed: int
) -> None:
    # A worker's failure is raised here.
    spawn(_rank, (str(tmp_path / "store"), seed), nprocs=RANKS)


def _rank(rank: int, store: str, seed: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS, device_id=device
    )
    _replay_steps(rank, device, seed)
    # NCCL waits for the graphs that hold its collectives.
    torch.distributed.destroy_process_group()


def _replay_steps(rank: int, device: torch.device, seed: int) -> None:
    place = ContextParallel(dcp_world_size=RANKS, dcp_rank=rank, dcp_group=DistributedGroup())
    impl = TritonAttentionImpl(HEADS, HEAD, HEAD**-0.5, KV_HEADS, device=device, context_parallel=place)
    builder = TritonAttentionMetadataBuilder(
        SPEC, ["layer.0"], BuilderConfig(num_heads=HEADS, context_parallel=place), device
    )
    scales, graphs = AttentionScales.of(device=device), StepGraphs(device)
    buffers = StepBuffers(metadata_layout(num_seqs=SEQS, num_tokens=SEQS, max_blocks=MAX_BLOCKS), device)
    # The same numbers on both ranks; the generator goes on in step.
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    pool = torch.randn(NUM_BLOCKS, 2, BLOCK * RANKS, KV_HEADS, HEAD, generator=generator)
    cache = torch.from_numpy(of_rank(pool.numpy(), RANKS, rank)).to(device)
    eager_cache, whole_cache = cache.clone(), pool.to(device)
    query, key, value = (torch.zeros(SEQS, heads, HEAD, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS))
    output = torch.empty_like(query)
    empty = build_common_metadata([], layout=buffers.layout, **SIZES)
    captured = builder.build_for_cudagraph_capture(empty, arrays=buffers.arrays)
    graphs.capture(0, lambda: impl.forward(scales, query, key, value, cache, captured, output))

    mine = slice(rank * HEADS, (rank + 1) * HEADS)
    for number in range(STEPS):
        ids = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
        lengths = [int(rng.integers(0, MAX_BLOCKS * BLOCK * RANKS)) for _ in range(SEQS)]
        rows = [SequenceRow(ids[MAX_BLOCKS * i : MAX_BLOCKS * (i + 1)], n, 1) for i, n in enumerate(lengths)]
        shapes = (HEADS * RANKS, KV_HEADS, KV_HEADS)
        drawn = [torch.randn(SEQS, heads, HEAD, generator=generator).to(device) for heads in shapes]
        for kept, new in zip((query, key, value), (drawn[0][:, mine], *drawn[1:]), strict=True):
            kept.copy_(new)
        common = build_common_metadata(rows, layout=buffers.layout, buffer=buffers.host_buffer(number), **SIZES)
        fresh = builder.build(0, common)
        eager = impl.forward(scales, query, key, value, eager_cache, fresh, torch.empty_like(query))
        builder.build(0, common, arrays=buffers.upload(number))
        graphs.replay(0)

        assert torch.equal(output, eager), f"step {number}"
        assert torch.equal(cache, eager_cache), f"step {number}"
        whole = _whole(common, drawn, whole_cache)[:, mine]
        torch.testing.assert_close(output, whole, rtol=0, atol=1e-5)


def _whole(common: CommonAttentionMetadata, drawn: list[torch.Tensor], cache: torch.Tensor) -> torch.Tensor:
    """What one rank with all heads and all tokens computes."""
    spec = KVCacheSpec(num_kv_heads=KV_HEADS, head_size=HEAD, block_size=BLOCK * RANKS, dtype="float32")
    heads, device = HEADS * RANKS, cache.device
    builder = TritonAttentionMetadataBuilder(spec, ["layer.0"], BuilderConfig(num_heads=heads), device)
    impl = TritonAttentionImpl(heads, HEAD, HEAD**-0.5, KV_HEADS, device=device)
    query, key, value = drawn
    metadata, scales = builder.build(0, common), AttentionScales.of(device=device)
    return impl.forward(scales, query, key, value, cache, metadata, torch.empty_like(query))
