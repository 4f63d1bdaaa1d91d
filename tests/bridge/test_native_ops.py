"""The ops as native custom calls, lowered for CUDA without a device; a recorder stands in for jaxlib's launcher."""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.bridge import native, native_ops
from jattn.bridge.kernel_cache import KernelCache
from torch_core.plan.plan import DeviceLimits
from torch_core.specs import AttentionSpec

SPEC = AttentionSpec(scale=0.088)


@pytest.fixture(scope="module")
def cache():
    return KernelCache(None)


@pytest.fixture(autouse=True)
def hopper(monkeypatch, cache):
    fake = types.SimpleNamespace(
        TritonKernel=lambda name, *rest: name,
        TritonKernelCall=lambda name, *rest: types.SimpleNamespace(
            to_proto=lambda *_: json.dumps([name, *rest]).encode()
        ),
        create_array_parameter=lambda *arguments: arguments,
        create_scalar_parameter=lambda *arguments: arguments,
    )
    native._opaque.cache_clear()
    monkeypatch.setattr(native, "_launcher", lambda: fake)
    monkeypatch.setattr(native, "kernel_cache", lambda: cache)
    monkeypatch.setattr(native, "device_limits", DeviceLimits)
    monkeypatch.setattr(native_ops, "device_limits", DeviceLimits)
    yield
    native._opaque.cache_clear()


def _array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _num_calls(function, *arguments) -> int:
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count(f"@{native.TARGET}")


INT = jnp.int32
CACHE = _array(4096, 2, 16, 8, 128)


def test_a_decode_call_splits_and_combines_and_returns_the_lse_when_asked(cache):
    arguments = (_array(1, 32, 128), CACHE, _array(1, 4096, dtype=INT), _array(1, dtype=INT), _array(2, dtype=INT))

    def call(with_lse):
        def attend(*arrays):
            return native_ops.paged_attention(
                *arrays, None, None, None, None, spec=SPEC, max_query_len=1, with_lse=with_lse
            )

        return attend

    assert _num_calls(call(False), *arguments) == 2
    out, lse = jax.eval_shape(call(True), *arguments)
    assert (out.shape, out.dtype) == ((1, 32, 128), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((1, 32), jnp.float32)


def test_dense_attention_is_one_call_and_may_have_sinks():
    arguments = (
        _array(64, 32, 128),
        _array(64, 8, 128),
        _array(64, 8, 128),
        _array(3, dtype=INT),
        _array(3, dtype=INT),
    )

    def attend(*arrays):
        *arrays, sinks = arrays
        return native_ops.attention(*arrays, None, sinks, spec=SPEC, max_query_len=64, max_key_len=64, with_lse=False)[
            0
        ]

    assert _num_calls(attend, *arguments, _array(32, dtype=jnp.float32)) == 1


def test_a_write_a_copy_and_a_merge_are_one_call_each():
    key, slots, scale = _array(4, 8, 128), _array(4, dtype=INT), _array(1, dtype=jnp.float32)
    fp8 = _array(4096, 2, 16, 8, 128, dtype=jnp.float8_e4m3fn)
    assert _num_calls(native_ops.write_kv_cache, key, key, fp8, slots, scale, scale) == 1
    assert _num_calls(native_ops.copy_blocks, CACHE, _array(3, 2, dtype=INT)) == 1
    out, lse = _array(4, 32, 128), _array(4, 32, dtype=jnp.float32)
    assert _num_calls(native_ops.merge_states, out, lse, out, lse) == 1


def test_no_tokens_need_no_call():
    query, ints = jnp.zeros((0, 32, 128), jnp.bfloat16), jnp.zeros((0,), INT)
    kv_cache = jnp.zeros((2, 2, 16, 8, 128), jnp.bfloat16)
    static = {"spec": SPEC, "max_query_len": 1, "with_lse": True}
    options = (None, None, None, None)
    table = jnp.zeros((0, 4), INT)
    out, lse = native_ops.paged_attention(query, kv_cache, table, ints, jnp.zeros(1, INT), *options, **static)
    assert out.shape == (0, 32, 128)
    assert lse is not None
    assert lse.shape == (0, 32)
    padded = jnp.ones((3, 32, 128), jnp.bfloat16)
    key = jnp.ones((3, 8, 128), jnp.bfloat16)
    starts = jnp.zeros(1, INT)
    out, lse = native_ops.attention(padded, key, key, starts, starts, None, None, max_key_len=1, **static)
    np.testing.assert_array_equal(out.astype(jnp.float32), 0)
    np.testing.assert_array_equal(lse, -np.inf)
    assert native_ops.write_kv_cache(key[:0], key[:0], kv_cache, ints, None, None) is kv_cache
    assert native_ops.copy_blocks(kv_cache, jnp.zeros((0, 2), INT)) is kv_cache
    merged, _ = native_ops.merge_states(query, jnp.zeros((0, 32)), query, jnp.zeros((0, 32)))
    assert merged.shape == (0, 32, 128)
