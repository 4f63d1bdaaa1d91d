"""What flax's own modules may ask of attention_fn: honoured as flax does it, or refused."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jattn import attention, dropout_seeds, ops
from jattn.nn import DeepSeekRoPE, MultiHeadAttention, MultiHeadLatentAttention, attention_fn
from jattn.nn.linen import MultiHeadAttention as LinenMultiHeadAttention
from jattn.nn.options import DenseOptions
from torch_core.attention.dropout import keep_factor, keep_mask
from torch_core.base.errors import InvalidInput, Unsupported

BATCH, LENGTH, KEYS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 6, 4, 2, 8
PADDING = jnp.array([[1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 0]], bool)[:, None, None]


def arrays(seed: int, *batch: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng, batch = np.random.default_rng(seed), batch or (BATCH,)
    shapes = ((LENGTH, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))
    query, key, value = (jnp.asarray(rng.normal(size=(*batch, *s, HEAD_DIM)), jnp.float32) for s in shapes)
    return query, key, value


def close(one: Any, other: Any) -> bool:
    return np.allclose(one, other, rtol=1e-5, atol=1e-5)


def at_once(function: Any, *arrays: Any, **options: Any) -> Any:
    """Calls a function in a program of its own, which compiles sooner than its operations one by one."""
    return jax.jit(functools.partial(function, **options))(*arrays)


class SowsNothing:
    def sow(self, *_: Any) -> None: ...


HONOURED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bias": {"bias": jnp.linspace(-1, 1, BATCH * HEADS * LENGTH * KEYS).reshape(BATCH, HEADS, LENGTH, KEYS)},
    "padding": {"mask": PADDING},
    "a mask of numbers": {"mask": jnp.tri(LENGTH, KEYS, 2)[None, None]},
    "a mask for each head": {"mask": jnp.tri(LENGTH, KEYS, 1, bool) | (jnp.arange(HEADS) == 1)[:, None, None]},
    "dropout": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(3)},
    "dropout apart": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(3), "broadcast_dropout": False},
    "dropout off": {"dropout_rate": 0.5, "deterministic": True},
    "precision": {"precision": "highest"},
    "dtype": {"dtype": jnp.float32},
}
WAYS = ("torch", "xla")
# These have a batch axis of their own.
TWO_AXES = ("bias", "padding", "dropout apart")


@pytest.mark.parametrize(
    ("what", "batch"), [*((what, (BATCH,)) for what in HONOURED), *((what, (1, BATCH)) for what in TWO_AXES)]
)
def test_the_result_is_that_of_flax(what: str, batch: tuple[int, ...], seed: int) -> None:
    options = dict(HONOURED[what])
    if len(batch) == 2 and what in ("bias", "padding"):
        options = {name: array[None] for name, array in options.items()}
    query, key, value = arrays(seed, *batch)
    # Flax's fast path takes masks of one batch axis only; with a module it takes the other.
    expected = at_once(nnx.dot_product_attention, query, key, value, **options, module=SowsNothing())
    # Kernels, where they are the default, count numbers of their own.
    implementation = "xla" if "dropout_rng" in options and ops.choose(None) != "xla" else None
    assert close(at_once(attention_fn, query, key, value, **options, implementation=implementation), expected)


@pytest.mark.parametrize(
    "options",
    [{"mask": PADDING}, {"lengths": jnp.array([4, 2]), "key_lengths": jnp.array([6, 3])}, {"is_causal": True}],
    ids=["padding", "lengths", "causal"],
)
def test_the_packed_call_of_the_kernels_gives_what_jnp_gives(options: dict[str, Any], seed: int) -> None:
    query, key, value = arrays(seed)
    found, expected = (at_once(attention_fn, query, key, value, **options, implementation=each) for each in WAYS)
    assert close(found, expected)
    assert np.abs(expected).min() < np.abs(expected).max()


@pytest.mark.parametrize("broadcast", [True, False])
def test_the_kernels_drop_by_seeds_from_the_key(broadcast: bool, seed: int) -> None:
    query, key, value = arrays(seed)
    rng, options = jax.random.key(seed), {"dropout_rate": 0.4, "broadcast_dropout": broadcast}
    found = at_once(attention_fn, query, key, value, dropout_rng=rng, **options, implementation="torch")
    seeds = dropout_seeds(rng, BATCH, HEADS, broadcast=broadcast)
    factors = keep_mask(np.asarray(seeds), np.arange(LENGTH), (0, KEYS), 0.4) * keep_factor(0.4)
    assert (factors == factors[:1, :1]).all() == broadcast
    weights = at_once(linen.dot_product_attention_weights, query, np.repeat(key, HEADS // KV_HEADS, 2))
    expected = np.einsum("bhqk,bkhd->bqhd", weights * factors, np.repeat(value, HEADS // KV_HEADS, 2))
    assert close(found, expected)


def test_the_kernels_gradient_drops_what_they_dropped(seed: int) -> None:
    arguments = arrays(seed)

    def loss(implementation: str, *x: jax.Array) -> jax.Array:
        seeds = dropout_seeds(jax.random.key(seed), BATCH, HEADS)
        query, key, value = (array.reshape(-1, *array.shape[2:]) for array in x)
        starts = jnp.arange(BATCH + 1, dtype=jnp.int32)
        options: dict[str, Any] = {"max_query_len": LENGTH, "max_key_len": KEYS, "implementation": implementation}
        out = attention(
            query, key, value, starts * LENGTH, starts * KEYS, dropout_rate=0.4, dropout_seeds=seeds, **options
        )
        return (out * jnp.sin(jnp.arange(out.size)).reshape(out.shape)).sum()

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1, 2)))(*arguments) for name in ("torch", "xla")
    )
    assert all(close(*pair) for pair in zip(found, expected, strict=True))
    mapped = jax.jit(jax.vmap(jax.grad(functools.partial(loss, "torch"), argnums=(0, 1, 2))))
    folded = mapped(*(jnp.stack([x, 2 * x]) for x in arguments))
    assert all(close(x[0], y) for x, y in zip(folded, found, strict=True))


def test_the_default_differentiates_what_its_kernels_do_not(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The default of this machine is an implementation with kernels, as on CUDA.
    monkeypatch.setattr(sys.modules["jattn.ops.choose"], "_CPU_DEFAULT", "torch")
    query, key, value = arrays(seed)
    bias = jnp.linspace(-1, 1, HEADS * 5).reshape(HEADS, 5)

    def loss(bias: jax.Array, implementation: str | None) -> jax.Array:
        return (attention_fn(query, key, value, relative_bias=bias, implementation=implementation) ** 2).sum()

    assert close(*(at_once(jax.grad(loss), bias, implementation=each) for each in (None, "xla")))
    with pytest.raises(Unsupported, match="relative_bias has a derivative, which implementation 'torch' does not"):
        jax.grad(loss)(bias, "torch")


@pytest.mark.parametrize("module", ["attention_fn", "nnx", "linen", "latent"])
def test_gradients_may_be_added_up_in_any_order_where_a_module_says_so(
    module: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def noting(*args: Any, deterministic: bool, **options: Any) -> jax.Array:
        asked.append(deterministic)
        return attention(*args, deterministic=deterministic, **options)

    monkeypatch.setattr(ops, "attention", noting)
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(2, 4, 16)), jnp.float32)
    for order in ({}, {"deterministic_gradients": False}):
        options: dict[str, Any] = {"implementation": "torch", **order}
        if module == "attention_fn":
            attention_fn(*arrays(seed), **options)
        elif module == "linen":
            layer = LinenMultiHeadAttention(num_heads=2, **options)
            layer.apply(layer.init(jax.random.key(0), x), x)
        elif module == "nnx":
            MultiHeadAttention(num_heads=2, in_features=16, **options, decode=False, rngs=nnx.Rngs(0))(x)
        else:
            sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
            MultiHeadLatentAttention(num_heads=2, in_features=16, **sizes, **options, rngs=nnx.Rngs(0))(x)
    half = len(asked) // 2
    assert half > 0
    assert all(asked[:half])
    assert not any(asked[half:])


def test_padding_holds_anything_and_gives_zeros(seed: int) -> None:
    query, key, value = arrays(seed)
    lens: dict[str, Any] = {"lengths": jnp.array([4, 2]), "key_lengths": jnp.array([6, 3])}
    expected = at_once(attention_fn, query, key, value, **lens)
    query, key, value = (np.array(x) for x in (query, key, value))
    query[1, 2:] = key[1, 3:] = value[1, 3:] = np.nan
    for implementation in WAYS:
        found = np.asarray(at_once(attention_fn, query, key, value, **lens, implementation=implementation))
        assert close(found, expected)
        assert not found[1, 2:].any()


def test_a_row_that_sees_nothing_gives_zeros_and_no_nan_in_a_gradient(seed: int) -> None:
    query, key, value = arrays(seed)
    mask = np.ones((BATCH, 1, LENGTH, KEYS), bool)
    mask[0, :, 1] = False

    def both(*arrays: jax.Array) -> Any:
        out, pullback = jax.vjp(lambda q, k, v: attention_fn(q, k, v, mask=jnp.asarray(mask)), *arrays)
        return out, pullback(jnp.ones_like(out))

    out, gradients = at_once(both, query, key, value)
    assert not np.asarray(out)[0, 1].any()
    assert all(np.isfinite(x).all() for x in gradients)


# T4 of the traps that users meet.
def test_one_causal_query_sees_every_key(seed: int) -> None:
    query, key, value = arrays(seed)
    assert close(attention_fn(query[:, :1], key, value, is_causal=True), attention_fn(query[:, :1], key, value))


def test_flaxs_module_decodes_with_it_as_with_its_own(seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(BATCH, 3, 16)).astype(np.float32)
    found = []
    for function in (nnx.dot_product_attention, attention_fn):
        module = nnx.MultiHeadAttention(4, 16, num_kv_heads=2, decode=True, attention_fn=function, rngs=nnx.Rngs(0))
        module.init_cache((BATCH, 8, 16))
        step = nnx.jit(lambda module, x: module(x))
        found.append(np.concatenate([step(module, x[:, i : i + 1]) for i in range(3)], 1))
    assert close(*found)


def test_weights_are_sown_in_both_of_flaxs_worlds(seed: int) -> None:
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(BATCH, 3, 16)), jnp.float32)
    module = nnx.MultiHeadAttention(4, 16, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0))
    _, sown = nnx.capture(module, nnx.Intermediate)(x, sow_weights=True)
    assert close(jax.tree.leaves(sown)[0].sum(-1), jnp.ones((BATCH, 4, 3)))
    layer: Any = linen.MultiHeadDotProductAttention(4, attention_fn=attention_fn)
    variables = layer.init(jax.random.key(0), x)
    _, sown = layer.apply(variables, x, sow_weights=True, mutable=["intermediates"])
    assert close(sown["intermediates"]["attention_weights"][0].sum(-1), jnp.ones((BATCH, 4, 3)))


def test_input_positions_reach_rope(seed: int) -> None:
    query, key, value = arrays(seed)
    rope = functools.partial(attention_fn, rope=lambda x, positions: x * jnp.cos(positions)[:, None])
    positions = jnp.array([[3, 5, 7, 2], [0, 1, 2, 3]])
    query, key, value = (np.asarray(x)[:, :LENGTH] for x in (query, key, value))
    for given, turned in (({"input_positions": positions}, positions), ({}, jnp.arange(LENGTH)[None])):
        angles = np.cos(turned)[..., None, None].astype(np.float32)
        expected = at_once(attention_fn, query * angles, key * angles, value)
        assert close(at_once(rope, query, key, value, **given), expected)


REFUSED: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "positions without rope": (
        InvalidInput,
        {"input_positions": jnp.arange(4)},
        "input_positions is given and rope is",
    ),
    "dropout without a key": (InvalidInput, {"dropout_rate": 0.5}, "dropout_rate is 0.5 and dropout_rng None; pass a"),
    "a rope of another size": (
        InvalidInput,
        {"rope": DeepSeekRoPE(dim=4)},
        "x has heads of 8 elements and the rope is for 4; build it with dim=8.",
    ),
    "dropout of all": (
        InvalidInput,
        {"dropout_rate": 1.0, "dropout_rng": jax.random.key(0)},
        "dropout_rate is 1.0; it must be at least 0 and less than 1.",
    ),
    "a mask of another shape": (
        InvalidInput,
        {"mask": jnp.ones((BATCH, 3, LENGTH, KEYS))},
        r"mask has shape \(2, 3, 4, 6\); it must be broadcastable to",
    ),
    "a mask in a list": (InvalidInput, {"mask": [[True] * KEYS] * LENGTH}, "mask is a list; it must be an array"),
    "a bias of another shape": (InvalidInput, {"bias": jnp.ones((LENGTH, 5))}, r"bias has shape \(4, 5\); it must be"),
    "a kernel with a bias": (
        Unsupported,
        {"bias": jnp.ones((LENGTH, KEYS)), "implementation": "torch"},
        "attention with a bias is not served by implementation 'torch'; use 'xla', or None.",
    ),
    "a kernel with weights to sow": (
        Unsupported,
        {"module": SowsNothing(), "implementation": "torch"},
        "attention with weights to sow is not served by implementation 'torch'; use 'xla', or None.",
    ),
    "an einsum": (Unsupported, {"qk_attn_weights_einsum": jnp.einsum}, "an einsum of your own was given"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_with_the_reason(what: str, seed: int) -> None:
    kind, options, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        attention_fn(*arrays(seed), **options)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 4, 8), (3, 6, 2, 8), (3, 6, 2, 8)), "with the same batch"),
        (((2, 4, 4, 8), (2, 6, 2, 8), (2, 5, 2, 8)), "lengths and heads must be equal"),
        (((4, 8), (6, 8), (6, 8)), "they must be"),
        (((2, 4, 4, 8), (2, 6, 2, 16), (2, 6, 2, 8)), "head_size = 8"),
        (((2, 4, 4, 8), (2, 6, 3, 8), (2, 6, 3, 8)), "multiple"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: Any, message: str) -> None:
    query, key, value = (jnp.ones(shape) for shape in shapes)
    with pytest.raises(InvalidInput, match=message):
        attention_fn(query, key, value)


def test_every_option_is_a_keyword_of_the_op_and_is_described() -> None:
    options = DenseOptions.__annotations__.keys()
    assert options - inspect.signature(attention).parameters.keys() == set()
    assert [name for name in options if not re.search(rf"\b{name}\b", inspect.getdoc(attention_fn) or "")] == []
