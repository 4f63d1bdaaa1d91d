"""Native custom calls on a CUDA device: the bits of the torch launch, in place, in every construct of JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn import ops
from jattn.bridge import native, to_torch
from tests.support.gluon_kernels import scaled_copy
from tests.support.sample_kernels import double_and_add
from torch_core import ops as torch_ops
from torch_core.base.specs import AttentionSpec

pytestmark = pytest.mark.gpu
NUM_BLOCKS, BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 80, 16, 8, 2, 64


def _double_and_add(x: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    results = native.call_operation(double_and_add(), {"x": x, "total": total})
    return results["copy"], results["total"]


def _step_arrays(
    seed: int, query_lens: list[int], seq_lens: list[int], dtype=jnp.bfloat16, unused_columns: int = 0, width: int = 16
) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    tokens = sum(query_lens)
    table = rng.permutation(NUM_BLOCKS - 1)[: len(seq_lens) * width].reshape(len(seq_lens), width) + 1
    slots = [
        int(table[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
        for s, (q, n) in enumerate(zip(query_lens, seq_lens, strict=True))
        for p in range(n - q, n)
    ]

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {
        "query": normal(tokens, HEADS, SIZE),
        "key": normal(tokens, KV_HEADS, SIZE),
        "value": normal(tokens, KV_HEADS, SIZE),
        "kv_cache": normal(NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, SIZE),
        "block_tables": jnp.asarray(np.pad(table, ((0, 0), (0, unused_columns))), jnp.int32),
        "seq_lens": jnp.asarray(seq_lens, jnp.int32),
        "query_start_loc": jnp.asarray(np.cumsum([0, *query_lens]), jnp.int32),
        "slot_mapping": jnp.asarray(slots, jnp.int32),
    }


def _decode(arrays: dict[str, jax.Array], kv_cache: jax.Array, implementation: str, max_query_len: int):
    kv_cache = ops.write_kv_cache(
        arrays["key"], arrays["value"], kv_cache, arrays["slot_mapping"], implementation=implementation
    )
    metadata = (arrays["block_tables"], arrays["seq_lens"], arrays["query_start_loc"])
    out, lse = ops.paged_attention_with_lse(
        arrays["query"], kv_cache, *metadata, max_query_len=max_query_len, implementation=implementation
    )
    return out, lse, kv_cache


def _bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def test_launches_are_chained_and_the_in_place_operand_is_written():
    x, total = jnp.arange(16.0), jnp.ones(16)
    copy, new_total = jax.jit(_double_and_add)(x, total)
    np.testing.assert_array_equal(new_total, 1 + 3 * np.arange(16.0))
    np.testing.assert_array_equal(copy, new_total)
    np.testing.assert_array_equal(total, 1.0)


def test_it_runs_eagerly_and_under_scan_while_cond_and_checkpoint():
    x, total = jnp.arange(16.0), jnp.ones(16)

    def scanned(x, total):
        return jax.lax.scan(lambda carry, _: (_double_and_add(x, carry)[1], None), total, None, length=5)[0]

    def looped(x, total):
        return jax.lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, _double_and_add(x, c[1])[1]), (0, total))[1]

    def chosen(x, total):
        return jax.lax.cond(x[1] > 0, lambda: _double_and_add(x, total)[1], lambda: total)

    np.testing.assert_array_equal(_double_and_add(x, total)[1], 1 + 3 * np.arange(16.0))
    np.testing.assert_array_equal(jax.jit(scanned)(x, total), 1 + 15 * np.arange(16.0))
    np.testing.assert_array_equal(jax.jit(looped)(x, total), 1 + 12 * np.arange(16.0))
    np.testing.assert_array_equal(jax.jit(chosen)(x, total), 1 + 3 * np.arange(16.0))
    np.testing.assert_array_equal(jax.jit(jax.checkpoint(_double_and_add))(x, total)[1], 1 + 3 * np.arange(16.0))


def test_an_exported_program_runs_after_it_was_stored():
    allowed = [jax.export.DisabledSafetyCheck.custom_call(native.TARGET)]
    x, total = jnp.arange(16.0), jnp.ones(16)
    stored = jax.export.export(jax.jit(_double_and_add), disabled_checks=allowed)(x, total).serialize()
    np.testing.assert_array_equal(jax.export.deserialize(stored).call(x, total)[1], 1 + 3 * np.arange(16.0))


# XLA captures no fewer launches than this in a CUDA graph.
@pytest.mark.parametrize("fewest", [1, 1000], ids=["captured", "not captured"])
def test_a_slice_may_begin_anywhere(fewest, seed):
    # Each has a block of its own, and each of the sliced arrays 256 bytes: XLA folds multiples of these alone.
    count = 4 * BLOCK_SIZE
    arrays = _step_arrays(seed, [1] * count, [*range(1, BLOCK_SIZE + 1)] * 4, width=1)

    def steps(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        out, _, cache = _decode(arrays, arrays["kv_cache"], "triton", 1)
        return _decode(arrays | {"query": out}, cache, "triton", 1)

    cut = ("seq_lens", "slot_mapping", "block_tables")
    joined = {name: jnp.concatenate([arrays[name][:1], arrays[name], arrays[name][:2]]) for name in cut}
    sliced = jax.jit(lambda a, b: steps(a | {name: b[name][1 : 1 + count] for name in cut}))
    program = sliced.lower(arrays, joined).compile({"xla_gpu_graph_min_graph_size": fewest})
    for _ in range(3):
        for found, expected in zip(program(arrays, joined), jax.jit(steps)(arrays), strict=True):
            np.testing.assert_array_equal(_bits(found), _bits(expected))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "longest", "unused_columns"),
    [
        ([1, 1, 1], [40, 7, 200], 1, 0),
        ([100, 1, 30], [150, 90, 30], 100, 0),
        ([100, 1, 30], [150, 90, 30], 100, 16),
        ([200, 1, 150], [250, 90, 150], 200, 0),
        ([200, 1, 150], [250, 90, 150], 4096, 0),
    ],
    ids=["decode", "mixed", "mixed with heads side by side", "prefill", "prefill of long queries"],
)
def test_native_calls_give_the_bits_of_the_torch_callback_and_of_the_torch_launch(
    query_lens, seq_lens, longest, unused_columns, seed
):
    arrays = _step_arrays(seed, query_lens, seq_lens, unused_columns=unused_columns)
    native_step = jax.jit(lambda a: _decode(a, a["kv_cache"], "triton", longest))(arrays)
    callback_step = jax.jit(lambda a: _decode(a, a["kv_cache"], "torch", longest))(arrays)
    for found, expected in zip(native_step, callback_step, strict=True):
        np.testing.assert_array_equal(_bits(found), _bits(expected))
    tensors = {name: to_torch(array).clone() for name, array in arrays.items()}
    torch_ops.write_kv_cache(tensors["key"], tensors["value"], tensors["kv_cache"], tensors["slot_mapping"])
    out, lse = torch_ops.paged_attention_with_lse(
        *(tensors[name] for name in ("query", "kv_cache", "block_tables", "seq_lens", "query_start_loc")),
        spec=AttentionSpec(scale=SIZE**-0.5),
        max_query_len=longest,
    )
    assert torch.equal(out.view(torch.int16), to_torch(native_step[0]).view(torch.int16))
    assert torch.equal(lse.view(torch.int32), to_torch(native_step[1]).view(torch.int32))
    assert torch.equal(tensors["kv_cache"].view(torch.int16), to_torch(native_step[2]).view(torch.int16))


def test_native_calls_agree_with_the_xla_implementation(seed):
    arrays = _step_arrays(seed, [20, 1, 5], [33, 120, 5], jnp.float32)
    native_step = jax.jit(lambda a: _decode(a, a["kv_cache"], "triton", 20))(arrays)
    with jax.default_matmul_precision("highest"):
        xla_step = jax.jit(lambda a: _decode(a, a["kv_cache"], "xla", 20))(arrays)
    for found, expected in zip(native_step, xla_step, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_a_donated_cache_keeps_its_address_over_a_thousand_steps_without_a_recompilation(seed):
    arrays = _step_arrays(seed, [1, 1, 1], [40, 7, 200])
    traces = []

    def step(arrays, kv_cache):
        traces.append(1)
        return _decode(arrays, kv_cache, "triton", 1)[::2]

    jitted: Any = jax.jit(step, donate_argnums=1)
    _, kv_cache = jitted(arrays, arrays["kv_cache"] + 0)
    address = kv_cache.unsafe_buffer_pointer()
    for _ in range(1000):
        _, kv_cache = jitted(arrays, kv_cache)
    assert kv_cache.unsafe_buffer_pointer() == address
    assert len(traces) == 1
    assert jitted._cache_size() == 1


def test_no_copy_of_the_cache_is_compiled_in(seed):
    arrays = _step_arrays(seed, [1, 1, 1], [40, 7, 200])
    step = jax.jit(lambda a, c: _decode(a, c, "triton", 1)[::2], donate_argnums=1)
    compiled: Any = step.lower(arrays, arrays["kv_cache"]).compile()
    shape = f"bf16[{NUM_BLOCKS},2,{BLOCK_SIZE},{KV_HEADS},{SIZE}]"
    assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and shape in line]
    assert compiled.memory_analysis().temp_size_in_bytes < arrays["kv_cache"].nbytes / 2


@pytest.mark.parametrize("longest", [70, 170])
def test_a_merge_and_dense_attention_run_natively_with_the_bits_of_the_callback(longest, seed):
    arrays = _step_arrays(seed, [longest, 1, 30], [longest, 1, 30])
    dense = (arrays["query"], arrays["key"], arrays["value"], arrays["query_start_loc"])

    def program(implementation: str):
        out, lse = ops.attention_with_lse(*dense, max_query_len=longest, implementation=implementation)
        return ops.merge_states(out, lse, out * 2, lse + 1, implementation=implementation)

    for found, expected in zip(jax.jit(program, static_argnums=0)("triton"), program("torch"), strict=True):
        np.testing.assert_array_equal(_bits(found), _bits(expected))


def test_under_shard_map_each_device_writes_and_reads_its_own_heads(seed):
    arrays = _step_arrays(seed, [1, 1, 1], [40, 7, 200])
    whole = jax.jit(lambda a: _decode(a, a["kv_cache"], "triton", 1))(arrays)
    devices = min(2, len(jax.devices()))
    mesh = jax.make_mesh((devices,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    heads = jax.sharding.PartitionSpec(None, "tp")
    cache = jax.sharding.PartitionSpec(None, None, None, "tp")
    specs = {name: jax.sharding.PartitionSpec() for name in arrays}
    specs |= {"query": heads, "key": heads, "value": heads, "kv_cache": cache}
    step = jax.shard_map(
        lambda a: _decode(a, a["kv_cache"], "triton", 1),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(heads, heads, cache),
        check_vma=False,
    )
    for found, expected in zip(jax.jit(step)(arrays), whole, strict=True):
        np.testing.assert_array_equal(_bits(found), _bits(expected))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.skipif("len(jax.devices()) < 2", reason="needs two GPUs")
def test_under_jit_each_device_writes_and_reads_its_own_heads_in_place(kind, seed):
    arrays = _step_arrays(seed, [1, 1, 1], [40, 7, 200])
    whole = jax.jit(lambda a: _decode(a, a["kv_cache"], "triton", 1))(arrays)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType[kind],), devices=jax.devices()[:2])
    specs: dict[str, jax.sharding.PartitionSpec] = dict.fromkeys(
        ("query", "key", "value"), jax.sharding.PartitionSpec(None, "tp")
    )
    specs["kv_cache"] = jax.sharding.PartitionSpec(None, None, None, "tp")
    spread = {
        name: jax.device_put(x, jax.sharding.NamedSharding(mesh, specs.get(name, jax.sharding.PartitionSpec())))
        for name, x in arrays.items()
    }
    cache = spread.pop("kv_cache")
    before = [shard.data.unsafe_buffer_pointer() for shard in cache.addressable_shards]
    step = jax.jit(lambda cache, a: _decode(a, cache, "triton", 1), donate_argnums=0)

    program = step.lower(cache, spread).compile().as_text()
    assert program is not None
    assert "all-gather" not in program
    found = step(cache, spread)

    assert [shard.data.unsafe_buffer_pointer() for shard in found[2].addressable_shards] == before
    for part, expected in zip(found, whole, strict=True):
        np.testing.assert_array_equal(_bits(part), _bits(expected))


def test_a_gluon_kernel_with_a_descriptor_runs_captured_in_a_chain():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(256, 64)), jnp.bfloat16)

    def chain(x):
        for _ in range(8):
            x = native.call_operation(scaled_copy(), {"x": x})["y"]
        return x

    program = jax.jit(chain)
    expected = x
    for _ in range(8):
        expected = expected * 3
    for _ in range(3):
        np.testing.assert_array_equal(_bits(program(x)), _bits(expected))
