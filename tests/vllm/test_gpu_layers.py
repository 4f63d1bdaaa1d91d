"""Every kind of layer gives on a CUDA device what it gives on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_core.base.specs import KVCacheSpec
from torch_core.metadata import EncoderRow, SequenceRow, build_common_metadata, build_dense_metadata
from torch_core.vllm import (
    AttentionScales,
    AttentionType,
    BuilderConfig,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

HEADS, KV_HEADS, HEAD, BLOCK, NUM_BLOCKS = 8, 2, 64, 16, 64
SPEC = KVCacheSpec(num_kv_heads=KV_HEADS, head_size=HEAD, block_size=BLOCK, dtype="bfloat16")
FP8 = torch.float8_e4m3fn
ENCODER_ROWS = [EncoderRow([40, 41], 20, 20), EncoderRow([42], 7, 7), EncoderRow([43], 3, 3)]
ROWS = [SequenceRow([5, 6, 7], 33, 9), SequenceRow([9, 10], 17, 1), SequenceRow([11, 12, 13], 0, 40)]
SHARED = [SequenceRow([1, 2, 20 + i], 35, 1) for i in range(5)]
SLOPES = [2.0 ** -(index + 1) for index in range(HEADS)]

#: Name: arguments of the layer, and of the case.
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "padded": ({}, {"build": {"num_seqs": 8, "num_tokens": 64}}),
    "sliding window": ({"sliding_window": 12}, {}),
    "soft cap": ({"logits_soft_cap": 5.0}, {}),
    "sinks": ({"sinks": torch.linspace(-2, 2, HEADS)}, {}),
    "alibi": ({"alibi_slopes": SLOPES}, {}),
    "alibi sqrt": ({"alibi_slopes": SLOPES, "use_alibi_sqrt": True}, {}),
    "local attention": ({"attention_chunk": 16}, {}),
    "not causal": ({}, {"build": {"causal": False}}),
    "spans": ({}, {"spans": [[[36, 40]], [[-1, -1]], [[3, 30]]]}),
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, {"cache": FP8}),
    "fp8 cache and query": ({"kv_cache_dtype": "fp8"}, {"cache": FP8, "query": FP8}),
    "quantised output": ({}, {"output": FP8}),
    "encoder": ({"attn_type": AttentionType.ENCODER}, {}),
    "encoder window": ({"attn_type": AttentionType.ENCODER_ONLY, "sliding_window": 6}, {}),
    "cross attention": ({"attn_type": AttentionType.ENCODER_DECODER}, {"build": {"encoder_rows": ENCODER_ROWS}}),
    "cascade": ({}, {"rows": SHARED, "prefix": 32}),
}


def run(name: str, device: str) -> torch.Tensor:
    arguments, case = LAYERS[name]
    kind = arguments.get("attn_type", AttentionType.DECODER)
    generator = torch.Generator().manual_seed(7)
    if kind in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        common = build_dense_metadata([20, 1, 33], num_seqs=4, num_tokens=64)
    else:
        rows = case.get("rows", ROWS)
        common = build_common_metadata(rows, block_size=BLOCK, num_blocks=NUM_BLOCKS, **case.get("build", {}))
    num_keys = common.num_tokens if common.encoder is None else common.encoder.num_encoder_tokens
    query = torch.randn(common.num_tokens, HEADS, HEAD, generator=generator)
    key, value = (torch.randn(num_keys, KV_HEADS, HEAD, generator=generator) for _ in "kv")
    cache = torch.randn(SPEC.shape(NUM_BLOCKS), generator=generator)

    query = query.to(case.get("query", torch.bfloat16)).to(device)
    output = torch.empty(query.shape, dtype=case.get("output", torch.bfloat16), device=device)
    moved: dict[str, Any] = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()
    }
    impl = TritonAttentionImpl(HEADS, HEAD, HEAD**-0.5, KV_HEADS, device=device, **moved)
    config = BuilderConfig(num_heads=HEADS, attn_type=kind)
    spans = case.get("spans")
    metadata = TritonAttentionMetadataBuilder(SPEC, ["layer.0"], config, device).build(
        case.get("prefix", 0),
        common,
        mm_prefix_range=None if spans is None else torch.tensor(spans, dtype=torch.int32, device=device),
    )
    impl.forward(
        AttentionScales.of(q_scale=0.5, k_scale=0.5, v_scale=0.25, device=device),
        query,
        key.bfloat16().to(device),
        value.bfloat16().to(device),
        cache.to(case.get("cache", torch.bfloat16)).to(device),
        metadata,
        output,
        output_scale=torch.full((1,), 0.05, device=device) if "output" in case else None,
    )
    return output.float().cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_on_the_gpu_what_it_gives_on_the_cpu(name):
    on_cpu, on_gpu = run(name, "cpu"), run(name, "cuda")

    # Two roundings of bfloat16, or of e4m3 for an output of that kind, each by at most half of its spacing.
    spacing = 2.0**-3 if "output" in LAYERS[name][1] else torch.finfo(torch.bfloat16).eps
    assert torch.isfinite(on_gpu).all()
    assert (on_gpu - on_cpu).abs().max() <= 2 * spacing * on_cpu.abs().max()


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_runs_on_the_cpu(name):
    assert torch.isfinite(run(name, "cpu")).all()
