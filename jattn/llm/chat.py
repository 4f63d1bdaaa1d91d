"""A conversation in a terminal: lines in, answers out as they come, over one `LLM`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from jattn.llm.engine import LLM, SamplingParams
from jattn.llm.text.prompts import chat_prompt


def converse(
    llm: LLM,
    lines: Iterable[str],
    say: Callable[[str], object],
    *,
    params: SamplingParams,
    system: str | None = None,
    chat_template: str | None = None,
) -> list[dict[str, str]]:
    """Answers each line in the light of those before it; the cached prefix makes that cheap.

    An interrupt ends the current answer, and the text so far stays. `/clear` forgets the conversation, `/exit` and the
    last line end it.

    Args:
        llm: the `LLM` that answers.
        lines: the user's lines.
        say: takes each piece of an answer, and the newline after it.
        params: sampling parameters of every answer.
        system: the system's message.
        chat_template: instead of the model's own.

    Returns:
        The conversation, as messages.

    Raises:
        InvalidInput: the model has no chat template and none is given, or it fails.
        RequestTooLong: the conversation has outgrown the model; `/clear` begins another.
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
            with contextlib.closing(llm.stream(prompt, params)) as stream, contextlib.suppress(KeyboardInterrupt):
                for delta in stream:
                    answer.append(delta.text)
                    say(delta.text)
            say("\n")
            messages = [*asked, {"role": "assistant", "content": "".join(answer)}]
    return messages
