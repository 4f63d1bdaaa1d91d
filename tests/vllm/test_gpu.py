"""What only a CUDA device shows: graphs replay bit for bit, one upload per step, cascade over a long prefix."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest
import torch

from torch_core.base.specs import KVCacheSpec
from torch_core.metadata import (
    Buckets,
    SequenceRow,
    build_common_metadata,
    common_prefix_length,
    metadata_layout,
)
from torch_core.vllm import (
    AttentionScales,
    BuilderConfig,
    DeviceInfo,
    StepBuffers,
    StepGraphs,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, HEAD, BLOCK = 32, 8, 128, 16
SPEC = KVCacheSpec(num_kv_heads=KV_HEADS, head_size=HEAD, block_size=BLOCK, dtype="bfloat16")
CUDA = "cuda"


def layer_and_builder() -> tuple[TritonAttentionImpl, TritonAttentionMetadataBuilder]:
    impl = TritonAttentionImpl(HEADS, HEAD, HEAD**-0.5, KV_HEADS, device=CUDA)
    return impl, TritonAttentionMetadataBuilder(SPEC, ["layer.0"], BuilderConfig(num_heads=HEADS), CUDA)


def random_tensors(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(CUDA).manual_seed(seed)
    shapes = ((num_tokens, HEADS, HEAD), (num_tokens, KV_HEADS, HEAD), (num_tokens, KV_HEADS, HEAD))
    query, key, value = (torch.randn(*shape, generator=generator, device=CUDA) for shape in shapes)
    return query.bfloat16(), key.bfloat16(), value.bfloat16()


def test_500_replays_with_changing_tables_and_lengths_equal_eager_steps_bit_for_bit(seed):
    rng = np.random.default_rng(seed)
    num_blocks, max_blocks, sizes = 1024, 32, Buckets("sequences", (1, 4, 16))
    impl, builder = layer_and_builder()
    scales, graphs = AttentionScales.of(device=CUDA), StepGraphs(CUDA)
    pool = torch.randn(SPEC.shape(num_blocks), device=CUDA).bfloat16()
    cache, eager_cache = pool.clone(), pool.clone()
    static = {}
    for size in sizes.sizes:
        buffers = StepBuffers(metadata_layout(num_seqs=size, num_tokens=size, max_blocks=max_blocks), CUDA)
        empty = build_common_metadata(
            [], block_size=BLOCK, num_blocks=num_blocks, num_seqs=size, num_tokens=size, max_blocks=max_blocks,
            max_query_len=1, layout=buffers.layout,
        )  # fmt: skip
        metadata = builder.build_for_cudagraph_capture(empty, arrays=buffers.arrays)
        tensors = random_tensors(size, size)
        output = torch.empty_like(tensors[0])

        def step(tensors=tensors, metadata=metadata, output=output):
            query, key, value = tensors
            return impl.forward(scales, query, key, value, cache, metadata, output)

        graphs.capture(size, step)
        static[size] = (buffers, tensors, output)

    for number in range(500):
        ids = rng.permutation(np.arange(1, num_blocks)).tolist()
        lengths = [int(rng.integers(0, max_blocks * BLOCK)) for _ in range(int(rng.integers(1, 17)))]
        rows = [SequenceRow(ids[32 * i : 32 * (i + 1)], length, 1) for i, length in enumerate(lengths)]
        size = sizes.pad(len(rows))
        buffers, tensors, output = static[size]
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
        common = build_common_metadata(
            rows, block_size=BLOCK, num_blocks=num_blocks, num_seqs=size, num_tokens=size, max_blocks=max_blocks,
            max_query_len=1, layout=buffers.layout, buffer=buffers.host_buffer(number),
        )  # fmt: skip
        query, key, value = tensors
        eager = impl.forward(scales, query, key, value, eager_cache, builder.build(0, common), torch.empty_like(query))
        buffers.upload(number)
        graphs.replay(size)

        assert torch.equal(output.view(torch.int16), eager.view(torch.int16)), f"step {number}"
    assert torch.equal(cache.view(torch.int16), eager_cache.view(torch.int16))


def test_a_step_makes_one_host_to_device_copy():
    layout = metadata_layout(num_seqs=64, num_tokens=64, max_blocks=64, extra=[("token_ids", (64,))])
    buffers = StepBuffers(layout, CUDA)
    impl, builder = layer_and_builder()
    rows = [SequenceRow(array("i", range(1 + 64 * i, 65 + 64 * i)), 1000, 1) for i in range(64)]
    cache = torch.zeros(SPEC.shape(64 * 64 + 1), device=CUDA, dtype=torch.bfloat16)
    query, key, value = random_tensors(64, 0)
    output, scales = torch.empty_like(query), AttentionScales.of(device=CUDA)

    def step(number: int) -> None:
        common = build_common_metadata(
            rows, block_size=BLOCK, num_blocks=64 * 64 + 1, num_seqs=64, num_tokens=64, max_blocks=64, layout=layout,
            buffer=buffers.host_buffer(number),
        )  # fmt: skip
        metadata = builder.build(0, common, arrays=buffers.upload(number))
        for _ in range(4):
            impl.forward(scales, query, key, value, cache, metadata, output)

    for number in range(3):
        step(number)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for number in range(3, 13):
            step(number)
        torch.cuda.synchronize()

    events = profile.events()
    assert events is not None
    copies = [event.name for event in events if event.name.startswith("Memcpy")]
    assert len(copies) == 10
    assert all("HtoD" in name for name in copies)


def shared_prefix_batch(num_seqs: int, prefix_blocks: int, suffix_blocks: int):
    """A decode batch whose sequences share a prefix; its step functions with and without cascade."""
    num_blocks = 1 + prefix_blocks + num_seqs * suffix_blocks
    prefix = list(range(1, prefix_blocks + 1))
    rows = []
    for index in range(num_seqs):
        first = 1 + prefix_blocks + index * suffix_blocks
        context = (prefix_blocks + suffix_blocks) * BLOCK - 5
        rows.append(SequenceRow([*prefix, *range(first, first + suffix_blocks)], context, 1))
    common = build_common_metadata(rows, block_size=BLOCK, num_blocks=num_blocks)
    impl, builder = layer_and_builder()
    cache = torch.randn(SPEC.shape(num_blocks), device=CUDA).bfloat16()
    query, key, value = random_tensors(num_seqs, 1)
    scales = AttentionScales.of(device=CUDA)

    def step(prefix_len: int) -> Callable[[], torch.Tensor]:
        metadata, output = builder.build(prefix_len, common), torch.empty_like(query)
        return lambda: impl.forward(scales, query, key, value, cache, metadata, output)

    shared = common_prefix_length(common)
    chosen = builder.use_cascade_attention(shared, common.query_lens, num_sms=DeviceInfo.of(CUDA).num_sms)
    return step(0), step(shared), chosen


def test_cascade_equals_the_plain_way_where_it_is_chosen():
    plain, cascade, chosen = shared_prefix_batch(64, 512, 4)

    found, expected = cascade().clone(), plain().clone()

    assert chosen
    assert (found.float() - expected.float()).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max()
