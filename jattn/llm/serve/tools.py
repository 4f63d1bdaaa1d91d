"""The tools of a request: their check, the grammar that they need, the reading of the answers."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jattn.llm.engine import SamplingParams, StructuredOutputsParams
from jattn.llm.load import TextTokenizer
from jattn.llm.text.tokens import TokenBytes
from jattn.llm.tools.formats import ReasoningFormat, ToolFormat, reasoning_format, tool_format
from jattn.llm.tools.grammar import Tool, calls_grammar, has_trigger, written_format
from jattn.llm.tools.parser import Reading
from torch_core.base.errors import InvalidInput

_log = logging.getLogger("jattn.llm.serve")

_MAX_TOOLS, _MAX_NAME = 128, 128
_INSTRUCTION = (
    "You can call functions. To call some, answer with nothing but a JSON list of the calls: "
    '[{"name": NAME, "arguments": OBJECT}]. Otherwise answer in plain text. The functions:\n'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        tools: tools that may be called; those that the grammar of a required call allows.
        required: the answer must be calls.
        parallel: there may be several calls.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True


def read_tools(tools: Sequence[Any] | None, choice: Any, *, parallel: bool) -> ToolUse | None:
    """Returns the tools of a chat's body; None if none may be called.

    Raises:
        InvalidInput: a tool is malformed, or the choice names none of them.
    """
    if tools is not None and len(tools) > _MAX_TOOLS:
        raise InvalidInput("tools", f"has {len(tools)} entries", f"it must have {_MAX_TOOLS} at most")
    found = [_tool(f"tools[{index}]", each) for index, each in enumerate(tools or ())]
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    if choice == "none" or (not found and choice in (None, "auto")):
        return None
    if named is not None:
        found = [each for each in found if each.name == named][:1]
    if not found:
        wanted = "it needs tools" if named is None else "it must name one of the tools"
        raise InvalidInput("tool_choice", value=named or choice, wanted=wanted)
    required = named is not None or choice == "required"
    return ToolUse(tools=tuple(found), required=required, parallel=parallel and named is None)


def with_instruction(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns messages whose first one, of the system, describes the tools; for templates that leave them out."""
    functions = "\n".join(json.dumps(each.get("function"), ensure_ascii=False) for each in tools)
    text = _INSTRUCTION + functions
    first = messages[0] if messages and messages[0].get("role") == "system" else None
    if first is None:
        return [{"role": "system", "content": text}, *map(dict, messages)]
    return [{**first, "content": f"{first.get('content') or ''}\n\n{text}"}, *map(dict, messages[1:])]


@functools.cache
def note_silent_template() -> None:
    """Logs once that a request has tools and the template does not write them."""
    _log.warning(
        "a request has tools, and the chat template does not write them: the model knows nothing of them "
        "(--tool-instruction describes them in the system message)"
    )


def reading_of(
    use: ToolUse | None,
    params: SamplingParams,
    *,
    parsers: tuple[str, str],
    template: str,
    prompt: str,
    tokenizer: TextTokenizer,
    answer: Mapping[str, Any] | None,
) -> tuple[Reading | None, SamplingParams]:
    """Returns how a request's answers are read, and its parameters with the grammar of its calls.

    Args:
        use: tools of the request.
        params: its parameters. A format of the text that they require stays, unless calls are required or `answer` is
            given.
        parsers: names of the formats of calls and of reasoning, "auto" for those of the template.
        template: source of the chat template.
        prompt: text of the prompt.
        tokenizer: tokenizer of the model.
        answer: JSON schema of an answer that is no call, if that is the required format.
    """
    form, reasoning = tool_format(parsers[0], template), reasoning_format(parsers[1], template)
    special = _special_tokens(tokenizer)
    if use is None:
        if params.structured_outputs is not None:
            return None, params
        # Channels have reasoning, too.
        form = form if form is not None and form.body == "channels" else None
    elif use.required or answer is not None:
        form = written_format(form, special)
        # A grammar cannot spell special tokens.
        reasoning = None if reasoning is None or special.intersection(reasoning.markers) else reasoning
        params = _constrained(params, use, form, reasoning, prompt, answer)
    elif params.structured_outputs is not None:
        reasoning = None
    elif form is not None and any(each.strict for each in use.tools) and has_trigger(form):
        markers = form.markers + (reasoning.markers if reasoning else ())
        # Clients ask for strict arguments by default: they are not refused where there is no grammar.
        if not special.intersection(markers) and importlib.util.find_spec("llguidance") is not None:
            params = _constrained(params, use, form, reasoning, prompt, None)
    if form is None and reasoning is None:
        return None, params
    markers = (form.markers if form else ()) + (reasoning.markers if reasoning else ())
    if special.intersection(markers):
        params = dataclasses.replace(params, skip_special_tokens=False)
    reading = Reading(
        tools=form,
        reasoning=reasoning,
        schemas={} if use is None else {each.name: each.schema or {} for each in use.tools},
        opened=_is_open(reasoning, prompt),
        most_calls=None if use is None or use.parallel else 1,
    )
    return reading, params


def _constrained(
    params: SamplingParams,
    use: ToolUse,
    form: ToolFormat,
    reasoning: ReasoningFormat | None,
    prompt: str,
    answer: Mapping[str, Any] | None,
) -> SamplingParams:
    grammar = calls_grammar(
        form,
        use.tools,
        required=use.required,
        parallel=use.parallel,
        answer=answer,
        reasoning=reasoning,
        opened=_is_open(reasoning, prompt),
    )
    return dataclasses.replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))


def _is_open(reasoning: ReasoningFormat | None, prompt: str) -> bool:
    return reasoning is not None and prompt.rstrip().endswith(reasoning.begin)


def _tool(name: str, given: Any) -> Tool:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or given.get("type", "function") != "function":
        raise InvalidInput(name, value=given, wanted="it must be an object of the type function, with a function")
    own, schema, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(own, str) or not 0 < len(own) <= _MAX_NAME:
        raise InvalidInput(f"{name}.function.name", value=own, wanted=f"it must have 1 to {_MAX_NAME} characters")
    if not isinstance(schema, Mapping | None):
        raise InvalidInput(f"{name}.function.parameters", value=schema, wanted="it must be a JSON schema")
    if not isinstance(strict, bool | None):
        raise InvalidInput(f"{name}.function.strict", value=strict, wanted="it must be true or false")
    return Tool(own, schema, bool(strict))


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer: TextTokenizer) -> frozenset[str]:
    ids = TokenBytes(tokenizer).special_token_ids
    return frozenset(filter(None, map(tokenizer.tokenizer.id_to_token, ids)))
