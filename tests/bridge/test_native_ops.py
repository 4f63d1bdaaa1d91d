"""The ops as native custom calls, lowered for CUDA without a device; a recorder stands in for jaxlib's launcher."""

from __future__ import annotations

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.bridge import native, run
from jattn.bridge.calls import array_spec
from jattn.bridge.kernel_cache import KernelCache
from torch_core.attention.backward_call import backward_of
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import AttentionSpec
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call

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
        create_tma_descriptor_parameter=lambda *arguments: repr(arguments),
    )
    native._code.cache_clear()
    monkeypatch.setattr(native, "_launcher", lambda: fake)
    monkeypatch.setattr(native, "kernel_cache", lambda: cache)
    monkeypatch.setattr(native, "device_limits", DeviceLimits)
    yield
    native._code.cache_clear()


def _array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _num_calls(function, *arguments) -> int:
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count(f"@{native.TARGET}")


INT = jnp.int32
CACHE = _array(4096, 2, 16, 8, 128)


def _paged(query, kv_cache, block_tables, seq_lens, query_start_loc, **options) -> dict[str, jax.Array]:
    call = PagedCall(
        query=query,
        kv_cache=kv_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        spec=SPEC,
        max_query_len=1,
        **options,
    )
    return run(call, native.run_native)


def _dense(query, key, value, query_start_loc, key_start_loc, *, sinks=None, **options) -> dict[str, jax.Array]:
    call = DenseCall(
        query=query,
        key=key,
        value=value,
        query_start_loc=query_start_loc,
        key_start_loc=key_start_loc,
        sinks=sinks,
        spec=SPEC,
        max_query_len=64,
        max_key_len=64,
        **options,
    )
    return run(call, native.run_native)


def _write(key, value, kv_cache, slot_mapping, k_scale=None, v_scale=None) -> dict[str, jax.Array]:
    call = WriteCall(
        key=key, value=value, kv_cache=kv_cache, slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale
    )
    return run(call, native.run_native)


def _copy(kv_cache, block_mapping) -> dict[str, jax.Array]:
    return run(CopyCall(kv_cache=kv_cache, block_mapping=block_mapping), native.run_native)


def _merge(out_a, lse_a, out_b, lse_b) -> dict[str, jax.Array]:
    return run(MergeCall(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b), native.run_native)


def test_a_decode_call_splits_and_combines_and_returns_the_lse_when_asked(cache):
    arguments = (_array(1, 32, 128), CACHE, _array(1, 4096, dtype=INT), _array(1, dtype=INT), _array(2, dtype=INT))
    assert _num_calls(_paged, *arguments) == 2
    results = jax.eval_shape(functools.partial(_paged, with_lse=True), *arguments)
    assert (results["out"].shape, results["out"].dtype) == ((1, 32, 128), jnp.bfloat16)
    assert (results["lse"].shape, results["lse"].dtype) == ((1, 32), jnp.float32)


def test_dense_attention_is_one_call_and_may_have_sinks():
    arguments = (_array(64, 32, 128), *[_array(64, 8, 128)] * 2, *[_array(3, dtype=INT)] * 2)

    def attend(*arrays):
        return _dense(*arrays[:-1], sinks=arrays[-1])

    assert _num_calls(attend, *arguments, _array(32, dtype=jnp.float32)) == 1


def test_a_gradient_on_hopper_is_two_calls_and_a_third_sums_that_of_the_sinks():
    lse = _array(300, 4, dtype=jnp.float32)
    arrays = (_array(300, 4, 192), _array(300, 4, 192), *[_array(300, 4, 128)] * 3, lse, *[_array(3, dtype=INT)] * 2)

    def differentiate(query, key, value, out, d_out, lse, query_start_loc, key_start_loc, sinks=None):
        call = DenseCall(
            query=query,
            key=key,
            value=value,
            query_start_loc=query_start_loc,
            key_start_loc=key_start_loc,
            sinks=sinks,
            spec=SPEC,
            max_query_len=300,
            max_key_len=300,
        )
        return run(backward_of(call, out=out, lse=lse, d_out=d_out), native.run_native)

    assert _num_calls(differentiate, *arrays) == 2
    assert _num_calls(differentiate, *arrays, _array(4, dtype=jnp.float32)) == 3
    gradients = jax.eval_shape(differentiate, *arrays)
    assert {name: x.shape for name, x in gradients.items()} == {
        "d_query": (300, 4, 192),
        "d_key": (300, 4, 192),
        "d_value": (300, 4, 128),
    }


