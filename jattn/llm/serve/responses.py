"""OpenAI's answers: completions and chats, whole or in events, and errors."""

from __future__ import annotations

import base64
import functools
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from jattn.llm.engine import CompletionOutput, Logprob, RequestOutput
from jattn.llm.load import TextTokenizer
from jattn.llm.serve.bodies import CompletionBody
from jattn.llm.serve.errors import RequestError
from jattn.llm.serve.messages import MessageReader, delta, message_of
from jattn.llm.serve.protocol import Generation
from jattn.llm.text.tokens import TextOffsets, TokenBytes
from jattn.llm.tools.parser import Reading

_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}


def error_body(error: RequestError) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


# JSON without spaces, and in UTF-8.
_dumped = functools.partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
# For events: `json.dumps` with options makes an encoder for each call.
_written = json.JSONEncoder(separators=(",", ":")).encode
# The log-probabilities of one token of a choice.
_MAX_DEPTH = 5
# Of a list in one piece.
_MAX_ELEMENTS = 1 << 14
# vLLM's log-probability of tokens that filters exclude: JSON has no infinity.
_SMALLEST = -9999.0


def event(body: dict[str, Any] | str) -> str:
    """Returns one server-sent event; a typed one, as those of a response are, has its name in front."""
    name = f"event: {body['type']}\n" if isinstance(body, dict) and "type" in body else ""
    return f"{name}data: {body if isinstance(body, str) else _written(body)}\n\n"


def json_bytes(body: dict[str, Any]) -> bytes:
    """Returns an answer as JSON, written in pieces: Python runs no other thread within a call of `json.dumps`."""
    return "".join(_pieces(body, _MAX_DEPTH)).encode()


