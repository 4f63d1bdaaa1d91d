"""Queries that are rounded to e4m3 for the Hopper kernel that multiplies in 8 bits, and those that are left alone."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.metadata import AttentionMetadata
from jattn.nn import PagedAttention
from jattn.ops import fp8_query, paged_attention
from torch_core.launch.plan import DeviceLimits
from torch_core.metadata import SequenceRow

module = importlib.import_module("jattn.ops.fp8_query")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "choose", lambda name, call: "triton")
    monkeypatch.setattr(module, "device_limits", DeviceLimits)


def arguments(*, tokens: int = 300, head_size: int = 128, cache: Any = jnp.float8_e4m3fn, **options: Any) -> Any:
    rows = [SequenceRow(list(range(1, 21)), 0, 300)] if tokens == 300 else [SequenceRow([1], 15, 1)]
    metadata = AttentionMetadata.build(rows, block_size=16, num_blocks=32, num_tokens=tokens)
    kv_cache = jnp.zeros((32, 2, 16, 2, head_size), cache)
    return kv_cache, {**metadata.sequences, **options}


@pytest.mark.usefixtures("on_hopper")
def test_long_queries_over_an_e4m3_cache_are_rounded_and_saturate() -> None:
    kv_cache, options = arguments()
    query = jnp.full((300, 8, 128), 1.06, jnp.bfloat16).at[0].set(1e4).at[1].set(-1e4)
    rounded, options = fp8_query(query, kv_cache, **options)
    assert rounded.dtype == jnp.float8_e4m3fn
    assert options["out_dtype"] == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(rounded[:3, 0, 0], np.float32), [448, -448, 1.0])


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1},
        {"head_size": 80},
        {"cache": jnp.float8_e5m2},
        {"cache": jnp.bfloat16},
        {"logits_soft_cap": 30.0},
    ],
    ids=str,
)
def test_other_calls_keep_their_queries(changes: dict[str, Any]) -> None:
    kv_cache, options = arguments(**changes)
    query = jnp.ones((changes.get("tokens", 300), 8, kv_cache.shape[-1]), jnp.bfloat16)
    same, unchanged = fp8_query(query, kv_cache, **options)
    assert same is query
    assert unchanged == options


@pytest.mark.usefixtures("on_hopper")
def test_a_rotation_rounds_its_queries_itself(seed: int) -> None:
    kv_cache, options = arguments()
    metadata = AttentionMetadata.build([SequenceRow(list(range(1, 21)), 0, 300)], block_size=16, num_blocks=32)
    qkv = 300 * jax.random.normal(jax.random.key(seed), (300, 12, 128), jnp.bfloat16)
    no_turn = jnp.concatenate([jnp.ones((300, 64)), jnp.zeros((300, 64))], 1)
    core = PagedAttention(8, 128, num_kv_heads=2, quantize_query=True)
    query, _ = core.rotate_and_write(qkv, no_turn, kv_cache, metadata)
    np.testing.assert_array_equal(query, fp8_query(qkv[:, :8], kv_cache, **options)[0])


def test_a_cpu_keeps_its_queries() -> None:
    kv_cache, options = arguments()
    query = jnp.ones((300, 8, 128), jnp.bfloat16)
    assert fp8_query(query, kv_cache, **options)[0] is query


@pytest.mark.gpu
def test_the_module_differs_from_exact_attention_by_the_rounding_of_queries_alone(seed: int) -> None:
    if module.device_limits().arch != 90:
        pytest.skip("about Hopper")
    keys = jax.random.split(jax.random.key(seed), 3)
    query = jax.random.normal(keys[0], (300, 8, 128), jnp.bfloat16)
    key, value = (jax.random.normal(each, (300, 2, 128), jnp.bfloat16) for each in keys[1:])
    metadata = AttentionMetadata.build([SequenceRow(list(range(1, 21)), 0, 300)], block_size=16, num_blocks=32)
    found = {}
    for quantize in (False, True):
        layer = PagedAttention(8, 128, num_kv_heads=2, quantize_query=quantize)
        empty = jnp.zeros((32, 2, 16, 2, 128), jnp.float8_e4m3fn)
        found[quantize], kv_cache = layer(query, key, value, empty, metadata)
    assert found[True].dtype == jnp.bfloat16
    rounded = query.astype(jnp.float8_e4m3fn)
    exact = paged_attention(
        rounded.astype(jnp.float32), kv_cache.astype(jnp.float32), **metadata.sequences, implementation="xla"
    )
    # Weights have e4m3's 3 bits of mantissa; their errors, at most 1/16 of each, add up like random ones.
    error = jnp.abs(found[True].astype(jnp.float32) - exact).max()
    assert 0 < error < jnp.abs(exact).max() / 16
    assert not (found[True] == found[False]).all()
