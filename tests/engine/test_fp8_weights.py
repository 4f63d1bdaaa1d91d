"""Engines whose linear layers multiply in FP8: new weights, and several devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from jattn.llm.models import Decoder, quantize_fp8, shard_model
from tests.engine.conftest import tiny_decoder
from tests.support.devices import mesh, on_four_devices
from torch_core.base.errors import InvalidInput

SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
PROMPT = [5, 9, 2, 40, 7, 7, 31, 90, 1, 6, 12]


def decoder(scale: float = 0.3) -> Decoder:
    graph, state = nnx.split(tiny_decoder(implementation="xla"))
    return nnx.merge(graph, jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * scale, state))


def rounded(model: Decoder) -> Decoder:
    quantize_fp8(model)
    return model


def leaves_of(engine: Engine) -> list[jax.Array]:
    return engine._core.device.runner.weights.leaves


def log_probabilities(model: Decoder, **config: Any) -> np.ndarray:
    with LLM(model, config=EngineConfig(**SIZES, **config)) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    return np.array([next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]])


def test_kernels_of_numbers_take_the_place_of_rounded_ones() -> None:
    engine = Engine(rounded(decoder()), EngineConfig(**SIZES))
    other = decoder(0.2)

    engine.update_weights(nnx.state(other))

    expected = jax.tree.leaves(nnx.state(rounded(other)))
    for found, leaf in zip(leaves_of(engine), expected, strict=True):
        np.testing.assert_array_equal(found, leaf)


def test_rounded_kernels_take_the_place_of_rounded_ones() -> None:
    engine, other = Engine(rounded(decoder()), EngineConfig(**SIZES)), rounded(decoder(0.2))
    engine.update_weights(nnx.state(other))
    for found, leaf in zip(leaves_of(engine), jax.tree.leaves(nnx.state(other)), strict=True):
        np.testing.assert_array_equal(found, leaf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda kernel: kernel[1:],
            r"^layers\.1\.mlp\.down_proj\.kernel is float32\[63, 32\]; the model's is float32\[64, 32\]",
        ),
        (
            lambda kernel: kernel.astype(jnp.int32),
            r"^layers\.1\.mlp\.down_proj\.kernel is int32\[64, 32\]; the model's is bf",
        ),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused_and_nothing_changes(change: Any, message: str) -> None:
    engine, other = Engine(rounded(decoder()), EngineConfig(**SIZES)), decoder(0.2)
    before = list(leaves_of(engine))
    state = nnx.state(other)
    state["layers"][1]["mlp"]["down_proj"]["kernel"] = nnx.Param(change(other.layers[1].mlp.down_proj.kernel[...]))
    with pytest.raises(InvalidInput, match=message):
        engine.update_weights(state)
    assert all(old is new for old, new in zip(before, leaves_of(engine), strict=True))


@pytest.mark.nightly
@on_four_devices
def test_several_devices_are_as_exact_as_one() -> None:
    exact = log_probabilities(decoder())
    one = np.abs(log_probabilities(rounded(decoder())) - exact).max()
    over = mesh("auto", tp=2)

    two = np.abs(log_probabilities(rounded(shard_model(decoder(), over)), mesh=over) - exact).max()

    assert 0 < two <= 2 * one


@on_four_devices
def test_an_engine_cuts_a_rounded_model_as_it_cuts_others() -> None:
    model, cut = rounded(decoder()), rounded(shard_model(decoder(), mesh("auto", tp=2)))
    engine = Engine(model, EngineConfig(**SIZES, tensor_parallel_size=2))
    for found, leaf in zip(leaves_of(engine), jax.tree.leaves(nnx.state(cut)), strict=True):
        np.testing.assert_array_equal(found, leaf)


@on_four_devices
def test_several_devices_take_whole_kernels_of_numbers() -> None:
    over, other = mesh("auto", tp=2), decoder(0.2)
    engine = Engine(rounded(shard_model(decoder(), over)), EngineConfig(**SIZES, mesh=over))

    engine.update_weights(nnx.state(other))

    expected = jax.tree.leaves(nnx.state(rounded(shard_model(other, over))))
    for found, leaf in zip(leaves_of(engine), expected, strict=True):
        assert found.sharding == leaf.sharding
        np.testing.assert_array_equal(found, leaf)
