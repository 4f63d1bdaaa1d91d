"""Answers of `/v1/responses`: a response of items, whole or as typed events."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jattn.llm.engine import CompletionOutput, RequestOutput
from jattn.llm.serve.errors import RequestError
from jattn.llm.serve.messages import message_of, new_call_id
from jattn.llm.serve.responses import Answer, Sample, usage
from jattn.llm.serve.responses_request import ResponsesBody
from jattn.llm.tools.parser import Part

#: The part of a part's event names, and the key of its text.
_TEXTS = {"text": "output_text", "reasoning": "reasoning_text"}


@dataclass(slots=True)
class ResponseAnswer:
    """The answer to one request, of one sample.

    Attributes:
        chat: the answer as that of a chat.
        body: the request's body.
        done: text after the last event; None for none.
    """

    chat: Answer
    body: ResponsesBody
    done: None = None
    _items: list[dict[str, Any]] = field(default_factory=list)
    _open: tuple[str, int] | None = None
    _num_events: int = 0
    _logprobs: list[Any] = field(default_factory=list)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the answer to a request that does not stream."""
        completion = outputs[0].outputs[0]
        is_cut = completion.finish_reason == "length"
        found = message_of(self.chat.reading, completion.text, cut=is_cut)
        status = "incomplete" if is_cut else "completed"
        if found.reasoning is not None:
            self._items.append(_reasoning_item(found.reasoning, "completed"))
        if found.text is not None:
            self._items.append(_message_item(found.text, status, self._new_logprobs(completion)))
        for call in found.calls:
            self._items.append(_call_item(call.call_id, call.name, call.arguments, status))
        return self._response(completion.finish_reason, outputs)

    def opening(self) -> list[dict[str, Any]]:
        """Returns the events before the first token."""
        response = self._response(None, [])
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def sample(self) -> Sample:
        """Returns the state of the sample, of which nothing has come."""
        return self.chat.sample()

    def parts(self, prompt: int, new: CompletionOutput, sample: Sample) -> list[dict[str, Any]]:
        """Returns the events for new text; none while it may be part of a marker."""
        events: list[dict[str, Any]] = []
        self._logprobs += self._new_logprobs(new)
        for part in sample.reader.read(new.text, finished=new.finish_reason is not None):
            kind = "call" if part.kind in ("name", "arguments") else part.kind
            if self._open != (kind, part.call):
                events += self._close("completed")
                events += self._begin(kind, part)
            events += self._extend(part)
        if new.finish_reason is not None:
            events += self._close("incomplete" if new.finish_reason == "length" else "completed")
        return events

    def closing(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Returns the events after the last token."""
        response = self._response(outputs[0].outputs[0].finish_reason, outputs)
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: RequestError) -> dict[str, Any]:
        """Returns the event of an error after the first event."""
        return self._event("error", code=error.code or "server_error", message=str(error), param=error.param)

    def _begin(self, kind: str, part: Part) -> list[dict[str, Any]]:
        self._open = kind, part.call
        if kind == "call":
            item = _call_item(new_call_id(self.chat.reading), part.text, "", "in_progress")
            self._items.append(item)
            return [self._event("response.output_item.added", item=dict(item), **self._place())]
        item = (_message_item if kind == "text" else _reasoning_item)("", "in_progress")
        self._items.append(item)
        content, item["content"] = item["content"], []
        events = [self._event("response.output_item.added", item=dict(item), **self._place())]
        item["content"] = content
        return [*events, self._content("response.content_part.added", part=dict(content[0]))]

    def _extend(self, part: Part) -> list[dict[str, Any]]:
        item = self._items[-1]
        if part.kind == "name":
            return []
        if part.kind == "arguments":
            item["arguments"] += part.text
            place = {"item_id": item["id"], **self._place()}
            return [self._event("response.function_call_arguments.delta", delta=part.text, **place)]
        item["content"][0]["text"] += part.text
        more = {}
        if part.kind == "text":
            more["logprobs"], self._logprobs = self._logprobs, []
            item["content"][0]["logprobs"] = [*item["content"][0]["logprobs"], *more["logprobs"]]
        return [self._content(f"response.{_TEXTS[part.kind]}.delta", delta=part.text, **more)]

    def _close(self, status: str) -> list[dict[str, Any]]:
        """Returns the events that end the open item."""
        if self._open is None:
            return []
        (kind, _), self._open = self._open, None
        item = self._items[-1]
        item["status"] = status
        if kind == "call":
            given = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **given, **self._place())]
        else:
            (content,) = item["content"]
            more = {"logprobs": content["logprobs"]} if kind == "text" else {}
            events = [
                self._content(f"response.{_TEXTS[kind]}.done", text=content["text"], **more),
                self._content("response.content_part.done", part=content),
            ]
        return [*events, self._event("response.output_item.done", item=item, **self._place())]

    def _content(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._items[-1]["id"], content_index=0, **self._place(), **more)

    def _place(self) -> dict[str, int]:
        return {"output_index": len(self._items) - 1}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **more}

    def _new_logprobs(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        found = self.chat.chat_logprobs(completion)
        return [] if found is None else found["content"]

    def _response(self, finish_reason: str | None, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        asked, params = self.body, self.chat.request.params
        is_cut = finish_reason == "length"
        status = "in_progress" if finish_reason is None else "incomplete" if is_cut else "completed"
        return {
            "id": f"resp_{self.chat.answer_id}",
            "object": "response",
            "created_at": self.chat.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self.chat.model,
            "output": self._items if outputs else [],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(asked.reasoning or {})},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(asked.text or {})},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": _usage(outputs) if outputs else None,
            "metadata": {},
        }


def _message_item(text: str, status: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}
    return {"id": _item_id("msg"), "type": "message", "role": "assistant", "status": status, "content": [content]}


def _reasoning_item(text: str, status: str) -> dict[str, Any]:
    content = {"type": "reasoning_text", "text": text}
    return {"id": _item_id("rs"), "type": "reasoning", "status": status, "summary": [], "content": [content]}


def _call_item(call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    item = {"id": _item_id("fc"), "type": "function_call", "status": status}
    return {**item, "call_id": call_id, "name": name, "arguments": arguments}


def _item_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    counts = usage(outputs)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