@dataclass(slots=True)
class Sample:
    """The state of a sample that is streamed: a chat's reader, the places of the tokens, and their number so far."""

    reader: MessageReader
    offsets: TextOffsets | None
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The frame of one HTTP answer, created at seconds of Unix time; the tokenizer is for prompts and single tokens.

    A chat is read by `reading`. The id follows the prefix of its form. The numbers of the prompts' tokens are for the
    counts within a stream.
    """

    request: Generation
    answer_id: str
    model: str
    created: int
    tokenizer: TextTokenizer | None = None
    reading: Reading | None = None
    num_prompt_tokens: Sequence[int] = ()
    tokens: TokenBytes | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", None if self.tokenizer is None else TokenBytes(self.tokenizer))

    @property
    def done(self) -> str:
        """The text after the last event."""
        return "[DONE]"

    @property
    def is_chat(self) -> bool:
        return self.request.messages is not None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the answer to a request that does not stream."""
        if self.request.prompt_alone:
            outputs = [_of_no_tokens(output) for output in outputs]
        choices = []
        for output in outputs:
            for completion in self._best(output):
                choice = {"index": len(choices), "finish_reason": _reason(completion)}
                choice |= self._message(completion) if self.is_chat else self._content(output, completion)
                choice |= {"stop_reason": completion.stop_reason} | _replay(completion)
                if self.request.returns_token_ids:
                    choice["token_ids"] = list(completion.token_ids)
                choices.append(choice | self._of_prompt(output, chat=False))
        body = self._frame("chat.completion" if self.is_chat else "text_completion", choices)
        # A chat has one prompt.
        return body | self._of_prompt(outputs[0], chat=True) | {"usage": usage(outputs)}

    def opening(self) -> list[dict[str, Any]]:
        """Returns the events before the first token: a chat's say who speaks."""
        if not self.is_chat:
            return []
        first = {"role": "assistant", "content": ""}
        return [self._chunk(index, first) | self._counts(0, 0) for index in range(self.request.params.n)]

    def sample(self) -> Sample:
        """Returns the state of a sample, of which nothing has come."""
        reader = MessageReader(self.reading, self.request.includes_reasoning)
        return Sample(reader, None if self.tokens is None else TextOffsets(self.tokens))

    def parts(self, prompt: int, new: CompletionOutput, sample: Sample) -> list[dict[str, Any]]:
        """Returns the events for the new text of one sample; none while it may be part of a marker."""
        index = prompt * self.request.params.n + new.index
        sample.num_tokens += len(new.token_ids)
        if not self.is_chat:
            chunks = [self._event("text_completion", [{"index": index, "text": new.text}])]
            logprobs = None
            if new.logprobs is not None:
                places = [0] * len(new.token_ids)
                if sample.offsets is not None:
                    places = sample.offsets.add(new.token_ids, new.text)
                logprobs = self._completion_logprobs(new.token_ids, new.logprobs, places)
        else:
            found = sample.reader.read(new.text, finished=new.finish_reason is not None)
            deltas = [delta(part, self.reading) for part in found]
            if not deltas and (new.logprobs or new.finish_reason is not None):
                deltas = [{"content": ""} if new.logprobs else {}]
            chunks, logprobs = [self._chunk(index, each) for each in deltas], self.chat_logprobs(new)
        for chunk in chunks:
            chunk["choices"][0] |= {"logprobs": None, "finish_reason": None, "stop_reason": None}
            chunk |= self._counts(prompt, sample.num_tokens)
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = logprobs
            ends = {"finish_reason": _reason(new, sample.reader.num_calls), "stop_reason": new.stop_reason}
            chunks[-1]["choices"][0] |= ends
        return chunks

    def closing(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Returns the events after the last token."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return [self._event(kind, []) | {"usage": usage(outputs)}] if self._ends_with_usage else []

    def failure(self, error: RequestError) -> dict[str, Any]:
        """Returns the event of an error after the first event."""
        return error_body(error)

    def chat_logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """Returns the log-probabilities of a chat's new tokens; None if they are not wanted."""
        count = self.request.params.logprobs
        if completion.logprobs is None or count is None:
            return None
        content = []
        for token, found in zip(completion.token_ids, completion.logprobs, strict=True):
            others = sorted((each for each in found.items() if each[1].rank <= count), key=lambda each: each[1].rank)
            top = [self._chat_logprob(*each) for each in others]
            content.append(self._chat_logprob(token, found[token]) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    @property
    def _ends_with_usage(self) -> bool:
        return bool((self.request.body.stream_options or {}).get("include_usage"))

    def _counts(self, prompt: int, new: int) -> dict[str, Any]:
        """Returns the counts of a sample so far, if each event has them."""
        if not (self._ends_with_usage and (self.request.body.stream_options or {}).get("continuous_usage_stats")):
            return {}
        count = self.num_prompt_tokens[prompt]
        return {"usage": {"prompt_tokens": count, "completion_tokens": new, "total_tokens": count + new}}

    def _best(self, output: RequestOutput) -> Sequence[CompletionOutput]:
        """Returns the choices: of more samples than that, those of the highest log-probability per token."""
        if self.request.num_choices == len(output.outputs):
            return output.outputs
        score = lambda each: (each.cumulative_logprob or 0.0) / max(len(each.token_ids), 1)  # noqa: E731
        return sorted(output.outputs, key=score, reverse=True)[: self.request.num_choices]

    def _message(self, completion: CompletionOutput) -> dict[str, Any]:
        found = message_of(
            self.reading,
            completion.text,
            cut=completion.finish_reason == "length",
            includes_reasoning=self.request.includes_reasoning,
        )
        message: dict[str, Any] = {"role": "assistant", "content": found.text}
        if found.reasoning is not None:
            message["reasoning_content"] = found.reasoning
        if found.calls:
            message["tool_calls"] = [
                {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for each in found.calls
            ]
        reason = _reason(completion, len(found.calls))
        return {"message": message, "logprobs": self.chat_logprobs(completion), "finish_reason": reason}

    def _content(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        token_ids, logprobs, text = completion.token_ids, completion.logprobs, completion.text
        offsets = None if self.tokens is None else TextOffsets(self.tokens)
        places, prompt = [], self._prompt(output) if self.request.echo else ""
        # Of more samples than choices, the best are found by log-probabilities.
        if logprobs is None or (isinstance(body := self.request.body, CompletionBody) and body.logprobs is None):
            return {"text": prompt + text, "logprobs": None}
        if self.request.echo:
            logprobs = (*(output.prompt_logprobs or ()), *logprobs)
            if offsets is not None:
                places = offsets.add(output.prompt_token_ids, prompt)
                offsets.begin(prompt)
            token_ids = (*output.prompt_token_ids, *token_ids)
        places += [0] * len(token_ids) if offsets is None else offsets.add(token_ids[len(places) :], text)
        return {"text": prompt + text, "logprobs": self._completion_logprobs(token_ids, logprobs, places)}

    def _prompt(self, output: RequestOutput) -> str:
        """Returns a prompt's text, as much of it as was read."""
        if output.prompt is not None and self.request.params.truncate_prompt_tokens is None:
            return output.prompt
        skip = self.request.params.skip_special_tokens
        return (
            "" if self.tokenizer is None else self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)
        )

    def _chat_logprob(self, token: int, found: Logprob) -> dict[str, Any]:
        own = b"" if self.tokens is None else self.tokens.of(token)
        return {"token": found.decoded_token or "", "logprob": _finite(found).logprob, "bytes": list(own)}

    def _completion_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob] | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        tokens, own, top = [], [], []
        for token, found in zip(token_ids, logprobs, strict=True):
            if found is None:
                # The first token of a prompt has none.
                tokens.append("" if self.tokens is None else self.tokens.text(token))
            else:
                tokens.append(found[token].decoded_token or "")
            own.append(None if found is None else _finite(found[token]).logprob)
            top.append(None if found is None else _by_text(found))
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": list(offsets)}

    def _of_prompt(self, output: RequestOutput, *, chat: bool) -> dict[str, Any]:
        """Returns a prompt's tokens and their log-probabilities in vLLM's form, if they are wanted and stand here."""
        found: dict[str, Any] = {}
        if chat is not self.is_chat:
            return found
        if output.prompt_logprobs is not None:
            found["prompt_logprobs"] = [
                None if each is None else {str(token): asdict(_finite(value)) for token, value in each.items()}
                for each in output.prompt_logprobs
            ]
        if self.request.returns_token_ids:
            found["prompt_token_ids"] = list(output.prompt_token_ids)
        return found

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return self._event("chat.completion.chunk", [{"index": index, "delta": delta, "finish_reason": None}])

    def _event(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # As OpenAI: every event has the key if the last one has the counts.
        return self._frame(kind, choices) | ({"usage": None} if self._ends_with_usage else {})

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        answer_id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.answer_id}"
        head = {"id": answer_id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices}


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Returns the counts of tokens, those included that came from the prefix cache."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Yields the JSON of a value: of dicts, and lists of dicts, each value by itself, down to a depth."""
    if depth and isinstance(value, dict):
        for index, (name, each) in enumerate(value.items()):
            yield f"{',' if index else '{'}{_dumped(name)}:"
            yield from _pieces(each, depth - 1)
        yield "}" if value else "{}"
    elif depth and isinstance(value, list) and value and isinstance(value[-1], dict):
        for index, each in enumerate(value):
            yield "," if index else "["
            yield from _pieces(each, depth - 1)
        yield "]"
    elif isinstance(value, list) and len(value) > _MAX_ELEMENTS:
        for start in range(0, len(value), _MAX_ELEMENTS):
            yield ("," if start else "[") + _dumped(value[start : start + _MAX_ELEMENTS])[1:-1]
        yield "]"
    else:
        yield _dumped(value)


def _of_no_tokens(output: RequestOutput) -> RequestOutput:
    """Returns an output as if nothing had been generated after the prompt."""
    nothing: dict[str, Any] = {"text": "", "token_ids": (), "finish_reason": "length", "stop_reason": None}
    completions = (replace(each, **nothing, logprobs=None if each.logprobs is None else ()) for each in output.outputs)
    return replace(output, outputs=tuple(completions))


def _replay(completion: CompletionOutput) -> dict[str, Any]:
    """Returns in vLLM's form what a trainer replays, if the engine records it: masks, and experts as .npy in base64."""
    found: dict[str, Any] = {}
    if completion.sampling_mask is not None:
        found["sampling_mask"] = completion.sampling_mask.token_ids
    if completion.routed_experts is not None:
        np.save(file := io.BytesIO(), completion.routed_experts, allow_pickle=False)
        found["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    return found


def _reason(completion: CompletionOutput, num_calls: int = 0) -> str | None:
    if num_calls and completion.finish_reason == "stop":
        return "tool_calls"
    return "abort" if completion.finish_reason == "cancelled" else completion.finish_reason


def _by_text(found: dict[int, Logprob]) -> dict[str, float]:
    """Returns log-probabilities by the tokens' texts; of equal texts only the first one is not spelled by its id."""
    values: dict[str, float] = {}
    for token, each in found.items():
        text = each.decoded_token or ""
        # vLLM's spelling.
        values[f"token_id:{token}" if text in values else text] = _finite(each).logprob
    return values


def _finite(found: Logprob) -> Logprob:
    return replace(found, logprob=_SMALLEST) if found.logprob < _SMALLEST else found
