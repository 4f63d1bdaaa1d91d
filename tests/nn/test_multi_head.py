"""The module trains as flax's does: the same parameters, outputs and gradients, in both directions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.nn import MultiHeadAttention
from torch_core.base.errors import InvalidInput

BATCH, LENGTH, FEATURES = 2, 6, 16
KEY_PADDING = jnp.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1]], bool)[:, None, None, :]
MASKS = {
    "no mask": {},
    "causal": {"is_causal": True},
    "causal mask": {"mask": nnx.make_causal_mask(jnp.ones((BATCH, LENGTH)))},
    "padding": {"mask": KEY_PADDING},
    "both": {"mask": jnp.broadcast_to(KEY_PADDING, (BATCH, 1, LENGTH, LENGTH)), "is_causal": True},
}
# Each with every mask: 40 configurations.
OPTIONS = {
    "plain": {},
    "no bias, groups": {"use_bias": False, "num_kv_heads": 2},
    "norms": {"normalize_qk": True},
    "another width": {"out_features": 5},
    "dropout": {"dropout_rate": 0.4, "deterministic": False},
    "dropout of its own for each head": {"dropout_rate": 0.4, "deterministic": False, "broadcast_dropout": False},
    "bfloat16": {"dtype": jnp.bfloat16, "num_kv_heads": 2},
    "bfloat16 parameters": {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16, "normalize_qk": True},
}

# What other tests cover, or what differs little from another option.
RARELY = ("dropout of its own for each head", "bfloat16 parameters")


def twins(seed: int, **options: Any) -> tuple[nnx.MultiHeadAttention, MultiHeadAttention]:
    """Flax's module and ours, built alike from different seeds."""
    options = {"num_heads": 4, "in_features": FEATURES, "decode": False, **options}
    kinds: tuple[Any, ...] = (nnx.MultiHeadAttention, MultiHeadAttention)
    theirs, ours = (
        kind(**options, bias_init=nnx.initializers.normal(0.5), rngs=nnx.Rngs(seed + index))
        for index, kind in enumerate(kinds)
    )
    return theirs, ours


def inputs(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape or (BATCH, LENGTH, FEATURES)), jnp.float32)


