"""One batch, three users: numpy on the host, torch's static buffers, and JAX's pytree hold the same numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jattn.metadata import AttentionMetadata
from torch_core.base.specs import KVCacheSpec
from torch_core.metadata import (
    Buckets,
    EncoderRow,
    PackedLayout,
    SequenceRow,
    build_common_metadata,
    check_metadata,
    encoder_layout,
    metadata_layout,
)
from torch_core.vllm import BuilderConfig, StepBuffers, TorchAttentionMetadataBuilder, upload

BLOCK, NUM_BLOCKS, MAX_BLOCKS, MAX_ENCODER_BLOCKS = 4, 400, 16, 4
SPEC = KVCacheSpec(num_kv_heads=2, head_size=32, block_size=BLOCK, dtype="float32")
NUM_SEQS, NUM_TOKENS = Buckets("num_seqs", (4, 8)), Buckets("num_tokens", (8, 128))
KINDS = ["prefill", "decode", "chunked", "speculative", "padded", "sliding window", "cross attention"]
BATCHES_OF_A_KIND = 43  # 301 in all


def lengths(kind: str, rng: np.random.Generator) -> tuple[int, int]:
    """The computed and new tokens of one row."""
    if kind == "prefill":
        return 0, int(rng.integers(1, 16))
    if kind == "chunked":
        return int(rng.integers(0, 30)), int(rng.integers(1, 16))
    if kind == "speculative":
        return int(rng.integers(1, 40)), 4
    return int(rng.integers(1, 50)), 1


def random_batch(kind: str, rng: np.random.Generator, layout_of: Any) -> tuple[list, dict[str, Any], PackedLayout]:
    ids = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
    rows, encoder_rows, options = [], [], {}
    window = 8 if kind == "sliding window" else None
    for _ in range(int(rng.integers(1, 9))):
        computed, new = lengths(kind, rng)
        count = -(-(computed + new) // BLOCK)
        table, ids = ids[:count], ids[count:]
        if window is not None:
            dropped = max(computed - window + 1, 0) // BLOCK
            table = [0] * dropped + table[dropped:]
        rows.append(SequenceRow(tuple(table), computed, new))
        if kind == "cross attention":
            length = int(rng.integers(1, BLOCK * MAX_ENCODER_BLOCKS))
            count = -(-length // BLOCK)
            encoder_rows.append(EncoderRow(ids[:count], length, length if rng.random() < 0.5 else 0))
            ids = ids[count:]
    if window is not None:
        options["window_left"] = window - 1
    if encoder_rows:
        options["encoder_rows"] = encoder_rows
    num_tokens = sum(row.num_new_tokens for row in rows)
    sizes = (8, 128) if kind == "padded" else (NUM_SEQS.pad(len(rows)), NUM_TOKENS.pad(num_tokens))
    return rows, options, layout_of(*sizes, bool(encoder_rows))


@functools.cache
def layout_of(num_seqs: int, num_tokens: int, cross: bool) -> PackedLayout:
    extra = encoder_layout(num_seqs=num_seqs, num_encoder_tokens=128, max_encoder_blocks=MAX_ENCODER_BLOCKS)
    return metadata_layout(
        num_seqs=num_seqs, num_tokens=num_tokens, max_blocks=MAX_BLOCKS, extra=extra if cross else ()
    )


@functools.partial(jax.jit, static_argnames=("layout", "max_query_len"))
def unpack_in_jax(buffer: jax.Array, *, layout: PackedLayout, max_query_len: int) -> tuple[AttentionMetadata, dict]:
    """What a jitted step does with the uploaded buffer: the decoder's pytree, and the cross-attention fields."""
    fields = layout.unpack(buffer)
    names = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping")
    metadata = AttentionMetadata(**{name: fields.pop(name) for name in names}, max_query_len=max_query_len)
    return metadata, fields


@pytest.mark.parametrize("kind", KINDS)
def test_three_builders_hold_equal_arrays(kind, rng):
    static: dict[PackedLayout, StepBuffers] = {}
    builder = TorchAttentionMetadataBuilder(SPEC, ["layer.0"], BuilderConfig(num_heads=4), "cpu")
    for number in range(BATCHES_OF_A_KIND):
        rows, options, layout = random_batch(kind, rng, layout_of)
        buffers = static.setdefault(layout, StepBuffers(layout, "cpu"))
        addresses = {name: tensor.data_ptr() for name, tensor in buffers.arrays.items()}
        host = build_common_metadata(
            rows,
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
            num_seqs=layout["seq_lens"].size,
            num_tokens=layout["slot_mapping"].size,
            max_blocks=MAX_BLOCKS,
            layout=layout,
            buffer=buffers.host_buffer(number),
            **options,
        )
        check_metadata(host, window_left=options.get("window_left"))

        arrays = buffers.upload(number)
        torch_side = builder.build(0, host, arrays=arrays)
        assert host.packed is not None
        jax_side, jax_rest = unpack_in_jax(host.packed.copy(), layout=layout, max_query_len=host.max_query_len)

        for ours, theirs in (("block_tables", "block_table"), ("seq_lens",) * 2, ("query_start_loc",) * 2,
                             ("slot_mapping",) * 2):  # fmt: skip
            expected = getattr(host, ours)
            assert np.array_equal(getattr(torch_side, theirs).numpy(), expected), ours
            assert np.array_equal(getattr(jax_side, ours), expected), ours
            assert getattr(torch_side, theirs).dtype == torch.int32
            assert getattr(jax_side, ours).dtype == np.int32
        assert np.array_equal(arrays["positions"].numpy(), host.positions)
        assert np.array_equal(jax_rest["positions"], host.positions)
        assert torch_side.max_query_len == jax_side.max_query_len == host.max_query_len
        if host.encoder is not None:
            for name in ("encoder_seq_lens", "cross_block_tables", "cross_slot_mapping"):
                expected = getattr(host.encoder, name)
                assert np.array_equal(getattr(torch_side, name).numpy(), expected)
                assert np.array_equal(jax_rest[name], expected)
        fresh = upload(host, "cpu")
        assert all(torch.equal(fresh[name], tensor) for name, tensor in arrays.items())
        assert {name: tensor.data_ptr() for name, tensor in arrays.items()} == addresses


def test_there_are_three_hundred_batches():
    assert len(KINDS) * BATCHES_OF_A_KIND >= 300
