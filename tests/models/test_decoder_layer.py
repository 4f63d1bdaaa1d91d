"""What a layer that is cut over devices asks to be summed, and by what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jattn.llm.models import TensorParallel
from jattn.llm.models.decoder_layer import DecoderLayer, through
from jattn.llm.models.layers import RMSNorm, norm
from tests.support.tiny_models import tiny_config


class Sums:
    """A second device that has nothing to add: who is asked for sums, and what a layer makes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes_norms: bool = True) -> None:
        self.asked: list[str] = []
        sums = self

        def summed(
            self: TensorParallel, x: jax.Array, axis: str, peers: Any = None, in_order: bool = False
        ) -> jax.Array:
            sums.asked.append(f"{axis} by {'XLA' if peers is None else peers}")
            return x

        def of_sum(self: RMSNorm, x: jax.Array, residual: jax.Array, axis_name: str, peers: Any) -> Any:
            sums.asked.append(f"{axis_name} and norm by {peers}")
            return (residual + x, self(residual + x)) if takes_norms else None

        monkeypatch.setattr(TensorParallel, "summed", summed)
        monkeypatch.setattr(RMSNorm, "of_sum", of_sum)
        self.monkeypatch = monkeypatch

    def layer(self, **changes: Any) -> tuple[jax.Array, jax.Array]:
        config = tiny_config(**changes)
        layer: Any = DecoderLayer(config, rngs=nnx.Rngs(0), parallel=TensorParallel(size=2))
        self.monkeypatch.setattr(type(layer.self_attn), "forward_paged", lambda self, x, *_: (2 * x, None))
        keys = iter(jax.random.split(jax.random.key(0), 9))
        following: Any = norm(config)
        # Weights of ones would be equal.
        for each in (layer.input_layernorm, layer.post_attention_layernorm, following):
            if each is not None:
                each.weight[...] = jax.random.normal(next(keys), each.weight.shape)
        x = jax.random.normal(next(keys), (2, config.hidden_size))
        metadata: Any = SimpleNamespace(peers="kernel", result_rows=None)
        x, normed, *_ = layer(x, through(layer.input_layernorm, x), None, (x,), metadata, following)
        return x, normed


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, ["tp and norm by kernel", "tp and norm by kernel"]),
        ({"norm_placement": "both"}, ["heads by kernel", "mlp by kernel"]),
        ({"norm_placement": "after"}, ["heads by kernel", "mlp by kernel"]),
        ({"norm_placement": "residual"}, ["heads by kernel", "mlp by kernel"]),
        ({"residual_multiplier": 0.5}, ["heads by kernel", "mlp by kernel"]),
        ({"norm_type": "layer_norm"}, ["heads by kernel", "mlp by kernel"]),
    ],
    ids=str,
)
def test_a_norm_is_asked_for_a_sum_where_nothing_stands_between_them(
    changes: dict[str, Any], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = Sums(monkeypatch)
    sums.layer(**changes)
    assert sums.asked == asked


def test_sums_that_the_norms_do_not_take_are_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = Sums(monkeypatch, takes_norms=False)
    sums.layer()
    assert sums.asked == [
        "tp and norm by kernel",
        "heads by kernel",
        "tp and norm by kernel",
        "mlp by kernel",
    ]


@pytest.mark.parametrize("kind", ["shared_norm", "two_norms"])
def test_sums_that_do_not_follow_from_each_other_are_not_both_the_kernels(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = Sums(monkeypatch)
    sums.layer(parallel_block=kind)
    assert sums.asked == ["heads by kernel", "mlp by XLA"]


def test_a_layer_gives_the_same_whether_norms_take_its_sums_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found, expected = (Sums(monkeypatch, takes_norms=taken).layer() for taken in (True, False))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
