"""Latent layers of DeepSeek's sizes on a CUDA device: what they give on the CPU, and captured over locked scratch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torch_core import ops
from torch_core.base.specs import LatentCacheSpec
from torch_core.metadata import SequenceRow, build_common_metadata, metadata_layout
from torch_core.vllm import (
    AttentionScales,
    BuilderConfig,
    MLADims,
    StepBuffers,
    StepGraphs,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
    WorkspaceManager,
)

BLOCK, NUM_BLOCKS, EPSILON = 64, 96, torch.finfo(torch.bfloat16).eps
DIMS = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
#: By the name of a cache's dtype, that of its array; "auto" is the layer's own.
CACHES = {"auto": None, "fp8": "float8_e4m3fn", "fp8_ds_mla": "uint8"}
#: Two decodes, prompts after a context and without one.
ROWS = [
    SequenceRow([5, 6, 7, 8, 9], 300, 1),
    SequenceRow([10], 0, 1),
    SequenceRow([11, 12, 13], 100, 40),
    SequenceRow([14, 15], 0, 70),
]

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Values that bfloat16 holds."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer_of(heads: int, device: str, dtype: torch.dtype, **options: Any) -> TritonMLAImpl:
    projection = torch.nn.Linear(512, heads * 256, bias=False, device=device, dtype=dtype).requires_grad_(False)
    projection.weight.copy_(normal(1, heads * 256, 512) * 0.04)
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")
    given: dict[str, Any] = {name: getattr(DIMS, name) for name in sizes} | {"kv_cache_dtype": "auto"} | options
    impl = TritonMLAImpl(
        heads, 576, 192**-0.5, 1, None, None, given.pop("kv_cache_dtype"), None, "decoder", None, q_lora_rank=None,
        kv_b_proj=projection, **given,
    )  # fmt: skip
    impl.process_weights_after_loading(dtype)
    return impl


def builder_of(heads: int, device: str, dtype: str, **config: Any) -> TritonMLAMetadataBuilder:
    spec = LatentCacheSpec(kv_lora_rank=512, rope_dim=64, block_size=BLOCK, dtype=dtype)
    return TritonMLAMetadataBuilder(spec, ["layer.0"], BuilderConfig(num_heads=heads, mla_dims=DIMS, **config), device)


def mixed_step(heads: int, cache_dtype: str, device: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    stored = CACHES[cache_dtype] or str(dtype).removeprefix("torch.")
    common = build_common_metadata(ROWS, block_size=BLOCK, num_blocks=NUM_BLOCKS)
    builder = builder_of(heads, device, stored, chunked_prefill_workspace_size=2 * BLOCK)
    scales = AttentionScales.of(k_scale=0.5, device=device)
    cache = torch.zeros(builder.latent_spec.shape(NUM_BLOCKS), dtype=getattr(torch, stored))
    for number, row in enumerate(ROWS):
        context = normal(seed + number, row.num_computed_tokens, 576).to(dtype)
        slots = [row.block_ids[token // BLOCK] * BLOCK + token % BLOCK for token in range(len(context))]
        if slots:
            scale = 0.5 if cache_dtype == "fp8" else None
            parts = context[:, :512], context[:, 512:]
            ops.write_latent_cache(*parts, cache, torch.tensor(slots).int(), k_scale=scale)
    shapes = ((heads, 192), (512,), (64,))
    query, kv_c, k_pe = (
        normal(seed + 10 + number, common.num_tokens, *shape).to(device, dtype) for number, shape in enumerate(shapes)
    )
    output = torch.full((common.num_tokens, heads * 128), float("nan"), device=device, dtype=dtype)
    impl = layer_of(heads, device, dtype, kv_cache_dtype=cache_dtype)
    impl.forward(scales, query, kv_c, k_pe, cache.to(device), builder.build(0, common), output)
    return output.double().cpu()


@each_device
@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("heads", [5, 128])
def test_a_mixed_batch_is_as_exact_as_on_the_cpu(heads, cache_dtype, device, seed):
    exact = mixed_step(heads, cache_dtype, "cpu", torch.float32, seed)
    same_dtype = mixed_step(heads, cache_dtype, "cpu", torch.bfloat16, seed)

    found = mixed_step(heads, cache_dtype, device, torch.bfloat16, seed)

    assert (found - exact).abs().max() <= 2 * ((same_dtype - exact).abs().max() + EPSILON * exact.abs().max())


@each_device
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("drafts", [0, 1])
def test_replays_over_locked_scratch_equal_eager_decodes_bit_for_bit(drafts, heads, device, seed):
    rng, size, max_blocks = np.random.default_rng(seed), 8, 10
    sizes: dict[str, Any] = {
        "block_size": BLOCK,
        "num_blocks": NUM_BLOCKS,
        "num_seqs": size,
        "num_tokens": size * (1 + drafts),
        "max_blocks": max_blocks,
        "max_query_len": 1 + drafts,
    }
    workspace = WorkspaceManager(device)
    builder = builder_of(
        heads, device, "bfloat16", workspace=workspace, max_num_seqs=size, max_model_len=max_blocks * BLOCK,
        num_speculative_tokens=drafts,
    )  # fmt: skip
    workspace.lock()
    reserved = workspace.num_bytes
    captured = layer_of(heads, device, torch.bfloat16, workspace=workspace)
    eager = layer_of(heads, device, torch.bfloat16)
    layout = metadata_layout(num_seqs=size, num_tokens=sizes["num_tokens"], max_blocks=max_blocks)
    buffers, graphs, scales = StepBuffers(layout, device), StepGraphs(device), AttentionScales.of(device=device)
    metadata = builder.build_for_cudagraph_capture(
        build_common_metadata([], layout=layout, **sizes), arrays=buffers.arrays
    )
    cache = normal(seed, NUM_BLOCKS, BLOCK, 576).to(device)
    eager_cache = cache.clone()
    shapes = ((heads, 192), (512,), (64,))
    tensors = [normal(number, sizes["num_tokens"], *shape).to(device) for number, shape in enumerate(shapes)]
    query, kv_c, k_pe = tensors
    output = torch.empty(sizes["num_tokens"], heads * 128, dtype=torch.bfloat16, device=device)
    graphs.capture("decode", lambda: captured.forward(scales, query, kv_c, k_pe, cache, metadata, output))

    for number in range(5):
        ids = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
        lengths = rng.integers(0, max_blocks * BLOCK - 1, int(rng.integers(1, size + 1))).tolist()
        rows = [SequenceRow(ids[10 * i : 10 * (i + 1)], length, 1 + drafts) for i, length in enumerate(lengths)]
        for index, tensor in enumerate(tensors):
            tensor.copy_(normal(seed + 100 * number + index, *tensor.shape))
        common = build_common_metadata(rows, layout=layout, buffer=buffers.host_buffer(number), **sizes)
        step = builder.build(0, common)
        expected = eager.forward(scales, query, kv_c, k_pe, eager_cache, step, torch.empty_like(output))
        buffers.upload(number)
        graphs.replay("decode")
        assert torch.equal(output.view(torch.int16), expected.view(torch.int16)), f"step {number}"
    assert torch.equal(cache.view(torch.int16), eager_cache.view(torch.int16))
    assert workspace.num_bytes == reserved
