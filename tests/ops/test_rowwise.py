"""Operations in jnp whose bits depend on a row alone: the number of rows and the form of a call do not show."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import ops
from torch_core.base.errors import InvalidInput

OPERATIONS = {
    "product": lambda x: ops.row_product(x, normal(1, 72, 50, dtype=x.dtype)),
    "gated product": lambda x: ops.row_product(x, normal(1, 72, 50, dtype=x.dtype), activation="silu"),
    "norm": lambda x: ops.row_norm(x, normal(2, 1, 72, dtype=x.dtype), epsilon=1e-5),
    "log-sum-exp": lambda x: ops.row_logsumexp(x.astype(jnp.float32)),
    "log-probability": lambda x: ops.token_logprobs(
        x.astype(jnp.float32), jnp.zeros(len(x), jnp.int32), temperature=0.7, batch_invariant=True
    ),
    "elementwise": lambda x: ops.rowwise(lambda x: jax.nn.silu(x) * x + x, x),
}


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_has_the_same_bits_alone_and_among_others(name, dtype, seed):
    function = jax.jit(OPERATIONS[name])
    x = normal(seed, 37, 72, dtype=dtype)
    whole = np.asarray(function(x).astype(jnp.float32))
    for first, count in ((36, 1), (5, 20)):
        part = np.asarray(function(x[first : first + count]).astype(jnp.float32))
        np.testing.assert_array_equal(part, whole[first : first + count])


@pytest.mark.parametrize("options", [{}, {"activation": "silu"}, {"epsilon": 1e-5}], ids=["plain", "gated", "normed"])
def test_rows_are_rounded_to_e4m3_as_torch_does(options, seed):
    x = normal(seed, 16, 72, dtype=jnp.bfloat16)
    scales = {"row_scale": jnp.abs(normal(seed + 1, 5)), "column_scale": jnp.abs(normal(seed + 2, 72))}
    if options.get("epsilon"):
        scales |= {"residual": x[:5], "weight": normal(seed + 3, 72, dtype=jnp.bfloat16)}
    found = [ops.row_quantize(x, **scales, **options, implementation=name) for name in ("xla", "torch")]
    (rows, stream), (expected, expected_stream) = found
    assert rows.shape == (5, 36 if "activation" in options else 72)
    np.testing.assert_allclose(rows.scale, expected.scale, rtol=2.0**-7)
    values, wanted = (each.values[:5].astype(jnp.float32) * each.scale[:, None] for each in (rows, expected))
    # A sum in another order moves an element over a border of e4m3 at most.
    np.testing.assert_allclose(values, wanted, rtol=2.0**-3, atol=2.0**-10 * float(rows.scale.max()))
    if stream is not None:
        np.testing.assert_array_equal(stream, expected_stream)


def test_mapped_rows_have_the_same_bits(seed):
    x, kernel = normal(seed, 3, 5, 72), normal(seed + 1, 72, 50)
    product = functools.partial(ops.row_product, kernel=kernel)
    mapped = jax.jit(jax.vmap(product))(x)
    np.testing.assert_array_equal(mapped, jnp.stack([product(each) for each in x]))


def test_rows_can_be_mapped_with_kernels_of_their_own(seed):
    x, kernel = normal(seed, 3, 5, 72), normal(seed + 1, 3, 72, 50)
    mapped = jax.vmap(ops.row_product)(x, kernel)
    np.testing.assert_array_equal(mapped[1], ops.row_product(x[1], kernel[1]))


def test_gradients_are_those_of_the_plain_operations(seed):
    x, kernel, weight = normal(seed, 9, 72), normal(seed + 1, 72, 50), normal(seed + 2, 1, 72)

    def loss(x, kernel, weight):
        return ops.row_logsumexp(ops.row_product(ops.row_norm(x, weight, epsilon=1e-5), kernel)).sum()

    def plain(x, kernel, weight):
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight
        return jax.nn.logsumexp(normed @ kernel, -1).sum()

    for found, expected in zip(
        jax.jit(jax.grad(loss, (0, 1, 2)))(x, kernel, weight),
        jax.jit(jax.grad(plain, (0, 1, 2)))(x, kernel, weight),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "torch"])
def test_a_product_with_a_gate_is_rounded_once_and_has_its_gradient(implementation, seed):
    x, kernel = normal(seed, 9, 72, dtype=jnp.bfloat16), normal(seed + 1, 72, 50, dtype=jnp.bfloat16)

    def wide(x, kernel):
        gate, up = jnp.split(x @ kernel, 2, axis=1)
        return jax.nn.silu(gate) * up

    def sizes(x, kernel):
        return ops.row_product(x, kernel, activation="silu", implementation=implementation).astype(jnp.float32).sum()

    found = ops.row_product(x, kernel, activation="silu", implementation=implementation)
    exact = wide(x.astype(jnp.float32), kernel.astype(jnp.float32))
    np.testing.assert_array_less(abs(found - exact), 2.0**-8 * abs(exact) + 1e-4)
    expected = jax.grad(lambda *each: wide(*each).sum(), (0, 1))(x.astype(jnp.float32), kernel.astype(jnp.float32))
    for gradient, wanted in zip(jax.grad(sizes, (0, 1))(x, kernel), expected, strict=True):
        np.testing.assert_allclose(gradient.astype(jnp.float32), wanted, rtol=2.0**-6, atol=2.0**-6 * abs(wanted).max())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"activation": "relu"}, "activation is 'relu'; use 'silu', or None"),
        ({"activation": "silu", "transposed": True}, "kernel has shape .* with an activation it is"),
        ({"activation": "silu", "columns": 7}, "kernel has shape .* with an activation it is"),
    ],
    ids=str,
)
def test_a_product_refuses_a_gate_that_it_does_not_have(options, problem):
    kernel = jnp.ones((8, options.pop("columns", 8)))
    with pytest.raises(InvalidInput, match=problem):
        ops.row_product(jnp.ones((2, 8)), kernel, **options)


@pytest.mark.parametrize("window", [None, 21])
def test_attention_to_a_cache_has_the_bits_of_dense_attention(window, seed):
    length, block_size = 90, 8
    query, key, value = (normal(seed + i, length, heads, 16, dtype=jnp.bfloat16) for i, heads in enumerate((6, 2, 2)))
    options: dict[str, Any] = {"batch_invariant": True, "sliding_window": window}
    starts = jnp.array([0, length], jnp.int32)
    dense = np.asarray(ops.attention(query, key, value, starts, max_query_len=length, **options)).astype(np.float32)
    num_blocks = -(-length // block_size)
    order = np.asarray(np.random.default_rng(seed).permutation(num_blocks) + 1, np.int32)
    places = np.arange(length)
    cache = np.full((num_blocks + 1, 2, block_size, 2, 16), np.nan, jnp.bfloat16)
    for index, array in enumerate((key, value)):
        cache[order[places // block_size], index, places % block_size] = array
    for ends, count in (([length, 64, 65, 12], 1), ([70], 30)):
        rows = np.concatenate([np.arange(end - count, end) for end in ends])
        out = ops.paged_attention(
            jnp.asarray(np.asarray(query)[rows]),
            jnp.asarray(cache),
            jnp.asarray(np.tile(order, (len(ends), 1))),
            jnp.array(ends, jnp.int32),
            jnp.arange(len(ends) + 1, dtype=jnp.int32) * count,
            max_query_len=count,
            **options,
        )
        np.testing.assert_array_equal(np.asarray(out).astype(np.float32), dense[rows])


def test_a_gradient_flows_through_attention_in_order(seed):
    query, key, value = (normal(seed + i, 20, 2, 8) for i in range(3))
    starts = jnp.array([0, 20], jnp.int32)

    def loss(query, invariant):
        return (ops.attention(query, key, value, starts, max_query_len=20, batch_invariant=invariant) ** 2).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    np.testing.assert_allclose(gradient(query, True), gradient(query, False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("epsilon", ["a", None, 10**400, -1, float("nan"), True])
def test_a_wrong_epsilon_is_refused(epsilon):
    with pytest.raises(InvalidInput, match=r"^epsilon is .*; it must be finite and not negative\.$"):
        ops.row_quantize(jnp.ones((2, 8)), weight=jnp.ones(8), epsilon=epsilon)
    with pytest.raises(InvalidInput, match=r"^epsilon is"):
        ops.row_norm(jnp.ones((2, 8)), jnp.ones((1, 8)), epsilon=epsilon)


def test_rows_without_an_element_are_not_quantised():
    with pytest.raises(InvalidInput, match=r"^x has rows without an element"):
        ops.row_quantize(jnp.ones((2, 0)))


@pytest.mark.parametrize(
    ("tokens", "temperature", "message"),
    [
        (jnp.zeros((2, 2), jnp.int32), None, r"^tokens has shape \(2, 2\); logits \(2, 3, 5\) are \[\.\.\., vocab\]"),
        (jnp.zeros((2, 3)), 1.0, r"^tokens is float32; token ids are integers, such as int32\.$"),
        ([[0] * 3] * 2, 0, r"^temperature is 0; it must be above 0, or None for 1\.$"),
    ],
)
def test_log_probabilities_of_what_are_no_tokens_are_refused(tokens, temperature, message):
    with pytest.raises(InvalidInput, match=message):
        ops.token_logprobs(jnp.zeros((2, 3, 5)), tokens, temperature=temperature)