def test_a_write_a_copy_and_a_merge_are_one_call_each():
    key, slots, scale = _array(4, 8, 128), _array(4, dtype=INT), _array(1, dtype=jnp.float32)
    fp8 = _array(4096, 2, 16, 8, 128, dtype=jnp.float8_e4m3fn)
    assert _num_calls(_write, key, key, fp8, slots, scale, scale) == 1
    assert _num_calls(_copy, CACHE, _array(3, 2, dtype=INT)) == 1
    out, lse = _array(4, 32, 128), _array(4, 32, dtype=jnp.float32)
    assert _num_calls(_merge, out, lse, out, lse) == 1


def test_an_fp8_query_reaches_the_fp8_prefill_kernel():
    fp8 = jnp.float8_e4m3fn
    call = PagedCall(
        query=_array(4096, 32, 128, dtype=fp8),
        kv_cache=_array(512, 2, 16, 8, 128, dtype=fp8),
        block_tables=_array(1, 256, dtype=INT),
        seq_lens=_array(1, dtype=INT),
        query_start_loc=_array(2, dtype=INT),
        q_scale=_array(1, dtype=jnp.float32),
        spec=SPEC,
        max_query_len=4096,
    )
    plan = plan_call(call.map(array_spec), DeviceLimits())
    assert [launch.name for launch in plan.launches] == ["hopper_fp8_prefill_kernel"]


def test_no_tokens_need_no_call():
    query, ints = jnp.zeros((0, 32, 128), jnp.bfloat16), jnp.zeros((0,), INT)
    kv_cache = jnp.zeros((2, 2, 16, 8, 128), jnp.bfloat16)
    results = _paged(query, kv_cache, jnp.zeros((0, 4), INT), ints, jnp.zeros(1, INT), with_lse=True)
    assert results["out"].shape == (0, 32, 128)
    assert results["lse"].shape == (0, 32)
    padded = jnp.ones((3, 32, 128), jnp.bfloat16)
    key = jnp.ones((3, 8, 128), jnp.bfloat16)
    starts = jnp.zeros(1, INT)
    results = _dense(padded, key, key, starts, starts, with_lse=True)
    np.testing.assert_array_equal(results["out"].astype(jnp.float32), 0)
    np.testing.assert_array_equal(results["lse"], -np.inf)
    assert _write(key[:0], key[:0], kv_cache, ints)["kv_cache"] is kv_cache
    assert _copy(kv_cache, jnp.zeros((0, 2), INT))["kv_cache"] is kv_cache
    assert _merge(query, jnp.zeros((0, 32)), query, jnp.zeros((0, 32)))["out"].shape == (0, 32, 128)


@pytest.mark.parametrize("when", ["compiled", "at once"])
def test_arrays_on_a_cpu_are_refused_by_name_where_kernels_would_be_launched(when):
    out, lse = jax.device_put((jnp.ones((3, 2, 8)), jnp.zeros((3, 2))), jax.devices("cpu")[0])
    merge = _merge if when == "at once" else jax.jit(_merge)
    with pytest.raises(Unsupported) as error:
        merge(out, lse, out, lse)
    assert str(error.value) == (
        "implementation='triton', the default where JAX sees a CUDA device, launches kernels there, and these arrays "
        "are on a CPU. Move them (jax.device_put(x, jax.devices('cuda')[0])), or name implementation='xla'."
    )
