"""Answers of `/v1/messages` in Anthropic's form: a message of blocks, whole or as events, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jattn.llm.engine import CompletionOutput, RequestOutput
from jattn.llm.serve.errors import RequestError
from jattn.llm.serve.messages import message_of, new_call_id, object_of
from jattn.llm.serve.responses import Answer, Sample, usage
from jattn.llm.tools.parser import Part

_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
#: The delta of each kind of part, and the key of its text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}


def message_error(error: RequestError) -> dict[str, Any]:
    """Returns Anthropic's error object."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


@dataclass(slots=True)
class MessageAnswer:
    """The answer to one request, of one sample.

    Attributes:
        chat: the answer as that of a chat.
        done: text after the last event; None for none.
    """

    chat: Answer
    done: None = None
    _open: tuple[str, int] | None = None
    _num_blocks: int = 0
    _num_calls: int = 0

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the answer to a request that does not stream."""
        completion = outputs[0].outputs[0]
        is_cut = completion.finish_reason == "length"
        shows = self.chat.request.includes_reasoning
        found = message_of(self.chat.reading, completion.text, cut=is_cut, includes_reasoning=shows)
        content = []
        if found.reasoning is not None:
            content.append(_block("reasoning", found.reasoning))
        if found.text:
            content.append(_block("text", found.text))
        content += [_call(each.call_id, each.name, object_of(each.arguments) or {}) for each in found.calls]
        self._num_calls = len(found.calls)
        return self._message(content, _usage(outputs)) | self._end(completion)

    def opening(self) -> list[dict[str, Any]]:
        """Returns the events before the first token."""
        counts = {"input_tokens": sum(self.chat.num_prompt_tokens), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], counts)}]

    def sample(self) -> Sample:
        """Returns the state of the sample, of which nothing has come."""
        return self.chat.sample()

    def parts(self, prompt: int, new: CompletionOutput, sample: Sample) -> list[dict[str, Any]]:
        """Returns the events for new text; none while it may be part of a marker."""
        events: list[dict[str, Any]] = []
        for part in sample.reader.read(new.text, finished=new.finish_reason is not None):
            kind = "call" if part.kind in ("name", "arguments") else part.kind
            if self._open != (kind, part.call):
                events += [*self._close(), self._begin(kind, part)]
            if part.kind != "name":
                name, key = _DELTAS[part.kind]
                delta = {"type": name, key: part.text}
                events.append({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})
        self._num_calls = sample.reader.num_calls
        return events if new.finish_reason is None else [*events, *self._close()]

    def closing(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Returns the events after the last token."""
        delta = self._end(outputs[0].outputs[0])
        return [{"type": "message_delta", "delta": delta, "usage": _usage(outputs)}, {"type": "message_stop"}]

    def failure(self, error: RequestError) -> dict[str, Any]:
        """Returns the event of an error after the first event."""
        return message_error(error)

    def _begin(self, kind: str, part: Part) -> dict[str, Any]:
        self._open = kind, part.call
        self._num_blocks += 1
        block = _call(new_call_id(self.chat.reading), part.text, {}) if kind == "call" else _block(kind, "")
        return {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _close(self) -> list[dict[str, Any]]:
        is_open, self._open = self._open is not None, None
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}] if is_open else []

    def _message(self, content: list[dict[str, Any]], counts: dict[str, Any]) -> dict[str, Any]:
        head = {"id": f"msg_{self.chat.answer_id}", "type": "message", "role": "assistant", "model": self.chat.model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": counts}

    def _end(self, completion: CompletionOutput) -> dict[str, Any]:
        sequence = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        reason = "tool_use" if self._num_calls else "end_turn" if sequence is None else "stop_sequence"
        if completion.finish_reason == "length":
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _block(kind: str, text: str) -> dict[str, Any]:
    # No signature is needed: nothing is encrypted.
    return {"type": "text", "text": text} if kind == "text" else {"type": "thinking", "thinking": text, "signature": ""}


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    counts = usage(outputs)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }
