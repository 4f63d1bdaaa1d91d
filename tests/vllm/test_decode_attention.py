"""vLLM's `decode_attention_fwd` on CPU tensors, and its plain form for heads that no kernel takes."""

from __future__ import annotations

import pytest
import torch

from tests.support import reference
from torch_core.attention.call import PagedCall
from torch_core.base.specs import AttentionSpec
from torch_core.vllm import ops as vllm_compat
from torch_core.vllm.ops.decode import attend_plainly

BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 4, 4, 2, 16


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2])
def test_decode_attention_fwd_reads_one_query_of_each_sequence(flat, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    query, lens = torch.randn(3, HEADS, SIZE, generator=generator), torch.tensor([9, 14, 1])
    keys, values = torch.randn(2, 13, BLOCK_SIZE, KV_HEADS, SIZE, generator=generator).to(dtype)
    tables = torch.randperm(12, generator=generator).reshape(3, 4) + 1
    pages = tables[..., None] if flat else tables
    out, lse = torch.full_like(query, torch.nan), torch.full((3, HEADS), torch.nan)
    k_buffer, v_buffer = (x.flatten(0, 1) if flat else x for x in (keys, values))
    scales = (0.5, torch.tensor(2.0))
    vllm_compat.decode_attention_fwd(
        query, k_buffer, v_buffer, out, lse, pages, lens, torch.empty(3, HEADS, 4, SIZE), 4, 0.3, BLOCK_SIZE, 5.0,
        *scales,
    )  # fmt: skip
    starts, spec = torch.arange(4, dtype=torch.int32), AttentionSpec(scale=0.3, logits_soft_cap=5.0)
    factors = {} if dtype == torch.float32 else {"k_scale": 0.5, "v_scale": 2.0}
    expected, expected_lse = reference.paged_attention_with_lse(
        query, (keys, values), tables.int(), lens.int(), starts, spec=spec, compute_dtype=torch.float64, **factors
    )
    _close(out, expected)
    _close(lse, expected_lse)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_decode_attention_fwd_reads_latents_as_keys_and_values(scale, seed):
    generator = torch.Generator().manual_seed(seed)
    query, lens = torch.randn(3, HEADS, 20, generator=generator), torch.tensor([9, 14, 1])
    latents = torch.randn(13, BLOCK_SIZE, 1, 20, generator=generator).to(
        torch.float32 if scale is None else torch.float8_e4m3fn
    )
    tables = torch.randperm(12, generator=generator).reshape(3, 4) + 1
    out, lse = torch.full((3, HEADS, 16), torch.nan), torch.full((3, HEADS), torch.nan)

    vllm_compat.decode_attention_fwd(
        query, latents, latents[..., :16], out, lse, tables, lens, None, 4, 0.3, BLOCK_SIZE, k_scale=scale,
        v_scale=scale, is_mla=True,
    )  # fmt: skip

    expected, expected_lse = reference.paged_attention_with_lse(
        query, (latents, latents[..., :16]), tables.int(), lens.int(), torch.arange(4, dtype=torch.int32),
        spec=AttentionSpec(scale=0.3), compute_dtype=torch.float64, k_scale=scale, v_scale=scale,
    )  # fmt: skip
    _close(out, expected)
    _close(lse, expected_lse)


@pytest.mark.parametrize(("dtype", "cap"), [(torch.float32, None), (torch.float8_e5m2, 5.0)])
def test_plain_torch_gives_what_the_kernels_give(dtype, cap, seed):
    generator = torch.Generator().manual_seed(seed)
    query, lens = torch.randn(3, HEADS, 20, generator=generator), torch.tensor([9, 0, 13], dtype=torch.int32)
    keys = torch.randn(13, BLOCK_SIZE, KV_HEADS, 20, generator=generator)
    tables = (torch.randperm(12, generator=generator).reshape(3, 4) + 1).int()
    # Unused slots and blocks, and other parts of the table, hold anything.
    keys[tables[0, 2], 1:] = keys[tables[2, 3], 1:] = keys[tables[1]] = keys[tables[0, 3]] = torch.nan
    tables[0, 3] = tables[1, 0] = 99
    keys, values = keys.to(dtype), keys[..., :12].to(dtype)
    scales = {} if dtype is torch.float32 else {"k_scale": 0.5, "v_scale": torch.tensor(2.0)}
    starts, out = torch.arange(4, dtype=torch.int32), torch.full((3, HEADS, 12), torch.nan)
    spec = AttentionSpec(scale=0.3, logits_soft_cap=cap)
    call = PagedCall(
        query=query, key_cache=keys, value_cache=values, block_tables=tables, seq_lens=lens, query_start_loc=starts,
        spec=spec, max_query_len=1, out=out, with_lse=True, **scales,
    )  # fmt: skip

    found = attend_plainly(call, out)

    expected, expected_lse = reference.paged_attention_with_lse(
        query, (keys, values), tables, lens, starts, spec=spec, compute_dtype=torch.float64, **scales
    )
    assert found["out"] is out
    _close(out, expected)
    _close(found["lse"], expected_lse)
