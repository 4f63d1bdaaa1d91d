"""The forms in which a prompt may be passed, in one form: token ids and their text."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jattn.llm.load import ChatTemplate, TextTokenizer
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput

#: A text, token ids, or vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`, or both of them.
Prompt = str | Sequence[int] | Mapping[str, Any]


def as_prompts(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts for one prompt or several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    try:
        if isinstance(prompts, (bytes, bytearray, memoryview)):
            # They would pass as token ids.
            raise TypeError
        listed = list(prompts)
    except TypeError:
        raise InvalidInput("prompts", f"is a {type(prompts).__name__}", "pass a prompt or a list of them") from None
    if not listed:
        raise InvalidInput("prompts", "is empty", "pass at least one")
    are_prompts = [isinstance(item, (str, list, tuple, Mapping)) or getattr(item, "ndim", 0) > 0 for item in listed]
    if all(are_prompts):
        return listed
    if any(are_prompts):
        index = are_prompts.index(False)
        wanted = "see LLM.generate"
        raise InvalidInput(f"prompts[{index}]", f"is a {type(listed[index]).__name__} among prompts", wanted)
    return [listed]


def encoded(
    prompt: Prompt,
    tokenizer: TextTokenizer | None,
    most: int | None = None,
    *,
    cut: bool = False,
    may_be_empty: bool = False,
) -> tuple[Sequence[int], str | None]:
    """Returns a prompt's token ids and its text, if it came as text; an empty one has special tokens alone, or none.

    `most` and `cut` are as in `TextTokenizer.encode`.
    """
    if isinstance(prompt, Mapping):
        if set(prompt) == {"prompt", "prompt_token_ids"}:
            return prompt["prompt_token_ids"], prompt["prompt"]
        prompt = _unwrapped(prompt)
    if not isinstance(prompt, str):
        return prompt, None
    if not prompt and not may_be_empty:
        raise InvalidInput(
            "a prompt is an empty string; give it at least one character, or pass token ids (the model's "
            "beginning-of-sequence token, to start from nothing).",
            argument="prompt",
        )
    if tokenizer is None:
        raise InvalidInput("the model has no tokenizer; pass lists of token ids, or LLM(model, tokenizer=...).")
    _check_text(prompt)
    return tokenizer.encode(prompt, most=most, cut=cut), prompt


def with_beginning(text: str, prompt: Prompt, *, lower: bool = False) -> Prompt:
    """Returns a prompt whose text begins with another, in lower case if `lower`; token ids stay."""
    if isinstance(prompt, Mapping) and set(prompt) == {"prompt"}:
        prompt = _unwrapped(prompt)
    if not isinstance(prompt, str):
        return prompt
    return (text + prompt).lower() if lower else text + prompt


@contextlib.contextmanager
def naming(index: int, prompts: Sequence[Prompt]) -> Iterator[None]:
    """Renames `prompt` in a refusal to its place among several prompts, such as "prompts[1]"."""
    try:
        yield
    except InvalidInput as error:
        # An error of the parameters concerns all prompts.
        raise error if len(prompts) == 1 else error.renamed(f"prompts[{index}]", old="prompt") from None


def chat_prompt(
    tokenizer: TextTokenizer | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: ChatTemplate | str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    most: int | None = None,
    cut: bool = False,
) -> Prompt:
    """Returns the prompt of a conversation, by the model's template or by `chat_template`.

    An empty list of tools is none: templates test whether there are tools. `most` and `cut` are as in
    `TextTokenizer.encode`.
    """
    tools = tools or None
    variables = {} if chat_template_kwargs is None else chat_template_kwargs
    check_template_kwargs(variables)
    if tokenizer is None:
        raise InvalidInput("the model has no tokenizer, which a chat needs.")
    template = template_of(tokenizer, chat_template, with_tools=tools is not None)
    text = template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
    _check_text(text)
    # The template writes the special tokens itself.
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False, most=most, cut=cut)}


def template_of(
    tokenizer: TextTokenizer, chat_template: ChatTemplate | str | None = None, *, with_tools: bool
) -> ChatTemplate:
    """Returns `chat_template`, or the model's own: for conversations with tools it may have another one."""
    template = chat_template
    if template is None:
        for_tools = tokenizer.tool_chat_template if with_tools else None
        template = tokenizer.chat_template if for_tools is None else for_tools
    if template is None:
        raise InvalidInput("the model has no chat template; pass chat_template (to a command, --chat-template FILE).")
    if isinstance(template, ChatTemplate):
        return template
    if not isinstance(template, str):
        raise InvalidInput("chat_template", value=template, wanted="it must be text, or a ChatTemplate")
    return _compiled(template, tuple(tokenizer.special_tokens.items()))


def check_template_kwargs(variables: Any) -> None:
    """Refuses variables of a chat template that are no mapping, or have the name of an argument."""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidInput("chat_template_kwargs", value=variables, wanted="it must map names of variables to values")
    for name in ("messages", "tools", "add_generation_prompt", "chat_template"):
        if name in variables:
            raise InvalidInput("chat_template_kwargs", f"has {name!r}, which is given beside it and not in it")


@functools.lru_cache(maxsize=8)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"character {error.start} of a prompt is a lone surrogate, U+{ord(text[error.start]):04X}; text must be "
            "what UTF-8 can encode.",
            argument="prompt",
        ) from None


def _unwrapped(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    """Returns the content of vLLM's TextPrompt or TokensPrompt."""
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if set(prompt) == {"prompt_token_ids"} and not isinstance(prompt["prompt_token_ids"], str):
        return prompt["prompt_token_ids"]
    raise InvalidInput(
        f"a prompt is a mapping with the keys {shown(list(prompt))}; it must be {{'prompt': text}} or "
        "{'prompt_token_ids': ids}.",
        argument="prompt",
    )
