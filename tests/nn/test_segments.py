"""Packed rows in attention_fn and the modules: the kernels' way and jnp's, positions, masks, padding, refusals."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.nn import MultiHeadAttention, attention_fn, dense
from jattn.nn.linen import MultiHeadAttention as LinenMultiHeadAttention
from jattn.ops import choose
from tests.nn.test_attention_fn import at_once
from torch_core.base.errors import InvalidInput, Unsupported

# Left padding, two documents; three documents and padding.
IDS: Any = np.array([[0, 0, 4, 4, 4, 9], [1, 1, 2, 3, 3, 0]], np.int32)
REAL = (IDS > 0)[:, :, None]
MASK: Any = (IDS[:, :, None] == IDS[:, None]) & (IDS > 0)[:, :, None]


def _arrays(seed: int) -> Any:
    random = np.random.default_rng(seed)
    query, key, value = (jnp.asarray(random.normal(size=(2, 6, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    return query, key, value


def _poisoned(*arrays: jax.Array) -> Any:
    return [np.where(REAL[..., None], x, np.float32("nan")) for x in arrays]


def _close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["torch", "xla"])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"is_causal": True, "sliding_window": 2, "sinks": jnp.ones(4), "logits_soft_cap": 2.0}],
    ids=["both ways", "causal", "window, sinks and cap"],
)
def test_segments_are_a_mask_and_padding_is_not_read(options: dict[str, Any], implementation: str, seed: int) -> None:
    arrays = _arrays(seed)
    poisoned = _poisoned(*arrays)
    found = at_once(attention_fn, *poisoned, **options, segment_ids=IDS, implementation=implementation)
    _close(found, at_once(attention_fn, *arrays, **options, mask=MASK[:, None], implementation="xla"))


def test_gradients_are_those_of_the_mask(seed: int) -> None:
    def loss(arrays: Any, **options: Any) -> jax.Array:
        return (attention_fn(*arrays, is_causal=True, **options) ** 2).sum()

    arrays = _arrays(seed)
    found = at_once(jax.grad(functools.partial(loss, segment_ids=IDS, implementation="torch")), _poisoned(*arrays))
    expected = at_once(jax.grad(functools.partial(loss, mask=MASK[:, None])), arrays)
    for ours, theirs in zip(found, expected, strict=True):
        _close(ours, np.where(REAL[..., None], theirs, 0))


@pytest.mark.parametrize(
    "options",
    [
        {"bias": jnp.linspace(-1, 1, 36).reshape(6, 6)},
        {"mask": np.arange(6) != 3},
        {"dropout_rate": 0.5, "dropout_rng": jax.random.key(1)},
        {"precision": "highest"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_jnp_takes_segments_with_everything_else(options: dict[str, Any], seed: int) -> None:
    arrays = _arrays(seed)
    found = at_once(attention_fn, *_poisoned(*arrays), **options, segment_ids=IDS, is_causal=True)
    mask = MASK[:, None] & options.pop("mask", True)
    _close(found, at_once(attention_fn, *arrays, **options, mask=mask, is_causal=True))


def test_a_chunk_counts_from_the_first_token_of_a_segment(seed: int) -> None:
    arrays, options = _arrays(seed), {"is_causal": True, "attention_chunk": 2}
    found = attention_fn(*arrays, **options, segment_ids=IDS)
    biased = attention_fn(*arrays, **options, segment_ids=IDS, bias=jnp.zeros((6, 6)))
    alone = attention_fn(*(x[:1, 2:5] for x in arrays), **options)
    _close(found[:1, 2:5], alone)
    _close(biased, found)


def test_cross_attention_has_ids_of_its_keys(seed: int) -> None:
    query, key, value = _arrays(seed)
    ids, key_ids = np.array([[1, 1, 2, 2, 2, 0]] * 2), np.array([[1, 2, 2, 0]] * 2)
    key, value = key[:, :4], value[:, :4]
    mask = (ids[:, :, None] == key_ids[:, None]) & (ids > 0)[:, :, None]
    expected = at_once(attention_fn, query, key, value, mask=mask[:, None])
    for implementation in ("torch", "xla"):
        options: dict[str, Any] = {"segment_ids": ids, "key_segment_ids": key_ids, "implementation": implementation}
        _close(at_once(attention_fn, query, key, value, **options), expected)


def _turned(x: jax.Array, positions: jax.Array) -> jax.Array:
    return x + positions[None, :, None]


def test_positions_count_from_the_first_token_of_a_segment(seed: int) -> None:
    arrays, positions = _arrays(seed), jnp.array([[0, 1, 0, 1, 2, 0], [0, 1, 0, 0, 1, 0]])
    rope = functools.partial(attention_fn, rope=_turned, segment_ids=IDS)
    _close(at_once(rope, *arrays), at_once(rope, *arrays, input_positions=positions))


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_of_segments_with_known_values_uses_the_kernels(causal: bool, seed: int) -> None:
    arrays, mask = _arrays(seed), jnp.asarray((np.tril(MASK) if causal else MASK)[:, None])
    # "torch" serves no mask: the call would be refused.
    found = at_once(attention_fn, *arrays, mask=mask, implementation="torch")
    _close(found, at_once(attention_fn, *arrays, mask=mask, implementation="xla"))


@pytest.mark.parametrize("mask", [np.tri(6, k=1, dtype=bool), MASK[0] & (np.arange(6) != 3)], ids=["shifted", "hole"])
def test_another_mask_is_not_taken_for_segments(mask: Any, seed: int) -> None:
    with pytest.raises(Unsupported, match="a mask that is not"):
        attention_fn(*_arrays(seed), mask=mask, implementation="torch")


def test_the_log_says_once_that_a_traced_mask_is_slow(seed: int, monkeypatch: Any, caplog: Any) -> None:
    dense._say_slow.cache_clear()
    monkeypatch.setattr(dense.ops, "choose", lambda implementation, call: "triton")
    arrays = _arrays(seed)
    with caplog.at_level(logging.WARNING, "jattn.nn.dense"):
        for _ in range(2):
            jax.make_jaxpr(lambda mask: attention_fn(*arrays, mask=mask))(MASK[:, None])
    assert [record.message.count("segment_ids=") for record in caplog.records] == [1]
    monkeypatch.undo()
    assert choose(None) in ("xla", "triton")


def test_the_modules_take_segments_and_left_padding(seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(2, 6, 16)).astype(np.float32)
    module = MultiHeadAttention(4, 16, num_kv_heads=2, rope=_turned, decode=False, rngs=nnx.Rngs(0))
    out = np.asarray(at_once(functools.partial(module, is_causal=True, segment_ids=IDS), x))
    alone = functools.partial(module, is_causal=True)
    _close(out[:1, 2:5], at_once(alone, x[:1, 2:5]))
    _close(out[1:, 3:5], at_once(alone, x[1:, 3:5]))
    assert module.out.bias is not None
    _close(out[0, :2], np.broadcast_to(module.out.bias[...], (2, 16)))

    twin = LinenMultiHeadAttention(4, num_kv_heads=2, rope=_turned)
    variables = {"params": nnx.to_pure_dict(nnx.state(module, nnx.Param))}
    _close(at_once(functools.partial(twin.apply, is_causal=True, segment_ids=IDS), variables, x), out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_ids": IDS[:, :5]}, r"segment_ids is int32\[2, 5\]; it must be int32\[2, 6\]"),
        ({"segment_ids": IDS.astype(float)}, "segment_ids is float32"),
        ({"max_segments": 3}, "max_segments is given without segment_ids"),
        ({"segment_ids": IDS, "lengths": jnp.array([6, 5])}, "lengths are given beside segment_ids"),
        ({"segment_ids": IDS, "max_segments": 1}, "pass max_segments=3"),
        ({"segment_ids": np.array([[1, 2, 1, 0, 0, 0]] * 2)}, r"segment_ids\[2\] is 1, an id that sequence 0 has"),
    ],
)
def test_segments_that_do_not_fit_are_refused_by_name(options: dict[str, Any], message: str, seed: int) -> None:
    with pytest.raises(InvalidInput, match=message):
        attention_fn(*_arrays(seed), **options)


@pytest.mark.parametrize("options", [{"segment_ids": jnp.ones((1, 2), int)}, {"max_segments": 2}], ids=str)
def test_a_call_with_a_cache_takes_no_segments(options: dict[str, Any]) -> None:
    module = MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    module.init_cache((1, 4, 8))
    with pytest.raises(Unsupported, match="segment_ids with a cache"):
        module(jnp.ones((1, 2, 8)), **options)
