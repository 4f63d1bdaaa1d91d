"""Caches that a module holds: any number of tokens a call, lengths of their own, and updates that nobody loses."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx

from jattn.nn import MultiHeadAttention, PagedCache
from tests.support.pretended_gpu import pretended_gpu
from torch_core.base.errors import InvalidInput, RequestTooLong, Unsupported

BATCH, LENGTH, FEATURES, BLOCK_SIZE = 2, 7, 16, 4


def build(**options: Any) -> MultiHeadAttention:
    options = {"num_heads": 4, "num_kv_heads": 2, "decode": False, **options}
    return MultiHeadAttention(in_features=FEATURES, bias_init=nnx.initializers.normal(0.5), rngs=nnx.Rngs(0), **options)


def holding(max_length: int = 12, **options: Any) -> MultiHeadAttention:
    module = build(**options)
    module.init_cache((BATCH, max_length, FEATURES), block_size=BLOCK_SIZE)
    return module


def lengths_of(module: MultiHeadAttention) -> list[Any]:
    assert module.cache_index is not None
    return module.cache_index[...].tolist()


def inputs(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape or (BATCH, LENGTH, FEATURES)), jnp.float32)


def turned(x: jax.Array, positions: jax.Array) -> jax.Array:
    """A rotary embedding of one frequency, with the signature of nnx.RoPE."""
    first, second = jnp.split(x, 2, -1)
    angle = 0.3 * positions[:, None]
    return jnp.concatenate([first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle)], -1)


EVERYTHING = {
    "rope": turned,
    "normalize_qk": True,
    "sliding_window": 4,
    "logits_soft_cap": 3.0,
    "alibi_slopes": (0.5, 0.25, 0.125, 0.1),
    "sinks": True,
    "scale": 0.4,
}


# Where arrays are changes neither what is refused nor what is served.
on_each_machine = pytest.mark.parametrize("machine", [contextlib.nullcontext, pretended_gpu], ids=["here", "gpu"])


@functools.cache
def _program(**options: Any) -> Any:
    return nnx.jit(lambda module, x: module(x, **options))


def at_once(module: MultiHeadAttention, x: Any, **options: Any) -> Any:
    """Calls a module in a program, which compiles sooner than its operations one by one."""
    return _program(**options)(module, x)


def close(one: Any, other: Any) -> bool:
    return np.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"attention_chunk": 3}], ids=["plain", "everything", "chunk"])
@pytest.mark.parametrize("pieces", [[7], [3, 1, 3]], ids=str)
def test_decode_in_any_pieces_gives_what_training_gives(options: dict[str, Any], pieces: list[int], seed: int) -> None:
    module, x = holding(**options), inputs(seed)
    expected = at_once(module, x, is_causal=True)
    cuts = np.cumsum([0, *pieces])
    found = [at_once(module, x[:, a:b], decode=True) for a, b in itertools.pairwise(cuts)]
    assert close(np.concatenate(found, 1), expected)
    assert lengths_of(module) == [LENGTH] * BATCH


def test_each_sequence_of_a_batch_has_a_length_of_its_own(seed: int) -> None:
    module, x, token = holding(), inputs(seed), inputs(seed + 1, BATCH, 1, FEATURES)
    rows, lengths = jnp.arange(BATCH), jnp.array([5, 2])
    # The next token stands behind each row's real ones; what is causal does not see what comes later.
    expected = module(x.at[rows, lengths].set(token[:, 0]), is_causal=True)
    found = module(x.at[1, 2:].set(jnp.nan), decode=True, lengths=lengths)
    assert close(found[0, :5], expected[0, :5])
    assert close(found[1, :2], expected[1, :2])
    # Padding is zeros before the output projection.
    assert module.out.bias is not None
    assert close(found[1, 2:], module.out.bias[...])
    assert lengths_of(module) == [5, 2]
    assert close(module(token, decode=True)[:, 0], expected[rows, lengths])


def test_lengths_make_the_rest_of_a_training_batch_padding(seed: int) -> None:
    module, x, lengths = build(), inputs(seed), jnp.array([5, 2])
    expected = module(x, is_causal=True)

    def loss(x: jax.Array) -> Any:
        y = module(x, is_causal=True, lengths=lengths)
        return jnp.where((jnp.arange(LENGTH) < lengths[:, None])[..., None], y, 0).sum(), y

    gradient, found = jax.grad(loss, has_aux=True)(x.at[1, 2:].set(jnp.nan))
    assert close(found[1, :2], expected[1, :2])
    assert np.isfinite(np.asarray(gradient)[1, :2]).all()


def test_cross_attention_writes_the_encoders_keys_once_and_reads_them_afterwards(seed: int) -> None:
    module = build(attention_type="encoder_decoder")
    module.init_cache((BATCH, LENGTH, FEATURES), block_size=BLOCK_SIZE)
    encoder, x, key_lengths = inputs(seed), inputs(seed + 1), jnp.array([LENGTH, 4])
    expected = module(x, encoder, key_lengths=key_lengths)
    first = module(x[:, :3], encoder, key_lengths=key_lengths, decode=True)
    later = module(x[:, 3:6], decode=True)
    assert close(jnp.concatenate([first, later], 1), expected[:, :6])


@jax.jit
def returned(module: MultiHeadAttention, x: jax.Array) -> tuple[MultiHeadAttention, jax.Array]:
    y = module(x)
    return module, y


def split(module: MultiHeadAttention, x: jax.Array) -> tuple[MultiHeadAttention, jax.Array]:
    graph, cache, rest = nnx.split(module, nnx.Cache, ...)

    def step(cache: Any, rest: Any, x: jax.Array) -> Any:
        merged = nnx.merge(graph, cache, rest)
        y = merged(x)
        return nnx.state(merged, PagedCache), y

    cache, y = jax.jit(step, donate_argnums=0)(cache, rest, x)
    return nnx.merge(graph, cache, rest), y


def scanned(module: MultiHeadAttention, x: jax.Array) -> tuple[MultiHeadAttention, jax.Array]:
    graph, cache, rest = nnx.split(module, nnx.Cache, ...)

    def step(cache: Any, token: jax.Array) -> Any:
        merged = nnx.merge(graph, cache, rest)
        y = merged(token[:, None])[:, 0]
        return nnx.state(merged, nnx.Cache), y

    cache, y = jax.jit(lambda cache, x: jax.lax.scan(step, cache, x.swapaxes(0, 1)))(cache, x)
    return nnx.merge(graph, cache, rest), y.swapaxes(0, 1)


def jitted(graph: bool) -> Callable[[MultiHeadAttention, jax.Array], tuple[MultiHeadAttention, jax.Array]]:
    def run(module: MultiHeadAttention, x: jax.Array) -> tuple[MultiHeadAttention, jax.Array]:
        return module, nnx.jit(lambda module, x: module(x), graph=graph)(module, x)

    return run


WAYS = {"jax.jit": returned, "split": split, "scan": scanned, "graph": jitted(True), "tree": jitted(False)}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_carry_the_cache_keeps_it_without_a_warning(way: str, seed: int) -> None:
    x = inputs(seed, BATCH, 3, FEATURES)
    expected = holding(decode=True)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module, y = WAYS[way](holding(decode=True), x)
        gc.collect()
    assert close(y, expected)
    assert lengths_of(module) == [3, 3]


# T1 of the traps that users meet.
def test_layers_that_hold_caches_are_scanned_and_mapped_by_nnx(seed: int) -> None:
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def layers(rngs: nnx.Rngs) -> MultiHeadAttention:
        module = MultiHeadAttention(2, 8, decode=True, rngs=rngs)
        module.init_cache((1, 6, 8))
        return module

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def scanned(module: MultiHeadAttention, x: jax.Array) -> jax.Array:
        return x + module(x)

    stacked, each, x = layers(nnx.Rngs(seed)), layers(nnx.Rngs(seed)), inputs(seed, 1, 5, 8)
    graph, state = nnx.split(each)
    expected = [x]
    for index in range(2):
        module = nnx.merge(graph, jax.tree.map(lambda leaf, index=index: leaf[index], state))
        expected.append(expected[-1] + at_once(module, expected[-1]))

    found = [scanned(stacked, x[:, :3]), scanned(stacked, x[:, 3:])]
    assert close(np.concatenate(found, 1), expected[-1])
    assert lengths_of(stacked) == [[5], [5]]
    mapped = nnx.jit(nnx.vmap(lambda module, x: x + module(x), in_axes=(0, None)))(each, x)
    assert close(mapped[0], expected[1])
    assert lengths_of(each) == [[5], [5]]


def test_a_jitted_function_that_drops_the_module_is_found_out(seed: int) -> None:
    module = holding()

    def step(module: MultiHeadAttention, x: jax.Array) -> jax.Array:
        return module(x, decode=True)

    # Not to wait for the garbage collector: nothing of the trace is in a cycle.
    with pytest.warns(RuntimeWarning, match=r"dropped it: the update is lost\. Return the module"):
        jax.jit(step)(module, inputs(seed, BATCH, 1, FEATURES))
    assert lengths_of(module) == [0, 0]


def test_a_module_that_a_jitted_function_closes_over_is_refused_by_flax(seed: int) -> None:
    module = holding()
    with pytest.raises(errors.TraceContextError, match="Cannot mutate PagedCache"):
        jax.jit(lambda x: module(x, decode=True))(inputs(seed, BATCH, 1, FEATURES))


# T2
def test_a_module_whose_cache_was_donated_says_so(seed: int) -> None:
    module, x = holding(), inputs(seed, BATCH, 1, FEATURES)
    after, _ = jax.jit(lambda m, x: (lambda y: (m, y))(m(x, decode=True)), donate_argnums=0)(module, x)
    graph, cache, rest = nnx.split(after, nnx.Cache, ...)
    jax.jit(lambda cache: cache, donate_argnums=0)(cache)
    with pytest.raises(InvalidInput, match=r"donated to a step and is deleted; go on with the module that the step"):
        nnx.merge(graph, cache, rest)(x, decode=True)


# T5
@pytest.mark.parametrize(
    ("options", "argument", "expected"),
    [
        ({}, None, "float32"),
        ({"dtype": jnp.bfloat16}, None, "bfloat16"),
        ({"param_dtype": jnp.float16}, None, "float16"),
        ({"kv_cache_dtype": jnp.float8_e4m3fn}, None, "float8_e4m3fn"),
        ({"dtype": jnp.bfloat16}, jnp.float32, "float32"),
    ],
)
def test_the_cache_has_the_dtype_of_the_computation_and_not_float32(
    options: dict[str, Any], argument: Any, expected: str
) -> None:
    module = build(**options)
    module.init_cache((BATCH, 12, FEATURES), argument)
    assert module.cached_key is not None
    assert module.cached_key.get_value().dtype.name == expected


@pytest.mark.parametrize(
    ("dtype", "of_cache"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16), (jnp.float16, jnp.bfloat16)]
)
def test_a_cache_of_another_dtype_than_the_computation_serves_it(dtype: Any, of_cache: Any, seed: int) -> None:
    module, x = build(dtype=dtype), inputs(seed)
    module.init_cache((BATCH, 12, FEATURES), of_cache)
    expected, found = at_once(module, x, is_causal=True), at_once(module, x, decode=True)
    assert found.dtype == dtype
    # Eight bits of mantissa in one of them.
    assert np.allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=0.05, atol=0.05)


@on_each_machine
def test_a_module_in_float64_decodes_in_float64(machine: Callable[[], Any], seed: int) -> None:
    with machine(), jax.enable_x64(True):
        x = np.random.default_rng(seed).normal(size=(BATCH, LENGTH, FEATURES))
        module = holding(param_dtype=jnp.float64)
        found = np.concatenate([at_once(module, each, decode=True) for each in (x[:, :3], x[:, 3:])], 1)
        assert np.allclose(found, at_once(module, x, is_causal=True), rtol=0, atol=1e-13)


def test_a_cache_that_came_back_from_a_file_as_numpys_arrays_goes_on(seed: int) -> None:
    x = inputs(seed)
    module, restored = holding(), holding()
    module(x[:, :3], decode=True)
    nnx.update(restored, jax.tree.map(np.asarray, nnx.state(module)))
    for token in (x[:, 3:4], x[:, 4:5]):
        assert close(restored(token, decode=True), module(token, decode=True))
    assert lengths_of(restored) == [5, 5]


def test_numpys_arrays_that_a_cache_was_given_stay_as_they_are(seed: int) -> None:
    module, arrays = holding(), jax.tree.map(np.array, nnx.state(holding(), nnx.Cache))
    nnx.update(module, arrays)
    module(inputs(seed), decode=True)
    assert not any(leaf.any() for leaf in jax.tree.leaves(arrays))


def test_a_step_without_tokens_changes_nothing(seed: int) -> None:
    module, x = holding(), inputs(seed)
    module(x, decode=True)
    assert module(x[:, :0], decode=True).shape == (BATCH, 0, FEATURES)
    assert lengths_of(module) == [LENGTH] * BATCH


def test_an_8_bit_cache_is_scaled(seed: int) -> None:
    x = inputs(seed)
    exact = holding()(x, decode=True)
    found = holding(kv_cache_dtype=jnp.int8, k_scale=0.03, v_scale=0.03)(x, decode=True)
    assert 0 < np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


def test_a_view_gets_a_cache_of_its_own(seed: int) -> None:
    module = build()
    view = nnx.view(module, decode=True, batch_size=BATCH, max_length=8)
    view(inputs(seed))
    assert lengths_of(view) == [LENGTH] * BATCH
    assert module.cached_key is None
    assert view.query.kernel is module.query.kernel


@on_each_machine
def test_what_does_not_fit_is_refused_outside_jit_and_is_nan_inside(machine: Callable[[], Any], seed: int) -> None:
    module, x = holding(max_length=8), inputs(seed)
    module(x[:, :6], decode=True, lengths=jnp.array([6, 2]))
    message = r"sequence 0 would hold 9 tokens and the module's cache holds 8 of each"
    with machine(), pytest.raises(RequestTooLong, match=message):
        module(x[:, :3], decode=True)
    assert lengths_of(module) == [6, 2]
    y = nnx.jit(lambda m, x: m(x, decode=True))(module, x[:, :3])
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


REFUSED: dict[str, tuple[type[Exception], Callable[[jax.Array], Any], str]] = {
    "decode without a cache": (InvalidInput, lambda x: build()(x, decode=True), "decode without a cache; call init_"),
    "another batch": (
        InvalidInput,
        lambda x: holding()(x[:1], decode=True),
        "for a batch of (2,), and the inputs need",
    ),
    "a mask": (
        Unsupported,
        lambda x: holding()(x, decode=True, mask=jnp.ones((1, 1, 1, 12))),
        "a mask with a cache; use lengths for padding",
    ),
    "dropout": (
        Unsupported,
        lambda x: holding(dropout_rate=0.5)(x, decode=True, deterministic=False),
        "dropout with a cache; use lengths",
    ),
    "sown weights": (Unsupported, lambda x: holding()(x, decode=True, sow_weights=True), "sow_weights with a cache;"),
    "an encoder": (
        Unsupported,
        lambda x: build(attention_type="encoder_only")(x, decode=True),
        "decode of a layer that holds no cache",
    ),
    "an encoder's cache": (
        Unsupported,
        lambda x: build(attention_type="encoder_only").init_cache((2, 8, 16)),
        "a layer that shares keys and values, or an encoder's, holds no cache.",
    ),
    "neither": (ValueError, lambda x: build(decode=None)(x), "decode was given neither to the module nor to the call"),
    "no dropout key": (
        InvalidInput,
        lambda x: build(dropout_rate=0.5, keep_rngs=False)(x, deterministic=False),
        "dropout needs rngs, and the module was built with keep_rngs=False",
    ),
    "features": (
        InvalidInput,
        lambda x: build()(x[..., :8]),
        "inputs_q has shape (2, 7, 8); it must be [..., length, 16]",
    ),
    "an encoder's features": (
        InvalidInput,
        lambda x: build(in_kv_features=8)(x, x),
        "inputs_k has shape (2, 7, 16); it must be [..., length, 8]",
    ),
    "a value's features": (
        InvalidInput,
        lambda x: build()(x, x, x[..., :8]),
        "inputs_v has shape (2, 7, 8); it must be [..., length, 16]",
    ),
    "no heads": (InvalidInput, lambda x: build(num_heads=0), "num_heads is 0; it must be from 1 to 65536."),
    "no key heads": (InvalidInput, lambda x: build(num_kv_heads=0), "num_kv_heads is 0; it must be from 1 to 65536."),
    "no elements": (InvalidInput, lambda x: build(head_dim=0), "head_dim is 0; it must be from 1 to 65536."),
    "a scale in an array": (
        InvalidInput,
        lambda x: build(scale=jnp.float32(0.5)),
        "scale is a JAX array; it is part of the program: give a number, such as float(scale).",
    ),
    "a batch below nothing": (InvalidInput, lambda x: build().init_cache((-2, 8, 16)), "input_shape is (-2, 8, 16); s"),
    "a batch of a float": (
        InvalidInput,
        lambda x: build().init_cache(cast("Any", (2.0, 9, 32))),
        "input_shape is (2.0, 9, 32); sizes of a batch must be ints of at least 0.",
    ),
    "no shape": (InvalidInput, lambda x: build().init_cache(cast("Any", 8)), "input_shape is 8; it must be (batch..."),
    "a value alone": (InvalidInput, lambda x: build()(x, None, x), "inputs_v is given without inputs_k"),
    "metadata alone": (InvalidInput, lambda x: build()(x, cache=jnp.zeros(1)), "one of cache and metadata is None"),
    "shared without": (InvalidInput, lambda x: build()(x, shared_kv=(x, x)), "built without kv_sharing=True"),
    "sharing nothing": (InvalidInput, lambda x: build(kv_sharing=True)(x), "no keys and values of its own"),
    "an attention_fn": (Unsupported, lambda x: build(attention_fn=lambda q, k, v: v), "a function of your own"),
    "an unknown type": (InvalidInput, lambda x: build(attention_type="self"), "attention_type is 'self'; use one of"),
    "rope across": (
        InvalidInput,
        lambda x: build(attention_type="encoder_decoder", rope=turned),
        "rope is given with 'encoder_decoder'",
    ),
    "slopes": (InvalidInput, lambda x: build(alibi_slopes=(1.0,)), "alibi_slopes has 1 numbers; it must have one for"),
    "two sizes": (
        InvalidInput,
        lambda x: build(qkv_features=32, head_dim=4),
        "qkv_features is 32 and head_dim 4 with 4",
    ),
    "lengths": (
        InvalidInput,
        lambda x: build()(x, lengths=jnp.arange(3)),
        "lengths is int32[3]; it must be int32[2], one for each row.",
    ),
    "a length beyond the row": (
        InvalidInput,
        lambda x: build()(x, lengths=jnp.array([7, 8])),
        "lengths of row 1 is 8; it must be from 0 to 7, the tokens of a padded row.",
    ),
    "a negative length in decode": (
        InvalidInput,
        lambda x: holding()(x, decode=True, lengths=jnp.array([-1, 7])),
        "lengths of row 0 is -1; it must be from 0 to 7",
    ),
    "an encoder's length beyond the row": (
        InvalidInput,
        lambda x: build(attention_type="encoder_decoder")(x, x[:, :4], key_lengths=jnp.array([4, 5])),
        "key_lengths of row 1 is 5; it must be from 0 to 4",
    ),
    "an encoder's lengths for self-attention": (
        InvalidInput,
        lambda x: holding()(x, decode=True, key_lengths=jnp.array([7, 7])),
        "key_lengths is given for self-attention with a cache",
    ),
    "positions without rope": (
        InvalidInput,
        lambda x: build()(x, input_positions=jnp.arange(7)),
        "input_positions is given and the module has no rope",
    ),
    "positions of another shape": (
        InvalidInput,
        lambda x: build(rope=turned)(x, input_positions=jnp.arange(5)),
        "input_positions has shape (5,); it must be (2, 7), or (7,) for all rows.",
    ),
    "positions that are no integers": (
        InvalidInput,
        lambda x: build(rope=turned)(x, input_positions=jnp.arange(7.0)),
        "input_positions is float32; positions are integers, such as int32.",
    ),
    "lengths in decode": (
        InvalidInput,
        lambda x: holding()(x, decode=True, lengths=jnp.ones(2)),
        "lengths is float32[2]; it must be int32[2], one for each row.",
    ),
    "int8 alone": (InvalidInput, lambda x: build(kv_cache_dtype="int8"), "int8 and k_scale or v_scale is None"),
    "a dtype of no cache": (
        InvalidInput,
        lambda x: build(kv_cache_dtype="fp8"),
        "the cache's dtype is fp8; it must be",
    ),
    "integers for a cache": (
        InvalidInput,
        lambda x: build().init_cache((2, 8, 16), jnp.int32),
        "the cache's dtype is int32; it must be one of float32, ",
    ),
    "no batch": (InvalidInput, lambda x: build().init_cache((16,)), "input_shape is (16,); it must be (batch..., "),
    "a list": (
        InvalidInput,
        lambda x: build()(cast("Any", [[1.0]])),
        "inputs_q is a list; it must be an array (jnp.asarray).",
    ),
    "an encoder's keys for a decoder": (
        InvalidInput,
        lambda x: holding()(x, x[:, :4], decode=True),
        "inputs_k has 4 tokens and inputs_q 7; with a cache a decoder's are the same tokens.",
    ),
    "no metadata": (
        InvalidInput,
        lambda x: build()(x, cache=jnp.zeros(1), metadata=cast("Any", {})),
        "metadata is a dict; use AttentionMetadata.build.",
    ),
    "no tokens": (InvalidInput, lambda x: holding(max_length=0), "max_length is 0; it must be an int of at least 1."),
}


@on_each_machine
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason(what: str, machine: Callable[[], Any], seed: int) -> None:
    kind, call, message = REFUSED[what]
    with machine(), pytest.raises(kind, match=re.escape(message)):
        call(inputs(seed))
