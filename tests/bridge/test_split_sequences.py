"""Ops on sequences that are split over devices: each computes its own in place, or the split is refused."""

from __future__ import annotations

import re
import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jattn import ops
from jattn.bridge import native, partitioned, typed_errors
from jattn.bridge.kernel_cache import KernelCache
from jattn.ops import xla
from tests.bridge.test_partition import WAYS, assert_close, each_kind, gradients, opaque, run_opaque
from tests.support.devices import CACHE, HEADS, WHOLE, addresses, collectives, mesh, on_four_devices, place
from torch_core.attention.backward_call import backward_of
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import AttentionSpec
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.launch.plan import DeviceLimits

SPEC = AttentionSpec(scale=0.25)
ROWS = PartitionSpec("dp", "tp")
BLOCKS = PartitionSpec("dp", None, None, "tp")
SEQS = PartitionSpec("dp")
# Four sequences, two for each half of the eight blocks; the last one is padding.
TABLES = np.array([[1, 2, 0], [3, 0, 0], [5, 6, 0], [0, 0, 0]], np.int32)
SEQ_LENS = np.array([7, 2, 8, 0], np.int32)


def arrays(each: int) -> tuple[np.ndarray, ...]:
    """A cache of eight blocks, queries and keys of so many rows for each sequence, and their slots."""
    rng = np.random.default_rng(each)
    shapes = ((8, 2, 4, 2, 16), (4 * each, 4, 16), (4 * each, 2, 16))
    positions = SEQ_LENS[:, None] - each + np.arange(each)
    slots = np.take_along_axis(TABLES, positions.clip(0) // 4, 1) * 4 + positions % 4
    slots = np.where(SEQ_LENS[:, None] > 0, slots, -1).reshape(-1).astype(np.int32)
    return (*(rng.normal(size=shape).astype(np.float32) for shape in shapes), slots)


def step(
    cache: Any, query: Any, key: Any, slots: Any, tables: Any, lens: Any, starts: Any, *, each: int, name: str
) -> Any:
    run = run_opaque if name == "opaque" else ops.run
    cache = run(WriteCall(key=key, value=key, slot_mapping=slots, kv_cache=cache), name)["kv_cache"]
    call = PagedCall(
        query=query,
        kv_cache=cache,
        block_tables=tables,
        seq_lens=lens,
        query_start_loc=starts,
        spec=SPEC,
        max_query_len=each,
        with_lse=True,
    )
    return run(call, name), cache


def split(on: jax.sharding.Mesh, *step_arrays: Any) -> list[jax.Array]:
    return [place(x, on, spec) for x, spec in zip(step_arrays, (BLOCKS, ROWS, ROWS, SEQS), strict=True)]


def starts_of(each: int) -> np.ndarray:
    return np.arange(5, dtype=np.int32) * each


@pytest.mark.parametrize(("kind", "name", "each"), [(*way, 2) for way in WAYS] + [("auto", "opaque", 1)])
@on_four_devices
def test_even_rows_and_their_blocks_split_in_place_without_a_collective(kind: str, name: str, each: int) -> None:
    cache, query, key, slots = arrays(each)
    rest = (slots, TABLES, SEQ_LENS, starts_of(each))
    expected, expected_cache = step(cache, query, key, *rest, each=each, name="xla")
    on = mesh(kind, dp=2, tp=2)
    placed = [
        place(x, on, spec) for x, spec in zip((cache, query, key, slots), (BLOCKS, ROWS, ROWS, SEQS), strict=True)
    ]
    program = jax.jit(lambda *args: step(*args, each=each, name=name), donate_argnums=0)
    if (kind, name) != ("auto", "xla"):
        assert collectives(program, *placed, *rest[1:]) == []
    before = addresses(placed[0])
    found, cache = program(*placed, *rest[1:])

    if (kind, name) != ("auto", "xla"):
        assert addresses(cache) == before
        assert found["out"].sharding.is_equivalent_to(NamedSharding(on, ROWS), 3)
    assert_close(found["out"], expected["out"])
    np.testing.assert_allclose(found["lse"], expected["lse"], rtol=1e-5)
    np.testing.assert_array_equal(cache, expected_cache)


@each_kind
@on_four_devices
def test_a_whole_cache_is_read_by_each_devices_sequences(kind: str) -> None:
    cache, query, _, _ = arrays(2)
    on = mesh(kind, dp=2, tp=2)

    def attend(query: Any, cache: Any, tables: Any, lens: Any, starts: Any) -> Any:
        call = PagedCall(
            query=query,
            kv_cache=cache,
            block_tables=tables,
            seq_lens=lens,
            query_start_loc=starts,
            spec=SPEC,
            max_query_len=2,
        )
        return opaque(call)["out"]

    rest = (TABLES, SEQ_LENS, starts_of(2))
    placed = place(query, on, ROWS), place(cache, on, PartitionSpec(None, None, None, "tp"))
    assert collectives(jax.jit(attend), *placed, *rest) == []
    assert_close(jax.jit(attend)(*placed, *rest), jax.jit(attend)(query, cache, *rest))


@pytest.mark.parametrize("fault", ["block of another device", "uneven rows"])
@each_kind
@on_four_devices
def test_what_the_shapes_promise_and_the_values_break_gives_nan(kind: str, fault: str) -> None:
    cache, query, key, slots = arrays(2)
    tables, starts = TABLES.copy(), starts_of(2)
    if fault == "uneven rows":
        starts = np.array([0, 1, 3, 5, 5], np.int32)
    else:
        tables[0, 1] = 7
    on = mesh(kind, dp=2, tp=2)
    placed = [
        place(x, on, spec) for x, spec in zip((cache, query, key, slots), (BLOCKS, ROWS, ROWS, SEQS), strict=True)
    ]

    found, _ = jax.jit(lambda *args: step(*args, each=2, name="opaque"))(*placed, tables, SEQ_LENS, starts)

    assert np.isnan(np.asarray(found["out"])[:4]).all()
    assert np.isnan(np.asarray(found["lse"])[:4]).all()


@each_kind
@on_four_devices
def test_tokens_that_are_whole_are_written_where_their_blocks_are(kind: str) -> None:
    cache, _, key, slots = arrays(2)
    on = mesh(kind, dp=2, tp=2)

    def write(cache: Any, key: Any, slots: Any) -> Any:
        return opaque(WriteCall(key=key, value=key, slot_mapping=slots, kv_cache=cache))["kv_cache"]

    placed = place(cache, on, BLOCKS), place(key, on, PartitionSpec(None, "tp")), slots[::-1].copy()
    assert collectives(jax.jit(write), *placed) == []
    np.testing.assert_array_equal(jax.jit(write)(*placed), write(cache, key, placed[2]))


@each_kind
@on_four_devices
def test_blocks_are_copied_on_the_device_that_has_them(kind: str) -> None:
    def copy(call: Any) -> dict[str, jax.Array]:
        source, target = call.block_mapping.T
        target = jnp.where(target < 0, call.kv_cache.shape[0], target)
        return {"kv_cache": call.kv_cache.at[target].set(call.kv_cache[source], mode="drop")}

    pairs = np.array([[1, 2], [5, 7]], np.int32)
    program = jax.jit(lambda cache, pairs: partitioned(copy)(CopyCall(kv_cache=cache, block_mapping=pairs))["kv_cache"])
    cache = arrays(1)[0]
    placed = place(cache, mesh(kind, dp=2, tp=2), BLOCKS)

    assert collectives(program, placed, pairs) == []
    found = np.asarray(program(placed, pairs))
    np.testing.assert_array_equal(found, cache[[0, 1, 1, 3, 4, 5, 6, 5]])


@pytest.mark.parametrize("name", ["xla", "torch"])
@on_four_devices
def test_training_on_a_split_batch_sums_only_what_all_sequences_share(name: str) -> None:
    rng = np.random.default_rng(3)
    given = {"query": rng.normal(size=(12, 4, 8)), "key": rng.normal(size=(12, 2, 8)), "sinks": rng.normal(size=4)}
    given = {key: x.astype(np.float32) for key, x in given.items()}
    starts = np.array([0, 3, 6, 9, 12], np.int32)

    def loss(given: dict[str, Any], name: str) -> jax.Array:
        call = DenseCall(
            value=given["key"], query_start_loc=starts, key_start_loc=starts, spec=SPEC, max_query_len=3, max_key_len=3,
            **given,
        )  # fmt: skip
        return (ops.run(call, name)["out"] ** 2).sum()

    expected = jax.grad(loss)(given, "xla")
    on = mesh("explicit", dp=2, tp=2)
    specs = {"query": ROWS, "key": ROWS, "sinks": PartitionSpec("tp")}
    placed = {key: place(x, on, specs[key]) for key, x in given.items()}
    program = jax.jit(jax.grad(loss), static_argnums=1)
    found = program(placed, name)

    assert set(collectives(program, placed, name)) <= {"all-reduce"}
    for key, x in expected.items():
        assert_close(found[key], x)


@pytest.mark.parametrize("name", [None, "xla", "torch"])
@pytest.mark.parametrize("rows", [SEQS, ROWS, WHOLE, HEADS], ids=str)
@pytest.mark.parametrize("blocks", [BLOCKS, CACHE, WHOLE], ids=str)
@on_four_devices
def test_gradients_of_a_cache_over_explicit_axes(blocks: PartitionSpec, rows: PartitionSpec, name: Any) -> None:
    rng = np.random.default_rng(3)
    query, cache = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 4, 16), (8, 2, 4, 2, 16)))
    lens, tables = jnp.array([3, 8, 5, 6], jnp.int32), jnp.array([[1, 2], [3, 0], [5, 4], [6, 7]], jnp.int32)
    starts = jnp.arange(5, dtype=jnp.int32)

    def loss(query: Any, cache: Any, name: str | None) -> jax.Array:
        out = ops.paged_attention(query, cache, tables, lens, starts, max_query_len=1, implementation=name)
        return (out**2).sum()

    on = mesh("explicit", dp=2, tp=2)
    derive = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    placed = place(query, on, rows), place(cache, on, blocks)
    if name == "torch" and "dp" in (*rows, *blocks):
        with pytest.raises(Unsupported, match=r"^paged_attention: Explicit mesh axes split its sequences or"):
            derive(*placed, name)
    else:
        for found, expected in zip(derive(*placed, name), derive(query, cache, "xla"), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize("spec", [WHOLE, ROWS], ids=["whole", "split"])
@each_kind
@on_four_devices
def test_even_sequences_without_a_cache_split_with_their_gradients(kind: str, spec: PartitionSpec, seed: int) -> None:
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=(8, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    forward: Any = DenseCall(
        query=query, key=key, value=value, query_start_loc=starts_of(2), key_start_loc=starts_of(2), spec=SPEC,
        max_query_len=2, max_key_len=2, with_lse=True,
    )  # fmt: skip
    backward = backward_of(forward, **xla.run(forward), d_out=query * 2)
    on = mesh(kind, dp=2, tp=2)

    for call, runtime in cast(Any, ((forward, xla.run), (backward, gradients))):
        expected, run = runtime(call), jax.jit(partitioned(runtime))
        specs = {name: PartitionSpec(*spec[: x.ndim]) for name, x in call.arrays().items() if x.ndim > 1}
        placed = call.with_arrays({name: place(x, on, specs.get(name, WHOLE)) for name, x in call.arrays().items()})
        assert collectives(run, placed) == []
        for name, found in run(placed).items():
            assert_close(found, expected[name])


@each_kind
@on_four_devices
def test_rows_beside_a_whole_written_cache_are_refused(kind: str) -> None:
    cache, _, key, slots = arrays(1)
    on = mesh(kind, dp=2, tp=2)
    placed = place(cache, on, PartitionSpec(None, None, None, "tp")), place(key, on, ROWS), place(slots, on, SEQS)

    def write(cache: Any, key: Any, slots: Any) -> Any:
        return opaque(WriteCall(key=key, value=key, slot_mapping=slots, kv_cache=cache))["kv_cache"]

    with pytest.raises(Unsupported) as error, typed_errors():
        jax.jit(write)(*placed)
    assert str(error.value).startswith(
        "write_kv_cache: sequences and blocks are split by mesh axes as follows: key by dp, value by dp, slot_mapping "
        "by dp, kv_cache by none. Split all alike; what is written must be split as the rows are"
    )


@on_four_devices
def test_the_kernels_are_launched_on_parts_without_a_collective() -> None:
    launcher = types.SimpleNamespace(
        TritonKernel=lambda name, *rest: name,
        TritonKernelCall=lambda *rest: types.SimpleNamespace(to_proto=lambda *_: b""),
        create_array_parameter=lambda *arguments: arguments,
        create_scalar_parameter=lambda *arguments: arguments,
    )
    on = mesh("explicit", dp=2, tp=2)

    def array(dtype: Any, spec: PartitionSpec, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, spec))

    cache = array(jnp.bfloat16, BLOCKS, 64, 2, 16, 8, 128)
    key, slots = array(jnp.bfloat16, ROWS, 8, 8, 128), array(jnp.int32, SEQS, 8)

    def write(cache: Any, key: Any, slots: Any) -> Any:
        call = WriteCall(key=key, value=key, slot_mapping=slots, kv_cache=cache)
        return partitioned(native.run_native)(call)["kv_cache"]

    native._code.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_launcher", lambda: launcher)
        patch.setattr(native, "kernel_cache", lambda: KernelCache(None))
        patch.setattr(native, "device_limits", DeviceLimits)
        text = jax.jit(write, donate_argnums=0).trace(cache, key, slots).lower(lowering_platforms=("cuda",)).as_text()
    native._code.cache_clear()

    assert text.count(f"@{native.TARGET}") == 1
    assert "tensor<32x2x16x4x128xbf16>" in text
    assert not re.search("all_gather|all_reduce|all_to_all|collective_permute", text)
