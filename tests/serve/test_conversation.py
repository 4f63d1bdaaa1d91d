"""Conversations of agents: tokens are only appended, and each turn finds the earlier ones in the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.serve import AsyncLLM, Conversation
from tests.serve.conftest import TEMPLATE
from torch_core.base.errors import InvalidInput

CONFIG = EngineConfig(
    block_size=4, max_num_seqs=4, max_num_batched_tokens=256, num_scheduler_steps=1, fixed_shapes=True
)
TURN = SamplingParams(temperature=0.9, max_tokens=6, ignore_eos=True, seed=3)
OPTIONS: dict[str, Any] = {"template": {"chat_template": TEMPLATE}}
QUESTION = [{"role": "user", "content": "The list"}]
RESULT = [{"role": "tool", "content": "42"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    with AsyncLLM(LLM(config=CONFIG)) as llm:
        yield llm


async def talk(llm: AsyncLLM, *, turns: int = 3) -> Conversation:
    conversation = await Conversation.start(llm, QUESTION, **OPTIONS)
    await conversation.generate(TURN)
    for _ in range(turns - 1):
        await conversation.append(RESULT)
        await conversation.generate(TURN)
    return conversation


def test_tokens_of_former_turns_stay_and_their_keys_are_found_in_the_cache(llm: AsyncLLM) -> None:
    conversation = asyncio.run(talk(llm))
    between = llm.llm.tokenizer.encode("\ntool: 42\nassistant:", add_special_tokens=False)  # type: ignore[union-attr]

    for before, turn in zip(conversation.turns, conversation.turns[1:], strict=False):
        assert conversation.token_ids[before.start : before.stop] == list(before.output.token_ids)
        assert conversation.token_ids[before.stop : turn.start] == between
        # All whole blocks of what came before, whose last sampled token has no keys yet. Other conversations of the
        # engine may have said more of it.
        assert (before.stop - 1) // 4 * 4 <= turn.num_cached_tokens < turn.start


def test_masks_and_log_probabilities_belong_to_the_sampled_tokens(llm: AsyncLLM) -> None:
    conversation = asyncio.run(talk(llm, turns=2))

    sampled = [place for turn in conversation.turns for place in range(turn.start, turn.stop)]
    assert [place for place, each in enumerate(conversation.sampled) if each] == sampled
    expected = [
        each[token].logprob
        for turn in conversation.turns
        for each, token in zip(turn.output.logprobs or (), turn.output.token_ids, strict=True)
    ]
    assert [conversation.logprobs[place] for place in sampled] == expected
    assert len(conversation.logprobs) == len(conversation.token_ids) == len(conversation.sampled)
    assert not any(value for value, each in zip(conversation.logprobs, conversation.sampled, strict=True) if not each)


def test_many_conversations_at_once_say_what_each_says_alone(llm: AsyncLLM) -> None:
    async def all_at_once() -> list[Conversation]:
        return await asyncio.gather(*(talk(llm, turns=2) for _ in range(4)))

    alone = asyncio.run(talk(llm, turns=2))

    assert all(each.token_ids == alone.token_ids for each in asyncio.run(all_at_once()))


def test_the_token_that_ended_a_turn_is_not_repeated_by_the_template(llm: AsyncLLM, monkeypatch: Any) -> None:
    tokenizer: Any = llm.llm.tokenizer

    async def append_after(last: str) -> list[int]:
        conversation = await Conversation.start(llm, QUESTION, **OPTIONS)
        turn = await conversation.generate(TURN)
        conversation.token_ids[-1] = tokenizer.encode(last, add_special_tokens=False)[-1]
        await conversation.append(RESULT)
        return conversation.token_ids[turn.stop :]

    between = tokenizer.encode("\ntool: 42\nassistant:", add_special_tokens=False)
    spec = replace(llm.llm.model.paged_spec, eos_token_ids=(between[0],))
    monkeypatch.setattr(llm.llm, "model", SimpleNamespace(paged_spec=spec))

    assert asyncio.run(append_after("\n")) == between[1:]
    assert asyncio.run(append_after("a")) == between


def test_a_fork_goes_on_by_itself_from_the_same_tokens(llm: AsyncLLM) -> None:
    async def both() -> tuple[Conversation, Conversation]:
        first = await talk(llm, turns=1)
        second = first.fork()
        second.append_tokens([5, 6])
        await second.generate(TURN)
        return first, second

    first, second = asyncio.run(both())

    assert (len(first.turns), len(second.turns)) == (1, 2)
    assert second.token_ids[: len(first.token_ids)] == first.token_ids


def test_messages_without_a_turn_before_them_are_refused(llm: AsyncLLM) -> None:
    async def append() -> None:
        conversation = await Conversation.start(llm, QUESTION, **OPTIONS)
        await conversation.append(RESULT)

    with pytest.raises(InvalidInput, match=r"^messages do not follow a turn of the model; give all of"):
        asyncio.run(append())


def test_a_template_that_changes_earlier_turns_is_refused(llm: AsyncLLM) -> None:
    async def append() -> None:
        conversation = Conversation(llm, [1, 2], template={"chat_template": "{{ messages[-1].content }}"})
        await conversation.generate(TURN)
        await conversation.append(RESULT)

    with pytest.raises(InvalidInput, match=r"^chat_template changes the text of earlier turns; use append_tokens"):
        asyncio.run(append())


def test_a_conversation_has_one_turn_at_a_time(llm: AsyncLLM) -> None:
    async def twice() -> None:
        conversation = Conversation(llm, [1, 2])
        await asyncio.gather(conversation.generate(TURN), conversation.generate(TURN))

    with pytest.raises(InvalidInput, match=r"^a turn of this conversation is being generated"):
        asyncio.run(twice())
