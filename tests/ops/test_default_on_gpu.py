"""implementation=None where JAX sees a CUDA device: its kernels, and jnp for the calls that they do not serve."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import ops
from jattn.metadata import PrefixGroups
from jattn.nn import attention_fn
from jattn.ops.choose import choose, choose_for_cache
from tests.calls.test_serves import BEYOND
from tests.support.attention_plans import backward_call, dense_call, latent_call, paged_call
from tests.support.pretended_gpu import pretended_gpu
from torch_core.base.errors import Unsupported
from torch_core.base.specs import KVCacheSpec, LatentCacheSpec

# Two sequences of 5 and 3 tokens in blocks of 4, each with one new token.
TABLES, LENS, STARTS = jnp.array([[1, 2], [3, 0]]), jnp.array([5, 3]), jnp.array([0, 1, 2])
SLOTS = jnp.array([8, 14])


def cache_and_new(seed: int, head_size: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = ((4, 2, 4, 1, head_size), (2, 2, head_size), (2, 1, head_size), (2, 1, head_size))
    cache, query, key, value = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return cache, query, key, value


def decoded(arrays: tuple[jax.Array, ...], implementation: str | None, **options: Any) -> jax.Array:
    cache, query, key, value = arrays
    cache = ops.write_kv_cache(key, value, cache, SLOTS, implementation=implementation)
    options = {"max_query_len": 1, "implementation": implementation, **options}
    return ops.paged_attention(query, cache, TABLES, LENS, STARTS, **options)


@pytest.mark.parametrize(
    "call", [paged_call(), dense_call(), latent_call(), backward_call()], ids=lambda call: call.name
)
def test_an_ordinary_call_goes_to_the_kernels(call: Any) -> None:
    with pretended_gpu():
        assert choose(None, call) == "triton"


@pytest.mark.parametrize(("call", "served_by"), [row[1:] for row in BEYOND])
def test_a_call_beyond_the_kernels_goes_to_jnp_where_that_serves_it(call: Any, served_by: set[str]) -> None:
    with pretended_gpu():
        in_jnp = "xla" in served_by and "triton" not in served_by
        assert choose(None, call) == ("xla" if in_jnp else "triton")


@pytest.mark.parametrize("call", [row[1] for row in BEYOND])
def test_a_name_stays_that_of_a_call_beyond_the_kernels(call: Any) -> None:
    with pretended_gpu():
        assert choose("triton", call) == "triton"


def test_a_named_implementation_refuses_what_the_default_gives_to_jnp(seed: int) -> None:
    arrays = cache_and_new(seed, 576, "float32")
    with (
        pretended_gpu(),
        pytest.raises(Unsupported, match="head_size is 576 and its limit 512, which implementation 'tr"),
    ):
        decoded(arrays, "triton")


@pytest.mark.parametrize(
    ("head_size", "dtype", "launched"),
    [
        (64, "float32", ["write_kv_cache", "paged_attention"]),
        (12, "float16", ["write_kv_cache", "paged_attention"]),
        (576, "float32", ["write_kv_cache"]),
        (64, "float64", []),
    ],
)
@pytest.mark.parametrize("jits", [False, True], ids=["at once", "under jit"])
def test_the_write_and_the_attention_of_a_cache_are_both_served(
    head_size: int, dtype: str, launched: list[str], jits: bool, seed: int
) -> None:
    with jax.enable_x64(dtype == "float64"):
        arrays = cache_and_new(seed, head_size, dtype)
        run = jax.jit(decoded, static_argnums=1) if jits else decoded
        expected = run(arrays, "xla")
        with pretended_gpu() as found:
            out = run(arrays, None)
            assert [call.name for call in found] == launched
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("head_size", "dtype", "launched"), [(576, "float32", ["merge_states"]), (64, "float64", [])])
def test_a_prefix_that_sequences_share_is_attended_by_whoever_serves_each_part(
    head_size: int, dtype: str, launched: list[str], seed: int
) -> None:
    groups = PrefixGroups(prefix_lens=jnp.array([4, 4]), piece_starts=jnp.array([0, 2, 2]), piece_tokens=2)
    tables, lens = jnp.array([[1, 2], [1, 3]]), jnp.array([7, 6])
    # On a GPU products of float32 are of TF32 unless told else.
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        cache, query, *_ = cache_and_new(seed, head_size, dtype)
        arguments = (query, cache, tables, lens, STARTS)
        expected = ops.paged_attention(*arguments, max_query_len=1, implementation="xla")
        with pretended_gpu() as found:
            out = ops.paged_attention(*arguments, max_query_len=1, groups=groups)
            assert [call.name for call in found] == launched
        eps = np.finfo(dtype).eps
        np.testing.assert_allclose(out, expected, rtol=0, atol=8 * eps * np.abs(expected).max())


@pytest.mark.parametrize(
    "option", ["sinks", pytest.param("alibi_slopes", marks=pytest.mark.nightly), "relative_bias", "qq_bias"]
)
def test_biases_in_float64_beside_a_narrower_query_reach_the_kernels_in_float32(option: str, seed: int) -> None:
    shape = {"relative_bias": (2, 5), "qq_bias": (3, 3)}.get(option, (2,))
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        query, bias = jnp.asarray(rng.normal(size=(3, 2, 8)), jnp.float32), jnp.asarray(rng.normal(size=shape))

        def loss(bias: jax.Array) -> jax.Array:
            arguments: dict[str, Any] = {"max_query_len": 3, option: bias}
            return ops.attention(query, query, query, jnp.array([0, 3], jnp.int32), **arguments).sum()

        expected = jax.jit(jax.grad(loss))(bias)
        with pretended_gpu() as found:
            # Of another function: the choice is made while it is traced.
            gradient = jax.jit(jax.grad(lambda bias: loss(bias)))(bias)
        assert gradient.dtype == jnp.float64
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=2.0**-20 * np.abs(expected).max())
        assert {getattr(call, option).dtype for call in found} == {"float32"}


def test_what_jnp_computes_for_the_kernels_has_its_derivatives(seed: int) -> None:
    query = jnp.asarray(np.random.default_rng(seed).normal(size=(3, 1, 576)), jnp.float32)

    def loss(query: jax.Array, implementation: str | None) -> jax.Array:
        return ops.attention(
            query, query, query, jnp.array([0, 3]), max_query_len=3, implementation=implementation
        ).sum()

    second = jax.jit(jax.hessian(loss), static_argnums=1)
    expected = second(query, "xla")
    with pretended_gpu():
        np.testing.assert_array_equal(second(query, None), expected)


def test_attention_fn_takes_jnp_with_flaxs_dropout_for_heads_beyond_the_kernels(seed: int) -> None:
    query = jnp.asarray(np.random.default_rng(seed).normal(size=(2, 3, 1, 576)), jnp.float32)
    options: dict[str, Any] = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(seed)}
    expected = attention_fn(query, query, query, **options, implementation="xla")
    with pretended_gpu() as found:
        np.testing.assert_array_equal(attention_fn(query, query, query, **options), expected)
        attention_fn(query[..., :256], query[..., :256], query[..., :256])
        assert [call.name for call in found] == ["attention"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (KVCacheSpec(num_kv_heads=2, head_size=256, block_size=16, dtype="float8_e4m3fn"), "triton"),
        (LatentCacheSpec(kv_lora_rank=512, rope_dim=64, block_size=64, dtype="uint8"), "triton"),
        (LatentCacheSpec(kv_lora_rank=640, rope_dim=64, block_size=64, dtype="bfloat16"), "xla"),
    ],
    ids=["keys and values", "packed latents", "wide latents"],
)
def test_an_engine_knows_who_reads_its_cache(spec: KVCacheSpec | LatentCacheSpec, expected: str) -> None:
    with pretended_gpu():
        assert choose_for_cache(None, spec, "bfloat16") == expected
        assert choose_for_cache("triton", spec, "bfloat16") == "triton"


def test_it_is_said_once_that_jnp_reads_a_cache(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    arrays = cache_and_new(seed, 576, "float32")
    with caplog.at_level(logging.INFO, "jattn"), pretended_gpu():
        decoded(arrays, None)
        decoded(arrays, None)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "paged_attention: head_size is 576 and its limit 512, which implementation 'triton' does not serve; 'xla' "
        "computes it, slower than the kernels would. Name implementation='xla' where that is meant."
    )


def test_of_dense_attention_only_who_listens_is_told(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    query = jnp.asarray(np.random.default_rng(seed).normal(size=(1, 3, 1, 576)), jnp.float32)
    with caplog.at_level(logging.INFO, "jattn"), pretended_gpu():
        attention_fn(query, query, query)
    assert [record.levelname for record in caplog.records] == ["INFO"]
