"""Text in, text out: a model folder, its tokenizer and an engine behind vLLM's names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from tqdm import tqdm

from jattn.engine.config import EngineConfig
from jattn.engine.delivery import Outbox
from jattn.engine.params import SamplingParams
from jattn.engine.placement import replica_meshes
from jattn.engine.prompts import Prompt, as_params, as_prompts, chat_prompt, encoded
from jattn.engine.replicas import AnyEngine, open_engine
from jattn.engine.request import RequestOutput
from jattn.engine.stream import TextStream
from jattn.load import ChatTemplate, TextTokenizer, embedded_model_folder, load_model
from jattn.models import PagedModel
from torch_core.checks import shown
from torch_core.errors import InvalidInput

__all__ = ["LLM", "generate"]

Conversation = Sequence[Mapping[str, Any]]


class LLM(contextlib.AbstractContextManager):
    """A model ready to generate, for any number of threads and of open streams at once.

    As a context manager it closes its engine at the end.

    Args:
        model: a Hugging Face folder of a known family, a module (a `Decoder`, or a `jattn.models.PagedModel` of your
            own), or None for the embedded model. The weights are captured now; see `Engine`.
        tokenizer: for a module; a folder brings its own. Without one, prompts are lists of token ids.
        dtype: see `jattn.load.load_model`; not for a module.
        implementation: of the attention ops, None for the fastest that runs here; not for a module.
        config: the engine's sizes.

    Attributes:
        model: the module, cut over the engine's mesh if it was loaded for one.
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
            meshes = replica_meshes(EngineConfig() if config is None else config)
            # Copies are made from a whole model.
            mesh = meshes[0] if len(meshes) == 1 else None
            model, _, tokenizer = load_model(folder, dtype=dtype, implementation=implementation, mesh=mesh)
        served: Any = model
        if not isinstance(tokenizer, TextTokenizer | None):
            raise InvalidInput(f"tokenizer is {shown(tokenizer)}; it must be a jattn.load.TextTokenizer, or None.")
        self.model: PagedModel = served
        self.tokenizer = tokenizer
        self.engine: AnyEngine = open_engine(served, config, tokenizer=tokenizer)

    def close(self) -> None:
        """Cancels what has not finished and gives the memory of the cache back now."""
        self.engine.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rng: int | jax.Array | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generates for all prompts at once and returns their results in order.

        Args:
            prompts: a string, a list of token ids, vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`, or a list
                of those.
            sampling_params: one for all, or one for each prompt.
            rng: an int or a jax key, the source of the seeds of those that bring none.
            use_tqdm: show progress, prompts done and tokens generated, on stderr.

        Raises:
            InvalidInput: an empty prompt, a token outside the vocabulary, or lists of unequal length.
            RequestTooLong: a prompt that can never fit; no prompt has been started.
        """
        listed = as_prompts(prompts)
        num_tokens = 0
        finished: dict[int, RequestOutput] = {}
        with (
            contextlib.closing(self.stream(listed, sampling_params, rng=rng)) as stream,
            tqdm(total=len(listed), unit="prompt", disable=not use_tqdm, dynamic_ncols=True) as progress,
        ):
            for delta in stream:
                num_tokens += len(delta.token_ids)
                if delta.output is not None:
                    finished[delta.index] = delta.output
                    progress.set_postfix(tokens=num_tokens, refresh=False)
                    progress.update()
        return [finished[index] for index in sorted(finished)]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: ChatTemplate | str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        rng: int | jax.Array | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, each a list of `{"role": ..., "content": ...}`.

        Args:
            messages: the conversation, or a list of them.
            sampling_params, rng, use_tqdm: as in `generate`.
            chat_template: instead of the model's own.
            tools: JSON schemas of functions, for templates that know of them.
            add_generation_prompt: end the prompt where the answer begins.

        Raises:
            InvalidInput: as `generate`; also without a template, or where it fails.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        options = {"chat_template": chat_template, "tools": tools, "add_generation_prompt": add_generation_prompt}
        prompts = [chat_prompt(self.tokenizer, each, **options) for each in conversations]
        return self.generate(prompts, sampling_params, rng=rng, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rng: int | jax.Array | None = None,
    ) -> TextStream:
        """Does what `generate` does, and yields the text of each prompt as it comes.

        Prompts are checked and queued before the first item is asked for. Closing or dropping the stream cancels what
        has not finished.
        """
        listed = as_prompts(prompts)
        params = as_params(sampling_params, len(listed), rng)
        outbox = Outbox()
        try:
            requests = []
            for prompt, each in zip(listed, params, strict=True):
                token_ids, text = encoded(prompt, self.tokenizer)
                requests.append(self.engine.add(token_ids, each, prompt=text, outbox=outbox))
            return TextStream(self.engine, self.tokenizer, outbox, requests)
        except BaseException:
            self.engine.abandon(outbox)
            raise


def generate(
    model: str | os.PathLike[str] | PagedModel | LLM | None,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    implementation: str | None = None,
    config: EngineConfig | None = None,
) -> list[RequestOutput]:
    """Generates text from one or more prompts with a model; greedy unless a temperature is given.

    Build an `LLM` once instead when you call more than once: this builds one for each call unless given one.

    Args:
        model: a model folder, a module, an `LLM`, or None for the embedded model.
        prompts: a string, a list of token ids, or a list of either.
        max_tokens, temperature, top_k, top_p, seed, stop: as in `SamplingParams`.
        implementation: of the attention ops, when `model` is a folder or None.
        config: of the engine, where `model` is no `LLM`.

    Example:
        >>> output = generate(None, "The list", max_tokens=4)[0]
        >>> len(output.outputs[0].token_ids)
        4
    """
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed, stop=stop
    )
    if not isinstance(model, LLM):
        model = LLM(model, implementation=implementation, config=config)
    return model.generate(prompts, params)
