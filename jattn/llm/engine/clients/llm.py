"""Text in, text out: a model folder, its tokenizer and an engine with vLLM's names."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from jattn.llm.engine.clients.adapters import AdapterRegistry, ServesAdapters
from jattn.llm.engine.clients.replicas import AnyEngine, open_engine
from jattn.llm.engine.clients.stream import TextStream
from jattn.llm.engine.clients.vectors import VectorsOfTexts
from jattn.llm.engine.clients.verify import Verification, verify
from jattn.llm.engine.device.placement import replica_meshes
from jattn.llm.engine.options.config import EngineConfig, check_config
from jattn.llm.engine.options.defaults import default_config
from jattn.llm.engine.options.params import SamplingParams, cuts_prompt
from jattn.llm.engine.request.lora import LoRARequest
from jattn.llm.engine.request.outputs import Outbox, RequestOutput
from jattn.llm.engine.request.request import Request
from jattn.llm.load import (
    ChatTemplate,
    SentenceModules,
    embedded_model_folder,
    load_generation_defaults,
    load_model,
    load_sentence_modules,
)
from jattn.llm.load.calibrate import calibrate_kv_cache
from jattn.llm.load.kv_scales import KVCacheScales
from jattn.llm.load.other_tokenizers import as_text_tokenizer
from jattn.llm.models import Decoder, PagedModel, TensorParallel
from jattn.llm.models.request_inputs import of_each
from jattn.llm.text.messages import as_messages
from jattn.llm.text.prompts import Prompt, as_prompts, chat_prompt, encoded, naming
from jattn.llm.workers.pool import end_idle_processes
from torch_core.base.checks import check_bool, check_int, shown
from torch_core.base.errors import InvalidInput
from torch_core.base.owners import ClosingOwner
from torch_core.base.specs import LARGEST_CODE

Conversation = Sequence[Mapping[str, Any]]
Inputs = Mapping[str, int | float]
Lora = str | LoRARequest | None


class LLM(ServesAdapters, VectorsOfTexts, ClosingOwner):
    """A model that generates text, for any number of threads and of open streams at once.

    As a context manager, it closes its engine at the end.

    A garbage collection that searches all objects takes 0.3 s and more in a process with JAX's compiled programs, and
    every step and request waits for it. A process that keeps its models should call `gc.collect()` and `gc.freeze()`
    once after the first call, as `jattn serve` does after its start.

    Args:
        model: a Hugging Face folder of a known family, a GGUF file, a module (a `Decoder`, or a
            `jattn.llm.models.PagedModel` of your own), or None for the embedded model.
        tokenizer: tokenizer of a module, or instead of the folder's own: a `TextTokenizer`, transformers', or a
            sentencepiece processor. Without one, prompts are lists of token ids.
        skip_tokenizer_init: do not read the folder's tokenizer, which may be missing; as in vLLM.
        dtype: dtype of the model; see `jattn.llm.load.load_model`; not for a module.
        implementation: implementation of the attention ops; None for the fastest on this machine; not for a module.
        quantization: "keep" keeps weights of FP8 and of 4 bits as stored, "fp8" makes linear layers multiply in FP8;
            see `jattn.llm.load.load_model`; not for a module.
        hf_overrides: values that replace those of config.json; see there; not for a module.
        config: sizes and options of the engine; None for `EngineConfig()`, and on a GPU for 64 sequences and 2,048
            tokens per step, or 256 and 8,192 where JAX may use 48 GiB (16,384 for models of less than 4 GiB).
        use_generation_config: use the sampling parameters of the folder's generation_config.json for requests without
            their own.
        follow: arrays that are replaced in a module replace those of the engine; see `Engine`.
        engine_options: fields of `EngineConfig` instead of a `config`, as in vLLM (`LLM(folder, max_num_seqs=4)`):
            block_size, max_num_seqs, max_num_batched_tokens, max_model_len, num_blocks, kv_cache_bytes,
            num_scheduler_steps, steps_in_flight, enable_prefix_caching, num_host_blocks, num_state_slots,
            disable_hybrid_kv_cache_manager, scrub_on_free, batch_invariant, fixed_shapes, enable_cascade_attention,
            speculative_config, tensor_parallel_size, decode_context_parallel_size, data_parallel_size, mesh,
            logical_axis_rules, kv_cache_dtype, quantize_queries, kv_cache_scales, step_timeout_seconds, seed,
            max_logprobs, logprobs_mode, enable_return_routed_experts, enable_lora, max_loras, max_lora_rank,
            lora_target_modules, enable_return_sampling_mask, non_finite_weights, logits_processors.

    Attributes:
        default_sampling: fields of `SamplingParams` for requests without parameters.
        model: the module, split over the engine's mesh if it was loaded for one.
        tokenizer: its tokenizer, or None.

    Raises:
        InvalidInput: the folder cannot be loaded (the message names the file and the fault), or options of the engine
            are given together with a `config`.
        TypeError: an argument that is neither one of these nor a field of `EngineConfig`.

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
        tokenizer: Any = None,
        skip_tokenizer_init: bool = False,
        dtype: str | None = None,
        implementation: str | None = None,
        quantization: str | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        config: EngineConfig | None = None,
        use_generation_config: bool = True,
        follow: bool = True,
        **engine_options: Any,
    ) -> None:
        check_config(config)
        if engine_options:
            config = _config_of(config, engine_options)
        check_bool("skip_tokenizer_init", skip_tokenizer_init)
        tokenizer = as_text_tokenizer(tokenizer)
        self.default_sampling: dict[str, Any] = {}
        self.sentence_modules = SentenceModules()
        if isinstance(model, nnx.Module):
            if any(option is not None for option in (dtype, implementation, quantization, hf_overrides)):
                raise InvalidInput(
                    "dtype, implementation, quantization and hf_overrides belong to the module that was passed; build "
                    "it with them."
                )
        else:
            folder: Any = embedded_model_folder() if model is None else model
            sizes = EngineConfig() if config is None else config
            # Copies are made from a whole model.
            mesh, *others = replica_meshes(sizes)
            mesh = None if others else mesh
            size, context_size = sizes.tensor_parallel_size, sizes.decode_context_parallel_size
            model, _, own_tokenizer = load_model(
                folder,
                dtype=dtype,
                implementation=implementation,
                with_tokenizer=tokenizer is None and not skip_tokenizer_init,
                mesh=mesh,
                parallel=None if mesh is None else TensorParallel(size=size, context_size=context_size),
                quantization=quantization,
                hf_overrides=hf_overrides,
                progress=sys.stderr.isatty(),
            )
            tokenizer = own_tokenizer if tokenizer is None else tokenizer
            self.sentence_modules = load_sentence_modules(folder)
            if use_generation_config:
                defaults = load_generation_defaults(folder)
                self.default_sampling = defaults.sampling
                if defaults.unserved:
                    warnings.warn(
                        f"generation_config.json has {', '.join(defaults.unserved)}, whose effect is missing here.",
                        stacklevel=2,
                    )
        served: Any = model
        self.model: PagedModel = served
        self.tokenizer = tokenizer
        if engine_options:
            # Checked before the model was loaded; sizes that are not among them follow from it.
            config = default_config(served, **engine_options)
        self._logprobs_mode = EngineConfig().logprobs_mode if config is None else config.logprobs_mode
        # An encoder generates nothing and needs no cache.
        is_encoder = isinstance(served, Decoder) and served.config.is_encoder
        self._engine = None if is_encoder else open_engine(served, config, tokenizer=tokenizer, follow=follow)
        self.adapters = AdapterRegistry(served, EngineConfig()) if self._engine is None else self._engine.adapters

    @property
    def engine(self) -> AnyEngine:
        """Runs the requests; its statistics and programs are there.

        Raises:
            InvalidInput: the model is an encoder.
        """
        if self._engine is None:
            raise InvalidInput("model is an encoder, which generates nothing; LLM.embed gives vectors.")
        return self._engine

    @property
    def generates(self) -> bool:
        """Whether the model generates; an encoder gives vectors alone, and has no engine."""
        return self._engine is not None

    @property
    def max_model_len(self) -> int:
        """Tokens of one sequence at most."""
        if self._engine is not None:
            return self._engine.max_model_len
        encoder: Any = self.model
        return encoder.config.max_position_embeddings

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""
        served: Any = self.model
        return (self._engine is not None and served.paged_spec.max_encoder_len) or self.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        served: Any = self.model
        return served.config.vocab_size if self._engine is None else served.paged_spec.vocab_size

    def close(self) -> None:
        """Cancels the unfinished requests, frees the memory of the cache now and ends the processes for texts."""
        if self._engine is not None:
            self._engine.close()
        end_idle_processes()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of requests without their own: the model's defaults if its folder has any."""
        return SamplingParams(**self.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rng: int | jax.Array | None = None,
        inputs: Inputs | Sequence[Inputs] | None = None,
        lora_request: Lora | Sequence[Lora] = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generates for all prompts at once and returns their results in order.

        Args:
            prompts: a string, a list of token ids, vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`, or a list
                of those.
            sampling_params: one for all prompts, or one for each; `get_default_sampling_params()` if None.
            rng: an int or a jax key, from which parameters without a seed get one.
            inputs: numbers for a model that declares some, one mapping for all prompts or one for each; see
                `Engine.add`.
            lora_request: the low-rank adapter, one for all prompts or one for each; None for none. See `Engine.add`.
            use_tqdm: show the progress (finished prompts and generated tokens) on stderr.

        Raises:
            InvalidInput: an empty prompt, a token outside the vocabulary, or lists of unequal length.
            RequestTooLong: a prompt can never fit; no prompt has been started.
        """
        listed = as_prompts(prompts)
        num_tokens = 0
        finished: dict[int, RequestOutput] = {}
        options: dict[str, Any] = {"rng": rng, "inputs": inputs, "lora_request": lora_request}
        with (
            contextlib.closing(self.stream(listed, sampling_params, **options)) as stream,
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
        rng: int | jax.Array | None = None,
        lora_request: Lora | Sequence[Lora] = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, each a list of `{"role": ..., "content": ...}`.

        Args:
            messages: the conversation, or a list of them.
            sampling_params, rng, lora_request, use_tqdm: as in `generate`.
            chat_template: instead of the model's own.
            tools: JSON schemas of functions, for templates that know of them.
            add_generation_prompt: end the prompt with the template's start of an answer.
            chat_template_kwargs: further variables of the template, for example {"enable_thinking": False} for Qwen 3.

        Raises:
            InvalidInput: as `generate`; also without a template, or if it fails.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(each, Mapping | list | tuple) for each in messages):
            raise InvalidInput(
                f"messages is {shown(messages)}; it must be a list of mappings with role and content, or a list of "
                "those."
            )
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            chat_prompt(
                self.tokenizer,
                as_messages(each),
                chat_template=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
                most=None if isinstance(sampling_params, Sequence) else self.longest_prompt,
                cut=cuts_prompt(sampling_params),
            )
            for each in conversations
        ]
        return self.generate(prompts, sampling_params, rng=rng, lora_request=lora_request, use_tqdm=use_tqdm)

    def verify(
        self, outputs: Sequence[RequestOutput], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Verification:
        """Compares log-probabilities of generated tokens with those of a training pass over each text, bit by bit.

        With `batch_invariant` no bit differs (docs/explanation/numerics.md). Texts are computed with current weights.

        Args:
            outputs: results of `generate`, with log-probabilities.
            sampling_params: those of `generate`, for the temperatures of "processed_logprobs".

        Raises:
            InvalidInput: an output has no log-probabilities, or the numbers of outputs and parameters differ.
            Unsupported: the model is a module of your own, or `logprobs_mode` is one of logits.
        """
        params = _params_of(sampling_params, len(outputs))
        temperatures = [1.0 if each is None else each.temperature for each in params]
        return verify(self.engine.current_model, outputs, logprobs_mode=self._logprobs_mode, temperatures=temperatures)

    def update_weights(
        self, state: nnx.Module | nnx.State | nnx.FlatState[Any] | Mapping[Any, Any], **options: Any
    ) -> None:
        """Replaces the weights between two steps.

        Args:
            state: state of the model.
            options: `unfinished`, `partial`, `prefix`, `cast` and `version`; see `Engine.update_weights`.

        Raises:
            InvalidInput: as `Engine.update_weights`; the weights are the old ones then.
        """
        self.engine.update_weights(state, **options)

    def calibrate_kv_cache(
        self, prompts: Prompt | Sequence[Prompt] | None = None, *, inputs: Inputs | Sequence[Inputs] | None = None
    ) -> KVCacheScales:
        """Measures the scales of an 8-bit cache, and uses them from then on if the engine has such a cache.

        Args:
            prompts: as in `generate`, and like those that will be served; random tokens if None.
            inputs: as in `generate`.

        Returns:
            The scales. Save them for later engines: `EngineConfig(kv_cache_scales=KVCacheScales.load(path))`.

        Raises:
            InvalidInput: as `calibrate_kv_cache`.
            Unsupported: likewise.
        """
        listed = None if prompts is None else [encoded(each, self.tokenizer)[0] for each in as_prompts(prompts)]
        model = cast(PagedModel, self.engine.current_model)
        scales = calibrate_kv_cache(model, listed, inputs=inputs)
        if self.engine.pool_plan.spec.dtype in LARGEST_CODE:
            self.engine.set_kv_cache_scales(scales)
        return scales

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rng: int | jax.Array | None = None,
        inputs: Inputs | Sequence[Inputs] | None = None,
        lora_request: Lora | Sequence[Lora] = None,
    ) -> TextStream:
        """Like `generate`, but yields the text of each prompt as it is generated.

        Prompts are checked and queued before the first item is requested. Closing or dropping the stream cancels the
        unfinished requests.
        """
        listed = as_prompts(prompts)
        self.engine.check_model(modules=True)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _params_of(sampling_params, len(listed), rng)
        numbers, loras = of_each(inputs, len(listed)), of_each(lora_request, len(listed), "lora_request")
        outbox = Outbox()
        try:
            requests: list[Request] = []
            for index, (prompt, each, own, lora) in enumerate(zip(listed, params, numbers, loras, strict=True)):
                with naming(index, listed):
                    token_ids, text = encoded(prompt, self.tokenizer, self.longest_prompt, cut=cuts_prompt(each))
                    options = {"prompt": text, "inputs": own, "lora": lora}
                    requests.append(self.engine.new_request(token_ids, each, **options, outbox=outbox))
            self.engine.queue(requests)
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

    For several calls, build an `LLM` once and use it: this function builds one for each call unless `model` is one.

    Args:
        model: a model folder, a module, an `LLM`, or None for the embedded model.
        prompts: a string, a list of token ids, or a list of either.
        max_tokens, temperature, top_k, top_p, seed, stop: as in `SamplingParams`.
        implementation: implementation of the attention ops, if `model` is a folder or None.
        config: config of the engine, unless `model` is an `LLM`.

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


def _config_of(config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    names = EngineConfig.__dataclass_fields__.keys()
    for name in options:
        if name not in names:
            raise TypeError(
                f"LLM() got an unexpected keyword argument {name!r}; besides its own it takes EngineConfig's: "
                f"{', '.join(names)}."
            )
    if config is not None:
        raise InvalidInput(f"{', '.join(options)}: given beside config; name all in one of them.")
    return default_config(**options)


def _params_of(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, rng: Any = None
) -> list[SamplingParams | None]:
    """Returns the parameters of each of `count` prompts.

    Args:
        params: parameters for all prompts, a list with one per prompt, or None for the defaults.
        count: number of prompts.
        rng: an int or a jax key, from which parameters without a seed get one; None leaves them unchanged.

    Raises:
        InvalidInput: the wrong kind or number of parameters.
    """
    if params is None or isinstance(params, SamplingParams):
        listed: list[SamplingParams | None] = [params] * count
    elif not isinstance(params, Sequence) or isinstance(params, str):
        raise InvalidInput("sampling_params", f"is a {type(params).__name__}", "pass SamplingParams or a list of them")
    elif len(params) != count:
        wanted = f"pass one or {count}"
        raise InvalidInput("sampling_params", f"has {len(params)} entries and there are {count} prompts", wanted)
    else:
        listed = list(params)
    return listed if rng is None else _seeded([each or SamplingParams() for each in listed], rng)


def _seeded(params: list[SamplingParams], rng: Any) -> list[SamplingParams | None]:
    if isinstance(rng, jax.Array):
        try:
            seeds = np.asarray(jax.random.bits(rng, (len(params),), "uint32")).tolist()
        except (TypeError, ValueError):
            wanted = "pass an int or one jax key"
            raise InvalidInput("rng", f"is an array of {rng.dtype}{list(rng.shape)}", wanted) from None
    else:
        check_int("rng", rng, 0, (1 << 32) - 1, also=", or a jax key")
        seeds = [(rng + index) & 0xFFFFFFFF for index in range(len(params))]
    return [
        replace(each, seed=seed) if isinstance(each, SamplingParams) and each.seed is None else each
        for each, seed in zip(params, seeds, strict=True)
    ]
