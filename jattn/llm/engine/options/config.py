"""The frozen sizes of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from jax.sharding import Mesh

from jattn.llm.engine.options.speculation import SpeculativeConfig
from jattn.llm.load.kv_scales import NAMES_OF_CACHES, KVCacheScales
from torch_core.adapters.call import MAX_RANK
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.limits import Choices, Limits, check_fields

#: Sizes and slots are int32.
MAX_SIZE = (1 << 31) - 1
#: vLLM's names of `EngineConfig.logprobs_mode`.
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
_MOST_DEVICES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine; names are vLLM's if it has them.

    Attributes:
        block_size: number of tokens in one cache block.
        max_num_seqs: most sequences of one step, up to 65,536.
        max_num_batched_tokens: most new tokens of one step: one for each running request, and the rest for prompts, in
            chunks if they are longer.
        max_model_len: most tokens of one sequence; None for the model's own limit.
        num_blocks: number of blocks of the pool, including the null block; None for enough for `max_num_seqs` sequences
            of full length, up to `kv_cache_bytes`.
        kv_cache_bytes: memory of the pool on each device, in bytes, if `num_blocks` is None. None for the free
            memory of devices that report it and belong to this process, such as GPUs, without 3% and without the
            largest step's intermediate arrays; and for 1 GiB elsewhere. Give a number if something else needs memory
            there later, such as a trainer.
        num_scheduler_steps: tokens that one program decodes for each running sequence before the host sees them, while
            no request waits for admission. A larger number spreads the host's work over more tokens; text then streams
            in pieces of this many tokens, and tokens after a stop are dropped. None for 4, or for 1 if a large model
            runs on a GPU, where the host has time for each token.
        steps_in_flight: steps that are dispatched before the first one is read; 2 hides the host's work behind the
            device's. Tokens that the second step computes for a request that the first one ends are dropped.
        enable_prefix_caching: share the blocks of equal prefixes.
        num_host_blocks: blocks of host memory for preempted requests, which then continue where they stopped; without
            free host blocks, or with 0, they are computed again.
        num_state_slots: number of slots for states of models with recurrent layers, including the null slot: one for
            each running sequence and for each shared prefix that is kept. None for 2 * max_num_seqs + 4, or as many as
            half of the pool's memory holds if num_blocks is None.
        disable_hybrid_kv_cache_manager: keep every token for every layer, also in models in which only some layers have
            a window. Otherwise layers with the same window form a group, whose blocks are freed as soon as the window
            has passed them.
        scrub_on_free: fill a block with zeros on the device as soon as no request and no cached prefix uses its
            content, before another request gets it.
        batch_invariant: the bits of a request's log-probabilities depend on its own tokens and the weights alone: not
            on other requests, chunks, preemption, shared prefixes, proposals or the program of a step, and they are
            those of the model's training pass. It switches the model too, see `jattn.llm.models.set_batch_invariant`;
            docs/explanation/numerics.md has the exact promise and its cost.
        fixed_shapes: run all steps with prompts in one shape and all steps that decode in another, those of a full
            batch: two programs are compiled. A small batch then costs as much as a full one.
        enable_cascade_attention: read a prefix that neighbouring requests share once for all of them while they decode.
            None does so if it should be faster on a GPU, True for all shared blocks, False never. Not with
            batch_invariant, and not with masks that depend on the distance to the prefix (windows, ALiBi).
        speculative_config: n-grams or a draft model propose tokens, which one step verifies: a `SpeculativeConfig` or a
            mapping of its fields; None for no speculation. The output does not change. Proposals need the results of
            the previous step, so steps_in_flight and num_scheduler_steps become 1.
        tensor_parallel_size: number of devices over which the model and its cache are split.
        decode_context_parallel_size: number of neighbouring devices that share one cache and distribute the tokens of
            each sequence, if there are fewer key/value heads than devices and each device would have a copy. The pool
            then holds this many times the tokens. It must divide the number of copies (devices / key/value heads). Each
            device has `block_size` tokens of a block.
        data_parallel_size: number of copies of the model, each with its own devices, pool and batch; all sizes here are
            those of one copy. A request goes to the copy that has most of its prompt cached, unless that copy has much
            more to do than another.
        mesh: the devices, with an axis "tp" and, for copies, an axis "dp"; the sizes above then follow from it. None
            for the first of `jax.devices()`.
        logical_axis_rules: pairs of a name and a mesh axis ("tp", or None for an axis that is not split), as in flax's
            `logical_axis_rules`, for the annotations of a model that is no Decoder. None for the rules that flax knows
            where the engine is built.
        kv_cache_dtype: dtype of the cache: "auto" for the model's own, or 8 bits: "fp8" (e4m3), "fp8_e5m2" or "int8";
            for latents also "fp8_ds_mla", FlashMLA's packed rows, which need no scales.
        quantize_queries: round queries to e4m3 in steps with prompts, where the cache is "fp8" and the GPU has a faster
            kernel for both in 8 bits (Hopper), as vLLM does. False keeps the queries in the model's dtype.
        kv_cache_scales: dequantisation scales of an 8-bit cache for each layer, as `calibrate_kv_cache` measures them.
            None for those of the checkpoint, or 1 without any. int8 needs scales.
        step_timeout_seconds: time in seconds after which a step without results is reported, once, by a warning of the
            logger "jattn" with its requests and tokens; None for no report.
        seed: seed of requests that have none of their own.
        max_logprobs: most tokens whose log-probabilities a request may ask for at each position; -1 for the whole
            vocabulary, which every step with log-probabilities then returns.
        logprobs_mode: the values that `SamplingParams.logprobs` asks for, by vLLM's names: "raw_logprobs", the
            log-probabilities of the model's logits; "processed_logprobs", those from which the token was drawn, after
            penalties, masks, temperature, top_k, top_p and min_p; "raw_logits" and "processed_logits", the logits.
            Trainers that take them for the sampler's probabilities need "processed_logprobs".
        enable_return_routed_experts: steps record the experts of each token, for models that have experts; see
            `CompletionOutput.routed_experts`.
        enable_lora: serve low-rank adapters (LoRA) by `Engine.add(lora=...)`. Steps without an adapter run the programs
            that they run without this option. Not with batch_invariant.
        max_loras: number of adapters whose requests run at the same time: slots of device memory, each of
            max_lora_rank. Requests of further adapters wait for a slot.
        max_lora_rank: largest rank of an adapter, up to 256.
        lora_target_modules: names of the modules that adapters may change, such as "o_proj" or "moe.down_proj"; None
            for all of `jattn.llm.models.adapter_targets` but routers, gates of shared experts and indexers. Each has
            memory in every slot, which for experts is much, and is multiplied in every step with an adapter.
        enable_return_sampling_mask: steps record the tokens that filters keep; see `CompletionOutput.sampling_mask`.
        non_finite_weights: what `update_weights`, and `add_lora` with an adapter from memory, do with NaN and infinite
            numbers: "refuse" raises, and the weights stay; "report" logs a warning; "accept" does not read them.
        logits_processors: pure JAX functions by name, for requests that select them by
            `SamplingParams.logits_processors`: `f(logits float32[vocab], token_ids int32[max_model_len],
            num_prompt_tokens, num_tokens, value) -> float32[vocab]`, of one row, applied in order.

    Raises:
        InvalidInput: a size out of range.
        Unsupported: batch_invariant together with enable_lora.

    Example:
        >>> EngineConfig(max_num_seqs=4).block_size
        16
    """

    block_size: Annotated[int, Limits(1, MAX_SIZE)] = 16
    # A step's uploads and results grow with its sequences and tokens, at any size of the pool.
    max_num_seqs: Annotated[int, Limits(1, 1 << 16)] = 8
    max_num_batched_tokens: Annotated[int, Limits(1, 1 << 24)] = 512
    max_model_len: Annotated[int | None, Limits(1, MAX_SIZE)] = None
    num_blocks: Annotated[int | None, Limits(2, MAX_SIZE)] = None
    kv_cache_bytes: Annotated[int | None, Limits(1, (1 << 63) - 1)] = None
    num_scheduler_steps: Annotated[int | None, Limits(1, MAX_SIZE)] = None
    steps_in_flight: Annotated[int, Limits(1, MAX_SIZE)] = 2
    enable_prefix_caching: bool = True
    num_host_blocks: Annotated[int, Limits(0, MAX_SIZE)] = 0
    num_state_slots: Annotated[int | None, Limits(4, MAX_SIZE)] = None
    disable_hybrid_kv_cache_manager: bool = False
    scrub_on_free: bool = False
    batch_invariant: bool = False
    fixed_shapes: bool = False
    enable_cascade_attention: bool | None = None
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    tensor_parallel_size: Annotated[int, Limits(1, _MOST_DEVICES)] = 1
    decode_context_parallel_size: Annotated[int, Limits(1, _MOST_DEVICES)] = 1
    data_parallel_size: Annotated[int, Limits(1, _MOST_DEVICES)] = 1
    mesh: Mesh | None = None
    logical_axis_rules: Sequence[tuple[str, str | None]] | None = None
    kv_cache_dtype: Annotated[str, Choices("auto", *NAMES_OF_CACHES)] = "auto"
    quantize_queries: bool = True
    kv_cache_scales: Annotated[
        KVCacheScales | None, Limits(wanted="KVCacheScales, which load() reads from a file, or None")
    ] = field(default=None, hash=False)
    step_timeout_seconds: Annotated[
        float | None, Limits(above=0, below=1e6, wanted="a number above 0 and below 1e6, or None")
    ] = 60.0
    seed: Annotated[int, Limits(0, (1 << 32) - 1)] = 0
    max_logprobs: Annotated[int, Limits(-1, 1 << 10, also=" (-1 for the whole vocabulary)")] = 20
    logprobs_mode: Annotated[str, Choices(*LOGPROBS_MODES)] = LOGPROBS_MODES[0]
    enable_return_routed_experts: bool = False
    enable_lora: bool = False
    max_loras: Annotated[int, Limits(1, 1 << 12)] = 1
    max_lora_rank: Annotated[int, Limits(1, MAX_RANK)] = 16
    lora_target_modules: Annotated[tuple[str, ...] | None, Limits(wanted="names of modules, or None")] = None
    enable_return_sampling_mask: bool = False
    non_finite_weights: Annotated[str, Choices("refuse", "report", "accept")] = "refuse"
    logits_processors: Mapping[str, Callable[..., Any]] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        self._take_sizes_of_mesh()
        object.__setattr__(self, "logical_axis_rules", _rules(self.logical_axis_rules))
        if isinstance(self.lora_target_modules, list):
            object.__setattr__(self, "lora_target_modules", tuple(self.lora_target_modules))
        named = {} if self.logits_processors is None else self.logits_processors
        if not isinstance(named, Mapping) or not all(isinstance(n, str) and callable(f) for n, f in named.items()):
            raise InvalidInput("logits_processors", value=named, wanted="it must map names to functions, or be None")
        check_fields(self)
        tokens = self.max_num_batched_tokens
        if self.steps_in_flight > 2:
            wanted = "a step reads the tokens of the one before it on the device, so at most 2 can be in flight"
            raise InvalidInput("steps_in_flight", value=self.steps_in_flight, wanted=wanted)
        of_one = f"max_num_batched_tokens ({tokens}), the tokens that a sequence may get in one step"
        if (self.num_scheduler_steps or 1) > tokens:
            wanted = f"it must not be above {of_one}"
            raise InvalidInput("num_scheduler_steps", value=self.num_scheduler_steps, wanted=wanted)
        if self.enable_lora and self.batch_invariant:
            wanted = "the bits of adapters' products depend on the program of a step: leave one of the two out"
            raise Unsupported("batch_invariant", "is True and so is enable_lora", wanted)
        if self.num_speculative_tokens >= tokens:
            wanted = f"it must be below {of_one}"
            raise InvalidInput("num_speculative_tokens", value=self.num_speculative_tokens, wanted=wanted)
        if tokens < self.max_num_seqs:
            least = f"max_num_seqs ({self.max_num_seqs}), one token for each sequence of a decode step"
            raise InvalidInput("max_num_batched_tokens", value=tokens, wanted=f"it must be at least {least}")
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            size = f"tensor_parallel_size ({self.tensor_parallel_size})"
            wanted = f"it must divide {size}, whose devices share the sequences"
            value = self.decode_context_parallel_size
            raise InvalidInput("decode_context_parallel_size", value=value, wanted=wanted)
        if self.num_speculative_tokens:
            object.__setattr__(self, "steps_in_flight", 1)
            object.__setattr__(self, "num_scheduler_steps", 1)

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens of a request that are guessed at once; 0 without speculation."""
        speculative = self.speculation
        return 0 if speculative is None else speculative.num_speculative_tokens

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config` as a `SpeculativeConfig`."""
        return cast("SpeculativeConfig | None", self.speculative_config)

    @property
    def most_scheduler_steps(self) -> int:
        """Tokens of a sequence that one program decodes at most."""
        return min(4, self.max_num_batched_tokens) if self.num_scheduler_steps is None else self.num_scheduler_steps

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a block on all devices that share a sequence: the unit of the allocator and of block tables."""
        return self.block_size * self.decode_context_parallel_size

    def _take_sizes_of_mesh(self) -> None:
        """Takes the numbers of devices from the mesh, if there is one."""
        if self.mesh is None:
            return
        sizes = {"tp": "tensor_parallel_size", "dp": "data_parallel_size"}
        axes = dict(self.mesh.shape) if isinstance(self.mesh, Mesh) else {}
        if "tp" not in axes or not axes.keys() <= sizes.keys():
            found = ", ".join(f"{name} ({size})" for name, size in axes.items()) or shown(self.mesh)
            wanted = "an engine's has 'tp' and may have 'dp', as in jax.make_mesh((1, 2), ('dp', 'tp'))"
            raise InvalidInput("mesh", f"has the axes {found}", wanted)
        for axis, name in sizes.items():
            size = axes.get(axis, 1)
            if getattr(self, name) not in (1, size):
                wanted = f"axis {axis!r} of the mesh has {size} devices"
                raise InvalidInput(name, value=getattr(self, name), wanted=wanted)
            object.__setattr__(self, name, size)


def _rules(rules: Any) -> tuple[tuple[str, str | None], ...] | None:
    """Returns checked rules as pairs that can be hashed."""
    if rules is None:
        return None
    try:
        pairs = tuple((name, axis) for name, axis in rules)
    except (TypeError, ValueError):
        raise InvalidInput("logical_axis_rules", value=rules, wanted="it must be pairs, or None") from None
    for index, (name, axis) in enumerate(pairs):
        if not isinstance(name, str) or axis not in ("tp", None):
            wanted = "it must be a name and 'tp' or None"
            raise InvalidInput(f"logical_axis_rules[{index}]", value=(name, axis), wanted=wanted)
    return pairs


def check_config(config: object) -> None:
    """Refuses a value that is no config, before it is used; None is the default config.

    Raises:
        InvalidInput: it is no config.
    """
    if not isinstance(config, EngineConfig | None):
        raise InvalidInput("config", f"is a {type(config).__name__}", "it must be an EngineConfig, or None")
