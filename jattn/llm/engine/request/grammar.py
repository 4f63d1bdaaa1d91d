"""Structured output: which tokens a grammar allows next; llguidance says it on the host, the device applies it."""

from __future__ import annotations

import copy
import importlib
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.llm.engine.options.params import SamplingParams, StructuredOutputsParams
from jattn.llm.load import TextTokenizer
from jattn.llm.workers.grammars import grammar_source, started_matcher
from jattn.llm.workers.pool import Refused, Task
from torch_core.base.errors import InvalidInput, Unsupported

_MOST_KNOWN, _MOST_KNOWN_TEXT = 64, 1 << 19
_TRY = Task(
    module="grammars",
    function="try_grammar",
    argument="structured_outputs",
    subject="the grammar",
    fix="make it simpler",
    seconds=2.0,
    memory_bytes=256 << 20,
)


class Grammar:
    """The state of one request's text in its grammar. Not thread-safe.

    Args:
        matcher: llguidance's, at its start.
        eos_token_ids: tokens that end the text.
        num_words: number of words of a mask.

    Attributes:
        eos_token_ids: the given ids.
    """

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int], num_words: int) -> None:
        self._matcher, self.eos_token_ids = matcher, tuple(eos_token_ids)
        self._end = mask_of(self.eos_token_ids, num_words)
        self._num_read = 0
        self._dead_end: str | None = None

    @property
    def error(self) -> str | None:
        """The reason why the text cannot continue (the grammar grew too large, or allows no token), or None."""
        if self._dead_end is not None:
            return self._dead_end
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else None

    def copy(self) -> Grammar:
        """Returns another one for the same grammar, at its start."""
        twin = Grammar(self._matcher.deep_copy(), self.eos_token_ids, len(self._end))
        twin._num_read = -1
        return twin

    def mask(
        self, output_token_ids: Sequence[int], params: SamplingParams, allowed: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns int32[num_words], a bit for each token that may come next; ends only, where the text is complete.

        Ends only, too, where there is an `error`.

        Args:
            output_token_ids: all tokens so far; those of earlier calls come first.
            params: min_tokens, before which nothing that ends a text is allowed, as long as anything else is, and
                ignore_eos, with which that holds of the end always; and allowed_token_ids, no others but for the end of
                a text that can only end.
            allowed: a mask of which the same holds as of allowed_token_ids.
        """
        # After an interrupt here, the text is read again from its start.
        done, self._num_read = self._num_read, -1
        if done < 0:
            self._matcher.reset()
            done, self._dead_end = 0, None
        self._matcher.consume_tokens(list(output_token_ids[done:]))
        self._num_read = len(output_token_ids)
        if self._matcher.is_stopped():
            return self._end
        mask = np.zeros(len(self._end), np.int32)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            return self._end
        mask[: len(bits)] = bits[: len(mask)]
        may_end = np.any(mask & self._end)
        if params.allowed_token_ids is not None:
            mask &= mask_of(params.allowed_token_ids, len(mask))
        if allowed is not None:
            mask &= allowed
        if not np.any(mask):
            if not may_end:
                self._dead_end = "no token is allowed that the text could go on with"
            return self._end
        goes_on = mask & ~self._end if params.ignore_eos else mask
        if len(output_token_ids) < params.min_tokens:
            goes_on = mask & ~self._end & ~mask_of(params.stop_token_ids, len(mask))
        return goes_on if np.any(goes_on) else mask


class GrammarCompiler:
    """Makes grammars over a model's tokens. Thread-safe.

    Args:
        tokenizer: tokenizer of the model; None refuses every grammar.
        vocab_size: vocabulary size of the model.
        eos_token_ids: ids of the model's end-of-sequence tokens.
    """

    def __init__(self, tokenizer: TextTokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokens: Any = None
        # The last ones, at their start, and the last refusals: many requests bring the same.
        self._known: dict[tuple[str, str, bool], Grammar | InvalidInput] = {}
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Returns the grammar at its start.

        Raises:
            InvalidInput: it cannot be compiled, or there is no tokenizer or nothing that ends a text.
            Unsupported: llguidance is not installed.
        """
        if self._tokenizer is None or not self._eos_token_ids:
            what = "a tokenizer" if self._tokenizer is None else "an end-of-sequence token"
            raise InvalidInput("structured_outputs", f"needs {what}, and the model has none")
        try:
            library = importlib.import_module("llguidance")
        except ImportError:
            wanted = "pip install 'jattn[structured]'"
            raise Unsupported("structured_outputs", "needs llguidance, which is not installed", wanted) from None
        ((name, value),) = params.constraints().items()
        if name == "json":
            value = params.schema()
        key = (name, value if isinstance(value, str) else json.dumps(value), params.disable_any_whitespace)
        with self._lock:
            found = self._known.pop(key, None)
            self._tokens = self._tokens or library.LLTokenizer(
                self._tokenizer.tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        if found is None:
            found = self._compiled(library, name, value, flexible=not params.disable_any_whitespace)
        with self._lock:
            self._known[key] = found
            # Memory grows with the text: a grammar of 128 KiB takes some 10 MiB.
            while len(self._known) > _MOST_KNOWN or sum(len(text) for _, text, _ in self._known) > _MOST_KNOWN_TEXT:
                del self._known[next(iter(self._known))]
            if isinstance(found, Grammar):
                return found.copy()
        raise copy.copy(found)

    def _compiled(self, library: Any, name: str, value: Any, *, flexible: bool) -> Grammar | InvalidInput:
        try:
            # The library's own limits miss some grammars, and no exception ends its work.
            _TRY.run(name, value, flexible)
            matcher = started_matcher(library, self._tokens, grammar_source(library, name, value, flexible=flexible))
        except (Refused, ValueError) as error:
            if isinstance(error, InvalidInput):
                return error.under(name)
            return InvalidInput(f"{name} cannot be compiled: {error}", argument="structured_outputs")
        return Grammar(matcher, self._eos_token_ids, -(-self._vocab_size // 32))


def mask_of(token_ids: Any, num_words: int) -> np.ndarray:
    """Returns int32[num_words] with a bit for each token."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
