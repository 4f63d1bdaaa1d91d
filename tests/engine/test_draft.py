"""A draft model beside the model: its guesses are verified on the device, and no token depends on what it says."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from jattn.llm.models import Decoder
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import GREEDY, prompts_of, run
from tests.support.tiny_models import write_tiny_model
from torch_core.base.errors import InvalidInput

# One shape of a step each for prompts and for tokens, and one pool: few programs to compile.
SIZES: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 20,
    "fixed_shapes": True,
}
SAMPLED = SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True, seed=3)


def perturbed(model: Decoder, scale: float) -> Decoder:
    """Another model that often says the same."""
    graph, state = nnx.split(model)
    random = np.random.default_rng(7)
    noise = lambda leaf: jnp.asarray(leaf + scale * random.standard_normal(leaf.shape, np.float32))  # noqa: E731
    return nnx.merge(graph, jax.tree.map(noise, state))


@functools.cache
def base() -> Decoder:
    return perturbed(tiny_decoder(num_hidden_layers=1), 1.0)


@functools.cache
def draft() -> Decoder:
    return perturbed(base(), 0.1)


def guessing(**changes: Any) -> EngineConfig:
    speculative = SpeculativeConfig(num_speculative_tokens=3, model=draft())
    return EngineConfig(**{**SIZES, "speculative_config": speculative, **changes})


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(base(), EngineConfig(**SIZES))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(base(), guessing())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SAMPLED,
        pytest.param(
            SamplingParams(temperature=0.7, top_k=9, top_p=0.9, max_tokens=12, logprobs=2, ignore_eos=True, seed=3),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            SamplingParams(temperature=0.7, frequency_penalty=1.0, max_tokens=9, ignore_eos=True, seed=3),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["greedy", "sampled", "filtered", "penalized"],
)
def test_tokens_are_those_of_no_speculation(plain, engine, params, seed) -> None:
    prompts = prompts_of(seed, 6, 17, 2, 9, 40)

    assert run(engine, prompts, params) == run(plain, prompts, params)
    stats = engine.cache_stats()
    assert (stats.used, stats.deferred) == (0, 0)


def test_some_guesses_come_true_and_some_do_not_and_both_are_counted(seed) -> None:
    engine = Engine(base(), guessing())
    assert engine.speculation_stats().acceptance_rate == 0

    tokens = run(engine, prompts_of(seed, 6, 17, 2, 9), SAMPLED)

    stats = engine.speculation_stats()
    assert 0 < stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos) < stats.num_draft_tokens
    assert stats.num_drafts >= stats.num_accepted_tokens_per_pos[0] >= stats.num_accepted_tokens_per_pos[2]
    # The first token of a request comes with its prompt; later ones with guesses, or at the end without any.
    assert stats.num_accepted_tokens + stats.num_drafts <= sum(map(len, tokens)) - 4
    assert stats.mean_acceptance_length == 1 + stats.num_accepted_tokens / stats.num_drafts


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_that_is_the_model_itself_is_always_right(temperature, seed) -> None:
    itself = SpeculativeConfig(num_speculative_tokens=3, model=perturbed(base(), 0.0))
    engine = Engine(base(), EngineConfig(**SIZES, speculative_config=itself))
    params = SamplingParams(temperature=temperature, max_tokens=21, ignore_eos=True, seed=3)

    run(engine, prompts_of(seed, 6, 17), params)

    stats = engine.speculation_stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 30
    # Two prompts in one step, then five times four tokens.
    assert engine.cache_stats().steps <= 7


def test_pairs_of_tokens_come_as_often_as_the_model_says(seed) -> None:
    vocabulary, count, prompt = 4, 384, [1, 2, 3]
    model = perturbed(tiny_decoder(vocab_size=vocabulary, num_hidden_layers=1), 0.5)
    speculative = SpeculativeConfig(num_speculative_tokens=2, model=perturbed(model, 0.2))
    config = EngineConfig(max_num_seqs=96, max_model_len=16, fixed_shapes=True, speculative_config=speculative)
    engine = Engine(model, dataclasses.replace(config, seed=seed))
    params = SamplingParams(temperature=4.0, max_tokens=4, ignore_eos=True)

    pairs = np.array([tokens[1:3] for tokens in run(engine, [prompt] * count, params)])

    sequences = [[*prompt, a, b] for a in range(vocabulary) for b in range(vocabulary)]
    logits = jax.jit(model.forward_dense)(jnp.asarray(sequences)).reshape(vocabulary, vocabulary, 5, vocabulary)
    each = np.asarray(jax.nn.softmax(logits / 4, axis=-1), np.float64)
    expected = count * np.einsum("a,ab,abc->bc", each[0, 0, 2], each[:, 0, 3], each[:, :, 4])
    found = np.zeros((vocabulary, vocabulary))
    np.add.at(found, (pairs[:, 0], pairs[:, 1]), 1)
    chi_square, freedom = ((found - expected) ** 2 / expected).sum(), vocabulary**2 - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
    assert 0.1 < engine.speculation_stats().acceptance_rate < 1


def test_a_stop_token_among_accepted_guesses_ends_the_request_there(plain, engine, seed) -> None:
    prompts = prompts_of(seed, 5, 8)
    stop = run(plain, prompts, SAMPLED)[0][7]
    params = SamplingParams(temperature=0.7, max_tokens=24, seed=3, stop_token_ids=(stop,), ignore_eos=True)

    assert run(engine, prompts, params) == run(plain, prompts, params)


@pytest.mark.parametrize("changes", [{}, {"num_host_blocks": 12}], ids=["computed again", "swapped"])
def test_in_a_pool_too_small_for_all_the_tokens_are_the_same(plain, changes, seed) -> None:
    prompts = prompts_of(seed, 30, 12, 19, 14)
    params = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, seed=3)
    engine = Engine(base(), guessing(**changes))

    assert run(engine, prompts, params) == run(plain, prompts, params)
    assert engine.cache_stats().preemptions + engine.cache_stats().swapped_in > 0
    assert engine.cache_stats().used == 0


def test_cached_prefixes_and_forks_hold_what_the_draft_computed_too(seed) -> None:
    itself = SpeculativeConfig(num_speculative_tokens=3, model=perturbed(base(), 0.0))
    engine = Engine(base(), EngineConfig(**SIZES, speculative_config=itself))
    (prompt,) = prompts_of(seed, 22)
    run(engine, [prompt])
    samples = engine.add(prompt, SamplingParams(n=3, temperature=0.7, max_tokens=9, ignore_eos=True)).samples
    while engine.num_unfinished:
        engine.step()

    assert samples[0].num_cached_tokens == 20
    assert engine.speculation_stats().acceptance_rate == 1


def test_new_weights_are_those_of_the_model_and_the_draft_stays(plain, seed) -> None:
    engine = Engine(perturbed(base(), 0.5), guessing())
    prompts = prompts_of(seed, 6, 17)
    run(engine, prompts)
    before = engine.num_compilations

    engine.update_weights(base())

    assert run(engine, prompts) == run(plain, prompts)
    assert engine.num_compilations == before


@pytest.mark.nightly
def test_a_draft_is_read_from_a_folder_and_may_have_another_shape_and_a_window(plain, tmp_path, seed) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    folder = write_tiny_model(tmp_path, seed, sliding_window=6, **sizes)
    config = guessing(speculative_config={"num_speculative_tokens": 2, "model": folder}, scrub_on_free=True)
    engine = Engine(base(), config)

    assert str(engine.pool_plan).startswith("20 blocks of 4 tokens in 3 layers")
    assert run(engine, prompts_of(seed, 30, 5)) == run(plain, prompts_of(seed, 30, 5))
    assert engine.speculation_stats().num_draft_tokens > 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: tiny_decoder(vocab_size=98),
            "the draft model has a vocabulary of 98 and the model one of 97; their tokens must be the same.",
        ),
        (
            lambda: tiny_decoder(max_position_embeddings=64),
            (
                "the draft model was made for 64 tokens at most and the engine for 128; set "
                "EngineConfig(max_model_len=64)."
            ),
        ),
        (
            lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
            "the draft model is a Linear; it must be a jattn.llm.models.PagedModel.",
        ),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(decoder, model, message) -> None:
    config = EngineConfig(**SIZES, speculative_config=SpeculativeConfig(num_speculative_tokens=2, model=model()))

    with pytest.raises(InvalidInput) as error:
        Engine(decoder, config)

    assert str(error.value) == message


@pytest.mark.nightly
def test_after_the_warm_up_nothing_compiles(seed) -> None:
    engine = Engine(base(), guessing())
    engine.warmup()
    before = engine.programs

    for params in (GREEDY, SAMPLED, SamplingParams(top_k=3, max_tokens=5)):
        run(engine, prompts_of(seed, 6, 17, 2, 9, 40), params)

    assert engine.programs == before
    assert len(before) == 4
