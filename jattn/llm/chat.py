"""A conversation in a terminal: lines in, answers out as they come, over one `LLM`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from jattn.llm.engine import LLM, SamplingParams
from jattn.llm.text.prompts import chat_prompt
from torch_core.base.errors import RequestTooLong


def converse(
    llm: LLM,
    lines: Iterable[str],
    say: Callable[[str], object],
    *,
    params: SamplingParams,
    system: str | None = None,
    chat_template: str | None = None,
) -> list[dict[str, str]]:
    """Answers each line in the light of those before it, which the cached prefix makes cheap; returns the conversation.

    An interrupt ends the current answer, and the text so far stays. `/clear` forgets the conversation, `/exit` and the
    last line end it. `say` takes each piece of an answer, and the newline after it. A further line that does not fit
    the model is refused and left out.

    Raises:
        RequestTooLong: the first line of a conversation does not fit.
    """
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    for line in lines:
        text = line.strip()
        if text == "/exit":
            break
        if text == "/clear":
            messages = list(beginning)
        elif text:
            asked = [*messages, {"role": "user", "content": text}]
            prompt = chat_prompt(llm.tokenizer, asked, chat_template=chat_template, add_generation_prompt=True)
            answer: list[str] = []
            try:
                with contextlib.closing(llm.stream(prompt, params)) as stream, contextlib.suppress(KeyboardInterrupt):
                    for delta in stream:
                        answer.append(delta.text)
                        say(delta.text)
            except RequestTooLong as error:
                if messages == beginning:
                    raise
                say(f"jattn: {error} /clear forgets the conversation.\n")
                continue
            say("\n")
            messages = [*asked, {"role": "assistant", "content": "".join(answer)}]
    return messages
