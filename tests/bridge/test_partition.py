"""Ops on operands that are split over devices: each computes its heads in place, or the split is refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jattn import ops
from jattn.bridge import partitioned, typed_errors
from jattn.ops import xla
from tests.support.devices import CACHE, HEADS, WHOLE, addresses, collectives, mesh, on_four_devices, place
from torch_core.attention.backward_call import DenseBackwardCall, backward_of, forward_of
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import Unsupported
from torch_core.base.specs import AttentionSpec
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.launch.call import Call

TABLES = np.array([[1, 2, 0], [3, 4, 5]], np.int32)
SEQ_LENS, STARTS = np.array([7, 9], np.int32), np.array([0, 2, 6], np.int32)
SLOTS = np.array([9, 10, 17, 18, 19, 20], np.int32)
METADATA = (TABLES, SEQ_LENS, STARTS, SLOTS)
SPEC = AttentionSpec(scale=0.25)

# jnp in the place of a custom call: the real ones need CUDA, or are callbacks, which JAX's partitioner loses.
opaque = partitioned(xla.run)


def run_opaque(call: Call[jax.Array], implementation: str) -> dict[str, jax.Array]:
    del implementation
    return opaque(call)


WAYS = [(kind, name) for kind in ("auto", "explicit") for name in ("xla", "opaque", "torch")]
WAYS.remove(("auto", "torch"))
each_way = pytest.mark.parametrize(("kind", "name"), WAYS, ids=map("-".join, WAYS))
each_kind = pytest.mark.parametrize("kind", ["auto", "explicit"])


@on_four_devices
def test_the_four_devices_are_a_cpus_on_any_machine() -> None:
    assert jax.config.values["jax_platforms"] == "cpu"
    assert [device.platform for device in jax.devices()] == ["cpu"] * 4


def arrays(num_kv_heads: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A cache, queries of 8 heads, and keys."""
    rng = np.random.default_rng(num_kv_heads)
    shapes = ((9, 2, 4, num_kv_heads, 16), (6, 8, 16), (6, num_kv_heads, 16))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)  # type: ignore[return-value]


def step(
    cache: Any, query: Any, key: Any, tables: Any, lens: Any, starts: Any, slots: Any, name: str = "opaque"
) -> Any:
    """Writes keys as keys and values, and attends."""
    run = run_opaque if name == "opaque" else ops.run
    cache = run(WriteCall(key=key, value=key, slot_mapping=slots, kv_cache=cache), name)["kv_cache"]
    call = PagedCall(
        query=query,
        kv_cache=cache,
        block_tables=tables,
        seq_lens=lens,
        query_start_loc=starts,
        spec=SPEC,
        max_query_len=4,
    )
    return run(call, name)["out"], cache


def refusal(mesh: jax.sharding.Mesh, cache: Any, query: Any, key: Any, num_kv_heads: int = 4) -> str:
    """How a step with its cache, queries and keys so split is refused."""
    placed = [place(x, mesh, spec) for x, spec in zip(arrays(num_kv_heads), (cache, query, key), strict=True)]
    with pytest.raises(Unsupported) as error, typed_errors():
        jax.jit(step)(*placed, *METADATA)
    return str(error.value)


@each_way
@on_four_devices
def test_split_over_heads_a_step_gives_the_same_in_place_without_a_collective(kind: str, name: str) -> None:
    expected, expected_cache = jax.jit(step, static_argnames="name")(*arrays(), *METADATA, name=name)
    on = mesh(kind)
    placed = [place(x, on, spec) for x, spec in zip(arrays(), (CACHE, HEADS, HEADS), strict=True)]
    program = jax.jit(lambda *args: step(*args, name=name), donate_argnums=0)

    assert collectives(program, *placed, *METADATA) == []
    before = addresses(placed[0])
    out, cache = program(*placed, *METADATA)

    assert addresses(cache) == before
    assert out.sharding.is_equivalent_to(NamedSharding(on, HEADS), 3)
    assert_close(out, expected)
    np.testing.assert_array_equal(cache, expected_cache)


