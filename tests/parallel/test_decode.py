"""Sequences spread over devices: written and attended in place, the result of one device, by one collective."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jattn import AttentionMetadata, SequenceRow, ops, parallel
from jattn.bridge import typed_errors
from tests.bridge.test_partition import assert_close
from tests.support.devices import addresses, collectives, mesh, on_four_devices, place
from tests.support.ranks import of_rank
from torch_core.attention.call import PagedCall
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec
from torch_core.cache_writes.call import WriteCall

RANKS = PartitionSpec("cp")
WHOLE = PartitionSpec()
OWN_HEADS = PartitionSpec(None, "cp")
# Blocks of 4 tokens on each of four devices, 16 together.
ROWS = [SequenceRow([1, 2, 3], 40, 1), SequenceRow([4], 0, 3), SequenceRow([5], 9, 2)]
METADATA: dict[str, Any] = {"block_size": 16, "num_blocks": 6, "num_seqs": 4, "num_tokens": 8}


def arrays(seed: int = 0, dtype: Any = np.float32) -> tuple[np.ndarray, ...]:
    """A cache for all tokens, queries of 8 heads, keys and values of 2."""
    rng = np.random.default_rng(seed)
    shapes = ((6, 2, 16, 2, 16), (8, 8, 16), (8, 2, 16), (8, 2, 16))
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def spread(cache: np.ndarray, interleave: int = 1) -> np.ndarray:
    """The four devices' caches, one after the other."""
    return np.concatenate([of_rank(cache, 4, rank, interleave) for rank in range(4)])


def calls(cache: Any, query: Any, key: Any, value: Any, step: Any, sinks: Any, **mask: Any) -> tuple[Any, Any]:
    write = WriteCall(key=key, value=value, slot_mapping=step.slot_mapping, kv_cache=cache)
    attend = PagedCall(
        query=query,
        kv_cache=cache,
        block_tables=step.block_tables,
        seq_lens=step.seq_lens,
        query_start_loc=step.query_start_loc,
        sinks=sinks,
        spec=AttentionSpec(scale=0.25, **mask),
        max_query_len=step.max_query_len,
        with_lse=True,
    )
    return write, attend


def expected(given: tuple[np.ndarray, ...], step: Any, sinks: Any, **mask: Any) -> tuple[Any, Any, Any]:
    cache, query, key, value = given
    write, attend = calls(cache, query, key, value, step, sinks, **mask)
    cache = ops.run(write, "xla")["kv_cache"]
    found = ops.run(attend.with_arrays({"kv_cache": cache}), "xla")
    return found["out"], found["lse"], cache


def program(kind: str, way: str, interleave: int = 1, implementation: str = "xla", **mask: Any) -> Any:
    def run(cache: Any, query: Any, key: Any, value: Any, step: Any, sinks: Any) -> Any:
        write, attend = calls(cache, query, key, value, step, sinks, **mask)
        options: dict[str, Any] = {"interleave_size": interleave, "implementation": implementation}
        written = parallel.write_kv_cache(write, "cp", **options)
        more = {"split_heads": "split" in way, "new": (key, value) if "chunk" in way else None}
        found = parallel.paged_attention(attend.with_arrays(written), "cp", **options, **more)
        return found["out"], found["lse"], written["kv_cache"]

    heads = OWN_HEADS if "split" in way else WHOLE
    mapped = jax.shard_map(
        run,
        mesh=mesh(kind, cp=4),
        in_specs=(RANKS, heads, WHOLE, WHOLE, WHOLE, PartitionSpec(*heads[1:])),
        out_specs=(heads, heads, RANKS),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


def placed(kind: str, way: str, given: tuple[np.ndarray, ...], interleave: int, *more: Any) -> list[Any]:
    on, heads = mesh(kind, cp=4), OWN_HEADS if "split" in way else WHOLE
    specs = (RANKS, heads, WHOLE, WHOLE)
    arrays = [place(x, on, spec) for x, spec in zip((spread(given[0], interleave), *given[1:]), specs, strict=True)]
    step, sinks = more
    return [*arrays, jax.tree.map(lambda x: place(x, on, WHOLE), step), place(sinks, on, PartitionSpec(*heads[1:]))]


WAYS = {
    "whole heads": ["all-gather"],
    "split heads": ["all-gather", "all-to-all"],
    "whole heads, chunk": ["all-gather"],
    "split heads, chunk": ["all-gather", "all-to-all"],
}


@pytest.mark.parametrize(
    ("kind", "interleave", "implementation"), [("auto", 1, "torch"), ("explicit", 4, "xla")], ids=["auto", "explicit"]
)
@pytest.mark.parametrize("way", WAYS)
@on_four_devices
def test_a_step_on_spread_sequences_is_that_of_one_device(
    way: str, kind: str, interleave: int, implementation: str
) -> None:
    step = AttentionMetadata.build(ROWS, **METADATA)
    given, sinks = arrays(), np.linspace(-1, 1, 8, dtype=np.float32)
    out, lse, cache = expected(given, step, sinks)
    run = program(kind, way, interleave, implementation)
    inputs = placed(kind, way, given, interleave, step, sinks)

    assert sorted(collectives(run, *inputs)) == WAYS[way]
    before = addresses(inputs[0])
    found_out, found_lse, found_cache = run(*inputs)

    assert addresses(found_cache) == before
    np.testing.assert_array_equal(found_cache, spread(np.asarray(cache), interleave))
    assert_close(found_out, out)
    np.testing.assert_allclose(found_lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "torch"])
