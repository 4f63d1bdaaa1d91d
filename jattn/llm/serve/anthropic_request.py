"""The body of `/v1/messages`, Anthropic's, as a chat: blocks become messages, and fields get a chat's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from jattn.llm.serve.bodies import GenerationBody, List, Object, Text, Whole, read_body, text_of
from jattn.llm.serve.protocol import Generation, parse_as_chat
from jattn.llm.text.messages import as_message
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput

#: Fields of a chat, by their names in the client's body.
_NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "parallel_tool_calls": "tool_choice",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")


def _check_system(name: str, value: Any) -> None:
    is_blocks = isinstance(value, list) and all(isinstance(each, Mapping) and _is_text(each) for each in value)
    if not isinstance(value, str | None) and not is_blocks:
        raise InvalidInput(name, value=value, wanted="it must be a string or a list of text blocks")


def _check_edits(name: str, value: Any) -> None:
    edits = value.get("edits", []) if isinstance(value, Mapping) else None
    # Templates leave the reasoning of earlier turns out by themselves.
    known = isinstance(edits, list) and all(
        isinstance(each, Mapping) and str(each.get("type")).startswith("clear_thinking") for each in edits
    )
    if value is not None and not known:
        raise InvalidInput(name, "is given", "this server changes no conversation: send what the model has to read")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesBody(GenerationBody):
    """The body of `/v1/messages`; the parameters of sampling are a chat's."""

    messages: List
    max_tokens: Whole  # type: ignore[misc]
    system: Annotated[Any, _check_system] = None
    stop_sequences: List | None = None
    tools: List | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    context_management: Annotated[Any, _check_edits] = None
    chat_template_kwargs: Object | None = None
    chat_template: Text | None = None
    #: Changes no answer: the cache is automatic.
    cache_control: Any = None


def parse_messages(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Generation:
    """Reads the body of `/v1/messages`; `defaults` has values of fields that it leaves out."""
    asked = read_body(MessagesBody, body, defaults)
    if asked.sampling.get("n", 1) != 1:
        raise InvalidInput("n", value=asked.sampling["n"], wanted="a message is one sample")
    for name, own in {"stop": "stop_sequences", "response_format": "output_config.format"}.items():
        if body.get(name) is not None:
            raise InvalidInput(name, "is given", f"the field of this request is {own}")
    output, choice, extra = asked.output_config or {}, asked.tool_choice or {}, dict(asked.chat_template_kwargs or {})
    form, thinking = output.get("format"), (asked.thinking or {}).get("type")
    if asked.thinking is not None and thinking not in _THINKING:
        raise InvalidInput("thinking", value=asked.thinking, wanted=f"its type must be one of {', '.join(_THINKING)}")
    if output.keys() - {"effort", "format"} or not isinstance(form, Mapping | None):
        raise InvalidInput("output_config", value=output, wanted="it must be an object with effort or format")
    if thinking is not None:
        extra.setdefault("enable_thinking", thinking != "disabled")
    chat: dict[str, Any] = {
        "messages": _messages(asked),
        "max_tokens": asked.max_tokens,
        "response_format": form and {"type": form.get("type"), "json_schema": {**form, "strict": True}},
        "tools": None if asked.tools is None else [_tool(index, each) for index, each in enumerate(asked.tools)],
        "tool_choice": _choice(choice),
        "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True,
        "reasoning_effort": output.get("effort"),
        "include_reasoning": thinking != "disabled",
        "chat_template_kwargs": extra,
        "chat_template": asked.chat_template,
        "stop": asked.stop_sequences,
    }
    return parse_as_chat(asked, chat, names=_NAMES, prompt_field="messages")


def _messages(asked: MessagesBody) -> list[dict[str, Any]]:
    """Returns a chat's messages; turns of one role in a row are one turn."""
    turns: list[tuple[str, list[tuple[str, Any]]]] = []
    for index, given in enumerate(asked.messages):
        name = f"messages[{index}]"
        role = given.get("role") if isinstance(given, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise InvalidInput(f"{name}.role", value=role, wanted="it must be user or assistant")
        content = given.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(each, Mapping) for each in blocks):
            raise InvalidInput(f"{name}.content", value=content, wanted="it must be a string or a list of blocks")
        if not turns or turns[-1][0] != role:
            turns.append((role, []))
        turns[-1][1].extend((f"{name}.content[{place}]", each) for place, each in enumerate(blocks))
    if turns and turns[-1][0] == "assistant":
        wanted = "this server continues no answer: the last message must be the user's"
        raise InvalidInput(f"messages[{len(asked.messages) - 1}].role", value="assistant", wanted=wanted)
    messages = [] if asked.system is None else [as_message("system", {"role": "system", "content": asked.system})]
    for role, blocks in turns:
        messages += [_assistant(blocks)] if role == "assistant" else _user(role, blocks)
    return messages


def _user(role: str, blocks: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, block in blocks:
        if _is_text(block):
            if not found or found[-1]["role"] != role:
                found.append({"role": role, "content": []})
            found[-1]["content"].append(block)
        elif block.get("type") == "tool_result" and role == "user":
            result = {"role": "tool", "tool_call_id": text_of(name, block, "tool_use_id")}
            found.append(as_message(name, {**result, "content": block.get("content") or ""}))
        else:
            raise InvalidInput(f"{name}.type", value=block.get("type"), wanted="it must be text or tool_result")
    return [as_message("messages", each) for each in found]


def _assistant(blocks: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = [], list[str](), list[dict[str, Any]]()
    for name, block in blocks:
        if _is_text(block):
            texts.append(block)
        elif block.get("type") == "thinking":
            thoughts.append(text_of(name, block, "thinking"))
        elif block.get("type") == "tool_use":
            given = block.get("input")
            if not isinstance(given, Mapping):
                raise InvalidInput(f"{name}.input", value=given, wanted="it must be an object")
            function = {"name": text_of(name, block, "name"), "arguments": given}
            calls.append({"id": text_of(name, block, "id"), "type": "function", "function": function})
        else:
            wanted = "it must be text, thinking or tool_use"
            raise InvalidInput(f"{name}.type", value=block.get("type"), wanted=wanted)
    message = {"role": "assistant", "content": texts or None, "reasoning_content": "".join(thoughts) or None}
    return as_message("messages", {**message, "tool_calls": calls})


def _is_text(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and isinstance(block.get("text"), str)


def _tool(index: int, tool: Any) -> dict[str, Any]:
    kind = tool.get("type", "custom") if isinstance(tool, Mapping) else None
    if kind not in ("custom", None) or not isinstance(tool, Mapping):
        problem = f"this server has no tools ({shown(kind)}) of its own"
        raise InvalidInput(f"tools[{index}]", "is none of the client's", problem)
    name, schema = text_of(f"tools[{index}]", tool, "name"), tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise InvalidInput(f"tools[{index}].input_schema", value=schema, wanted="it must be a JSON schema")
    known = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": name, **known, "parameters": schema}}


def _choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        wanted = f"its type must be one of {', '.join((*_CHOICES, 'tool'))}"
        raise InvalidInput("tool_choice", value=choice, wanted=wanted)
    return _CHOICES[kind]