@on_four_devices
def test_heads_that_two_axes_split_together_are_computed_in_place() -> None:
    expected, _ = jax.jit(step)(*arrays(), *METADATA)
    both = ("dp", "tp")
    specs = (PartitionSpec(None, None, None, both), PartitionSpec(None, both), PartitionSpec(None, both))
    placed = [place(x, mesh("auto", dp=2, tp=2), spec) for x, spec in zip(arrays(), specs, strict=True)]

    assert collectives(jax.jit(step), *placed, *METADATA) == []
    assert_close(jax.jit(step)(*placed, *METADATA)[0], expected)


def split_call(name: str) -> tuple[Call[Any], dict[str, PartitionSpec]]:
    """A call with what a model may pass, and how the arrays with heads are split."""
    cache, query, key = arrays()
    slopes = np.linspace(0.1, 1, 8, dtype=np.float32)
    scales = np.full((9, 4, 4), 0.5, np.float32)
    heads = {"query": HEADS, "key": HEADS, "value": HEADS, "kv_cache": CACHE}
    half = PartitionSpec(None, None, "tp")
    paged: dict[str, Any] = {
        "block_tables": TABLES,
        "seq_lens": SEQ_LENS,
        "query_start_loc": STARTS,
        "spec": SPEC,
        "max_query_len": 4,
    }
    if name == "paged":
        more = {"alibi_slopes": slopes, "sinks": slopes, "relative_bias": slopes[:, None] * np.ones(5, np.float32)}
        vector = dict.fromkeys(more, PartitionSpec("tp"))
        return PagedCall(query=query, kv_cache=cache, with_lse=True, **paged, **more), heads | vector
    if name == "pair":
        pair = {"key_cache": cache[:, 0], "value_cache": cache[:, 1]}
        return PagedCall(query=query, **pair, **paged), heads | dict.fromkeys(pair, half)
    if name == "scaled":
        both = {"k_scale_cache": scales, "v_scale_cache": scales}
        call = WriteCall(key=key, value=key, slot_mapping=SLOTS, kv_cache=(cache * 9).astype(np.int8), **both)
        return call, heads | dict.fromkeys(both, half)
    if name == "dense":
        starts: dict[str, Any] = {"query_start_loc": STARTS, "key_start_loc": STARTS}
        return DenseCall(query=query, key=key, value=key, spec=SPEC, max_query_len=4, max_key_len=4, **starts), heads
    lse = query[:, :, 0]
    call = MergeCall(out_a=query, lse_a=lse, out_b=query * 2, lse_b=lse + 1)
    return call, dict.fromkeys(call.arrays(), HEADS)


def gradients(call: Call[jax.Array]) -> dict[str, jax.Array]:
    """A backward call by jnp, where the kernels and torch have one of their own."""
    assert isinstance(call, DenseBackwardCall)
    names = ("query", "key", "value", "sinks")
    forward = forward_of(call)
    _, pull = jax.vjp(
        lambda *given: xla.run(forward.with_arrays(dict(zip(names, given, strict=True))))["out"],
        *(getattr(call, name) for name in names),
    )
    return {f"d_{name}": found for name, found in zip(names, pull(call.d_out), strict=True)}


@each_kind
@on_four_devices
def test_gradients_are_split_as_what_they_are_gradients_of(kind: str) -> None:
    forward, specs = split_call("dense")
    sinks = np.linspace(0.1, 1, 8, dtype=np.float32)
    assert isinstance(forward, DenseCall)
    seeds = np.arange(2 * 8 * 2, dtype=np.int32).reshape(2, 8, 2)
    forward = dataclasses.replace(forward, sinks=sinks, with_lse=True, dropout_rate=0.3, dropout_seeds=seeds)
    found = xla.run(forward)
    call = backward_of(forward, out=found["out"], lse=found["lse"], d_out=forward.query * 2)
    heads = PartitionSpec(None, "tp")
    specs |= {"out": heads, "lse": heads, "d_out": heads, "dropout_seeds": heads, "sinks": PartitionSpec("tp")}
    expected = gradients(call)
    split = jax.jit(partitioned(gradients))
    on = mesh(kind, dp=2, tp=2)
    placed = call.with_arrays({key: place(x, on, specs.get(key, WHOLE)) for key, x in call.arrays().items()})

    assert collectives(split, placed) == []
    for key, found in split(placed).items():
        assert "tp" in str(found.sharding.spec)
        assert_close(found, expected[key])