def results(module: nnx.MultiHeadAttention, x: jax.Array, call: dict[str, Any]) -> list[Any]:
    """The output and the gradients of the input and of each parameter."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params: Any, x: jax.Array) -> Any:
        # Variables of this trace, because dropout counts its draws. The first row sees no key in one mask.
        y = nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, rest))(x, **call)[:, 1:]
        return (y.astype(jnp.float32) ** 2).mean(), y

    # Compiled whole: its small operations one by one would take longer to lower than this takes.
    (gradients, dx), y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    return [y, dx, *jax.tree.leaves(gradients)]


def apart(expected: Any, found: Any, scale: float | None = None) -> float:
    """How far two arrays are from each other, relative to `scale` or the largest of the first."""
    expected, found = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    return np.abs(expected - found).max() / (np.abs(expected).max() if scale is None else scale)


def configurations() -> Iterator[Any]:
    """All 40, of which the suite takes every mask once with plain options, and every option once."""
    for index, (options, mask) in enumerate(itertools.product(OPTIONS, MASKS)):
        often = options == "plain" or (options not in RARELY and index % (len(MASKS) + 1) == 0)
        yield pytest.param(options, mask, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize(("options", "mask"), list(configurations()))
def test_weights_load_both_ways_and_give_equal_outputs_and_gradients(options: str, mask: str, seed: int) -> None:
    theirs, ours = twins(seed % 1000, **OPTIONS[options])
    x = inputs(seed)
    # Eight bits of mantissa in bfloat16: both round every product.
    tolerance = 3e-2 if "bfloat16" in options else 1e-5
    nnx.update(ours, nnx.state(theirs))
    expected, found = results(theirs, x, MASKS[mask]), results(ours, x, MASKS[mask])
    assert apart(expected[0], found[0]) <= tolerance
    # The gradient of a key bias is nothing but rounding: a shift of all keys changes no softmax.
    largest = max(float(jnp.abs(one).max()) for one in expected[1:])
    assert all(apart(*pair, largest) <= tolerance for pair in zip(expected[1:], found[1:], strict=True))
    # And back, after our module learnt something.
    nnx.update(ours, jax.tree.map(lambda weight: weight * weight.dtype.type(1.5), nnx.state(ours, nnx.Param)))
    nnx.update(theirs, nnx.state(ours))
    again, found = (nnx.jit(lambda module, x: module(x, **MASKS[mask])[:, 1:])(each, x) for each in (theirs, ours))
    assert apart(again, found) <= tolerance
    assert apart(again, expected[0]) > tolerance


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ({}, {"num_kv_heads": 2}),
        ({}, {"dropout_rate": 0.5, "deterministic": False}),
        ({"is_causal": True}, {"num_kv_heads": 2}),
        ({"mask": jnp.ones((1, 1, 1, 1), bool)}, {"dropout_rate": 0.5, "deterministic": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(0, LENGTH), (BATCH, 0)], ids=str)
def test_a_batch_without_rows_or_tokens_has_an_output_without_any(
    shape: tuple[int, int], options: dict[str, Any], call: dict[str, Any]
) -> None:
    _, module = twins(0, **options)
    x = jnp.zeros((*shape, FEATURES))
    attend = jax.jit(jax.value_and_grad(lambda x: module(x, **call, rngs=nnx.Rngs(0)).sum()))
    assert nnx.jit(lambda module, x: module(x, **call))(module, x).shape == x.shape
    assert [each.shape for each in attend(x)] == [(), x.shape]


def test_an_encoder_that_has_no_token_gives_zeros() -> None:
    _, module = twins(0, use_bias=False)
    assert not module(jnp.ones((BATCH, LENGTH, FEATURES)), jnp.ones((BATCH, 0, FEATURES))).any()


@pytest.mark.parametrize(
    "options",
    [{"num_kv_heads": 2, "normalize_qk": True}, {"dropout_rate": 0.5, "keep_rngs": False, "out_features": 5}],
    ids=str,
)
def test_a_module_of_flaxs_options_and_parameters_is_made_from_flaxs(options: dict[str, Any], seed: int) -> None:
    theirs, _ = twins(seed, **options)
    theirs.init_cache((BATCH, LENGTH, FEATURES))
    ours = MultiHeadAttention.from_nnx(theirs)
    x = jax.random.normal(jax.random.key(seed), (BATCH, LENGTH, FEATURES))
    assert np.allclose(ours(x, deterministic=True), theirs(x, deterministic=True), atol=1e-5)
    assert ours.query.kernel is theirs.query.kernel
    assert ours.cached_key is None
    nearby = MultiHeadAttention.from_nnx(theirs, sliding_window=1)
    assert not np.allclose(nearby(x, deterministic=True), ours(x, deterministic=True), atol=1e-2)


@pytest.mark.parametrize("use_bias", [True, False])
def test_weights_of_another_number_of_heads_are_refused_by_name(use_bias: bool, seed: int) -> None:
    theirs, _ = twins(seed, use_bias=use_bias)
    _, ours = twins(seed, use_bias=use_bias, num_kv_heads=2)
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    with pytest.raises(InvalidInput, match=r"key.kernel has shape \(16, 4, 4\); .*\[..., 2, 4\]"):
        ours(jnp.ones((BATCH, LENGTH, FEATURES)))


def test_the_state_of_flaxs_cache_is_refused_with_the_filter_that_leaves_it_out(seed: int) -> None:
    theirs, ours = twins(seed)
    for module in (theirs, ours):
        module.init_cache((BATCH, LENGTH, FEATURES))
    nnx.update(ours, nnx.state(theirs))
    with pytest.raises(InvalidInput, match=r"nnx.state\(module, nnx.Not\(nnx.Cache\)\)"):
        ours(jnp.ones((BATCH, 1, FEATURES)), decode=True)
    ours.init_cache((BATCH, LENGTH, FEATURES))
    nnx.update(ours, nnx.state(theirs, nnx.Not(nnx.Cache)))
    ours(jnp.ones((BATCH, 1, FEATURES)), decode=True)


def test_parameters_are_taken_from_a_module_that_has_them_alone():
    with pytest.raises(InvalidInput, match=r"^module is a Linear; it must be an nnx\.MultiHeadAttention\.$"):
        MultiHeadAttention.from_nnx(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))  # pyright: ignore[reportArgumentType]
    theirs = nnx.MultiHeadAttention(4, FEATURES, decode=False, rngs=nnx.Rngs(0))
    for change in ({"num_heads": 2}, {"out_features": 3}, {"use_bias": False}, {"normalize_qk": True}):
        with pytest.raises(InvalidInput, match=r"^\w+ is \w+; the module's parameters have"):
            MultiHeadAttention.from_nnx(theirs, **change)
