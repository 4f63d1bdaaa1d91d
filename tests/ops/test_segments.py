"""Segments of packed rows in JAX: every implementation, derivatives, vmap, devices, and refusals before and in jit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

import jattn
from jattn import ops
from tests.bridge.test_partition import run_opaque
from tests.ops.runner import QUICK_COMPILE, keywords
from tests.support.attention_cases import AttentionCase, assert_matches_reference, to_torch
from tests.support.devices import collectives, mesh, on_four_devices, place
from tests.support.segment_cases import assert_padded_match, padded, padded_backward, random_segment_case, segment_case
from torch_core import ops as torch_ops
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec

IDS = np.array([0, 5, 5, 5, 2, 2, 7, 7, 7, 7, 3, -1], np.int32)
TWICE = np.array([0, 5, 5, 2, 2, 5, 7, 7, 7, 7, 3, -1], np.int32)
STARTS = np.array([0, 6, 12], np.int32)


def _arrays(case: AttentionCase) -> dict[str, Any]:
    return {name: jnp.asarray(x) for name, x in {**case.operands, **case.options}.items() if isinstance(x, np.ndarray)}


def _attend(case: AttentionCase, implementation: str) -> Any:
    static = {name: x for name, x in case.options.items() if not isinstance(x, np.ndarray)}

    def attend(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        options = {**static, **keywords(case.spec), **case.limits, "implementation": implementation}
        return ops.attention_with_lse(**arrays, **options)

    return attend


@pytest.mark.parametrize("implementation", ["torch", "xla"])
@pytest.mark.parametrize("seed", [1, 4, 5])
def test_results_and_gradients_of_a_random_problem_are_as_exact_as_torch(seed: int, implementation: str) -> None:
    case = random_segment_case(seed, longest=14)
    call = padded_backward(case, torch_ops.run)
    names = [name.removeprefix("d_") for name in call.outputs()]
    arrays = _arrays(padded(case))

    @jax.jit
    def both(arrays: dict[str, jax.Array], gradients: Any) -> Any:
        fixed = {name: x for name, x in arrays.items() if name not in names}
        results, pull = jax.vjp(
            lambda moving: _attend(case, implementation)({**fixed, **moving}), {name: arrays[name] for name in names}
        )
        return results, pull(gradients)[0]

    d_out = jnp.asarray(call.d_out.float().numpy()).astype(arrays["query"].dtype)
    d_lse = jnp.zeros(call.lse.shape) if call.d_lse is None else jnp.asarray(call.d_lse.numpy())
    program = both.lower(arrays, (d_out, d_lse)).compile(QUICK_COMPILE)
    (out, lse), gradients = program(arrays, (d_out, d_lse))
    found = {f"d_{name}": to_torch(np.asarray(gradients[name])) for name in names}
    call = replace(call, out=to_torch(np.asarray(out)), lse=to_torch(np.asarray(lse)))
    assert_padded_match(case, call, found)


def test_torch_in_jax_has_the_bits_of_torch(seed: int) -> None:
    case = segment_case(seed, [[-2, 5, 3], [7, 2, -1]], spec=AttentionSpec(scale=0.2, window_left=3))
    found = jax.jit(_attend(case, "torch"))(_arrays(padded(case)))
    expected = case.run(torch_ops.attention_with_lse)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(to_torch(np.asarray(ours)), theirs)


def _small(seed: int, ids: Any = IDS, **options: Any) -> jax.Array:
    x = jax.random.normal(jax.random.key(seed), (12, 2, 8))
    return jattn.attention(x, x, x, jnp.asarray(STARTS), max_query_len=6, segment_ids=ids, **options)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (TWICE, {}, r"segment_ids\[5\] is 5, an id that sequence 0 has before another one"),
        (IDS.astype(np.int64), {}, "segment_ids is int64; it must be int32"),
        (IDS[None], {}, r"segment_ids has shape \[1, 12\]"),
        (IDS, {"max_segments": 1}, "pass max_segments=2"),
        (IDS, {"max_segment_len": 3}, r"segment_ids\[6\] has 4 tokens of segment 7, more than 3"),
    ],
)
def test_segments_that_do_not_fit_are_refused_before_anything_runs(ids: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _small(0, ids, **options)


@pytest.mark.parametrize("implementation", ["torch", "xla"])
@pytest.mark.parametrize(
    "options", [{}, {"max_segments": 1}, {"max_segment_len": 3}], ids=["an id twice", "too many", "too long"]
)
def test_segments_that_do_not_fit_are_nan_inside_jit(options: dict[str, Any], implementation: str) -> None:
    ids = IDS if options else TWICE
    out = jax.jit(lambda ids: _small(0, ids, implementation=implementation, **options))(ids)
    assert np.isnan(out[ids > 0]).all()


def test_examples_of_a_vmap_become_one_call(seed: int) -> None:
    queries = jax.random.normal(jax.random.key(seed), (3, 12, 2, 8))
    ids = jnp.stack([jnp.asarray(IDS), jnp.where(IDS == 2, 0, IDS), jnp.asarray(IDS)])

    def attend(query: jax.Array, ids: jax.Array) -> jax.Array:
        # The last three tokens are padding of the array.
        starts = jnp.array([0, 6, 9])
        options = {"max_query_len": 6, "segment_ids": ids, "implementation": "torch"}
        return jattn.attention(query, query, query, starts, **options)

    found, single = jax.jit(jax.vmap(attend))(queries, ids), jax.jit(attend)
    for one, query, each in zip(found, queries, ids, strict=True):
        np.testing.assert_allclose(one, single(query, each), atol=1e-6)
    assert not found[:, 9:].any()


@pytest.mark.parametrize(("kind", "name"), [("auto", "opaque"), ("explicit", "xla")])
@on_four_devices
def test_rows_of_segments_split_over_devices_without_a_collective(kind: str, name: str, seed: int) -> None:
    lens = [[3, 5], [8], [-2, 4, 2], [1, -7]]
    case = segment_case(seed, lens, num_heads=4, num_kv_heads=2, head_size=16)
    on = mesh(kind, dp=2, tp=2)
    split = {name: place(x, on, PartitionSpec("dp", "tp")) for name, x in case.operands.items() if x.ndim == 3}
    split["segment_ids"] = place(case.options["segment_ids"], on, PartitionSpec("dp"))
    call = case.call().map(lambda x: jnp.asarray(x.numpy()))

    def attend(arrays: dict[str, jax.Array]) -> jax.Array:
        return (run_opaque if name == "opaque" else ops.run)(call.with_arrays(arrays), name)["out"]

    program = jax.jit(attend)
    assert collectives(program, split) == []
    assert_matches_reference(case, to_torch(np.asarray(program(split))))
