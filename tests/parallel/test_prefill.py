"""Long sequences split over devices: the ring and the gathered keys give one device's result and gradients."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jattn import ops, parallel
from tests.support.devices import collectives, mesh, on_four_devices
from torch_core.base.errors import InvalidInput, Unsupported

TOKENS = PartitionSpec(None, "cp")
BATCH, LENGTH = 2, 32
ORDER = parallel.zigzag_order(LENGTH, 4)


def arrays(dtype: str = "float32", length: int = LENGTH) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(5)
    return tuple(jnp.asarray(rng.normal(size=(BATCH, length, heads, 16)), dtype) for heads in (4, 2, 2))


def whole(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    length = query.shape[1]
    starts = jnp.arange(BATCH + 1, dtype=jnp.int32) * length
    query, key, value = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    out = ops.attention(query, key, value, starts, max_query_len=length, implementation="xla", **options)
    return out.reshape(BATCH, length, *out.shape[1:])


def split(method: str, **options: Any) -> Any:
    attend = {"ring": parallel.ring_attention, "all-gather": parallel.all_gather_attention}[method]
    devices = options.pop("devices", 4)
    mapped = jax.shard_map(
        lambda *arrays: attend(*arrays, "cp", **options),
        mesh=jax.make_mesh((devices,), ("cp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]),
        in_specs=TOKENS,
        out_specs=TOKENS,
        check_vma=False,
    )

    def run(*arrays: jax.Array) -> jax.Array:
        order = parallel.zigzag_order(arrays[0].shape[1], devices)
        return mapped(*(x[:, order] for x in arrays))[:, np.argsort(order)]

    return run


def loss(attend: Any) -> Any:
    return lambda *arrays: (attend(*arrays).astype(jnp.float32) * jnp.arange(16)).sum()


def assert_near(found: Any, exact: Any, eps: float) -> None:
    exact = np.asarray(exact, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=0, atol=eps * np.abs(exact).max())


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ring, causal": ("ring", {"implementation": "xla"}),
    "ring, torch": ("ring", {"implementation": "torch"}),
    "ring, full, soft cap": ("ring", {"implementation": "torch", "causal": False, "logits_soft_cap": 3.0}),
    "gathered": ("all-gather", {"implementation": "xla"}),
    "gathered, full": ("all-gather", {"implementation": "torch", "causal": False}),
    "gathered, window": ("all-gather", {"implementation": "torch", "sliding_window": 7}),
    "gathered, chunk": ("all-gather", {"implementation": "torch", "attention_chunk": 12}),
    "gathered, ALiBi": (
        "all-gather",
        {"implementation": "torch", "alibi_slopes": np.linspace(0.1, 1, 4, dtype=np.float32)},
    ),
}


@pytest.mark.parametrize("name", CASES)
@on_four_devices
def test_split_sequences_have_the_result_and_gradients_of_whole_ones(name: str) -> None:
    method, options = CASES[name]
    given = arrays()
    plain = {key: x for key, x in options.items() if key != "implementation"}
    assert_like_whole(split(method, **options), given, **plain)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("devices", "chunk"), [(1, 5), (2, 5), (3, 7), (4, 1)])
@on_four_devices
def test_a_ring_of_any_number_of_devices_and_of_odd_chunks(devices: int, chunk: int, causal: bool) -> None:
    given = arrays(length=2 * devices * chunk)

    assert_like_whole(split("ring", devices=devices, implementation="xla", causal=causal), given, causal=causal)


@on_four_devices
def test_a_ring_weighs_keys_of_far_larger_scores_on_other_devices() -> None:
    # exp(score) of one part alone would overflow, that of another underflow.
    query, key, value = arrays()
    given = (query, key * jnp.linspace(0, 300, LENGTH)[:, None, None], value)
    largest = float(jnp.abs(given[0]).max() * jnp.abs(given[1]).max() * 16**0.5)

    # A score of float32 is rounded, and so is an lse.
    assert_like_whole(split("ring", implementation="xla"), given, eps=2.0**-23 * largest)


def assert_like_whole(attend: Any, given: tuple[jax.Array, ...], eps: float = 2e-6, **options: Any) -> None:
    exact, pull = jax.vjp(lambda *arrays: whole(*arrays, **options), *given)
    d_out = exact * jnp.arange(16)
    found, pull_split = jax.vjp(jax.jit(attend), *given)

    assert_near(found, exact, eps)
    # What is not derived may be computed in another way.
    assert_near(jax.jit(attend)(*given), exact, eps)
    for mine, theirs in zip(pull_split(d_out), pull(d_out), strict=True):
        assert_near(mine, theirs, eps)


@pytest.mark.parametrize("method", ["ring", "all-gather"])
@on_four_devices
def test_a_shard_map_that_checks_what_differs_by_device_has_the_same_gradients(method: str) -> None:
    given, sinks = arrays(), jnp.linspace(-1, 1, 4)
    # A ring has no sinks.
    shared = {} if method == "ring" else {"sinks": sinks}
    exact = jax.grad(lambda given, shared: loss(lambda *x: whole(*x, **shared))(*given), (0, 1))(given, shared)
    attend = {"ring": parallel.ring_attention, "all-gather": parallel.all_gather_attention}[method]
    mapped = jax.shard_map(
        lambda arrays, shared: attend(*arrays, "cp", implementation="torch", **shared),
        mesh=mesh("auto", cp=4),
        in_specs=(TOKENS, PartitionSpec()),
        out_specs=TOKENS,
    )
    found = jax.jit(
        jax.grad(lambda given, shared: loss(lambda *x: mapped(tuple(y[:, ORDER] for y in x), shared))(*given), (0, 1))
    )(given, shared)

    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert_near(mine, theirs, 2e-6)


@pytest.mark.parametrize("causal", [True, False])
@on_four_devices
def test_in_bfloat16_the_ring_rounds_as_one_device_does(causal: bool) -> None:
    given = arrays("bfloat16")
    wide = tuple(x.astype(jnp.float32) for x in given)

    def run(attend: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        return attend(*arrays), *jax.grad(loss(attend), (0, 1, 2))(*arrays)

    one = functools.partial(whole, causal=causal)
    exact, rounded = run(one, *wide), run(one, *given)
    found = jax.jit(functools.partial(run, split("ring", implementation="torch", causal=causal)))(*given)

    for mine, plain, truth in zip(found, rounded, exact, strict=True):
        assert mine.dtype == jnp.bfloat16
        truth = np.asarray(truth, np.float64)
        bound = 2 * (np.abs(np.asarray(plain, np.float64) - truth).max() + 2.0**-8 * np.abs(truth).max())
        assert np.abs(np.asarray(mine, np.float64) - truth).max() <= bound


@on_four_devices
def test_a_step_of_the_ring_copies_no_rows() -> None:
    on: dict[str, Any] = {"mesh": mesh("auto", cp=4), "in_specs": TOKENS, "out_specs": TOKENS, "check_vma": False}
    options: dict[str, Any] = {"max_gathered_bytes": 0, "implementation": "torch"}
    ring = jax.shard_map(lambda q, k, v: parallel.ring_attention(q, k, v, "cp", **options), **on)
    # Of the starts of sequences alone.
    joined = re.findall(r"(\w+)\[[\d,]*\] = concatenate", str(jax.make_jaxpr(ring)(*arrays("bfloat16"))))

    assert set(joined) == {"i32"}


@on_four_devices
def test_the_ring_passes_keys_on_and_gathers_nothing() -> None:
    given = tuple(x[:, ORDER] for x in arrays())
    on: dict[str, Any] = {"mesh": mesh("auto", cp=4), "in_specs": TOKENS, "out_specs": TOKENS, "check_vma": False}
    all_bytes = sum(x.nbytes for x in given[1:])

    def ring(most: int) -> Any:
        options: dict[str, Any] = {"max_gathered_bytes": most, "implementation": "torch"}
        return jax.shard_map(lambda q, k, v: parallel.ring_attention(q, k, v, "cp", **options), **on)

    forward = ring(all_bytes - 1)
    gathered = jax.shard_map(lambda q, k, v: parallel.all_gather_attention(q, k, v, "cp", implementation="torch"), **on)

    # Keys and values, to each of the three others.
    assert collectives(jax.jit(forward), *given) == ["collective-permute"] * 6
    # In the derivative keys and values again, unless XLA keeps them, and their gradients all the way round.
    for each in (forward, ring(all_bytes)):
        both = collectives(jax.jit(lambda *x, each=each: jax.vjp(each, *x)[1](x[0])), *given)
        assert set(both) == {"collective-permute"}
        assert len(both) in (6 + 8, 6 + 6 + 8)
    # Few keys are gathered where nothing is derived.
    assert set(collectives(jax.jit(ring(all_bytes)), *given)) == {"all-gather"}
    assert set(collectives(jax.jit(gathered), *given)) == {"all-gather"}
    derived = jax.jit(lambda *x: jax.vjp(gathered, *x)[1](x[0]))
    assert sorted(collectives(derived, *given)) == ["all-gather"] * 2 + ["reduce-scatter"] * 2


@on_four_devices
def test_what_is_not_served_is_refused() -> None:
    given = arrays()
    with pytest.raises(Unsupported, match=r"^sliding_window is 7; in a ring most steps would carry keys that no"):
        split("ring", sliding_window=7)(*given)
    with pytest.raises(Unsupported, match=r"^sliding_window without the causal mask is not served where tokens are"):
        split("all-gather", sliding_window=7, causal=False)(*given)
    query, key, value = (x[:, :3] for x in given)
    with pytest.raises(InvalidInput, match=r"^query has shape \[2, 3, 4, 16\], key has shape \[2, 3, 2, 16\], value "):
        parallel.ring_attention(query, key, value, "cp")
    with pytest.raises(InvalidInput, match=r"^scale is 0.0; it must be finite and not zero"):
        parallel.ring_attention(given[0], given[1], given[2], "cp", scale=0.0)
    with pytest.raises(InvalidInput, match=r"^max_gathered_bytes is -1; "):
        split("ring", max_gathered_bytes=-1)(*given)
    with pytest.raises(
        InvalidInput, match=r"^num_tokens is 12; it must be a multiple of 8, two chunks for each device"
    ):
        parallel.zigzag_order(12, 4)
    with pytest.raises(InvalidInput, match=r"^num_devices is 0; "):
        parallel.zigzag_order(8, 0)


@pytest.mark.parametrize("method", ["ring", "all-gather"])
@pytest.mark.parametrize("part", [(slice(None), slice(16)), slice(1)], ids=["shorter", "of fewer sequences"])
@pytest.mark.parametrize("others", [(1, 2), (2,)], ids=["keys", "values"])
@on_four_devices
def test_keys_of_other_tokens_than_the_queries_are_refused(method: str, part: Any, others: tuple[int, ...]) -> None:
    given = [x[part] if index in others else x for index, x in enumerate(arrays())]
    attend = {"ring": parallel.ring_attention, "all-gather": parallel.all_gather_attention}[method]
    mapped = jax.shard_map(
        lambda *arrays: attend(*arrays, "cp", implementation="xla"),
        mesh=mesh("auto", cp=4),
        in_specs=TOKENS,
        out_specs=TOKENS,
        check_vma=False,
    )

    with pytest.raises(InvalidInput, match=r"^query has shape \[2, 8, 4, 16\], key has shape .* two chunks of equal"):
        mapped(*given)


REFUSED: dict[str, dict[str, Any]] = {
    "relative_bias": {"causal": False, "relative_bias": np.ones((4, 5), np.float32)},
    "use_alibi_sqrt": {"causal": False, "alibi_slopes": np.ones(4, np.float32), "use_alibi_sqrt": True},
    "qq_bias": {"qq_bias": np.ones((LENGTH, LENGTH), np.float32)},
    "seq_causal": {"causal": False, "seq_causal": np.array([True, False])},
    "mm_prefix_range": {"mm_prefix_range": np.zeros((BATCH, 1, 2), np.int32)},
    "segment_ids": {"segment_ids": np.ones(BATCH * LENGTH, np.int32)},
}


@pytest.mark.parametrize("name", REFUSED)
@on_four_devices
def test_what_counts_the_rows_of_a_whole_sequence_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=rf"^{name} .*is not served where tokens are split"):
        split("all-gather", implementation="xla", **REFUSED[name])(*arrays())


@pytest.mark.parametrize("method", ["ring", "all-gather"])
@on_four_devices
def test_no_sequences_have_no_result(method: str) -> None:
    assert split(method, implementation="xla")(*(x[:0] for x in arrays())).shape == (0, LENGTH, 4, 16)
