"""Ranks that share sequences: what the layers of all ranks compute together is what one rank with all heads does."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import spawn

from tests.support.backend_cases import HEAD, HEADS, KV_HEADS, ONES, SCALE, SPEC, refuses
from tests.support.ranks import of_rank
from torch_core.base.errors import Unsupported
from torch_core.metadata import SequenceRow, build_common_metadata
from torch_core.ops import merge_states
from torch_core.vllm import (
    BuilderConfig,
    ContextParallel,
    DistributedGroup,
    TorchAttentionImpl,
    TorchAttentionMetadataBuilder,
    TritonAttentionImpl,
)

DECODE = [SequenceRow([5, 6, 7], 9, 1), SequenceRow([9, 10], 4, 1), SequenceRow([11], 0, 1)]
MIXED = [SequenceRow([5, 6, 7], 9, 3), SequenceRow([9], 3, 1), SequenceRow([11], 0, 5)]
SLOPES = [0.1, 0.2, 0.4, 0.8]


@dataclass
class SimulatedGroup:
    """Ranks that are threads of one process: each call waits for all."""

    ranks: int

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=60)
        self.given: dict[int, torch.Tensor] = {}
        self.sent: list[tuple[int, ...]] = []

    def of(self, rank: int) -> Any:
        return SimpleNamespace(
            all_gather=lambda tensor, dim: torch.cat(self.exchange(rank, tensor), dim),
            all_to_all=lambda tensor: torch.stack([other[rank] for other in self.exchange(rank, tensor)]),
        )

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.barrier.wait()
        self.given[rank] = tensor
        if rank == 0:
            self.sent.append(tuple(tensor.shape))
        self.barrier.wait()
        return [self.given[other] for other in range(self.ranks)]


def together(ranks: int, work: Any) -> list[Any]:
    results: list[Any] = [None] * ranks
    errors = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Problem:
    """A batch over ranks: a cache for all tokens, queries of every rank's heads, keys and values."""

    def __init__(self, seed: int, rows: list[SequenceRow], ranks: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.step = build_common_metadata(rows, block_size=SPEC.block_size * ranks, num_blocks=16)
        tokens = self.step.num_tokens

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.cache = normal(16, 2, SPEC.block_size * ranks, KV_HEADS, HEAD)
        self.query = normal(tokens, HEADS * ranks, HEAD)
        self.key, self.value = normal(tokens, KV_HEADS, HEAD), normal(tokens, KV_HEADS, HEAD)

    def whole(self, ranks: int, **options: Any) -> torch.Tensor:
        heads = self.query.shape[1]
        for name, repeated in (("alibi_slopes", list), ("sinks", torch.tensor)):
            if options.get(name) is not None:
                options[name] = repeated(list(options[name]) * (heads // HEADS))
        spec = replace(SPEC, block_size=SPEC.block_size * ranks)
        metadata = TorchAttentionMetadataBuilder(spec, [], BuilderConfig(num_heads=HEADS), "cpu").build(0, self.step)
        impl = TorchAttentionImpl(heads, HEAD, SCALE, KV_HEADS, **options)
        out = torch.empty_like(self.query)
        return impl.forward(ONES, self.query, self.key, self.value, self.cache.clone(), metadata, out)

    def metadata(self, place: ContextParallel) -> Any:
        config = BuilderConfig(num_heads=HEADS, context_parallel=place)
        return TorchAttentionMetadataBuilder(SPEC, [], config, "cpu").build(0, self.step)

    def forward(self, place: ContextParallel, **options: Any) -> torch.Tensor:
        impl = TorchAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, context_parallel=place, **options)
        mine = self.query[:, place.dcp_rank * HEADS :][:, :HEADS].contiguous()
        out = torch.full_like(mine, float("nan"))
        return impl.forward(ONES, mine, self.key, self.value, self.cache_of(place), self.metadata(place), out)

    def cache_of(self, place: ContextParallel) -> torch.Tensor:
        return torch.from_numpy(
            of_rank(self.cache.numpy(), place.dcp_world_size, place.dcp_rank, place.interleave_size)
        )


CASES: dict[str, tuple[list[SequenceRow], dict[str, Any]]] = {
    "decode": (DECODE, {}),
    "decode with sinks": (DECODE, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}),
    "prompts and decodes": (MIXED, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}),
    "window": (MIXED, {"sliding_window": 4}),
    "ALiBi": (MIXED, {"alibi_slopes": SLOPES}),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_ranks_with_a_group_compute_their_heads_of_the_whole(name: str, ranks: int, seed: int) -> None:
    rows, options = CASES[name]
    problem, group = Problem(seed, rows, ranks), SimulatedGroup(ranks)
    expected = problem.whole(ranks, **options)

    def forward(rank: int) -> torch.Tensor:
        place = ContextParallel(dcp_world_size=ranks, dcp_rank=rank, dcp_group=group.of(rank))
        return problem.forward(place, **options)

    found = torch.cat(together(ranks, forward), 1)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    # Queries, and slopes, and one message of the outputs with their lse, as bytes.
    tokens = problem.step.num_tokens
    assert [shape for shape in group.sent if len(shape) > 1] == [
        (tokens, HEADS, HEAD),
        (ranks, tokens, HEADS, 4 * HEAD + 4),
    ]


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])])
def test_what_forward_with_lse_returns_merges_to_the_whole(
    ranks: int, interleave: int, sinks: torch.Tensor | None, seed: int
) -> None:
    problem, results = Problem(seed, MIXED, ranks), []
    for rank in range(ranks):
        place = ContextParallel(dcp_world_size=ranks, dcp_rank=rank, interleave_size=interleave)
        impl = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, sinks=sinks, context_parallel=place)
        assert impl.need_to_return_lse_for_decode
        given = (problem.query[:, :HEADS], problem.key, problem.value, problem.cache_of(place))
        results.append(impl.forward_with_lse(ONES, given[0].contiguous(), *given[1:], problem.metadata(place)))

    out, lse = results[0]
    for other in results[1:]:
        out, lse = merge_states(out, lse, *other)

    problem.query = problem.query[:, :HEADS].contiguous()
    expected = problem.whole(ranks, sinks=sinks)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_metadata_and_groups_that_do_not_fit_are_refused(seed: int) -> None:
    problem = Problem(seed, DECODE, 2)
    place = ContextParallel(dcp_world_size=2, dcp_rank=0)
    impl = TorchAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, context_parallel=place)
    cache, metadata = problem.cache_of(place), problem.metadata(place)
    before, query = cache.clone(), problem.query[:, :HEADS].contiguous()
    given = (ONES, query, problem.key, problem.value, cache)

    with refuses(
        "dcp_group is None; this layer holds 1 of 2 parts of each sequence: give its ContextParallel the group of "
        "those ranks, or call forward_with_lse and merge the parts.",
        Unsupported,
    ):
        impl.forward(*given, metadata, query)
    with refuses("dcp_local_seq_lens of the metadata is None; its builder was not told of the ranks."):
        impl.forward_with_lse(*given, replace(metadata, dcp_local_seq_lens=None))
    impl.context_parallel = replace(place, dcp_group=SimulatedGroup(2).of(0))
    with refuses(
        "sequences are spread over 2 ranks: that is for decoder layers (this one is of type decoder) and for an output "
        "without output_scale.",
        Unsupported,
    ):
        impl.forward(*given, metadata, query, torch.ones(1))
    with refuses(
        "block_size of the metadata is 4; these layers have 8 (4 on each of 2 ranks, which share a block). Build it "
        "with block_size=8."
    ):
        problem.step = build_common_metadata(DECODE, block_size=4, num_blocks=16)
        problem.metadata(place)
    encoder = TritonAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, attn_type="encoder")
    with refuses("attn_type is 'encoder'; forward_with_lse is for decoder layers.", Unsupported):
        encoder.forward_with_lse(*given, metadata)
    assert torch.equal(cache, before)
    assert np.isfinite(cache.numpy()).all()


