"""Text in, text out: a model folder, its tokenizer and an engine behind vLLM's names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from jattn.engine.config import EngineConfig
from jattn.engine.delivery import Outbox
from jattn.engine.engine import Engine
from jattn.engine.request import Request, RequestOutput, SamplingParams
from jattn.engine.stream import TextStream
from jattn.load import TextTokenizer, embedded_model_folder, load_model
from jattn.models import PagedModel
from torch_core.checks import shown
from torch_core.errors import InvalidInput

__all__ = ["LLM", "generate"]

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM(contextlib.AbstractContextManager):
    """A model ready to generate, for any number of threads and of open streams at once.

    As a context manager it closes its engine at the end.

    Args:
        model: a Hugging Face folder of a Llama-family model, a module (a `Decoder`, or a `jattn.models.PagedModel` of
            your own), or None for the embedded model. The weights are captured now; see `Engine`.
        tokenizer: for a module; a folder brings its own. Without one, prompts are lists of token ids.
        dtype: see `jattn.load.load_model`; not for a module.
        implementation: of the attention ops, None for the fastest that runs here; not for a module.
        config: the engine's sizes.

    Attributes:
        model: the module.
        tokenizer: its tokenizer, or None.
        engine: runs the requests; its statistics and programs are there.

    Raises:
        InvalidInput: a folder that cannot be loaded; the message names the file and what is wrong with it.

    Example:
        >>> llm = LLM()
        >>> outputs = llm.generate("The list", SamplingParams(temperature=0.0, max_tokens=4))
        >>> len(outputs[0].outputs[0].token_ids)
        4
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PagedModel | None = None,
        *,
        tokenizer: TextTokenizer | None = None,
        dtype: str | None = None,
        implementation: str | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        if isinstance(model, nnx.Module):
            if dtype is not None or implementation is not None:
                raise InvalidInput("dtype and implementation belong to the module that was passed; build it with them.")
        else:
            folder: Any = embedded_model_folder() if model is None else model
            model, _, tokenizer = load_model(folder, dtype=dtype, implementation=implementation)
        served: Any = model
        if not isinstance(tokenizer, TextTokenizer | None):
            raise InvalidInput(f"tokenizer is {shown(tokenizer)}; it must be a jattn.load.TextTokenizer, or None.")
        self.model: PagedModel = served
        self.tokenizer = tokenizer
        self.engine = Engine(served, config)

    def close(self) -> None:
        """Cancels what has not finished and gives the memory of the cache back now."""
        self.engine.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts at once and returns their results in order.

        Args:
            prompts: a string, a list of token ids, vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`, or a list
                of those.
            sampling_params: one for all, or one for each prompt.

        Raises:
            InvalidInput: an empty prompt, a token outside the vocabulary, or lists of unequal length.
            RequestTooLong: a prompt that can never fit; no prompt has been started.
        """
        with contextlib.closing(self.stream(prompts, sampling_params)) as stream:
            finished = {delta.index: delta.output for delta in stream if delta.output is not None}
        return [finished[index] for index in sorted(finished)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> TextStream:
        """Does what `generate` does, and yields the text of each prompt as it comes.

        Prompts are checked and queued before the first item is asked for. Closing or dropping the stream cancels what
        has not finished.
        """
        listed = _as_list(prompts)
        params = _as_params(sampling_params, len(listed))
        outbox = Outbox()
        try:
            requests = [self._add(prompt, each, outbox) for prompt, each in zip(listed, params, strict=True)]
            return TextStream(self.engine, self.tokenizer, outbox, requests)
        except BaseException:
            self.engine.abandon(outbox)
            raise

    def _add(self, prompt: Prompt, params: SamplingParams | None, outbox: Outbox) -> Request:
        if isinstance(prompt, Mapping):
            prompt = _unwrapped(prompt)
        if not isinstance(prompt, str):
            return self.engine.add(prompt, params, outbox=outbox)
        if not prompt:
            raise InvalidInput(
                "a prompt is an empty string; give it at least one character, or pass token ids (the model's "
                "beginning-of-sequence token, to start from nothing)."
            )
        if self.tokenizer is None:
            raise InvalidInput("the model folder has no tokenizer.json; pass prompts as lists of token ids.")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"character {error.start} of a prompt is a lone surrogate, U+{ord(prompt[error.start]):04X}; text must "
                "be what UTF-8 can encode."
            ) from None
        return self.engine.add(self.tokenizer.encode(prompt), params, prompt=prompt, outbox=outbox)


def generate(
    model: str | os.PathLike[str] | PagedModel | LLM | None,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    implementation: str | None = None,
) -> list[RequestOutput]:
    """Generates text from one or more prompts with a model; greedy unless a temperature is given.

    Build an `LLM` once instead when you call more than once: this builds one for each call unless given one.

    Args:
        model: a model folder, a module, an `LLM`, or None for the embedded model.
        prompts: a string, a list of token ids, or a list of either.
        max_tokens, temperature, top_k, top_p, seed, stop: as in `SamplingParams`.
        implementation: of the attention ops, when `model` is a folder or None.

    Example:
        >>> output = generate(None, "The list", max_tokens=4)[0]
        >>> len(output.outputs[0].token_ids)
        4
    """
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed, stop=stop
    )
    if not isinstance(model, LLM):
        model = LLM(model, implementation=implementation)
    return model.generate(prompts, params)


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    try:
        if isinstance(prompts, (bytes, bytearray, memoryview)):
            # They would pass as token ids.
            raise TypeError
        listed = list(prompts)
    except TypeError:
        raise InvalidInput(f"prompts is a {type(prompts).__name__}; pass a prompt or a list of them.") from None
    if not listed:
        raise InvalidInput("prompts is empty; pass at least one.")
    are_prompts = [isinstance(item, (str, list, tuple, Mapping)) or getattr(item, "ndim", 0) > 0 for item in listed]
    if all(are_prompts):
        return listed
    if any(are_prompts):
        index = are_prompts.index(False)
        raise InvalidInput(f"prompts[{index}] is a {type(listed[index]).__name__} among prompts; see LLM.generate.")
    return [listed]


def _unwrapped(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    """Returns what is in vLLM's TextPrompt or TokensPrompt."""
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if set(prompt) == {"prompt_token_ids"}:
        return prompt["prompt_token_ids"]
    raise InvalidInput(
        f"a prompt is a mapping with the keys {shown(list(prompt))}; it must be {{'prompt': text}} or "
        "{'prompt_token_ids': ids}."
    )


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams] | list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise InvalidInput(f"sampling_params is a {type(params).__name__}; pass SamplingParams or a list of them.")
    if len(params) != count:
        raise InvalidInput(
            f"sampling_params has {len(params)} entries and there are {count} prompts; pass one or {count}."
        )
    return list(params)
