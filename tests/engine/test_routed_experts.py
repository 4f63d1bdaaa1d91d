"""Experts that a rollout records for each token, and the training pass that replays them."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from jattn.llm.models import Decoder, MoEConfig
from jattn.llm.models.experts import SparseMLP
from tests.engine.conftest import tiny_decoder
from tests.support.devices import on_four_devices
from torch_core.base.errors import InvalidInput, Unsupported

MOE = MoEConfig(
    num_experts=7,
    num_experts_per_tok=2,
    intermediate_size=16,
    scoring_func="sigmoid",
    score_correction_bias=True,
    dense_layers=(0,),
)
SIZES: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "enable_return_routed_experts": True,
    # Programs of one shape: fewer to compile.
    "fixed_shapes": True,
}
LENGTH = 64


@functools.cache
def decoder(**changes: Any) -> Decoder:
    model = tiny_decoder(**{"implementation": "xla", "moe": MOE, "num_key_value_heads": 4, **changes})
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.3, state))


@functools.cache
def dense(model: Decoder) -> Any:
    """A jitted dense pass that also returns the experts that its routers choose."""

    def run(token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        found: list[jax.Array] = []
        original = SparseMLP.with_experts

        def noted(module: SparseMLP, x: jax.Array, forced: jax.Array | None = None) -> Any:
            result = original(module, x, forced)
            found.append(result[1])
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SparseMLP, "with_experts", noted)
            return model.forward_dense(token_ids), jnp.stack(found, axis=2)

    return jax.jit(run)


def padded(tokens: list[int]) -> jax.Array:
    return jnp.pad(jnp.asarray(tokens, jnp.int32), (0, LENGTH - len(tokens)))[None]


def check(model: Decoder, prompt: Any, output: Any) -> None:
    tokens = [*prompt, *output.token_ids]
    found = output.routed_experts
    assert (found.dtype, found.shape) == (np.int16, (len(tokens) - 1, 2, 2))
    assert (found[:, 0] == -1).all()
    np.testing.assert_array_equal(found[:, 1:], dense(model)(padded(tokens))[1][0, : len(tokens) - 1])


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 97, length).tolist() for length in lengths]


@pytest.mark.parametrize(
    "options",
    [
        # Three sequences of 40 and more tokens and blocks for fewer than two: preempted, computed again or swapped.
        {"num_blocks": 24, "num_scheduler_steps": 3},
        {"num_blocks": 24, "num_host_blocks": 32, "num_scheduler_steps": 1},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
    ids=["computed again", "swapped", "speculative"],
)
def test_experts_are_those_of_a_dense_pass_however_the_tokens_were_computed(options, seed) -> None:
    model, prompts = decoder(), prompts_of(seed, 37, 35, 2)
    prompts[2] *= 12
    llm = LLM(model, config=EngineConfig(**SIZES, **options))
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)

    for output in llm.generate(prompts, params):
        check(model, output.prompt_token_ids, output.outputs[0])

    # A cached prefix, and samples that share the blocks of their prompt.
    llm.generate(prompts[:1], params)
    longer = [[*prompts[0], 5], [*prompts[0][:21], 1, 2]]
    drawn = SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(longer, drawn)
    assert outputs[0].num_cached_tokens >= 36
    for output in outputs:
        for sample in output.outputs:
            check(model, output.prompt_token_ids, sample)


def test_a_request_says_whether_it_wants_its_experts_and_an_end_cuts_them(seed) -> None:
    engine = Engine(decoder(), EngineConfig(**SIZES))
    (prompt,) = prompts_of(seed, 30)
    quiet = engine.add(prompt, SamplingParams(max_tokens=2, return_routed_experts=False))
    cut = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    engine.step()
    # Half of the prompt is computed.
    early = engine.add(prompt[:3], SamplingParams(max_tokens=20))
    while not cut.output_token_ids:
        engine.step()
    engine.cancel(cut.request_id)
    engine.cancel(early.request_id)
    while engine.num_unfinished:
        engine.step()

    assert quiet.routed_experts is None
    tokens = [*prompt, *cut.output_token_ids]
    expected = dense(decoder())(padded(tokens))[1][0, : len(tokens) - 1]
    np.testing.assert_array_equal(cast(Any, cut.routed_experts)[:, 1:], expected)


def test_replayed_experts_give_the_rollouts_log_probabilities_whatever_the_router_would_choose(seed) -> None:
    model = decoder()
    params = SamplingParams(max_tokens=12, logprobs=0, seed=3, ignore_eos=True)
    (output,) = LLM(model, config=EngineConfig(**SIZES)).generate(prompts_of(seed, 23), params)
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    other: Any = nnx.clone(model)
    # It changes what is chosen and no weight.
    bias = other.layers[1].moe.e_score_correction_bias
    bias[...] = jnp.arange(7) - bias[...]
    assert (dense(other)(padded(tokens))[1] != dense(model)(padded(tokens))[1]).any()

    assert replay_error(other, output, output.outputs[0].routed_experts) < 1e-5


def replay_error(model: Decoder, output: Any, experts: Any) -> float:
    """The largest difference of the log-probabilities of a dense pass by given experts from those of a rollout."""
    sample = output.outputs[0]
    tokens = [*output.prompt_token_ids, *sample.token_ids]
    # Of the last token, and of the padding, the router decides.
    forced = np.full((1, LENGTH, 2, 2), -1, np.int16)
    forced[0, : len(tokens) - 1] = experts
    logits = jax.jit(model.forward_dense)(padded(tokens), routed_experts=forced)[0]
    logprobs = jax.nn.log_softmax(logits)[jnp.arange(len(tokens) - 1), jnp.asarray(tokens[1:])]
    expected = [each[token].logprob for token, each in zip(sample.token_ids, sample.logprobs, strict=True)]
    return float(np.abs(logprobs[-len(expected) :] - np.asarray(expected)).max())


def test_gradients_through_forced_gates_are_those_of_the_free_router(seed) -> None:
    model, tokens = decoder(), padded(prompts_of(seed, 40)[0])
    chosen = dense(model)(tokens)[1]
    experts = jnp.concatenate([jnp.full_like(chosen, -1), chosen], axis=2)
    graph, state = nnx.split(model)

    def loss(state: Any, experts: jax.Array | None) -> jax.Array:
        return jnp.square(nnx.merge(graph, state).forward_dense(tokens, routed_experts=experts)).mean()

    free, forced = (jax.jit(jax.grad(loss))(state, each) for each in (None, experts))

    router: Any = forced["layers"][1]["moe"]["router"]["kernel"][...]
    assert float(jnp.abs(router).max()) > 1e-6
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-4), forced, free)


@on_four_devices
def test_experts_of_a_model_that_is_cut_over_devices_are_those_of_a_dense_pass() -> None:
    config = EngineConfig(**SIZES, tensor_parallel_size=2, num_scheduler_steps=1)
    moe = MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=16, dense_layers=(0,))
    graph, state = nnx.split(tiny_decoder(implementation="xla", moe=moe, num_key_value_heads=4))
    model = nnx.merge(graph, jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.3, state))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    for output in LLM(model, config=config).generate(prompts_of(1, 20, 9, 31), params):
        check(model, output.prompt_token_ids, output.outputs[0])


def test_what_cannot_be_recorded_or_replayed_is_refused_by_name() -> None:
    model, tokens = decoder(), jnp.zeros((1, 5), jnp.int32)
    with pytest.raises(InvalidInput, match=r"^enable_return_routed_experts is True and model is a Decoder without "):
        Engine(tiny_decoder(), EngineConfig(**SIZES))
    with pytest.raises(Unsupported, match=r"^enable_return_routed_experts is True and every layer has a sliding "):
        Engine(decoder(sliding_window=8), EngineConfig(**SIZES))
    with pytest.raises(InvalidInput, match=r"^return_routed_experts is True; the engine needs EngineConfig\("):
        Engine(model, EngineConfig(block_size=4)).add([1], SamplingParams(return_routed_experts=True))
    for experts, message in [
        (np.zeros((1, 5, 2, 3), np.int32), r"^routed_experts is int32\[1, 5, 2, 3\]; .* \[1, 5, 2, 2\]"),
        (np.zeros((1, 5, 2, 2), np.float32), r"^routed_experts is float32\["),
        (np.full((1, 5, 2, 2), 7), r"^routed_experts\[0, 0, 0, 0\] is 7; ids are below 7"),
        ([1], r"^routed_experts is a list; "),
    ]:
        with pytest.raises(InvalidInput, match=message):
            model.forward_dense(tokens, routed_experts=experts)
    with pytest.raises(InvalidInput, match=r"^routed_experts is given and the model has no experts"):
        tiny_decoder().forward_dense(tokens, routed_experts=np.zeros((1, 5, 2, 2), np.int32))
