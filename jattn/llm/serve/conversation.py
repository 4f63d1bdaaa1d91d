"""`Conversation`: the turns of an agent as one growing list of token ids, which is never tokenised again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jattn.llm.engine import CompletionOutput, RequestOutputKind, SamplingParams
from jattn.llm.serve.async_llm import AsyncLLM
from jattn.llm.text.messages import as_messages
from jattn.llm.text.prompts import chat_prompt
from torch_core.base.errors import InvalidInput

Messages = Sequence[Mapping[str, Any]]
# Stands for the text of a turn in a rendered conversation.
_TURN = "0f3b7c5e-turn"


@dataclass(frozen=True, slots=True)
class Turn:
    """One generated turn.

    Attributes:
        start, stop: places of its tokens in `Conversation.token_ids`.
        output: its text, tokens, log-probabilities and finish reason.
        num_cached_tokens: tokens of the conversation before it whose keys and values were in the cache.
    """

    start: int
    stop: int
    output: CompletionOutput
    num_cached_tokens: int


class Conversation:
    """A conversation with a model, for agents and for reinforcement learning over several turns.

    Tokens are only appended: sampled tokens stay as they were sampled, and messages between turns (the results of
    tools) are tokenised by themselves. So each turn finds the keys and values of all earlier ones in the prefix cache,
    and a trainer gets the tokens that were sampled with the probabilities that they were sampled with.

    Args:
        llm: the model. Any number of conversations share it.
        token_ids: the first tokens; see `start` for messages.
        template: options of the chat template for further messages: `chat_template`, `tools`, `chat_template_kwargs`,
            as in `LLM.chat`.
        options: `salt`, `priority` and `inputs` of each turn, as in `Engine.add`.

    Attributes:
        token_ids: all tokens so far.
        sampled: for each of them whether the model sampled it: the mask of a loss.
        logprobs: for each sampled token its log-probability, as `EngineConfig.logprobs_mode` says; 0 for the others.
        turns: the generated turns.

    Example:
        >>> from jattn.llm.engine import LLM
        >>> async def talk() -> Conversation:
        ...     with AsyncLLM(LLM()) as llm:
        ...         conversation = Conversation(llm, llm.llm.tokenizer.encode("The list"))
        ...         await conversation.generate(SamplingParams(max_tokens=3, ignore_eos=True))
        ...         conversation.append_tokens(llm.llm.tokenizer.encode(" and"))
        ...         await conversation.generate(SamplingParams(max_tokens=2, ignore_eos=True))
        ...         return conversation
        >>> conversation = asyncio.run(talk())
        >>> sum(conversation.sampled), [turn.stop - turn.start for turn in conversation.turns]
        (5, [3, 2])
    """

    def __init__(
        self, llm: AsyncLLM, token_ids: Sequence[int], *, template: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._llm, self._template, self._options = llm, dict(template or {}), options
        self._is_generating = False
        self.token_ids: list[int] = []
        self.sampled: list[bool] = []
        self.logprobs: list[float] = []
        self.turns: list[Turn] = []
        self.append_tokens(token_ids)

    @classmethod
    async def start(
        cls, llm: AsyncLLM, messages: Messages, *, template: Mapping[str, Any] | None = None, **options: Any
    ) -> Conversation:
        """Returns a conversation that begins with messages, up to the start of the model's turn.

        Raises:
            InvalidInput: as `LLM.chat`.
        """
        prompt = await asyncio.to_thread(
            chat_prompt, llm.llm.tokenizer, as_messages(messages), **{**(template or {}), "add_generation_prompt": True}
        )
        found: Any = prompt
        return cls(llm, found["prompt_token_ids"], template=template, **options)

    async def generate(self, params: SamplingParams | None = None) -> Turn:
        """Generates the model's turn and appends its tokens; after an error, or if it is cancelled, none of them.

        Args:
            params: sampling parameters with n = 1; None for the model's defaults. The log-probabilities of the sampled
                tokens are always computed.

        Raises:
            InvalidInput: a turn is being generated, or as `Engine.add`.
            RequestTooLong: the conversation and its next turn do not fit the model.
        """
        params = self._llm.llm.get_default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams) or params.n != 1:
            raise InvalidInput("params", value=params, wanted="it must be SamplingParams with n = 1")
        logprobs = 0 if params.logprobs is None else params.logprobs
        params = replace(params, logprobs=logprobs, output_kind=RequestOutputKind.FINAL_ONLY)
        start = len(self.token_ids)
        with self._generating():
            prompt: Any = {"prompt_token_ids": self.token_ids[:]}
            (output,) = [each async for each in self._llm.generate(prompt, params, **self._options)]
        (found,) = output.outputs
        self.token_ids += found.token_ids
        self.sampled += [True] * len(found.token_ids)
        values = zip(found.logprobs or (), found.token_ids, strict=True)
        self.logprobs += [each[token].logprob for each, token in values]
        self.turns.append(Turn(start, len(self.token_ids), found, output.num_cached_tokens))
        return self.turns[-1]

    async def append(self, messages: Messages) -> None:
        """Appends messages (of tools, of the user) after the model's turn, up to the start of its next one.

        The text between two turns is taken from the template, rendered with a turn of another text. The token that
        ended the turn is not repeated.

        Raises:
            InvalidInput: the last tokens are not a turn of the model, or the template does not write its turns as they
                are; use `append_tokens`.
        """
        if not self.turns or self.turns[-1].stop != len(self.token_ids):
            raise InvalidInput("messages", "do not follow a turn of the model", "give all of them in one call")
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _TURN}]
        tokenizer: Any = self._llm.llm.tokenizer
        options = {**self._template, "add_generation_prompt": True}

        def between() -> list[int]:
            rendered: Any = chat_prompt(tokenizer, [*before, *as_messages(messages)], **options)
            _, found, text = rendered["prompt"].rpartition(_TURN)
            if not found:
                raise InvalidInput("chat_template", "changes the text of earlier turns", "use append_tokens")
            return tokenizer.encode(text, add_special_tokens=False)

        with self._generating():
            token_ids = await asyncio.to_thread(between)
        # A model may end a turn with another of its tokens than the template does.
        ends = self._llm.llm.model.paged_spec.eos_token_ids
        is_repeated = bool(token_ids) and token_ids[0] in ends and self.token_ids[-1] in ends
        self.append_tokens(token_ids[is_repeated:])

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the model does not sample.

        Raises:
            InvalidInput: a turn is being generated.
        """
        with self._generating():
            self.token_ids += token_ids
            self.sampled += [False] * len(token_ids)
            self.logprobs += [0.0] * len(token_ids)

    def fork(self) -> Conversation:
        """Returns a copy that goes on by itself; both share the cached prefix."""
        copy = Conversation(self._llm, (), template=self._template, **self._options)
        copy.token_ids, copy.sampled, copy.logprobs = self.token_ids[:], self.sampled[:], self.logprobs[:]
        copy.turns = self.turns[:]
        return copy

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        if self._is_generating:
            raise InvalidInput("a turn of this conversation is being generated; wait for it, or fork it before.")
        self._is_generating = True
        try:
            yield
        finally:
            self._is_generating = False
