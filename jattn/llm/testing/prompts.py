"""The prompts of a cross-check: texts or token ids, checked, or a few of unequal length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jattn.llm.load import TextTokenizer
from jattn.llm.models import ModelConfig
from torch_core.base.errors import InvalidInput, RequestTooLong

DEFAULT_PROMPTS = (
    "The",
    "A class definition",
    "The for statement is used to iterate over the elements of a sequence",
    (
        "If an exception occurs during execution of the try clause, the rest of the clause is skipped. Then, if its "
        "type matches the exception named after the except keyword, the except clause is executed, and then execution "
        "continues after the try/except block."
    ),
)
#: Lengths of the prompts for a model without a tokenizer.
DEFAULT_PROMPT_LENS = (1, 7, 16, 45)


def prompt_tokens(
    prompts: Sequence[str | Sequence[int]] | None, config: ModelConfig, tokenizer: TextTokenizer | None, max_tokens: int
) -> list[tuple[int, ...]]:
    """Returns the token ids of prompts, or of a few of unequal length if None, each with room for new tokens.

    Raises:
        InvalidInput: there are no prompts, an empty one, a text without a tokenizer, or a token outside the vocabulary.
        RequestTooLong: a prompt and its new tokens exceed the model's context.
    """
    if prompts is None:
        encoder = config.encoder
        room = config.max_position_embeddings - max_tokens if encoder is None else encoder.max_position_embeddings
        if tokenizer is None:
            random = np.random.default_rng(0)
            prompts = [random.integers(config.vocab_size, size=length).tolist() for length in DEFAULT_PROMPT_LENS]
        else:
            prompts = [tokenizer.encode(prompt) for prompt in DEFAULT_PROMPTS]
        prompts = [prompt[: max(room, 1)] for prompt in prompts]
    if isinstance(prompts, str) or not prompts:
        raise InvalidInput("prompts", "must be a list of at least one text or list of token ids")
    tokens = [_one_prompt(index, prompt, tokenizer) for index, prompt in enumerate(prompts)]
    for index, prompt in enumerate(tokens):
        if not prompt:
            raise InvalidInput(f"prompts[{index}]", "is empty", "it needs at least one token")
        outside = [place for place, token in enumerate(prompt) if not 0 <= token < config.vocab_size]
        if outside:
            raise InvalidInput(
                f"prompts[{index}][{outside[0]}] is {prompt[outside[0]]}; token ids are 0 to {config.vocab_size - 1}."
            )
        if config.encoder is not None and len(prompt) > config.encoder.max_position_embeddings:
            raise RequestTooLong(
                f"prompts[{index}] has {len(prompt)} tokens; the model's encoder was made for "
                f"{config.encoder.max_position_embeddings}. Shorten it."
            )
        # The decoder of a model with an encoder starts with one token.
        count = len(prompt) if config.encoder is None else 1
        if count + max_tokens > config.max_position_embeddings:
            raise RequestTooLong(
                f"prompts[{index}] needs {count + max_tokens} tokens ({count} + {max_tokens} new); the "
                f"model was made for {config.max_position_embeddings}. Shorten it or lower max_tokens."
            )
    return tokens


def _one_prompt(index: int, prompt: str | Sequence[int], tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidInput(f"prompts[{index}]", "is a text and there is no tokenizer", "pass a list of token ids")
        return tuple(tokenizer.encode(prompt))
    array = np.asarray(prompt)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise InvalidInput(f"prompts[{index}]", "must be a text or a flat list of ints")
    return tuple(array.tolist())