PROMPTS = [SequenceRow([5, 6, 7], 0, 12), SequenceRow([9], 0, 4)]
PROMPT_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "window": {"sliding_window": 4},
    "ALiBi": {"alibi_slopes": SLOPES},
}


@pytest.mark.parametrize("name", PROMPT_CASES)
def test_ranks_that_share_prompts_compute_their_chunks_and_then_decode(name: str, seed: int) -> None:
    options, group = PROMPT_CASES[name], SimulatedGroup(2)
    problem = Problem(seed, PROMPTS, 2)
    problem.query = problem.query[:, :HEADS].contiguous()
    expected = problem.whole(2, **options)
    nexts = [replace(row, num_computed_tokens=row.num_new_tokens, num_new_tokens=1) for row in PROMPTS]
    decode = Problem(seed + 1, [SequenceRow([*row.block_ids, 12 + i], 12 - 8 * i, 1) for i, row in enumerate(nexts)], 2)
    decode.query = decode.query[:, :HEADS].contiguous()
    decode.cache = problem.cache.clone()
    spec = replace(SPEC, block_size=2 * SPEC.block_size)
    whole = TorchAttentionMetadataBuilder(spec, [], BuilderConfig(num_heads=HEADS), "cpu").build(0, problem.step)
    TorchAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS).forward(
        ONES, problem.query, problem.key, problem.value, decode.cache, whole, torch.empty_like(problem.query)
    )
    expected_next = decode.whole(2, **options)

    def forward(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        place = ContextParallel(pcp_world_size=2, pcp_rank=rank, pcp_group=group.of(rank))
        impl = TorchAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, context_parallel=place, **options)
        assert impl.supports_pcp
        cache = torch.from_numpy(of_rank(problem.cache.numpy(), 2, rank))
        metadata = problem.metadata(place)
        rows = metadata.prompt_share.token_indices
        query, key, value = (x[rows].contiguous() for x in (problem.query, problem.key, problem.value))
        out = impl.forward(ONES, query, key, value, cache, metadata, torch.full_like(query, float("nan")))
        given = (decode.query, decode.key, decode.value, cache, decode.metadata(place))
        return rows, out, impl.forward(ONES, *given, torch.empty_like(decode.query))

    for rows, out, following in together(2, forward):
        torch.testing.assert_close(out, expected[rows], rtol=0, atol=1e-5)
        torch.testing.assert_close(following, expected_next, rtol=0, atol=1e-5)


