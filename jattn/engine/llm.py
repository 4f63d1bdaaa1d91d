"""Text in, text out: a model folder, its tokenizer and an engine behind vLLM's names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jattn.engine.config import EngineConfig
from jattn.engine.detokenize import Detokenizer
from jattn.engine.engine import Engine
from jattn.engine.request import CompletionOutput, Request, RequestOutput, SamplingParams
from jattn.load import TextTokenizer, embedded_model_folder, load_model
from jattn.models import Decoder
from torch_core.errors import InvalidInput

__all__ = ["LLM", "TextDelta", "generate"]

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step brought for one prompt.

    Attributes:
        index: the prompt's place in the list.
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        output: the finished request; None while it runs.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None


class LLM:
    """A model ready to generate.

    Args:
        model: a Hugging Face folder of a Llama-family model, a `Decoder`, or None for the embedded model.
        tokenizer: for a `Decoder`; a folder brings its own. Without one, prompts are lists of token ids.
        dtype: see `jattn.load.load_model`; not for a `Decoder`.
        implementation: of the attention ops, None for the fastest that runs here; not for a `Decoder`.
        config: the engine's sizes.

    Attributes:
        model: the decoder.
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
        model: str | os.PathLike[str] | Decoder | None = None,
        *,
        tokenizer: TextTokenizer | None = None,
        dtype: str | None = None,
        implementation: str | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        if isinstance(model, Decoder):
            if dtype is not None or implementation is not None:
                raise InvalidInput(
                    "dtype and implementation belong to the Decoder that was passed; build it with them."
                )
        else:
            folder = embedded_model_folder() if model is None else model
            model, _, tokenizer = load_model(folder, dtype=dtype, implementation=implementation)
        self.model = model
        self.tokenizer = tokenizer
        self.engine = Engine(model, config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts at once and returns their results in order.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            sampling_params: one for all, or one for each prompt.

        Raises:
            InvalidInput: an empty prompt, a token outside the vocabulary, or lists of unequal length.
            RequestTooLong: a prompt that can never fit; no prompt has been started.
        """
        finished = {
            delta.index: delta.output for delta in self.stream(prompts, sampling_params) if delta.output is not None
        }
        return [finished[index] for index in sorted(finished)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TextDelta]:
        """Does what `generate` does, and yields the text of each prompt as it comes.

        Prompts are checked and queued before the first item is asked for. Closing the iterator early cancels what
        has not finished.
        """
        listed = _as_list(prompts)
        params = _as_params(sampling_params, len(listed))
        requests: list[Request] = []
        try:
            for prompt, each in zip(listed, params, strict=True):
                requests.append(self._add(prompt, each))
        except BaseException:
            self._cancel(requests)
            raise
        return self._deltas(requests)

    def _deltas(self, requests: list[Request]) -> Iterator[TextDelta]:
        index_of = {request.request_id: index for index, request in enumerate(requests)}
        detokenizers = [
            None if self.tokenizer is None else Detokenizer(self.tokenizer, request.params.stop) for request in requests
        ]
        unfinished = len(requests)
        try:
            while unfinished:
                for delta in self.engine.step():
                    index = index_of.get(delta.request_id)
                    if index is None:
                        continue
                    request, detokenizer = requests[index], detokenizers[index]
                    token_ids, text = delta.token_ids, ""
                    if detokenizer is not None:
                        # The token that ended the text is no part of it.
                        shown = token_ids[:-1] if delta.finish_reason == "stop" else token_ids
                        text = detokenizer.push(shown, finished=delta.finish_reason is not None)
                        if detokenizer.stopped:
                            behind = len(request.output_token_ids) - detokenizer.num_tokens
                            token_ids = token_ids[: len(token_ids) - behind]
                            self.engine.stop(request, detokenizer.num_tokens)
                    output = None
                    if request.finish_reason is not None:
                        unfinished -= 1
                        output = _output(request, detokenizer)
                    yield TextDelta(index, text, token_ids, output)
        finally:
            self._cancel(requests)

    def _add(self, prompt: Prompt, params: SamplingParams) -> Request:
        if not isinstance(prompt, str):
            return self.engine.add(prompt, params)
        if not prompt:
            raise InvalidInput(
                "a prompt is an empty string; give it at least one character, or pass token ids (the model's "
                "beginning-of-sequence token, to start from nothing)."
            )
        if self.tokenizer is None:
            raise InvalidInput("the model folder has no tokenizer.json; pass prompts as lists of token ids.")
        return self.engine.add(self.tokenizer.encode(prompt), params, prompt=prompt)

    def _cancel(self, requests: list[Request]) -> None:
        for request in requests:
            if request.finish_reason is None:
                self.engine.cancel(request.request_id)


def generate(
    model: str | os.PathLike[str] | Decoder | LLM | None,
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
        model: a model folder, a `Decoder`, an `LLM`, or None for the embedded model.
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
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if not listed:
        raise InvalidInput("prompts is empty; pass at least one.")
    if all(isinstance(item, (str, list, tuple)) or hasattr(item, "__array__") for item in listed) and not all(
        getattr(item, "ndim", None) == 0 for item in listed
    ):
        return listed
    return [listed]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidInput(
            f"sampling_params has {len(params)} entries and there are {count} prompts; pass one or {count}."
        )
    return list(params)


def _output(request: Request, detokenizer: Detokenizer | None) -> RequestOutput:
    text = "" if detokenizer is None else detokenizer.text
    completion = CompletionOutput(text, tuple(request.output_token_ids), request.finish_reason)
    return RequestOutput(
        request.request_id,
        request.prompt,
        request.prompt_token_ids,
        (completion,),
        request.num_cached_tokens,
        request.metrics,
    )
