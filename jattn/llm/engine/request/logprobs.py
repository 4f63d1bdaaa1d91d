"""Log-probabilities of sampled tokens, of the likeliest tokens, and of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_GROUP = 128


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability.

    Attributes:
        logprob: natural logarithm of its probability, as the model has it.
        rank: 1 for the likeliest token.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class Logprobs(NamedTuple):
    """The log-probabilities of some tokens, with any leading axes.

    Attributes:
        logprob: float32[...], the token's.
        rank: int32[...], 1 for the likeliest.
        top_ids: int32[..., num_logprobs], the likeliest tokens in order.
        top_logprobs: float32[..., num_logprobs].
    """

    logprob: Any
    rank: Any
    top_ids: Any
    top_logprobs: Any


def token_logprobs(logits: jax.Array, tokens: jax.Array, num_logprobs: int) -> Logprobs:
    """Returns the log-probabilities of int32[rows] tokens under float32[rows, vocab] logits, and the likeliest."""
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top, top_ids = likeliest(logits, num_logprobs)
    return Logprobs(chosen[:, 0] - log_normalizer, rank, top_ids, top - log_normalizer[:, None])


def likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` largest of each row of [rows, vocab] in descending order, and where they are.

    They are in the `count` groups with the largest maxima, so only a small array is sorted; a sort of the vocabulary
    costs more than a model's layer. Of equal values the earlier come first.
    """
    rows, vocab = logits.shape
    count = min(count, vocab)
    num_groups = -(-vocab // _GROUP)
    if count == 0 or num_groups <= 2 * count:
        return jax.lax.top_k(logits, count)
    padded = jnp.pad(logits, ((0, 0), (0, num_groups * _GROUP - vocab)), constant_values=-jnp.inf)
    groups = padded.reshape(rows, num_groups, _GROUP)
    _, best = jax.lax.top_k(jnp.max(groups, axis=-1), count)
    # In the order of the vocabulary, so that equal values stay in it.
    best = jnp.sort(best, axis=-1)
    inside = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(rows, -1)
    top, places = jax.lax.top_k(inside, count)
    return top, jnp.take_along_axis(best, places // _GROUP, axis=1) * _GROUP + places % _GROUP


def as_dict(
    token: int, found: Logprobs, num_logprobs: int, decode: Callable[[Sequence[int]], str] | None
) -> dict[int, Logprob]:
    """Returns vLLM's mapping for one position: the token itself first, then the likeliest in order.

    Args:
        token: the sampled token or the prompt's.
        found: values of this position, without leading axes.
        num_logprobs: number of the likeliest tokens; -1 for all.
        decode: token ids to text, or None.
    """
    count = len(found.top_ids) if num_logprobs < 0 else num_logprobs
    entries = {token: (float(found.logprob), int(found.rank))}
    best = zip(found.top_ids[:count].tolist(), found.top_logprobs[:count].tolist(), strict=True)
    for rank, (each, value) in enumerate(best, 1):
        entries.setdefault(each, (value, rank))
    return {
        each: Logprob(value, rank, None if decode is None else decode([each]))
        for each, (value, rank) in entries.items()
    }
