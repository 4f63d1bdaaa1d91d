"""Chat templates: a conversation becomes a prompt, by a program that came with a model and is not trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jattn.llm.workers.pool import Refused, Task
from torch_core.base.errors import InvalidInput

_MAX_SOURCE = 1 << 17
_RENDER = Task(
    module="templates",
    function="render_template",
    argument="messages",
    subject="the chat template",
    fix="shorten the conversation, or give another chat_template",
    seconds=2.0,
    memory_bytes=256 << 20,
)
_COMPILE = replace(_RENDER, function="compile_template", argument="chat_template", fix="give another chat_template")


class ChatTemplate:
    """A Jinja template as transformers has them: `messages`, `tools`, `add_generation_prompt`, `bos_token`, ...

    It runs in jinja2's immutable sandbox, which hides attributes of Python's own objects and refuses changes of its
    arguments, and in a process of its own, which ends after 2 seconds of processor time or 256 MiB of memory.

    Args:
        source: source of the template.
        special_tokens: names (bos_token, eos_token, ...) to their texts.

    Raises:
        InvalidInput: the source is too long or does not compile.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}")
        >>> template.render([{"role": "user", "content": "Hello"}])
        'user: Hello\\n'
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        if not isinstance(source, str) or len(source) > _MAX_SOURCE:
            raise InvalidInput("chat_template", f"must be text of {_MAX_SOURCE} characters at most")
        self.source, self._special_tokens = source, dict(special_tokens or {})
        try:
            _COMPILE.run(source)
        except Refused as error:
            raise InvalidInput("chat_template", f"does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Returns the prompt.

        Args:
            messages: mappings with role and content.
            tools: JSON schemas of functions, for templates that know of them.
            add_generation_prompt: end where the assistant's answer begins.
            **variables: variables of the template. All values must be such that JSON can spell them.

        Raises:
            InvalidInput: the template fails, refuses the conversation, or goes beyond a limit.
            Overloaded: no process became free in time.
        """
        names = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            text = _RENDER.run(self.source, messages, self._special_tokens | variables | names)
        except Refused as error:
            raise InvalidInput(f"the chat template fails on these messages: {error}.") from None
        return text.decode("utf-8", "surrogatepass")
