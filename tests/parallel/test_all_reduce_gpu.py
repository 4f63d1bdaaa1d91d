"""Sums and exchanges of small arrays over two to four GPUs, by kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jattn import parallel
from jattn.bridge.native import TARGET
from jattn.llm.models.layers import RMSNorm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("len(jax.devices()) < 2", reason="needs two GPUs")]

SPLIT = PartitionSpec("tp")


def peers_of(world: int) -> tuple[Mesh, parallel.Peers]:
    if len(jax.devices()) < world:
        pytest.skip(f"needs {world} GPUs")
    mesh = Mesh(np.asarray(jax.devices()[:world], object), ("tp",))
    peers = parallel.Peers.of(mesh, "tp")
    assert peers is not None
    return mesh, peers


def mapped(function: Any, mesh: Mesh, **options: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False), **options)


# The last of each take two shots.
SUMS = [(2, (1, 4096)), (2, (5, 1554)), (2, (128, 2048)), *((3, shape) for shape in ((5, 1554), (128, 2048)))]
SUMS += [(4, (5, 1554)), (4, (128, 2048))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("world", "shape"), SUMS)
def test_all_have_the_sum_in_the_order_of_devices_rounded_once(
    world: int, shape: tuple[int, ...], dtype: str, seed: int
) -> None:
    mesh, peers = peers_of(world)
    x = jax.random.normal(jax.random.key(seed), (world, *shape), dtype)
    summed = mapped(lambda x, table: parallel.all_reduce(x, "tp", table), mesh)

    found = np.asarray(summed(jax.device_put(x, NamedSharding(mesh, SPLIT)), peers.table).astype(jnp.float32))
    total = functools.reduce(np.add, np.asarray(x.astype(jnp.float32)))
    expected = np.asarray(jnp.asarray(total).astype(dtype).astype(jnp.float32))
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


# Rows that take one block, half of one, and two; over three and four devices 64 of them take two shots. Three do not
# divide them.
WIDTHS = [(2, (512, 1024, 3584, 1024)), (3, (3070, 6140, 4298, 6140)), (4, (4096, 8192, 7168, 8192))]


@pytest.mark.parametrize(("world", "widths"), WIDTHS)
def test_a_thousand_sums_of_changing_sizes_mix_no_call_with_another(
    world: int, widths: tuple[int, ...], seed: int
) -> None:
    mesh, peers = peers_of(world)

    def differing(keys: jax.Array, table: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(keys[0])

        def sums(step: jax.Array, count: jax.Array) -> jax.Array:
            for index, rows in enumerate((1, 64, 7, 64)):
                x = jax.random.normal(jax.random.fold_in(key, 4 * step + index), (rows, widths[1]), jnp.bfloat16)
                every = jax.lax.all_gather(x, "tp").astype(jnp.float32)
                # One sum waits for the last.
                x = jnp.where(count < 0, 0, x)
                found = [parallel.all_reduce(x, "tp", table)]
                # The same words in other rows.
                rows_x = x.reshape(-1, widths[index])
                rows_x = jnp.where(found[0][0, 0] > 1e9, 0, rows_x)
                zeros, ones = jnp.zeros_like(rows_x), jnp.ones_like(rows_x[0])
                pair = parallel.all_reduce_norm(rows_x, zeros, ones, "tp", table, epsilon=1e-6)
                assert pair is not None
                found.append(pair[0].reshape(x.shape))
                for each in found:
                    count += (each != functools.reduce(jnp.add, every).astype(x.dtype)).sum(dtype=jnp.int32)
            return count

        return jax.lax.fori_loop(0, 250, sums, jnp.int32(0))[None]

    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), world))
    counts = mapped(differing, mesh)(jax.device_put(keys, NamedSharding(mesh, SPLIT)), peers.table)
    np.testing.assert_array_equal(counts, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("norm_type", ["rms_norm", "rms_norm_wide", "gemma_rms_norm"])
@pytest.mark.parametrize(
    ("world", "shape"),
    [
        *((2, shape) for shape in ((1, 4096), (64, 4096), (3, 2560), (2, 16384), (5, 66))),
        (3, (64, 6140)),
        (4, (64, 8192)),
    ],
)
def test_a_sum_is_added_to_its_residual_and_normed(
    world: int, shape: tuple[int, ...], norm_type: str, dtype: str, seed: int
) -> None:
    mesh, peers = peers_of(world)
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (world, *shape), dtype)
    residual = jax.random.normal(keys[1], shape, dtype)
    norm: Any = RMSNorm(shape[-1], epsilon=0.01, dtype=dtype, norm_type=norm_type)
    norm.weight[...] = jax.random.normal(keys[2], shape[-1:], dtype)

    def both(x: jax.Array, table: jax.Array) -> tuple[jax.Array, ...]:
        once = norm.of_sum(x[0], residual, "tp", table)
        assert once is not None
        total = residual + parallel.all_reduce(jnp.where(once[0][0, 0] > 1e9, 0, x[0]), "tp", table)
        return *(each[None] for each in once), total[None]

    total, normed, expected = (
        np.asarray(each.astype(jnp.float32), np.float64)
        for each in mapped(both, mesh)(jax.device_put(x, NamedSharding(mesh, SPLIT)), peers.table)
    )
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(normed, np.broadcast_to(normed[0], normed.shape))
    wide = total / np.sqrt((total * total).mean(-1, keepdims=True) + 0.01)
    wide *= np.asarray(norm.weight[...].astype(jnp.float32), np.float64) + (norm_type == "gemma_rms_norm")
    numbers = jnp.finfo(dtype)
    roundings = 1 if norm_type == "rms_norm" else 0.5
    # What float32 has of the mean and of the root, too; of the smallest numbers, a step of theirs.
    bound = (np.abs(wide) * roundings * 1.01 + float(numbers.smallest_normal)) * float(numbers.eps)
    assert (np.abs(normed - wide) <= bound).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_one", [True, False], ids=["one part for all", "a part for each"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_has_what_all_have_for_it(world: int, is_one: bool, dtype: str, seed: int) -> None:
    mesh, peers = peers_of(world)
    parts = 1 if is_one else world
    x = jax.random.normal(jax.random.key(seed), (world, parts, 5, 130), dtype)
    exchanged = mapped(lambda x, table: parallel.exchange(x[0], "tp", table)[None], mesh)

    found = exchanged(jax.device_put(x, NamedSharding(mesh, SPLIT)), peers.table)
    for rank in range(world):
        np.testing.assert_array_equal(found[rank], x[:, rank % parts])


def attention_parts(
    key: jax.Array, tokens: int, heads: int, size: int, dtype: Any, parts: int
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of which a fifth of the rows saw nothing."""
    keys = jax.random.split(key, 3)
    out = jax.random.normal(keys[0], (parts * tokens, heads, size), dtype)
    lse = 9 * jax.random.normal(keys[1], out.shape[:2])
    nothing = jax.random.bernoulli(keys[2], 0.2, lse.shape)
    return jnp.where(nothing[..., None], jnp.nan, out), jnp.where(nothing, -jnp.inf, lse)


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, "bfloat16"), (2, "float16"), (2, "float32"), (3, "bfloat16"), (4, "bfloat16")]
)
@pytest.mark.parametrize("way", ["whole heads", "split heads", "split heads, sinks"])
def test_merged_attention_is_that_of_a_collective(way: str, world: int, dtype: str, seed: int) -> None:
    mesh, peers = peers_of(world)
    options: dict[str, Any] = {"split_heads": "split" in way, "out_dtype": dtype}
    options["sinks"] = jnp.linspace(-9, 9, 4) if "sinks" in way else None
    out, lse = attention_parts(jax.random.key(seed), 5, 4 * world, 128, dtype, world)

    def merge(out: jax.Array, lse: jax.Array, table: jax.Array) -> Any:
        kernels, collectives = (
            parallel.merge_over_axis(out, lse, "tp", peers=peers, **options) for peers in (table, None)
        )
        return jax.tree.map(lambda x: x[None], (kernels, collectives))

    parts = jax.device_put((out, lse), NamedSharding(mesh, SPLIT))
    found, expected = mapped(merge, mesh)(*parts, peers.table)
    found, expected = ([np.asarray(x.astype(jnp.float32)) for x in pair] for pair in (found, expected))
    # Two ways that round to neighbours, and float32's exponentials.
    np.testing.assert_allclose(found[0], expected[0], rtol=float(jnp.finfo(dtype).eps), atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)
    if "whole" in way:
        for each in found:
            np.testing.assert_array_equal(each, np.broadcast_to(each[0], each.shape))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_thousand_merges_and_exchanges_of_changing_sizes_mix_no_call_with_another(world: int, seed: int) -> None:
    mesh, peers = peers_of(world)

    def differing(keys: jax.Array, table: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(keys[0])

        def merges(step: jax.Array, count: jax.Array) -> jax.Array:
            for index, (tokens, size) in enumerate(((1, 128), (64, 64), (7, 256), (1, 128))):
                key_of_call = jax.random.fold_in(key, 4 * step + index)
                out, lse = attention_parts(key_of_call, tokens, 4 * world, size, "bfloat16", 1)
                # One call waits for the last.
                lse = jnp.where(count < 0, 0, lse)
                options: dict[str, Any] = {"split_heads": index % 2 == 1, "out_dtype": jnp.bfloat16}
                once, lse_once = parallel.merge_over_axis(out, lse, "tp", peers=table, **options)
                other, lse_other = parallel.merge_over_axis(out, lse, "tp", **options)
                # One rounding of numbers below 8, of which two ways give neighbours.
                count += (jnp.abs(once - other) > 2**-5).sum(dtype=jnp.int32)
                count += (~(jnp.abs(lse_once - lse_other) < 1e-4)).sum(dtype=jnp.int32)
                count -= (jnp.isneginf(lse_once) & jnp.isneginf(lse_other)).sum(dtype=jnp.int32)
                words = jax.lax.bitcast_convert_type(jnp.where(count < 0, 0, out), jnp.int16)
                moved = parallel.exchange(words[None], "tp", table)
                count += (moved != jax.lax.all_gather(words, "tp")).sum(dtype=jnp.int32)
            return count

        return jax.lax.fori_loop(0, 250, merges, jnp.int32(0))[None]

    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), world))
    counts = mapped(differing, mesh)(jax.device_put(keys, NamedSharding(mesh, SPLIT)), peers.table)
    np.testing.assert_array_equal(counts, 0)


def test_a_large_array_is_summed_by_psum() -> None:
    mesh, peers = peers_of(2)
    summed = mapped(lambda x, table: parallel.all_reduce(x, "tp", table), mesh)
    small, large = (jax.ShapeDtypeStruct((2, rows, 4096), jnp.bfloat16) for rows in (64, 4096))

    assert TARGET in summed.lower(small, peers.table).as_text()
    assert TARGET not in summed.lower(large, peers.table).as_text()
