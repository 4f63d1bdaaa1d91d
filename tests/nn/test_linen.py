"""The linen twin: flax's parameters and the collection `cache`, and the bridge in both directions."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, linen, nnx, serialization
from flax.nnx import bridge

from jattn.nn import MultiHeadAttention, PagedAttention
from jattn.nn import linen as twin
from torch_core.base.errors import InvalidInput, RequestTooLong, Unsupported

BATCH, LENGTH, FEATURES = 2, 6, 16
KEY = jax.random.key(0)


def inputs(seed: int, length: int = LENGTH) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(BATCH, length, FEATURES)), jnp.float32)


def close(one: Any, other: Any) -> bool:
    return np.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"normalize_qk": True, "dropout_rate": 0.5, "deterministic": False}],
    ids=["plain", "norms and dropout"],
)
def test_parameters_and_outputs_are_flaxs(options: dict[str, Any], seed: int) -> None:
    x, mask = inputs(seed), linen.make_causal_mask(jnp.ones((BATCH, LENGTH)))
    theirs, ours = linen.MultiHeadDotProductAttention(4, **options), twin.MultiHeadAttention(4, **options)
    rngs = {"params": KEY, "dropout": jax.random.key(1)}
    variables = jax.jit(theirs.init)(rngs, x)
    assert jax.eval_shape(ours.init, rngs, x) == jax.eval_shape(lambda: variables)
    call = {"mask": mask, "rngs": {"dropout": KEY}}
    expected, found = (jax.jit(functools.partial(each.apply, **call))(variables, x) for each in (theirs, ours))
    assert close(found, expected)


def decoding(**options: Any) -> twin.MultiHeadAttention:
    return twin.MultiHeadAttention(4, decode=True, max_length=8, block_size=4, **options)


def lengths_in(cache: Any) -> list[int]:
    return cache["cache_index"].tolist()


def test_decode_of_any_length_gives_what_the_nnx_module_gives(seed: int) -> None:
    layer, x = decoding(num_kv_heads=2), inputs(seed)
    # T20: the dummy input of init is short, the cache is not.
    variables: Any = jax.jit(layer.init)(KEY, x[:, :1])
    assert variables["cache"]["cached_key"].shape == (1 + 2 * BATCH, 4, 2, 4)
    module = MultiHeadAttention(4, FEATURES, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0))
    nnx.update(module, variables["params"])
    expected = jax.jit(functools.partial(module, is_causal=True))(x)
    apply = jax.jit(functools.partial(layer.apply, mutable=["cache"]))
    first, updated = apply(variables, x[:, :5], lengths=jnp.array([5, 3]))
    variables = {**variables, **updated}
    assert close(first[0], expected[0, :5])
    later, updated = apply(variables, x[:, 5:])
    assert close(later[0, 0], expected[0, 5])
    assert lengths_in(updated["cache"]) == [6, 4]


def test_without_the_mutable_collection_flax_refuses_the_write(seed: int) -> None:
    layer, x = decoding(), inputs(seed)
    with pytest.raises(errors.ModifyScopeVariableError, match="cache"):
        layer.apply(layer.init(KEY, x[:, :1]), x)


def test_a_cache_that_flax_reads_from_bytes_goes_on(seed: int) -> None:
    x, layer = inputs(seed), twin.MultiHeadAttention(4, decode=True, max_length=8)
    variables = layer.init(KEY, x)
    variables = {**variables, **layer.apply(variables, x, mutable=["cache"])[1]}
    restored = serialization.from_bytes(layer.init(jax.random.key(1), x), serialization.to_bytes(variables))
    again = (layer.apply(each, x[:, :1], mutable=["cache"])[0] for each in (variables, restored))
    assert close(*again)


def test_an_nnx_module_holding_a_cache_becomes_a_linen_module(seed: int) -> None:
    def holding(*, rngs: nnx.Rngs) -> MultiHeadAttention:
        module = MultiHeadAttention(4, FEATURES, decode=True, rngs=rngs)
        module.init_cache((BATCH, 8, FEATURES))
        return module

    layer, x = bridge.to_linen(holding), inputs(seed)
    variables = layer.init(KEY, x[:, :1])
    # A type of variables is a collection of its own.
    variables = {**variables, "PagedCache": holding_cache(holding)}
    y, updated = layer.apply(variables, x, mutable=["PagedCache"])
    module = holding(rngs=nnx.Rngs(0))
    nnx.update(module, variables["params"])
    assert close(y, module(x))
    assert lengths_in(updated["PagedCache"]) == [LENGTH] * BATCH


def holding_cache(build: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(build(rngs=nnx.Rngs(0)), nnx.Cache))


def test_the_linen_twin_becomes_an_nnx_module(seed: int) -> None:
    x = inputs(seed)
    module: Any = bridge.lazy_init(bridge.ToNNX(decoding(), rngs=nnx.Rngs(0)), x[:, :1])
    first, second = module(x[:, :5], mutable=["cache"]), module(x[:, 5:], mutable=["cache"])
    assert module.cache_index[...].tolist() == [LENGTH] * BATCH
    plain = twin.MultiHeadAttention(4).apply(
        {"params": nnx.to_pure_dict(nnx.state(module, nnx.Param))}, x, is_causal=True
    )
    assert close(jnp.concatenate([first, second], 1), plain)


def test_the_core_becomes_a_linen_module() -> None:
    layer = bridge.to_linen(PagedAttention, 4, 8)
    assert isinstance(layer.nnx_class(*layer.args, rngs=nnx.Rngs(0)), PagedAttention)


def overflow(layer: Any, variables: Any, x: jax.Array) -> Any:
    return layer.apply(variables, x, mutable=["cache"])


def of_another_batch(layer: Any, variables: Any, x: jax.Array) -> Any:
    return layer.apply(variables, jnp.concatenate([x, x]), mutable=["cache"])


def deleted(layer: Any, variables: Any, x: jax.Array) -> Any:
    variables["cache"]["cached_key"].delete()
    return layer.apply(variables, x, mutable=["cache"])


@pytest.mark.parametrize(
    ("use", "tokens", "error", "message"),
    [
        (overflow, 7, RequestTooLong, "would hold 7 tokens and the module's cache holds 6 of each; call init of a"),
        (overflow, 7, RequestTooLong, "a module with a larger max_length."),
        (of_another_batch, 1, InvalidInput, "; call init with the inputs' batch."),
        (deleted, 1, InvalidInput, "; go on with the variables that the step returned, or call init."),
    ],
)  # fmt: skip
def test_a_cache_that_does_not_fit_is_refused_by_the_names_of_linen(use, tokens, error, message, seed) -> None:
    layer, x = twin.MultiHeadAttention(4, decode=True, max_length=6, block_size=4), inputs(seed, 7)
    variables = layer.init(KEY, x[:, :1])

    with pytest.raises(error, match=re.escape(message)):
        use(layer, variables, x[:, :tokens])


def test_a_program_gives_nan_beyond_max_length_and_not_beyond_its_blocks(seed) -> None:
    layer, x = twin.MultiHeadAttention(4, decode=True, max_length=6, block_size=4), inputs(seed, 7)
    variables = layer.init(KEY, x[:, :1])

    found, _ = jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["cache"]))(variables, x)

    assert np.isnan(found).all()


REFUSED: dict[str, tuple[type[Exception], dict[str, Any], dict[str, Any], str]] = {
    "no max_length": (
        InvalidInput,
        {"decode": True},
        {},
        "decode without max_length; the cache's size comes from there",
    ),
    "a mask": (
        Unsupported,
        {"decode": True, "max_length": 8},
        {"mask": jnp.ones((1, 1, 1, 8))},
        "a mask with a cache; use lengths",
    ),
    "an attention_fn": (Unsupported, {"attention_fn": lambda q, k, v: v}, {}, "a function of your own"),
    "an einsum": (Unsupported, {"qk_attn_weights_einsum_cls": lambda: jnp.einsum}, {}, "an einsum of your own"),
    "features": (InvalidInput, {"qkv_features": 18}, {}, "qkv_features is 18; it must be a multiple of num_heads, 4."),
    "positions without rope": (
        InvalidInput,
        {"decode": True, "max_length": 8},
        {"input_positions": jnp.arange(1)},
        "input_positions is given and the module has no rope",
    ),
    "an encoder's keys for a decoder": (
        InvalidInput,
        {"decode": True, "max_length": 8},
        {"inputs_k": jnp.ones((BATCH, 3, FEATURES))},
        "inputs_k has 3 tokens and inputs_q 1; with a cache they are the same tokens.",
    ),
    "a value alone": (
        InvalidInput,
        {},
        {"inputs_v": jnp.ones((BATCH, 1, FEATURES))},
        "inputs_v is given without inputs_k",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason(what: str, seed: int) -> None:
    kind, options, call, message = REFUSED[what]
    layer, x = twin.MultiHeadAttention(4, **options), inputs(seed, 1)
    with pytest.raises(kind, match=message):
        layer.apply(layer.init(KEY, x), x, **call, mutable=["cache"])
