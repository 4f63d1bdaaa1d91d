"""The formats in which families of models write calls of tools and reasoning, as data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch_core.base.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The calls of one family of models.

    Attributes:
        name: name of the format; those that vLLM has are vLLM's.
        body: the form of a call. "json" is an object with a name and arguments, or a list of them; "named" is a name
            and the JSON object of its arguments; "xml" has a tag for each argument; "python" is a list of Python calls;
            "channels" is Harmony.
        begin: markers in front of calls.
        end: markers after them; an answer may end before them.
        dropped: further markers around calls.
        bare: calls may also begin with the first character of an answer, without a marker. Such a call must name a
            tool of the request: any JSON could be meant for the reader.
        head: for "named", a regular expression of the text from the marker to the arguments, with the group `name`.
        signs: texts, one of which a chat template of the family contains.
        written: texts around the JSON arguments of a call, for grammars: "{name}" stands for the name as JSON. Without
            them, a required call is written as the format "json".
        between: text between two calls.
        around: texts around all calls.
        id_length: characters of a call's id; None for OpenAI's form.
    """

    name: str
    body: Literal["json", "named", "xml", "python", "channels"]
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    bare: bool = False
    head: str = ""
    signs: tuple[str, ...] = ()
    written: tuple[str, str] | None = None
    between: str = ""
    around: tuple[str, str] = ("", "")
    id_length: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers; special tokens among them must stay in the text."""
        return self.begin + self.end + self.dropped + (HARMONY_MARKERS if self.body == "channels" else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The reasoning of one family of models, in front of the answer.

    Attributes:
        name: name of the format; those that vLLM has are vLLM's.
        begin, end: markers around the reasoning. A prompt may end with the first one.
        implied: the answer begins within the reasoning, also without the first marker.
        dropped: markers around the answer itself.
        signs: as of `ToolFormat`.
    """

    name: str
    begin: str
    end: str
    implied: bool = False
    dropped: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers; special tokens among them must stay in the text."""
        return (self.begin, self.end, *self.dropped)


START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKERS = (START, CHANNEL, MESSAGE, "<|constrain|>", *HARMONY_ENDS)
# DeepSeek's bars are wide ones.
_CALL, _SEP, _CALL_END, *_CALLS = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("call\u2581begin", "sep", "call\u2581end", "calls\u2581begin", "calls\u2581end")
)
_NAME = r"\s*(?P<name>[^\s<\[{]+)"

#: In the order in which a template is searched for their signs.
TOOL_FORMATS = (
    ToolFormat(name="openai", body="channels", signs=(CHANNEL,)),
    ToolFormat(
        name="deepseek_v3",
        body="named",
        begin=(_CALL,),
        end=(_CALL_END,),
        dropped=tuple(_CALLS),
        # The newer form has the name alone in front of the separator.
        head=rf"\s*(?:function\s*{_SEP}{_NAME}\s*(?:```(?:json)?\s*)?|(?P<only>[^\s<\[{{]+)\s*{_SEP}\s*)",
        signs=(_CALL,),
    ),
    ToolFormat(
        name="qwen3_coder",
        body="xml",
        begin=("<tool_call>", "<function="),
        end=("</tool_call>",),
        signs=("<function=",),
    ),
    ToolFormat(
        name="hermes",
        body="json",
        begin=("<tool_call>",),
        end=("</tool_call>",),
        signs=("<tool_call>",),
        written=('<tool_call>\n{"name": {name}, "arguments": ', "}\n</tool_call>"),
        between="\n",
    ),
    ToolFormat(
        name="mistral",
        body="named",
        begin=("[TOOL_CALLS]",),
        head=rf"{_NAME}\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?",
        signs=("[TOOL_CALLS]",),
        # Its templates refuse other lengths.
        id_length=9,
    ),
    ToolFormat(
        name="phi4_mini_json",
        body="json",
        begin=("<|tool_call|>", "functools"),
        end=("<|/tool_call|>",),
        signs=("<|tool|>",),
    ),
    ToolFormat(name="granite", body="json", begin=("<|tool_call|>",), bare=True, signs=("<|tool_call|>",)),
    ToolFormat(
        name="pythonic",
        body="python",
        begin=("<|python_start|>",),
        end=("<|python_end|>",),
        bare=True,
        signs=("func_name1(", "<|python_start|>"),
    ),
    ToolFormat(
        name="llama3_json",
        body="json",
        begin=("<|python_tag|>",),
        bare=True,
        signs=("<|python_tag|>", '"parameters": dictionary'),
        written=('{"name": {name}, "parameters": ', "}"),
        between="; ",
    ),
    ToolFormat(
        name="json",
        body="json",
        bare=True,
        written=('{"name": {name}, "arguments": ', "}"),
        between=", ",
        around=("[", "]"),
    ),
)
#: The format for templates without a sign; a list of calls, if a grammar requires it.
GENERIC = TOOL_FORMATS[-1]

REASONING_FORMATS = (
    ReasoningFormat(
        name="granite_response",
        begin="<think>",
        end="</think>",
        dropped=("<response>", "</response>"),
        signs=("<response>",),
    ),
    ReasoningFormat(name="qwen3", begin="<think>", end="</think>", signs=("</think>", "<think>")),
    ReasoningFormat(name="deepseek_r1", begin="<think>", end="</think>", implied=True),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]", signs=("[THINK]",)),
    ReasoningFormat(
        name="granite",
        begin="Here is my thought process:",
        end="Here is my response:",
        signs=("Here is my thought process:",),
    ),
    ReasoningFormat(name="seed_oss", begin="<seed:think>", end="</seed:think>", signs=("<seed:think>",)),
)

_F = TypeVar("_F", ToolFormat, ReasoningFormat)
#: Names of an option: "auto" looks for the signs of a template, "none" reads nothing.
TOOL_PARSERS = ("auto", "none", *(each.name for each in TOOL_FORMATS))
REASONING_PARSERS = ("auto", "none", *(each.name for each in REASONING_FORMATS))


@functools.lru_cache(maxsize=64)
def tool_format(name: str, template: str) -> ToolFormat | None:
    """Returns the format of an option's name, or with "auto" that of a template; None if there is none to read."""
    return _chosen(TOOL_FORMATS, name, template) or (GENERIC if name == "auto" else None)


@functools.lru_cache(maxsize=64)
def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Returns the format of an option's name, or with "auto" that of a template; None if there is none to read."""
    return _chosen(REASONING_FORMATS, name, template)


def _chosen(formats: tuple[_F, ...], name: str, template: str) -> _F | None:
    if name == "auto":
        return next((each for each in formats if any(sign in template for sign in each.signs)), None)
    found = {each.name: each for each in formats}
    if name not in found and name != "none":
        known = ", ".join(("auto", "none", *found))
        raise InvalidInput("parser", value=name, wanted=f"it must be one of {known}")
    return found.get(name)
