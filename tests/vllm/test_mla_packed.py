"""vLLM's latent layer over packed rows ("fp8_ds_mla"): the same as over what the rows stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_core import ops
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import LatentCacheSpec
from torch_core.metadata import SequenceRow, build_common_metadata
from torch_core.vllm import AttentionScales, BuilderConfig, MLADims, TritonMLAImpl, TritonMLAMetadataBuilder

HEADS, BLOCK, RANK, ROPE = 2, 4, 128, 8
DIMS = MLADims(q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=8, qk_rope_head_dim=ROPE, v_head_dim=6)
#: A decode after 8 tokens, a prefill after 9, one after none.
ROWS = [SequenceRow([5, 6, 7], 8, 1), SequenceRow([11, 12, 13, 14], 9, 5), SequenceRow([15, 16], 0, 7)]


def _impl(kv_cache_dtype: str) -> TritonMLAImpl:
    projection = torch.nn.Linear(RANK, HEADS * 14, bias=False).requires_grad_(False)
    weight = torch.randn(projection.weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    projection.weight.copy_(weight)
    sizes: dict[str, Any] = {
        name: getattr(DIMS, name)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")
    }
    impl = TritonMLAImpl(
        HEADS, RANK + ROPE, 0.25, 1, None, None, kv_cache_dtype, None, "decoder", None, q_lora_rank=None,
        kv_b_proj=projection, **sizes,
    )  # fmt: skip
    impl.process_weights_after_loading(torch.float32)
    return impl


def _run(kv_cache_dtype: str, cache: torch.Tensor, seed: int) -> torch.Tensor:
    dtype = "uint8" if cache.dtype == torch.uint8 else "float32"
    spec = LatentCacheSpec(kv_lora_rank=RANK, rope_dim=ROPE, block_size=BLOCK, dtype=dtype)
    builder = TritonMLAMetadataBuilder(spec, ["layer.0"], BuilderConfig(num_heads=HEADS, mla_dims=DIMS), "cpu")
    common = build_common_metadata(ROWS, block_size=BLOCK, num_blocks=20)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(common.num_tokens, HEADS, DIMS.qk_head_dim, generator=generator)
    # Codes of one scale, which packed rows hold as they are.
    kv_c = torch.randint(-7, 8, (common.num_tokens, RANK), generator=generator).float() * 64
    kv_c[:, 0] = 448.0
    k_pe = torch.randint(-7, 8, (common.num_tokens, ROPE), generator=generator).float()
    output = torch.full((common.num_tokens, HEADS * 6), float("nan"))
    layer = AttentionScales.of()
    return _impl(kv_cache_dtype).forward(
        layer, query * 0.01, kv_c / 448, k_pe, cache, builder.build(0, common), output
    )  # fmt: skip


def test_decodes_and_prefills_read_what_the_rows_stand_for(seed):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.full((20, BLOCK, RANK + 4 + 2 * ROPE), 255, dtype=torch.uint8)
    for row in ROWS:
        slots = [row.block_ids[t // BLOCK] * BLOCK + t % BLOCK for t in range(row.num_computed_tokens)]
        kv_c, k_pe = (torch.randn(len(slots), size, generator=generator) for size in (RANK, ROPE))
        ops.write_latent_cache(kv_c, k_pe, packed, torch.tensor(slots, dtype=torch.int32))
    plain = ops.unpack_latents(packed, RANK, torch.float32)
    expected, found = _run("auto", plain, seed), _run("fp8_ds_mla", packed, seed)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_another_cache_is_refused(seed):
    with pytest.raises(InvalidInput, match=r"kv_cache has shape .20, 4, 136.; .* latents of .num_blocks, 4, 148"):
        _run("fp8_ds_mla", torch.zeros(20, BLOCK, RANK + ROPE, dtype=torch.uint8), seed)
