"""Training and generation are one model: the log-probabilities of both agree, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

from examples.flax_policy_gradient import CONFIG, LanguageModel
from jattn import EngineConfig, SamplingParams
from jattn.llm.engine import Engine

PROMPTS, NEW = 100, 6


class Recorded(LanguageModel):
    """Reports the log-probabilities of every row that the engine samples from."""

    rows: list[np.ndarray] = []  # noqa: RUF012 - of the one test that uses it.

    def logits(self, hidden: jax.Array) -> jax.Array:
        found = super().logits(hidden)
        if isinstance(hidden, Tracer):
            jax.debug.callback(lambda rows: self.rows.append(np.array(rows)), jax.nn.log_softmax(found))
        return found


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    model = Recorded(CONFIG, rngs=nnx.Rngs(0))
    Recorded.rows.clear()
    yield model
    Recorded.rows.clear()


def prompts(seed: int) -> list[list[int]]:
    """A hundred prompts of 1 to 30 tokens, half of which begin with one of two shared prefixes."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(CONFIG.vocab_size, size=16).tolist() for _ in range(2)]
    shared = [prefixes[index % 2] if index % 4 < 2 else [] for index in range(PROMPTS)]
    return [[*start, *rng.integers(CONFIG.vocab_size, size=rng.integers(1, 15)).tolist()] for start in shared]


def compute_in(model: Recorded, dtype: str) -> None:
    """Rounds the weights, and has everything computed in their type."""
    model.paged_spec = replace(LanguageModel.paged_spec, dtype=dtype)
    model.embed.dtype = model.position.dtype = jnp.dtype(dtype)
    nnx.update(model, jax.tree.map(lambda weight: weight.astype(dtype), nnx.state(model)))


def log_probs(model: Recorded, token_ids: np.ndarray) -> np.ndarray:
    graph, params = nnx.split(model)
    return np.asarray(jax.jit(lambda params: nnx.merge(graph, params).log_probs(token_ids))(params), np.float32)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_paged_generation_draws_from_the_log_probabilities_of_training(
    recorded: Recorded, dtype: str, seed: int
) -> None:
    compute_in(recorded, dtype)
    # So few blocks that running requests are preempted, so few tokens a step that prompts are cut in chunks; one shape.
    sizes: dict[str, Any] = {
        "max_num_seqs": 8,
        "block_size": 4,
        "num_blocks": 28,
        "max_num_batched_tokens": 16,
        "fixed_shapes": True,
    }
    with Engine(recorded, EngineConfig(**sizes)) as engine:
        requests = [
            engine.add(prompt, SamplingParams(max_tokens=NEW, temperature=1.0, seed=index, ignore_eos=True))
            for index, prompt in enumerate(prompts(seed))
        ]
        while engine.num_unfinished:
            engine.step()
        stats = engine.cache_stats()
    jax.effects_barrier()
    assert stats.hit_tokens > 0
    assert stats.preemptions > 0
    generated = np.concatenate(Recorded.rows).astype(np.float32)
    sequences = [[*request.prompt_token_ids, *request.output_token_ids] for request in requests]
    padded = np.zeros((PROMPTS, max(map(len, sequences))), np.int32)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    Recorded.rows.clear()
    taught = log_probs(recorded, padded)
    exact, bound = taught, 1e-4
    if dtype != "float32":
        # The rule of all results: twice the error of the same dtype, here of the training pass.
        compute_in(recorded, "float32")
        exact = log_probs(recorded, padded)
        bound = 2 * (np.abs(taught - exact).max() + float(jnp.finfo(dtype).eps) * np.abs(exact).max())
    for index, sequence in enumerate(sequences):
        for position in range(len(sequence) - NEW, len(sequence)):
            # The engine says not whose a row is; among thousands of rows of 16 numbers no other is so near.
            distance = np.abs(generated - exact[index, position - 1]).max(1)
            assert distance.min() <= bound
