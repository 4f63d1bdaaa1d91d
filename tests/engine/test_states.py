"""A model with a recurrent layer and an attention layer: chunks, shared prefixes, forks, preemption, swaps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jattn import ops
from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams, SpeculativeConfig, scheduler
from jattn.llm.models import PagedSpec
from jattn.nn import PagedAttention, ShortConv
from tests.engine.conftest import tiny_decoder
from tests.engine.test_draft import perturbed
from tests.engine.test_engine import prompts_of, run

WIDTH, HEADS, SIZE = 32, 4, 8
TOKENS = 8
SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 12}
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


class Hybrid(nnx.Module):
    """Two short convolutions and an attention layer without positions between them."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(97, WIDTH, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.first, self.last = (ShortConv(WIDTH, conv_size=4, rngs=rngs) for _ in range(2))
        self.qkv = nnx.Linear(WIDTH, 3 * HEADS * SIZE, use_bias=False, rngs=rngs)
        self.attention = PagedAttention(HEADS, SIZE, implementation="xla")
        self.head = nnx.Linear(WIDTH, 97, rngs=rngs)
        self.paged_spec = PagedSpec(
            vocab_size=97,
            max_model_len=64,
            num_layers=1,
            num_kv_heads=HEADS,
            head_dim=SIZE,
            states=(self.first.state_spec(), self.last.state_spec()),
        )

    def __call__(self, token_ids: Any, positions: Any, kv_caches: Any, metadata: Any) -> Any:
        cache, first, last = kv_caches
        x = self.embed(token_ids)
        mixed, first = self.first(x, states=first, metadata=metadata)
        query, key, value = self._heads(x := x + mixed)
        attended, cache = self.attention(query, key, value, cache, metadata)
        mixed, last = self.last(x := x + attended.reshape(x.shape), states=last, metadata=metadata)
        return x + mixed, (cache, first, last)

    def dense(self, token_ids: Any) -> jax.Array:
        x = self.embed(token_ids)
        x = x + self.first(x)
        starts = jnp.array([0, len(token_ids)], jnp.int32)
        query, key, value = self._heads(x)
        x = x + ops.attention(query, key, value, starts, max_query_len=len(token_ids)).reshape(x.shape)
        return self.logits(x + self.last(x))

    def logits(self, hidden: Any) -> Any:
        return self.head(hidden)

    def _heads(self, x: Any) -> Any:
        return (each.reshape(-1, HEADS, SIZE) for each in jnp.split(self.qkv(x), 3, axis=-1))


@pytest.fixture(scope="module")
def hybrid() -> Hybrid:
    return Hybrid()


@pytest.fixture(scope="module")
def engine(hybrid) -> Engine:
    return Engine(hybrid, EngineConfig(**SIZES))


@nnx.jit
def _dense(model: Hybrid, tokens: jax.Array) -> jax.Array:
    return model.dense(tokens)


