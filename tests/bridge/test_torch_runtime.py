"""Plans that torch launches inside a JAX program: in place, on XLA's memory alone, captured where XLA captures."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn import ops
from jattn.bridge import torch_runtime
from tests.support.interpret import run_interpreted_operation
from tests.support.sample_kernels import double_and_add
from torch_core.launch import launcher as launch


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """The buffers of each run of a plan; without CUDA the interpreter runs it."""
    found = []
    launched = launch.run_operation

    def recorded(plan, tensors, out):
        found.append(set(tensors) | set(out))
        if torch.cuda.is_available():
            return launched(plan, tensors, out)
        return run_interpreted_operation(plan, {**tensors, **out})

    monkeypatch.setattr(launch, "run_operation", recorded)
    return found


def _double_and_add(x: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    results = torch_runtime.launch_operation(double_and_add(), {"x": x, "total": total})
    return results["copy"], results["total"]


def test_outputs_and_in_place_operands_come_back_by_name():
    copy, total = jax.jit(_double_and_add)(jnp.arange(16.0), jnp.ones(16))

    np.testing.assert_array_equal(total, 1 + 3 * np.arange(16.0))
    np.testing.assert_array_equal(copy, total)


def test_nothing_is_left_for_torch_to_allocate(runs):
    assert double_and_add().scratch

    _, total = _double_and_add(jnp.arange(16.0), jnp.ones(16))

    np.testing.assert_array_equal(total, 1 + 3 * np.arange(16.0))
    assert runs[0] == set(double_and_add().specs)


def test_code_is_loaded_onto_each_device_that_may_run_the_program(monkeypatch):
    prepared = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices = [SimpleNamespace(local_hardware_id=index, platform="gpu") for index in (0, 2)]
    monkeypatch.setattr(jax, "local_devices", lambda: [*devices, SimpleNamespace(local_hardware_id=1, platform="cpu")])
    monkeypatch.setattr(launch, "prepare_operation", lambda plan, device: prepared.append(str(device)))

    jax.eval_shape(lambda *operands: _double_and_add(*operands), jnp.arange(16.0), jnp.ones(16))

    assert prepared == ["cuda:0", "cuda:2"]


def _attend(implementation: str):
    query = jnp.ones((4, 8, 64), jnp.bfloat16)
    kv_cache = jnp.ones((33, 2, 16, 2, 64), jnp.bfloat16)
    tables = jnp.arange(1, 33, dtype=jnp.int32).reshape(4, 8)
    lens, starts = jnp.full(4, 100, jnp.int32), jnp.arange(5, dtype=jnp.int32)

    @jax.jit
    def step(query: jax.Array, kv_cache: jax.Array) -> jax.Array:
        for _ in range(8):
            query = ops.paged_attention(
                query, kv_cache, tables, lens, starts, max_query_len=1, implementation=implementation
            )
        return query

    return step, query, kv_cache


@pytest.mark.gpu
def test_python_runs_once_for_each_call_site_of_a_captured_program(runs):
    step, query, kv_cache = _attend("torch")
    out = step(query, kv_cache)
    # XLA may run a program once before it captures, and captures anew where a buffer has moved.
    for _ in range(4):
        out = step(query, kv_cache)
    jax.block_until_ready(out)
    before = len(runs)

    for _ in range(200):
        out = step(query, kv_cache)
    jax.block_until_ready(out)

    print("calls of 8 sites:", before, "then", len(runs) - before)
    # 16 sets of addresses are kept for each site; without capture these would be 1,600.
    assert len(runs) <= 8 * 16


@pytest.mark.gpu
def test_torch_allocates_nothing_while_a_program_runs():
    step, query, kv_cache = _attend("torch")
    jax.block_until_ready(step(query, kv_cache))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]

    jax.block_until_ready(step(query, kv_cache))

    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_captured_results_are_those_of_the_native_calls_bit_by_bit():
    torch_step, query, kv_cache = _attend("torch")
    native_step, _, _ = _attend("triton")
    query = jax.random.normal(jax.random.key(0), query.shape, query.dtype)
    kv_cache = jax.random.normal(jax.random.key(1), kv_cache.shape, kv_cache.dtype)
    expected = np.asarray(native_step(query, kv_cache)).view(np.uint16)

    found = [torch_step(query, kv_cache) for _ in range(20)][-1]

    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), expected)