@each_kind
@on_four_devices
def test_the_gradient_of_a_head_that_all_devices_share_is_the_sum_over_them(kind: str) -> None:
    forward, specs = split_call("dense")
    forward = forward.with_arrays({name: getattr(forward, name)[:, :1] for name in ("key", "value")})
    forward = dataclasses.replace(forward, with_lse=True)
    call = backward_of(forward, **xla.run(forward), d_out=forward.query * 2)
    specs |= dict.fromkeys(("out", "lse", "d_out"), PartitionSpec(None, "tp")) | dict.fromkeys(("key", "value"), WHOLE)
    expected = gradients(call)
    on = mesh(kind)
    placed = call.with_arrays({key: place(x, on, specs.get(key, WHOLE)) for key, x in call.arrays().items()})
    for key, found in jax.jit(partitioned(gradients))(placed).items():
        assert_close(found, expected[key])


@pytest.mark.parametrize(("name", "names"), [("dense", ("query", "key", "value")), ("paged", ("query", "kv_cache"))])
@on_four_devices
def test_torch_differentiates_on_explicit_axes(name: str, names: tuple[str, ...]) -> None:
    call, specs = split_call(name)
    call = dataclasses.replace(call, relative_bias=None)

    def loss(arrays: dict[str, jax.Array], implementation: str) -> jax.Array:
        return (ops.run(call.with_arrays(arrays), implementation)["out"] ** 2).sum()

    arrays = {name: getattr(call, name) for name in names}
    expected = jax.grad(loss)(arrays, "xla")
    on = mesh("explicit")
    placed = {name: place(array, on, specs[name]) for name, array in arrays.items()}
    found = jax.jit(jax.grad(loss), static_argnums=1)(placed, "torch")
    for name in names:
        assert "tp" in str(found[name].sharding.spec)
        assert_close(found[name], expected[name])


@pytest.mark.parametrize("name", ["paged", "pair", "scaled", "dense", "merge"])
@each_kind
@on_four_devices
def test_every_call_splits_itself(kind: str, name: str) -> None:
    call, specs = split_call(name)
    expected = jax.jit(xla.run)(call)
    on = mesh(kind, dp=2, tp=2)
    placed = call.with_arrays({key: place(x, on, specs.get(key, WHOLE)) for key, x in call.arrays().items()})

    assert collectives(jax.jit(opaque), placed) == []
    for key, found in jax.jit(opaque)(placed).items():
        assert "tp" in str(found.sharding.spec)
        assert_close(found, expected[key])


@each_kind
@on_four_devices
def test_a_copy_of_blocks_splits_itself(kind: str) -> None:
    def copy(call: Any) -> dict[str, jax.Array]:
        source, target = call.block_mapping.T
        return {"kv_cache": call.kv_cache.at[target].set(call.kv_cache[source])}

    pairs = np.array([[1, 2]], np.int32)
    program = jax.jit(lambda cache, pairs: partitioned(copy)(CopyCall(kv_cache=cache, block_mapping=pairs))["kv_cache"])
    cache = place(arrays()[0], mesh(kind), CACHE)

    assert collectives(program, cache, pairs) == []
    np.testing.assert_array_equal(program(cache, pairs)[2], arrays()[0][1])


@each_kind
@on_four_devices
def test_what_is_whole_on_every_device_is_cut_there(kind: str) -> None:
    cache, query, key = arrays()
    expected, _ = jax.jit(step)(cache, query, key, *METADATA)
    on = mesh(kind)
    placed = place(cache, on, CACHE), place(query, on, WHOLE), place(key, on, WHOLE)

    assert collectives(jax.jit(step), *placed, *METADATA) == []
    assert_close(jax.jit(step)(*placed, *METADATA)[0], expected)


@each_kind
@on_four_devices
def test_the_queries_of_one_key_head_split_and_its_cache_stays_whole(kind: str) -> None:
    expected, _ = jax.jit(step)(*arrays(1), *METADATA)
    on = mesh(kind)
    placed = [place(x, on, spec) for x, spec in zip(arrays(1), (WHOLE, HEADS, WHOLE), strict=True)]

    assert collectives(jax.jit(step), *placed, *METADATA) == []
    assert_close(jax.jit(step)(*placed, *METADATA)[0], expected)