def expected(model: Hybrid, prompt: list[int]) -> list[int]:
    """Greedy tokens from whole sequences, padded to one length: later tokens change nothing."""
    tokens = list(prompt)
    for _ in range(TOKENS):
        logits = _dense(model, jnp.array(tokens + [0] * (64 - len(tokens))))
        tokens.append(int(logits[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def test_chunks_and_decoded_tokens_equal_whole_sequences(engine, hybrid, seed) -> None:
    prompts = prompts_of(seed, 1, 4, 7, 30)

    assert run(engine, prompts, GREEDY) == [expected(hybrid, prompt) for prompt in prompts]


def test_a_prefix_continues_from_a_snapshot(engine, hybrid, seed) -> None:
    (prompt,) = prompts_of(seed, 21)
    run(engine, [prompt], GREEDY)
    longer = [*prompt, 5]
    request = engine.add(longer, GREEDY)
    while engine.num_unfinished:
        engine.step()

    assert request.num_cached_tokens == 20
    assert request.output_token_ids == expected(hybrid, longer)


def test_slots_take_half_of_the_memory_at_most(hybrid) -> None:
    sizes: dict[str, Any] = {"block_size": 4, "max_num_seqs": 64, "max_num_batched_tokens": 64}
    num_slots = (1 << 16) // 2 // sum(spec.bytes_per_slot for spec in hybrid.paged_spec.states)
    with Engine(hybrid, EngineConfig(**sizes, kv_cache_bytes=1 << 16)) as engine:
        assert engine.cache_stats().slots_free == num_slots - 1, "all but the null slot"


def test_a_snapshot_of_other_weights_is_no_prefix(engine, hybrid, seed) -> None:
    (prompt,) = prompts_of(seed, 21)
    run(engine, [prompt], GREEDY)
    engine.update_weights(hybrid)
    request = engine.add([*prompt, 5], GREEDY)
    while engine.num_unfinished:
        engine.step()

    assert request.num_cached_tokens == 0


def test_preempted_and_swapped_sequences_go_on(hybrid, seed) -> None:
    prompts = prompts_of(seed, 9, 10, 11)
    wanted = [expected(hybrid, prompt) for prompt in prompts]
    for host in (0, 11):
        engine = Engine(hybrid, EngineConfig(**SIZES, num_host_blocks=host))
        assert run(engine, prompts, GREEDY) == wanted
        stats = engine.cache_stats()
        assert (stats.swapped_in if host else stats.preemptions) > 0


def test_the_samples_of_a_prompt_fork_its_state(hybrid, seed) -> None:
    (prompt,) = prompts_of(seed, 9)
    llm = LLM(hybrid, config=EngineConfig(**SIZES))
    alone = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    three = llm.generate(prompt, SamplingParams(temperature=1e-4, max_tokens=TOKENS, ignore_eos=True, n=3, seed=1))

    assert list(alone) == expected(hybrid, prompt)
    assert [list(output.token_ids) for output in three[0].outputs] == [list(alone)] * 3


class Oracle:
    """Guesses from known continuations, one of two tokens wrong: rejections at every place."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts, self.count = texts, 0

    def guess(self, request: Any, count: int) -> tuple[int, ...]:
        known = list(request.token_ids(0, request.num_known_tokens))
        text = next((text for text in self.texts if text[: len(known)] == known), known)
        guesses = text[len(known) : len(known) + count]
        self.count += 1
        return tuple(guess if (self.count + index) % 3 else 0 for index, guess in enumerate(guesses))

    def forget(self, request_id: str) -> None:
        pass


@pytest.mark.parametrize("num_blocks", [pytest.param(64, marks=pytest.mark.nightly), 12])
def test_guesses_that_are_accepted_in_part_leave_the_state_after_the_accepted_ones(
    hybrid, seed, monkeypatch, num_blocks
) -> None:
    prompts = prompts_of(seed, 9, 10, 11, 4)
    wanted = [expected(hybrid, prompt) for prompt in prompts]
    oracle = Oracle([prompt + tokens for prompt, tokens in zip(prompts, wanted, strict=True)])
    monkeypatch.setattr(scheduler, "guesses_of", lambda config: oracle)
    speculative = SpeculativeConfig(num_speculative_tokens=3)
    sizes = SIZES | {"num_blocks": num_blocks, "num_host_blocks": 0}
    engine = Engine(hybrid, EngineConfig(**sizes, fixed_shapes=True, speculative_config=speculative))

    assert run(engine, prompts, GREEDY) == wanted
    stats = engine.speculation_stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert num_blocks > 12 or engine.cache_stats().preemptions
    # Snapshots of decoded tokens and of prompts hold for later requests.
    assert run(engine, [[*prompts[1], wanted[1][0], 3]], GREEDY) == [expected(hybrid, [*prompts[1], wanted[1][0], 3])]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_a_draft_model_of_either_kind_changes_no_token(hybrid, seed, kind) -> None:
    draft = perturbed(hybrid, 0.01) if kind == "hybrid" else tiny_decoder(num_hidden_layers=1)
    prompts = prompts_of(seed, 9, 4, 11)
    speculative = SpeculativeConfig(num_speculative_tokens=3, model=draft)
    engine = Engine(hybrid, EngineConfig(**SIZES, fixed_shapes=True, speculative_config=speculative))

    assert run(engine, prompts, GREEDY) == [expected(hybrid, prompt) for prompt in prompts]
    accepted = engine.speculation_stats().num_accepted_tokens
    assert kind == "attention" or accepted > 0