@on_four_devices
def test_a_window_and_alibi_count_tokens_of_the_whole_sequence(implementation: str) -> None:
    step = AttentionMetadata.build(ROWS, **METADATA)
    cache, query, key, value = arrays()
    slopes = np.linspace(0.1, 1, 8, dtype=np.float32)

    def attend(cache: Any, query: Any, slopes: Any) -> Any:
        _, call = calls(cache, query, key, value, step, None, window_left=11)
        return parallel.paged_attention(
            replace(call, alibi_slopes=slopes), "cp", split_heads=True, implementation=implementation
        )

    mapped = jax.shard_map(
        attend,
        mesh=mesh("auto", cp=4),
        in_specs=(RANKS, OWN_HEADS, RANKS),
        out_specs=OWN_HEADS,
        check_vma=False,
    )
    found = jax.jit(mapped)(spread(cache), query, slopes)

    _, call = calls(cache, query, key, value, step, None, window_left=11)
    exact = ops.run(replace(call, alibi_slopes=slopes), "xla")
    assert_close(found["out"], exact["out"])
    np.testing.assert_allclose(found["lse"], exact["lse"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_four_devices
def test_each_device_merges_to_the_same_bits(dtype: str) -> None:
    rng = np.random.default_rng(1)
    out = rng.normal(size=(12, 4, 16)).astype(jnp.dtype(dtype))
    lse = rng.normal(size=(12, 4)).astype(np.float32) * 30
    lse[:3], out[:3] = -np.inf, np.nan
    lse[[3, 6, 9]] = -np.inf
    mapped = jax.shard_map(
        lambda out, lse: parallel.merge_over_axis(out, lse, "cp"),
        mesh=mesh("auto", cp=4),
        in_specs=RANKS,
        out_specs=RANKS,
    )

    found, found_lse = (np.asarray(x).reshape(4, 3, *x.shape[1:]) for x in jax.jit(mapped)(out, lse))

    assert all(np.array_equal(found[0], other) for other in found[1:])
    parts, lses = out.astype(np.float64).reshape(4, 3, 4, 16), lse.astype(np.float64).reshape(4, 3, 4)
    weights = np.exp(lses - lses.max(0).clip(-1e9))
    total = weights.sum(0)
    exact = (
        np.where(weights[..., None] > 0, parts * weights[..., None], 0).sum(0)
        / np.where(total > 0, total, 1)[..., None]
    )
    np.testing.assert_allclose(found[0], exact, rtol=1e-5, atol=1e-6)
    assert np.isneginf(found_lse[0][0]).all()
    assert (found[0][0] == 0).all()


@on_four_devices
def test_the_message_is_as_large_as_output_and_lse() -> None:
    def merge(out: jax.Array, lse: jax.Array) -> Any:
        return parallel.merge_over_axis(out, lse, "cp", split_heads=True)

    mapped = jax.shard_map(merge, mesh=mesh("auto", cp=4), in_specs=RANKS, out_specs=OWN_HEADS)
    shapes = jax.ShapeDtypeStruct((20, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((20, 8), jnp.float32)
    text = jax.jit(mapped).lower(*shapes).as_text()

    # 5 rows of 8 heads: 64 bfloat16 and two halves of a float32.
    assert "all_to_all" in text
    assert "tensor<5x4x2x66xui16>" in text


@on_four_devices
def test_heads_that_the_axis_does_not_divide_are_refused() -> None:
    mapped = jax.shard_map(
        lambda out, lse: parallel.merge_over_axis(out, lse, "cp", split_heads=True),
        mesh=mesh("auto", cp=4),
        in_specs=RANKS,
        out_specs=RANKS,
    )
    with pytest.raises(InvalidInput) as error, typed_errors():
        jax.jit(mapped)(jnp.zeros((4, 6, 8)), jnp.zeros((4, 6)))
    assert str(error.value) == "out has 6 heads; 4 devices split them, so it must be a multiple."