@each_kind
@on_four_devices
def test_in_a_loop_the_split_cache_stays_in_place(kind: str) -> None:
    on = mesh(kind)
    cache, query, key = (place(x, on, spec) for x, spec in zip(arrays(), (CACHE, HEADS, HEADS), strict=True))

    def steps(cache: jax.Array, *rest: Any) -> jax.Array:
        return jax.lax.scan(lambda cache, _: (step(cache, *rest)[1], None), cache, None, length=3)[0]

    before = addresses(cache)
    assert addresses(jax.jit(steps, donate_argnums=0)(cache, query, key, *METADATA)) == before


@each_kind
@pytest.mark.parametrize("name", ["xla", "torch"])
@on_four_devices
def test_outside_jit_split_arrays_run_in_one_program(kind: str, name: str) -> None:
    on = mesh(kind)
    cache, query, key = (place(x, on, spec) for x, spec in zip(arrays(), (CACHE, HEADS, HEADS), strict=True))
    if (kind, name) == ("auto", "torch"):
        with pytest.raises(Unsupported, match="JAX's custom_partitioning loses callbacks"):
            step(cache, query, key, *METADATA, name=name)
        return
    out, _ = step(cache, query, key, *METADATA, name=name)

    assert out.sharding.is_equivalent_to(NamedSharding(on, HEADS), 3)


@on_four_devices
def test_a_program_of_one_device_runs_callbacks_as_ever() -> None:
    expected, _ = jax.jit(step)(*arrays(), *METADATA)

    assert_close(jax.jit(lambda *args: step(*args, name="torch"))(*arrays(), *METADATA)[0], expected)


@on_four_devices
def test_along_explicit_axes_jnp_has_its_derivative() -> None:
    def loss(query: jax.Array, cache: jax.Array) -> jax.Array:
        tables, lens, starts = map(jnp.asarray, (TABLES, SEQ_LENS, STARTS))
        return ops.paged_attention(query, cache, tables, lens, starts, max_query_len=4, implementation="xla").sum()

    cache, query, _ = arrays()
    expected = jax.jit(jax.grad(loss))(query, cache)
    on = mesh("explicit")

    assert_close(jax.jit(jax.grad(loss))(place(query, on, HEADS), place(cache, on, CACHE)), expected)


@pytest.mark.parametrize("name", ["xla", "torch"])
@on_four_devices
def test_sequences_split_in_a_shard_map_with_each_devices_own_metadata(name: str) -> None:
    cache, query, key = arrays()
    own = (np.array([[1, 2]], np.int32), np.array([6], np.int32), np.array([0, 3], np.int32), SLOTS[:3] - 2)
    rows, blocks = PartitionSpec("dp", "tp"), PartitionSpec("dp", None, None, "tp")
    mapped = jax.shard_map(
        functools.partial(step, name=name),
        mesh=mesh("auto", dp=2, tp=2),
        in_specs=(blocks, rows, rows, *[PartitionSpec("dp")] * 4),
        out_specs=(rows, blocks),
    )
    out, _ = jax.jit(mapped)(cache[:8], query, key, *(np.concatenate([x, x]) for x in own))

    for half in range(2):
        part = slice(3 * half, 3 * half + 3)
        expected, _ = jax.jit(step)(cache[4 * half : 4 * half + 4], query[part], key[part], *own)
        assert_close(out[part], expected)


@each_kind
@on_four_devices
def test_uneven_rows_and_slots_of_a_block_are_refused(kind: str) -> None:
    on = mesh(kind, dp=2, tp=2)

    found = refusal(on, CACHE, PartitionSpec("dp", "tp"), HEADS)

    assert found == (
        "paged_attention: sequences are split by mesh axes as follows: query by dp, kv_cache by none; num_tokens = 6 "
        "cannot be cut into 2 even parts of whole sequences. Every sequence must have max_query_len query rows "
        "(num_tokens == num_seqs * max_query_len; keys likewise), as many sequences on each device. Undo that split of "
        "its operands and results (jax.lax.with_sharding_constraint, or jax.sharding.reshard along Explicit axes), or "
        "call it inside jax.shard_map with each device's own sequences and blocks (AttentionMetadata.build_sharded)."
    )
    blocks = refusal(on, PartitionSpec(None, None, "dp", "tp"), HEADS, HEADS)
    assert blocks.startswith("write_kv_cache: kv_cache is split along block_size by mesh axis dp;")


