"""Validation of requests: a prompt and its parameters become a `Request`, or an error names the fault."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.options.params import LIMITS, SamplingParams, needs_slot, pack_sampling, sampling_kind
from jattn.llm.engine.request.bad_words import BadWords, BadWordsFinder
from jattn.llm.engine.request.grammar import Grammar, GrammarCompiler
from jattn.llm.engine.request.lora import LoadedAdapter, prefix_salt
from jattn.llm.engine.request.outputs import Outbox, RequestMetrics
from jattn.llm.engine.request.request import AUTOMATIC, Request
from jattn.llm.load import TextTokenizer
from jattn.llm.models import PagedSpec
from jattn.llm.models.request_inputs import packed
from torch_core.base.checks import check_int, shown
from torch_core.base.errors import InvalidInput, RequestTooLong, Unsupported

_MAX_REQUEST_ID = 256
_MAX_SALT_BYTES = 64
_MOST_PRIORITY = 1 << 20
# At most this many later requests overtake one that is one level lower, so that none waits forever.
_ARRIVALS_OF_A_PRIORITY = 64


class Validator:
    """Checks requests against the limits of a model and an engine; any thread may at any time.

    Args:
        model: the model's vocabulary, end-of-sequence tokens and length.
        config: the engine's seed and limits.
        tokenizer: tokenizer of the model, for parameters in text; None refuses these.

    Attributes:
        max_model_len: the limit that holds.

    Raises:
        InvalidInput: max_model_len is above the model's own.
    """

    def __init__(self, model: PagedSpec, config: EngineConfig, tokenizer: TextTokenizer | None) -> None:
        longest, max_model_len = model.max_model_len, config.max_model_len
        if max_model_len is not None and max_model_len > longest:
            wanted = f"the model was made for {longest} tokens at most"
            raise InvalidInput("max_model_len", value=max_model_len, wanted=wanted)
        self.max_model_len = longest if max_model_len is None else max_model_len
        self._vocab_size, self._inputs = model.vocab_size, model.inputs
        self._max_encoder_len = model.max_encoder_len
        starts = (model.decoder_start_token_id, model.forced_bos_token_id)
        self._decoder_start = tuple(token for token in starts if token is not None)
        self._eos_token_ids = frozenset(model.eos_token_ids)
        self._forced_eos_token_id = model.forced_eos_token_id
        self._config = config
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
        self._words = None if tokenizer is None else BadWordsFinder(tokenizer, model.vocab_size, model.eos_token_ids)

    def grammar(self, params: SamplingParams | None) -> Grammar | None:
        """Compiles the grammar of a request, if it has one.

        Raises:
            InvalidInput: params of another type, or a grammar that cannot be compiled.
            Unsupported: an optional package is missing.
        """
        if not isinstance(params, SamplingParams | None):
            raise InvalidInput("params", f"is a {type(params).__name__}", "it must be SamplingParams, or None")
        structured = None if params is None else params.structured_outputs
        return None if structured is None else self._grammars.compile(structured)

    def requests(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        salt: bytes | None = None,
        priority: int = 0,
        inputs: Mapping[str, Any] | None = None,
        adapter: LoadedAdapter | None = None,
        outbox: Outbox,
    ) -> tuple[Request, ...]:
        """Returns the n samples of a prompt as requests; see `Engine.add` for the arguments.

        They have no number yet; see `Request.take_number`.

        Raises:
            InvalidInput: a bad argument.
            RequestTooLong: it does not fit the model.
            Unsupported: structured output without its library; log-probabilities of an encoder's input.
        """
        grammar = self.grammar(params)
        params = SamplingParams() if params is None else params
        if request_id is not None:
            _check_id(request_id)
        if prompt is not None and not isinstance(prompt, str):
            raise InvalidInput("prompt", f"is a {type(prompt).__name__}", "it must be the prompt's text, or None")
        if salt is not None and not (isinstance(salt, bytes) and 1 <= len(salt) <= _MAX_SALT_BYTES):
            raise InvalidInput("salt", f"must be bytes, 1 to {_MAX_SALT_BYTES} of them, or None")
        numbers = packed(inputs, self._inputs)
        salt = prefix_salt(salt, numbers.tobytes(), adapter)
        given = self._kept(_of(request_id), prompt_token_ids, params)
        num_slots = self._encoder_slots(_of(request_id), len(given), params) if self._decoder_start else 0
        max_tokens = self._max_tokens(request_id, len(self._decoder_start or given), params)
        # After the checks of the length: a conversion holds Python's lock.
        tokens, encoder_tokens = self._tokens(_of(request_id), given), ()
        if self._decoder_start:
            tokens, encoder_tokens = self._decoder_start, tokens
        self._check_limits(params)
        eos = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        # Without a seed of its own each sample adds its number.
        seed, is_seeded = (self._config.seed, False) if params.seed is None else (params.seed, True)
        if params.prompt_logprobs is not None:
            # Cached tokens have no hidden states, so that no cached prefix may be read.
            salt = secrets.token_bytes(16)
        check_int("priority", priority, -_MOST_PRIORITY, _MOST_PRIORITY)
        bad_words = self._bad_words(params)
        samples = tuple(
            Request(
                request_id if index == 0 and request_id is not None else "",
                tokens,
                params,
                pack_sampling(params, (seed + (index if is_seeded else 0)) & 0xFFFFFFFF, len(tokens)),
                eos,
                RequestMetrics(time.monotonic()),
                sampling_kind(params),
                needs_slot(params),
                bad_words,
                grammar if grammar is None or index == 0 else grammar.copy(),
                index,
                forced_eos_token_id=None if params.ignore_eos else self._forced_eos_token_id,
                prompt=prompt,
                salt=salt,
                inputs=numbers,
                keeps_mask=self._keeps_mask(params),
                adapter=adapter,
                order=priority * _ARRIVALS_OF_A_PRIORITY,
                outbox=outbox,
                encoder_token_ids=encoder_tokens,
                num_encoder_slots=num_slots,
                max_tokens=max_tokens,
            )
            for index in range(params.n)
        )
        for sample in samples:
            sample.samples = samples
        samples[0].followers += samples[1:]
        return samples

    def _keeps_mask(self, params: SamplingParams) -> bool:
        if params.return_sampling_mask is not None:
            return params.return_sampling_mask
        return self._config.enable_return_sampling_mask and params.top_k > 0 and params.temperature > 0

    def _max_tokens(self, request_id: str | None, num_tokens: int, params: SamplingParams) -> int:
        """Returns the most new tokens after a prompt of `num_tokens`.

        Raises:
            RequestTooLong: prompt and new tokens are more than the limit.
        """
        max_tokens = max(self.max_model_len - num_tokens, 1) if params.max_tokens is None else params.max_tokens
        total = num_tokens + max_tokens
        if max_tokens >= self.max_model_len > num_tokens:
            room = f"this engine's max_model_len is {self.max_model_len}, and the prompt has {num_tokens} of it"
            wanted = f"{room}. Lower it, or pass None for as many as there is room for"
            raise RequestTooLong("max_tokens", value=max_tokens, wanted=wanted)
        if total > self.max_model_len:
            name = "the request" if request_id is None else repr(request_id)
            raise RequestTooLong(
                f"{name} needs {total} tokens ({num_tokens} prompt + {max_tokens} new); this engine's "
                f"max_model_len is {self.max_model_len}. Shorten the prompt or lower max_tokens.",
                argument="prompt",
            )
        return max_tokens

    def _encoder_slots(self, whose: str, num_tokens: int, params: SamplingParams) -> int:
        """Returns the slots of an encoder's input in whole blocks.

        Raises:
            RequestTooLong: the model does not take it, or a step.
            Unsupported: probabilities of a prompt that nothing predicts.
        """
        if params.prompt_logprobs is not None:
            wanted = "the prompt is read by this model's encoder, which predicts none of it"
            raise Unsupported("prompt_logprobs", "is given", wanted)
        if num_tokens > self._max_encoder_len:
            raise RequestTooLong(
                f"the prompt{whose} has {num_tokens} tokens; the model's encoder was made for "
                f"{self._max_encoder_len}. Shorten it.",
                argument="prompt",
            )
        block_size, most = self._config.block_size, self._config.max_num_batched_tokens
        num_slots = -(-num_tokens // block_size) * block_size
        if num_slots > most:
            raise RequestTooLong(
                f"the prompt{whose} takes {num_slots} slots; an encoder reads it in one step, and "
                f"max_num_batched_tokens is {most}. Shorten it or raise EngineConfig(max_num_batched_tokens=...).",
                argument="prompt",
            )
        return num_slots

    @property
    def _longest_encoder_input(self) -> int:
        """Tokens that the model takes and that one step reads, in whole blocks."""
        block_size = self._config.block_size
        return min(self._max_encoder_len, self._config.max_num_batched_tokens // block_size * block_size)

    def _check_limits(self, params: SamplingParams) -> None:
        """Checks parameters that depend on the model and the engine."""
        if params.stop and self._tokenizer is None:
            raise InvalidInput("stop", "is given, but there is no tokenizer that makes the text to find it in")
        for name in ("return_sampling_mask", "return_routed_experts"):
            if getattr(params, name) and not getattr(self._config, f"enable_{name}"):
                raise InvalidInput(name, value=True, wanted=f"the engine needs EngineConfig(enable_{name}=True)")
        most = self._vocab_size if self._config.max_logprobs < 0 else self._config.max_logprobs
        wanted = {
            # A prompt's have a program of their own for the whole vocabulary.
            "logprobs": self._vocab_size if params.logprobs == -1 else params.logprobs,
            "prompt_logprobs": params.prompt_logprobs,
        }
        for name, count in wanted.items():
            if (count or 0) > most:
                fix = "Ask for fewer, or set EngineConfig(max_logprobs=...), which may be -1"
                reason = f"this engine's max_logprobs is {most}. {fix}"
                raise InvalidInput(name, value=getattr(params, name), wanted=reason)
        if (count := len(params.allowed_token_ids or ())) > self._vocab_size:
            wanted = f"the vocabulary has {self._vocab_size} tokens; name each once"
            raise InvalidInput("allowed_token_ids", f"has {count} entries", wanted)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            bad = [token for token in getattr(params, name) or () if token >= self._vocab_size]
            if bad:
                raise InvalidInput(
                    f"token {shown(bad[0])} of {name} is outside the vocabulary; ids are 0 to {self._vocab_size - 1}.",
                    argument=name,
                )
        if len(params.stop_token_ids) + len(self._eos_token_ids) > LIMITS.stop_tokens:
            problem = f"has {len(params.stop_token_ids)} entries and the model {len(self._eos_token_ids)} of its own"
            raise InvalidInput("stop_token_ids", problem, f"together they must be {LIMITS.stop_tokens} at most")
        known = self._config.logits_processors or {}
        for name in params.logits_processors or ():
            if name not in known:
                wanted = f"this engine has {', '.join(known) or 'none'} (EngineConfig.logits_processors)"
                raise InvalidInput("logits_processors", f"names {shown(name)}", wanted)

    def _bad_words(self, params: SamplingParams) -> BadWords | None:
        if not params.bad_words:
            return None
        if self._words is None:
            raise InvalidInput("bad_words", "is given, but there is no tokenizer to find their tokens")
        return self._words.find(params)

    def _kept(self, whose: str, token_ids: Sequence[int], params: SamplingParams) -> Sequence[int] | np.ndarray:
        """Returns the tokens of a prompt that its parameters keep; those of a list are not checked."""
        given = token_ids if isinstance(token_ids, list | tuple) else _array(whose, token_ids)
        if (keep := params.truncate_prompt_tokens) is None:
            return given
        longest = self._longest_encoder_input if self._decoder_start else self.max_model_len - 1
        return given[-min(keep if keep > 0 else longest, longest) :]

    def _tokens(self, whose: str, token_ids: Sequence[int] | np.ndarray) -> tuple[int, ...]:
        tokens = _array(whose, token_ids)
        bad = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))
        if bad.size:
            raise InvalidInput(
                f"prompt token {int(bad[0])}{whose} is {int(tokens[bad[0]])}, outside the vocabulary; ids are 0 to "
                f"{self._vocab_size - 1}.",
                argument="prompt",
            )
        return tuple(tokens.tolist())


def taken(request_id: str) -> InvalidInput:
    """Returns the refusal of an id that an unfinished request has."""
    return InvalidInput("request_id", f"{shown(request_id)} belongs to an unfinished request", "ids must be unique")


def _array(whose: str, token_ids: Any) -> np.ndarray:
    """Returns a prompt's token ids as an array of whole numbers."""
    try:
        tokens = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError):
        raise InvalidInput(
            f"the prompt{whose} must be a flat sequence of ints; it is ragged.", argument="prompt"
        ) from None
    if tokens.size == 0:
        raise InvalidInput(f"the prompt{whose} is empty; it needs at least one token.", argument="prompt")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidInput(
            f"the prompt{whose} has dtype {tokens.dtype} and shape {tokens.shape}; it must be a flat sequence of ints.",
            argument="prompt",
        )
    return tokens


def _of(request_id: str | None) -> str:
    """Returns whose a prompt is; nothing for a caller who gave no id, and knows of none."""
    return "" if request_id is None else f" of {request_id!r}"


def _check_id(request_id: object) -> None:
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= _MAX_REQUEST_ID:
        raise InvalidInput("request_id", f"must be a string of 1 to {_MAX_REQUEST_ID} characters")
    if request_id.startswith(AUTOMATIC):
        wanted = f"ids that begin with {AUTOMATIC!r} are the engine's own numbers"
        raise InvalidInput("request_id", value=request_id, wanted=wanted)
