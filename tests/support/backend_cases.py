"""Batches, caches and layers for the tests of the attention backends."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support import reference
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import KVCacheSpec
from torch_core.metadata import SequenceRow, build_common_metadata
from torch_core.ops import write_kv_cache
from torch_core.vllm import AttentionScales, BuilderConfig, TritonAttentionMetadataBuilder

__all__ = [
    "BLOCK",
    "HEAD",
    "HEADS",
    "KV_HEADS",
    "NUM_BLOCKS",
    "ONES",
    "ROWS",
    "SCALE",
    "SPEC",
    "Case",
    "metadata_of",
    "refuses",
    "shared_prefix_rows",
]

BLOCK, HEADS, KV_HEADS, HEAD = 4, 4, 2, 32
NUM_BLOCKS = 40
SCALE = HEAD**-0.5
SPEC = KVCacheSpec(num_kv_heads=KV_HEADS, head_size=HEAD, block_size=BLOCK, dtype="float32")
ROWS = [SequenceRow([5, 6, 7], 8, 3), SequenceRow([9], 3, 1), SequenceRow([11, 12], 0, 7)]
ONES = AttentionScales.of()


def refuses(message: str, error: type[Exception] = InvalidInput):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


class Case:
    """A batch, a poisoned cache with its contexts written, and the step's queries, keys and values."""

    def __init__(self, rng, rows=ROWS, *, dtype=torch.float32, cache_dtype=None, **build):
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
        self.step = build_common_metadata(rows, block_size=BLOCK, num_blocks=NUM_BLOCKS, **build)
        tokens = self.step.num_tokens

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.query, self.key, self.value = normal(tokens, HEADS, HEAD), *(normal(tokens, KV_HEADS, HEAD) for _ in "kv")
        cache_dtype = cache_dtype or dtype
        quantized = cache_dtype.itemsize == 1
        self.cache = torch.full(SPEC.shape(NUM_BLOCKS), float("nan") if not quantized else 0.0).to(cache_dtype)
        for row in rows:
            slots = [row.block_ids[t // BLOCK] * BLOCK + t % BLOCK for t in range(row.num_computed_tokens)]
            if slots:
                key, value = (normal(len(slots), KV_HEADS, HEAD) for _ in "kv")
                write_kv_cache(key, value, self.cache, torch.tensor(slots, dtype=torch.int32))

    def run(self, impl, metadata, layer=ONES, **changes):
        cache, query = changes.pop("cache", self.cache).clone(), changes.pop("query", self.query)
        output = changes.pop("output", torch.full_like(query, float("nan")))
        key, value = changes.pop("key", self.key), changes.pop("value", self.value)
        impl.forward(layer, query, key, value, cache, metadata, output, **changes)
        return output

    def expected(self, spec, compute_dtype: torch.dtype | None = torch.float64, **options):
        cache = self.cache.clone()
        tensors = {name: torch.from_numpy(getattr(self.step, name).copy()) for name in
                   ("block_tables", "seq_lens", "query_start_loc", "slot_mapping")}  # fmt: skip
        scales = {name: options.get(name) for name in ("k_scale", "v_scale")}
        reference.write_kv_cache(self.key, self.value, cache, tensors.pop("slot_mapping"), **scales)
        return reference.paged_attention(
            self.query, cache, **tensors, spec=spec, compute_dtype=compute_dtype, **options
        )


def metadata_of(step, *, builder=TritonAttentionMetadataBuilder, prefix=0, **config):
    return builder(SPEC, ["layer.0"], BuilderConfig(num_heads=HEADS, **config), "cpu").build(prefix, step)


def shared_prefix_rows(count, prefix_blocks, *, new=1):
    prefix = list(range(1, prefix_blocks + 1))
    context = prefix_blocks * BLOCK + 2
    return [SequenceRow([*prefix, 20 + 2 * i, 21 + 2 * i], context, new) for i in range(count)]