@each_kind
@on_four_devices
def test_heads_that_are_split_differently_are_refused(kind: str) -> None:
    found = refusal(mesh(kind, dp=2, tp=2), CACHE, PartitionSpec(None, "dp"), HEADS)

    assert found == (
        "paged_attention: heads are split by mesh axes as follows: query (8 heads) by dp, kv_cache (4 heads) by tp. "
        "Split all alike, by axes that split nothing else and whose sizes divide the key/value heads; where those are "
        "fewer than devices, repeat them."
    )


@each_kind
@on_four_devices
def test_a_whole_cache_beside_split_keys_is_refused(kind: str) -> None:
    found = refusal(mesh(kind), WHOLE, HEADS, HEADS)

    assert "key (4 heads) by tp, value (4 heads) by tp, kv_cache (4 heads) by none." in found


@each_kind
@on_four_devices
def test_more_devices_than_key_heads_are_refused_rather_than_padded(kind: str) -> None:
    found = refusal(mesh(kind), WHOLE, HEADS, WHOLE, num_kv_heads=2)

    assert (
        "paged_attention: heads are split by mesh axes as follows: query (8 heads) by tp, kv_cache (2 heads) by"
        in found
    )


@on_four_devices
def test_torch_along_auto_axes_is_refused() -> None:
    on = mesh("auto")
    placed = [place(x, on, spec) for x, spec in zip(arrays(), (CACHE, HEADS, HEADS), strict=True)]
    with pytest.raises(Unsupported) as error:
        jax.jit(lambda *args: step(*args, name="torch"))(*placed, *METADATA)
    assert str(error.value) == (
        "write_kv_cache: implementation='torch' cannot be split along Auto mesh axes, because JAX's "
        "custom_partitioning loses callbacks; use implementation='triton' or 'xla', a mesh of Explicit axes, or "
        "jax.shard_map."
    )


@on_four_devices
def test_auto_axes_beside_others_are_refused() -> None:
    text = "write_kv_cache: mesh axes tp are of type Auto and dp are not; call it inside a jax.shard_map over all axes"
    both = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit, AxisType.Auto))
    assert refusal(both, CACHE, HEADS, HEADS).startswith(text)

    half = jax.shard_map(
        step, mesh=mesh("auto", dp=2, tp=2), in_specs=WHOLE, out_specs=WHOLE, axis_names={"dp"}, check_vma=False
    )
    with pytest.raises(Unsupported, match=text):
        jax.jit(half)(*arrays(), *METADATA)


def assert_close(found: Any, expected: Any) -> None:
    """Within the roundings of a few sums: XLA vectorises a part of an array differently from the whole."""
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=16 * float(np.finfo(np.float32).eps) * scale)


@each_way
@on_four_devices
def test_latents_are_whole_on_every_device_and_heads_are_split(kind, name):
    devices, rng = mesh(kind), np.random.default_rng(5)
    latents, query, new = (rng.normal(size=size).astype(np.float32) for size in ((9, 4, 20), (6, 8, 20), (6, 20)))
    latents[0] = np.nan

    def attend(latents: Any, query: Any, new: Any, tables: Any, lens: Any, starts: Any, slots: Any, name: str) -> Any:
        run = run_opaque if name == "opaque" else ops.run
        write = LatentWriteCall(kv_c=new[:, :16], k_pe=new[:, 16:], slot_mapping=slots, latent_cache=latents)
        latents = run(write, name)["latent_cache"]
        call = LatentCall(
            query=query,
            latent_cache=latents,
            kv_lora_rank=16,
            block_tables=tables,
            seq_lens=lens,
            query_start_loc=starts,
            spec=SPEC,
            max_query_len=4,
            with_lse=True,
        )
        results = run(call, name)
        return results["out"], results["lse"], latents

    expected = attend(*map(jnp.asarray, (latents, query, new, *METADATA)), name="xla")
    with jax.set_mesh(devices):
        placed = [
            place(array, devices, HEADS if array is query else WHOLE) for array in (latents, query, new, *METADATA)
        ]
        function = jax.jit(functools.partial(attend, name=name), donate_argnums=0)
        assert collectives(function, *placed) == []
        before = addresses(placed[0])
        found = function(*placed)

    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-5)
    assert addresses(found[2]) == before
    assert found[0].sharding.shard_shape(found[0].shape) == (6, 2, 16)
