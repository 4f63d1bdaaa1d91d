"""vLLM's prefill on a cached prefix and its step of chunks and decodes, on CPU tensors, against the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tests.support import reference
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec
from torch_core.vllm.ops import chunked_prefill_paged_decode
from torch_core.vllm.ops.prefix_prefill import context_attention_fwd

BLOCK_SIZE, HEADS, KV_HEADS, SIZE, WIDTH = 4, 4, 2, 16, 4
QUERY_LENS, SEQ_LENS = [3, 1, 5], [9, 14, 5]
FP8 = torch.float8_e4m3fn


class Batch(NamedTuple):
    """Caches in the order of this project, whose slots past each context are NaN; two rows of padding."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    tables: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor


@pytest.fixture
def batch(seed) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 13, BLOCK_SIZE, KV_HEADS, SIZE, generator=generator)
    tables = torch.randperm(12, generator=generator).reshape(3, WIDTH) + 1
    for row, (new, total) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
        slots = [divmod(position, BLOCK_SIZE) for position in range(total - new, WIDTH * BLOCK_SIZE)]
        for column, offset in slots:
            keys[tables[row, column], offset] = values[tables[row, column], offset] = torch.nan
        # What lies past a context may be any number.
        tables[row, -(-(total - new) // BLOCK_SIZE) :] = -7
    q = torch.randn(11, HEADS, SIZE, generator=generator)
    k, v = torch.randn(2, 11, KV_HEADS, SIZE, generator=generator)
    starts = torch.tensor([0, 3, 4, 9])
    return Batch(q, k, v, (keys, values), tables, starts, torch.tensor(SEQ_LENS))


def head_major(batch: Batch, split: bool) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = batch.caches
    if not split:
        return keys.permute(0, 2, 1, 3), values.permute(0, 2, 1, 3)
    by_x = keys.view(13, BLOCK_SIZE, KV_HEADS, SIZE // 8, 8).permute(0, 2, 3, 1, 4).contiguous()
    return by_x, values.permute(0, 2, 3, 1).contiguous()


def expected(batch: Batch, *, spec: AttentionSpec, k_scale=1.0, v_scale=1.0, **options: Any) -> torch.Tensor:
    rows = []
    for row, (new, total) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
        part = slice(int(batch.starts[row]), int(batch.starts[row + 1]))
        context = [(b, o) for b, o in (divmod(p, BLOCK_SIZE) for p in range(total - new))]
        keys, values = (
            torch.cat([torch.stack([x[batch.tables[row, b], o] for b, o in context]).double() * scale, fresh[part]])
            if context
            else fresh[part].double()
            for x, scale, fresh in zip(batch.caches, (k_scale, v_scale), (batch.k, batch.v), strict=True)
        )
        ends = [torch.tensor([0, length], dtype=torch.int32) for length in (new, total)]
        bounds = {"max_query_len": new, "max_key_len": total, "compute_dtype": torch.float64}
        rows.append(reference.attention(batch.q[part].double(), keys, values, *ends, spec=spec, **options, **bounds))
    return torch.cat(rows)


def prefix(batch: Batch, out: torch.Tensor, split: bool = True, dtype: str = "auto", scales=(None, None), **options):
    caches = head_major(batch, split)
    arrays = (batch.tables, batch.starts, batch.seq_lens)
    context_attention_fwd(batch.q, batch.k, batch.v, out, dtype, *caches, *arrays, None, 5, *scales, **options)
    return out


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({}, AttentionSpec(scale=SIZE**-0.5)),
        ({"sliding_window": 4, "sm_scale": 0.3}, AttentionSpec(scale=0.3, window_left=3)),
        ({"sliding_window": 0, "causal": False}, AttentionSpec(scale=SIZE**-0.5, causal=False)),
        ({"sinks": torch.arange(4.0)}, AttentionSpec(scale=SIZE**-0.5)),
        ({"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}, AttentionSpec(scale=SIZE**-0.5)),
    ],
)
def test_new_tokens_see_their_cached_context_and_each_other(batch, options, spec, split):
    found = prefix(batch, torch.full_like(batch.q, torch.nan), split, **options)
    arrays = {name: options[name] for name in ("sinks", "alibi_slopes") if name in options}
    close(found[:9], expected(batch, spec=spec, **arrays))
    assert found[9:].isnan().all()


def test_the_context_is_scaled_and_the_new_keys_are_not(batch):
    coded = batch._replace(caches=tuple(x.to(FP8) for x in batch.caches))
    as_bytes = coded._replace(caches=tuple(x.view(torch.uint8) for x in coded.caches))
    scales = torch.tensor(0.5), torch.tensor([2.0])
    found = prefix(as_bytes, torch.empty_like(batch.q), dtype="fp8", scales=scales)
    real = coded._replace(caches=tuple(x.double() for x in coded.caches))
    close(found[:9], expected(real, spec=AttentionSpec(scale=SIZE**-0.5), k_scale=0.5, v_scale=2.0))


def test_rows_of_single_tokens_are_left_alone_where_that_is_asked_for(batch):
    wanted = expected(batch, spec=AttentionSpec(scale=SIZE**-0.5))
    found = prefix(batch, torch.full_like(batch.q, torch.nan), skip_decode=True)
    close(found[:3], wanted[:3])
    close(found[4:9], wanted[4:])
    assert found[3].isnan().all()


def test_an_fp8_output_is_scaled(batch):
    out = torch.zeros_like(batch.q, dtype=FP8)
    wanted = (expected(batch, spec=AttentionSpec(scale=SIZE**-0.5)) / 0.02).clamp(-448, 448)
    found = prefix(batch, out, fp8_out_scale=torch.tensor([0.02]))[:9]
    assert ((found.double() - wanted).abs() <= (wanted.abs() / 16).clamp(min=2**-10) * 1.01).all()


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_a_step_of_chunks_and_decodes_reads_a_single_tokens_key_from_the_cache(batch, dtype, split):
    # Row 1 is the decode: its key and value are in the cache only.
    keys, values = (x.clone() for x in batch.caches)
    batch.tables[1] = torch.tensor([1, 2, 3, 12])
    for cache, fresh in ((keys, batch.k), (values, batch.v)):
        cache[[1, 2, 3, 12]] = torch.randn(4, BLOCK_SIZE, KV_HEADS, SIZE)
        cache[batch.tables[1, 3], 1] = fresh[3].to(FP8).float() if dtype == "fp8" else fresh[3]
    for row, used in ((0, 2), (2, 0)):
        batch.tables[row, :used] = torch.tensor([4, 5])[:used]
        for cache in (keys, values):
            cache[[4, 5]] = torch.randn(2, BLOCK_SIZE, KV_HEADS, SIZE)
    stored = FP8 if dtype == "fp8" else torch.float32
    full = batch._replace(caches=(keys.to(stored), values.to(stored)))
    out = torch.full_like(batch.q, torch.nan)
    new_k, new_v = (torch.cat([x[:3], torch.full_like(x[3:4], torch.nan), x[4:]]) for x in (batch.k, batch.v))
    chunked_prefill_paged_decode(
        batch.q, new_k, new_v, out, dtype, *head_major(full, split), batch.tables, batch.starts, batch.seq_lens, 14, 5,
        torch.ones(1), torch.ones(1), sliding_window=6,
    )  # fmt: skip
    if dtype == "fp8":
        k, v = batch.k.clone(), batch.v.clone()
        k[3], v[3] = k[3].to(FP8).float(), v[3].to(FP8).float()
        full = full._replace(k=k, v=v, caches=tuple(x.double() for x in full.caches))
    close(out[:9], expected(full, spec=AttentionSpec(scale=SIZE**-0.5, window_left=5)))
    assert out[9:].isnan().all()


def test_a_step_of_decodes_needs_no_keys(batch):
    tables, starts = torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1, 2])
    full = batch._replace(caches=tuple(torch.randn(13, BLOCK_SIZE, KV_HEADS, SIZE) for _ in range(2)))
    out = torch.full_like(batch.q[:2], torch.nan)
    lens = torch.tensor([7, 3])
    chunked_prefill_paged_decode(
        batch.q[:2], None, None, out, "auto", *head_major(full, True), tables, starts, lens, 7, 1, None, None
    )
    arrays = (batch.q[:2], full.caches, tables.int(), lens.int(), starts.int())
    close(out, reference.paged_attention(*arrays, spec=AttentionSpec(scale=SIZE**-0.5), compute_dtype=torch.float64))


def test_a_step_of_nothing_writes_nothing(batch):
    caches, out = head_major(batch, True), torch.full_like(batch.q, torch.nan)
    nobody = batch.tables[:0], batch.starts[:1], batch.seq_lens[:0]
    context_attention_fwd(batch.q, batch.k, batch.v, out, "auto", *caches, *nobody, None, 5, None, None)
    chunked_prefill_paged_decode(batch.q, batch.k, batch.v, out, "auto", *caches, *nobody, 0, 1, None, None)
    assert out.isnan().all()


def test_chunks_without_new_keys_find_them_in_the_cache(batch):
    full = batch._replace(
        caches=tuple(torch.randn(13, BLOCK_SIZE, KV_HEADS, SIZE) for _ in range(2)),
        tables=torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]),
    )
    out = torch.full_like(batch.q, torch.nan)
    chunked_prefill_paged_decode(
        batch.q, None, None, out, "auto", *head_major(full, True), full.tables, batch.starts, batch.seq_lens, 14, 5,
        None, None, causal=False,
    )  # fmt: skip
    arrays = (batch.q, full.caches, full.tables.int(), batch.seq_lens.int(), batch.starts.int())
    spec = AttentionSpec(scale=SIZE**-0.5, causal=False)
    close(out[:9], reference.paged_attention(*arrays, spec=spec, compute_dtype=torch.float64)[:9])
    assert out[9:].isnan().all()


@pytest.mark.parametrize("option", [{"is_block_table_ptr": True}, {"interleaved_v_pack_factor": 8}])
def test_another_value_of_an_option_that_is_not_served_is_refused(batch, option):
    with pytest.raises(Unsupported) as error:
        prefix(batch, torch.empty_like(batch.q), **option)
    assert error.value.argument in option


def test_keys_without_values_are_refused(batch):
    with pytest.raises(InvalidInput, match="v is None; give both, or None for both"):
        prefix(batch._replace(v=None), torch.empty_like(batch.q))
