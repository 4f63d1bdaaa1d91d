"""Speculative decoding: who guesses how many tokens, and how many of them came true."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from flax import nnx

from torch_core.base.checks import INT32_MAX, check_int, shown
from torch_core.base.errors import InvalidInput

_METHODS = ("ngram", "draft_model")
_MOST_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The options of speculation: the source and number of proposed tokens, which one step verifies; names are vLLM's.

    Speculation never changes the output, greedy or sampled: each position is sampled with the key that it has without
    speculation, and a proposal is accepted only if it equals the sampled token. A draft model proposes with the same
    key, so the two agree about as often as two samplers without communication can (Daliri, Musco and Suresh 2024,
    arXiv:2408.07978).

    Attributes:
        num_speculative_tokens: tokens of a request that are guessed at once, 1 to 64.
        model: the draft model: a folder for `load_model`, or a `PagedModel`, of the same vocabulary; None for n-grams.
        method: "draft_model" or "ngram"; by default it follows from `model`.
        prompt_lookup_max: longest n-gram, in tokens, that is looked up.
        prompt_lookup_min: the same at least.

    Raises:
        InvalidInput: a number out of range, or a method that does not go with `model`.

    Example:
        >>> SpeculativeConfig(num_speculative_tokens=3).method
        'ngram'
    """

    num_speculative_tokens: int
    model: str | os.PathLike[str] | nnx.Module | None = None
    method: str | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        check_int("num_speculative_tokens", self.num_speculative_tokens, 1, _MOST_TOKENS)
        check_int("prompt_lookup_min", self.prompt_lookup_min, 1, INT32_MAX)
        check_int("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, INT32_MAX)
        if not isinstance(self.model, str | os.PathLike | nnx.Module | None):
            raise InvalidInput(f"model is {shown(self.model)}; it must be a folder, a PagedModel, or None for n-grams.")
        fitting = _METHODS[self.model is not None]
        if self.method is None:
            object.__setattr__(self, "method", fitting)
        elif self.method != fitting:
            raise InvalidInput(
                f"method is {shown(self.method)} and model is {shown(self.model)}; 'draft_model' needs a model, "
                "'ngram' has none, and there is no other."
            )

    @classmethod
    def from_json(cls, text: str) -> SpeculativeConfig:
        """Reads it from a JSON object of its fields, as command lines take it.

        Raises:
            InvalidInput: not a JSON object of these fields.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InvalidInput("speculative_config", f"is {shown(text)}, which is no JSON: {error}") from None
        return cls._of_mapping(given)

    @classmethod
    def of(cls, given: Any) -> SpeculativeConfig | None:
        """Returns it for a mapping of its fields, as vLLM takes one; itself and None are returned as they are.

        Raises:
            InvalidInput: another type, an unknown field, or no number of tokens.
        """
        return given if isinstance(given, SpeculativeConfig | None) else cls._of_mapping(given)

    @classmethod
    def _of_mapping(cls, given: Any) -> SpeculativeConfig:
        try:
            return cls(**given)
        except TypeError:
            raise InvalidInput(
                f"speculative_config is {shown(given)}; it must be a SpeculativeConfig, or a mapping with "
                f"num_speculative_tokens and nothing else but {', '.join(list(cls.__dataclass_fields__)[1:])}."
            ) from None


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """The counts of proposed and accepted tokens since the engine was built; names are those of vLLM's metrics.

    Attributes:
        num_drafts: times that tokens of a request were guessed.
        num_draft_tokens: tokens that were guessed.
        num_accepted_tokens: guesses that were the model's own tokens.
        num_accepted_tokens_per_pos: the same for each place after the last known token.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens for each guessed one; 0 before the first."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a step with guesses gives a request, the one that is not guessed included."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)


class SpeculationCounts:
    """Counts for `SpeculationStats`. Not thread-safe.

    Args:
        num_speculative_tokens: guesses of a request at once at most.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted = [0] * num_speculative_tokens

    def add(self, num_guesses: int, num_accepted: int) -> None:
        """Counts one request's guesses of one step."""
        self._num_drafts += 1
        self._num_draft_tokens += num_guesses
        for place in range(num_accepted):
            self._accepted[place] += 1

    def stats(self) -> SpeculationStats:
        """Returns a frozen snapshot."""
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, sum(self._accepted), tuple(self._accepted))