def test_prompts_that_a_rank_cannot_attend_to_alone_are_refused(seed: int) -> None:
    problem = Problem(seed, PROMPTS, 2)
    place = ContextParallel(pcp_world_size=2, pcp_group=SimulatedGroup(2).of(0))
    metadata = problem.metadata(place)
    query, key = problem.query[:8, :HEADS].contiguous(), problem.key[:8]
    cache = torch.zeros(SPEC.shape(16))
    impl = TorchAttentionImpl(HEADS, HEAD, SCALE, KV_HEADS, context_parallel=place)
    message = (
        "pcp_world_size is 2; the tokens of prompts are split for causal layers with keys, values and a cache of their "
        "own, without mm_prefix_range and seq_causal."
    )
    shared = TorchAttentionImpl(
        HEADS, HEAD, SCALE, KV_HEADS, context_parallel=place, kv_sharing_target_layer_name="other"
    )
    for layer, given in ((impl, replace(metadata, causal=False)), (shared, metadata)):
        with refuses(message, Unsupported):
            layer.forward(ONES, query, key, key, cache, given, query)
    with refuses(message, Unsupported):
        impl.forward_with_lse(ONES, query, key, key, cache, metadata)
    with refuses("key has 16 tokens; this rank has 8 of the prompts' (prompt_share.token_indices)."):
        impl.forward(ONES, query, problem.key, problem.value, cache, metadata, query)
    assert not cache.any()


def test_chunks_of_prompts_and_uneven_prompts_are_refused(seed: int) -> None:
    place = ContextParallel(pcp_world_size=2, pcp_group=SimulatedGroup(2).of(0))
    with refuses(
        "num_new_tokens of row 0 is 3 of 12 tokens; where the tokens of prompts are split over 2 ranks, a step has "
        "whole prompts of a multiple of 4 tokens, or one token for each row. Pad prompts, and keep chunks and decodes "
        "apart.",
        Unsupported,
    ):
        Problem(seed, MIXED, 2).metadata(place)


def one_of_two_processes(rank: int, store: str, seed: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    problem = Problem(seed, MIXED, 2)
    found = problem.forward(ContextParallel(dcp_world_size=2, dcp_rank=rank, dcp_group=DistributedGroup()))
    torch.testing.assert_close(found, problem.whole(2)[:, rank * HEADS :][:, :HEADS], rtol=0, atol=1e-5)
    torch.distributed.destroy_process_group()


@pytest.mark.nightly
def test_two_processes_over_gloo_compute_their_heads_of_the_whole(tmp_path: Path, seed: int) -> None:
    # A worker's failure is raised here.
    spawn(one_of_two_processes, (str(tmp_path / "store"), seed), nprocs=2)
