"""An engine's device side: the pool, its host memory and the model's runner, built from a model and a config."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import Mesh

from jattn.llm.engine.device.adapters import AdapterMemory
from jattn.llm.engine.device.cache_arrays import array_specs, layer_groups, pool_plan
from jattn.llm.engine.device.draft import WithDraft, with_draft
from jattn.llm.engine.device.placement import Placement, outlasts_the_host
from jattn.llm.engine.device.routing import check_routes
from jattn.llm.engine.device.runner import ModelRunner
from jattn.llm.engine.device.sampler import check_processors
from jattn.llm.engine.device.weights import Arrivals
from jattn.llm.engine.options.config import EngineConfig, check_config
from jattn.llm.engine.options.speculation import SpeculationCounts
from jattn.llm.load.kv_scales import cached_spec, writing_8_bits
from jattn.llm.models import PagedModel, PagedSpec
from jattn.llm.models.latent import with_split_expansions
from jattn.llm.processes import Announce, Channel, check_together, model_facts, shared_channel
from jattn.llm.reports import Watchdog
from jattn.ops.choose import choose_for_cache
from jattn.pool import HostBlocks, KVPool, PoolPlan, free_bytes
from torch_core.base.errors import InvalidInput, OutOfMemory, Unsupported
from torch_core.base.specs import KVCacheSpec, LatentCacheSpec
from torch_core.cache import CacheConfig, CommittedStep, LayerGroups, StateConfig

CacheSpec = KVCacheSpec | LatentCacheSpec

# The share of a device's free memory that neither the pool nor the largest step takes: for small programs, for gaps
# between arrays, and for the kernels that XLA compares while it compiles.
_SPARE_SHARE = 0.03
_BYTES_UNKNOWN = 1 << 30
# The share of a pool that is given up at once, at most, where its arrays have no room.
_MOST_CUT = 1 / 8
# The null slot and those that one sequence may need for a moment.
_LEAST_SLOTS = 4
# What other processes repeat of a committed step before its rows; they have no host memory to swap with.
_MOVES = ("blocks_to_scrub", "slots_to_scrub", "copies", "state_copies")


@dataclass(frozen=True, slots=True)
class Device:
    """The pool and the runner of steps; it outlives any scheduler state.

    Attributes:
        pool: the cache arrays.
        host: memory for swapped blocks, if the engine has any.
        runner: the model.
        in_turns: prompts and decoding have steps of their own.
        pads_rows: a step costs by its longest row times its rows.
        num_scheduler_steps: tokens of each sequence that a program decodes at most.
        channel: channel to the other processes with parts of the same model; None if this process has all of it.
        speculation: counts of proposals.
        watchdog: watchdog of its steps.
        non_finite_weights: see `EngineConfig`.
    """

    pool: KVPool
    host: HostBlocks | None
    runner: ModelRunner
    in_turns: bool
    pads_rows: bool
    num_scheduler_steps: int
    speculation: SpeculationCounts
    watchdog: Watchdog
    non_finite_weights: str
    channel: Channel | None = None

    def prepare(self, step: CommittedStep) -> None:
        """Executes a committed step's operations on whole blocks; see `KVPool.prepare`."""
        if step.moves_memory:
            self._announce("moves", *(getattr(step, name) for name in _MOVES))
        if self.runner.routing is not None:
            self.runner.routing.moved(step)
        self.pool.prepare(step, self.host)

    def forget(self) -> None:
        """Drops the runner's state of earlier steps."""
        self._announce("forget")
        self.runner.forget()

    def renew(self) -> None:
        """Allocates a new pool."""
        self._announce("renew")
        self.pool.renew()

    def lend(self) -> None:
        """Gives the pool's memory back until `renew`."""
        # Before it is announced: it may be refused.
        self.pool.close()
        self._announce("lend")

    def close(self) -> None:
        """Gives the pool's memory back for good."""
        self._announce("close")
        self.runner.end_warmup()
        self.pool.close()

    def warmup(
        self,
        report: Callable[[int, int, str], None],
        wanted: Callable[[str], bool] | None = None,
        *,
        lends_pool: bool = False,
    ) -> None:
        """Compiles every program, or those whose names are wanted; see `ModelRunner.warmup`.

        With `lends_pool`, which loses what is in it, XLA compares kernels in the pool's memory meanwhile: a pool that
        fills the memory leaves room for the candidates of one program or two at a time.
        """
        self._announce("warmup")
        if lends_pool and self.channel is None and self.runner.programs.tuning_bytes:
            self.pool.close()
            try:
                self.runner.compile(report, wanted)
            finally:
                self.pool.renew()
        self.runner.warmup(report, wanted)

    def start_warmup(
        self,
        report: Callable[[int, int, str], None] | None,
        finished: Callable[[], object],
        wanted: Callable[[str], bool] | None,
    ) -> None:
        """Like `warmup`, in the background; with other processes, which must compile the same ones, at once."""
        report = (lambda done, total, name: None) if report is None else report
        if self.channel is not None:
            self.warmup(report, wanted)
        else:
            self.runner.start_warmup(report, finished, wanted)

    def follow(self, channel: Channel) -> bool:
        """Repeats process 0's device operations until its engine sleeps; returns whether that is closed."""
        while True:
            what, *arguments = channel.receive()
            if what == "moves":
                moves: Any = dict(zip(_MOVES, arguments, strict=True))
                self.pool.prepare(CommittedStep(step_id=0, **moves))
            elif what == "forget":
                self.runner.forget()
            elif what == "renew":
                self.pool.renew()
            elif what == "warmup":
                self.runner.warmup(lambda *_: None)
            elif what in ("lend", "close"):
                self.pool.close()
                return what == "close"
            else:
                self.runner.follow(what, *arguments)

    def brought(self, check: Callable[[], Arrivals], *, is_idle: bool) -> list[jax.Array]:
        """Returns leaves of weights, checked and on the devices: in every process or in none.

        Args:
            check: function that returns the new leaves.
            is_idle: no step of any process uses the weights.

        Raises:
            InvalidInput: the check failed, here or in another process; there are several and they are not idle.
        """
        weights = self.runner.weights
        if self.channel is None:
            return weights.brought(check(), self.non_finite_weights)
        if not is_idle:
            raise InvalidInput(
                "the engine has several processes and is awake: its steps would mix the old weights and the new ones. "
                "Call sleep() in process 0, which ends follow() in the others, then this in every process."
            )
        arrivals = check_together(check)
        # Together, too: a device may lack the memory.
        return check_together(lambda: jax.block_until_ready(weights.brought(arrivals, self.non_finite_weights)))

    def _announce(self, what: str, *arguments: object) -> None:
        if self.channel is not None:
            self.channel.send(what, *arguments)


def open_device(
    model: PagedModel, config: EngineConfig, *, mesh: Mesh | None = None, max_model_len: int, model_fingerprint: bytes
) -> tuple[Device, CacheConfig, PoolPlan]:
    """Allocates an engine's device side; returns it with the allocator's sizes and the pool's plan.

    Args:
        model: whole, or cut over the mesh.
        config: sizes.
        mesh: the devices of this replica; None for JAX's default device.
        max_model_len: tokens of one sequence at most.
        model_fingerprint: fingerprint of the weights, in prefix keys.

    Raises:
        InvalidInput: sizes that do not fit the model or the memory; nothing was allocated.
        Unsupported: the model's implementation of attention cannot run here.
    """
    placed = _place(model, config, mesh, max_model_len)
    free = free_memory(config, mesh)
    budget = int(free * (1 - _SPARE_SHARE)) if free else config.kv_cache_bytes or _BYTES_UNKNOWN
    cache = _plan_cache(placed, config, mesh, max_model_len, budget)
    # A small pool leaves any step room, and its engine need not wait for one more compilation.
    if free and cache.plan.num_bytes > cache.parts * free // 2:
        step, tuning = _bytes_beside(placed, cache, config, mesh)
        budget = min(budget, free - tuning) - step
        cache = _plan_cache(placed, config, mesh, max_model_len, max(1, budget))
    while True:
        try:
            pool = _allocate(placed, cache, cache.plan.num_blocks)
            break
        except OutOfMemory as error:
            if not free or budget < free // 2:
                raise
            missing = 1 - error.share
        # The free memory is in pieces that are no multiples of an array; smaller ones fill them better. A try that
        # fails takes ten seconds.
        budget -= max(free // 50, int(budget * min(missing / 2, _MOST_CUT)))
        cache = _plan_cache(placed, config, mesh, max_model_len, budget)
    cache_config = CacheConfig(
        num_blocks=cache.plan.num_blocks,
        block_size=config.tokens_per_block,
        enable_prefix_caching=config.enable_prefix_caching,
        groups=cache.layers.groups,
        max_step_tokens=config.max_num_batched_tokens,
        model_fingerprint=model_fingerprint,
        cache_dtype=placed.spec.dtype,
        max_blocks_per_seq=cache.max_blocks + cache.num_encoder_blocks,
        scrub_on_free=config.scrub_on_free,
        num_host_blocks=config.num_host_blocks,
        states=cache.states,
    )
    return _build(placed, cache, pool, config, mesh), cache_config, cache.plan


@dataclass(frozen=True, slots=True)
class _Placed:
    """A model on the engine's devices.

    Attributes:
        model: the model, with its draft model and the scales of its cache.
        placement: its devices.
        shape: its sizes, with the dtype of the cache.
        spec: layout of a layer's cache.
        implementations: of the attention ops in its layers.
        batch_invariant: attention takes each query on its own.
        adapters: the memory of adapters; None without.
    """

    model: PagedModel
    placement: Placement
    shape: PagedSpec
    spec: CacheSpec
    implementations: tuple[str, ...]
    batch_invariant: bool = False
    adapters: AdapterMemory | None = None

    @property
    def draft(self) -> PagedSpec | None:
        """Sizes of the draft model."""
        return self.model.draft.paged_spec if isinstance(self.model, WithDraft) else None

    @property
    def ragged(self) -> bool:
        """Whether attention works on each row as it is; the jnp ops pad every row of a step to the longest."""
        return self.batch_invariant or "xla" not in self.implementations


@dataclass(frozen=True, slots=True)
class _CachePlan:
    """Sizes of the cache.

    Attributes:
        plan: the pool's size.
        layers: the cache groups.
        max_blocks: columns of a block table.
        num_encoder_blocks: blocks of an encoder's input.
        parts: devices over which a block is split.
        states: sizes of state slots; None for a model without states.
    """

    plan: PoolPlan
    layers: LayerGroups
    max_blocks: int
    num_encoder_blocks: int
    parts: int
    states: StateConfig | None


def _place(model: PagedModel, config: EngineConfig, mesh: Mesh | None, max_model_len: int) -> _Placed:
    vocab_size, context = model.paged_spec.vocab_size, config.decode_context_parallel_size
    check_processors(config.logits_processors or {}, vocab_size=vocab_size, max_model_len=max_model_len)
    if config.enable_return_routed_experts:
        check_routes(model)
    placement, model = Placement.of(model, mesh, context, config.logical_axis_rules)
    shape = cached_spec(model.paged_spec, config.kv_cache_dtype)
    if shape.dtype != model.paged_spec.dtype:
        model = writing_8_bits(model, shape.dtype, config.kv_cache_scales, config.quantize_queries)
    model = with_draft(model, config, max_model_len)
    if isinstance(model, WithDraft):
        of_draft, draft = Placement.of(model.draft, mesh, context, config.logical_axis_rules)
        if of_draft.by_compiler != placement.by_compiler:
            raise Unsupported(
                f"one of the model and its draft model, a {type(draft).__name__}, is cut by annotations and the other "
                "is not; annotate both, or use n-grams."
            )
        model = WithDraft(model.base, draft)
        shape = replace(shape, states=model.paged_spec.states)
    model = placement.with_scales(model)
    if not (config.batch_invariant or placement.by_compiler):
        model = cast(PagedModel, with_split_expansions(cast(nnx.Module, model)))
    # Refuse now: a call that cannot run on this machine would fail in every step.
    asked = {getattr(module, "implementation", "") for _, module in nnx.iter_modules(cast(nnx.Module, model))}
    spec = shape.cache_spec(config.block_size)
    chosen = {choose_for_cache(name, spec, model.paged_spec.dtype) for name in (asked - {""}) or {None}}
    # Before the free memory is measured.
    adapters = AdapterMemory(model, config, placement) if config.enable_lora else None
    return _Placed(model, placement, shape, spec, tuple(sorted(chosen)), config.batch_invariant, adapters)


def _plan_cache(
    placed: _Placed, config: EngineConfig, mesh: Mesh | None, max_model_len: int, num_bytes: int
) -> _CachePlan:
    """Plans the cache; `num_bytes` is the budget of each device if the config has no number of blocks."""
    shape, draft, size = placed.shape, placed.draft, config.block_size
    layers = layer_groups(config, shape, draft, max_model_len)
    arrays = array_specs(shape, layers, size)
    further: list[CacheSpec] = [*shape.further_specs(size)]
    if draft is not None:
        further += draft.cache_specs(size) + draft.further_specs(size)
    parts = mesh.shape["tp"] if mesh is not None and any(placed.placement.cache_spec(placed.spec)) else 1
    num_encoder_blocks = -(-shape.max_encoder_len // size)
    longest = max_model_len + num_encoder_blocks * size
    states = None
    if shape.states:
        of_devices = mesh.shape["tp"] if mesh is not None and placed.placement.splits_heads else 1
        slot_bytes = sum(spec.bytes_per_slot for spec in shape.states) // of_devices
        num_slots = config.num_state_slots or 2 * config.max_num_seqs + 4
        if config.num_state_slots is None and config.num_blocks is None:
            # Sequences then wait for slots as they do for blocks.
            num_slots = min(num_slots, max(_LEAST_SLOTS, num_bytes // 2 // slot_bytes))
        states = StateConfig(num_slots=num_slots, num_host_slots=config.max_num_seqs * (config.num_host_blocks > 0))
        num_bytes = max(1, num_bytes - num_slots * slot_bytes)
    plan = pool_plan(config, [*arrays, *further], layers, num_bytes * parts, max_model_len=longest)
    return _CachePlan(plan, layers, -(-max_model_len // config.tokens_per_block), num_encoder_blocks, parts, states)


def _allocate(placed: _Placed, cache: _CachePlan, num_blocks: int) -> KVPool:
    return KVPool(
        cache.plan.spec,
        num_layers=cache.plan.num_layers,
        num_blocks=num_blocks,
        device=placed.placement.cache_sharding(placed.spec),
        further=cache.plan.further,
        states=placed.shape.states,
        num_slots=cache.states.num_slots if cache.states else 0,
        state_axis="tp" if placed.placement.splits_heads else None,
    )


def _bytes_beside(placed: _Placed, cache: _CachePlan, config: EngineConfig, mesh: Mesh | None) -> tuple[int, int]:
    """Returns the bytes of the largest step's intermediate arrays on a device, and those that compiling takes there.

    The pool's size does not change them.
    """
    pool = _allocate(placed, cache, 2 * (1 if mesh is None else mesh.size))
    runner = _runner(placed, cache, pool, config, None)
    try:
        return runner.step_bytes(), runner.programs.tuning_bytes
    finally:
        pool.close()


def _build(placed: _Placed, cache: _CachePlan, pool: KVPool, config: EngineConfig, mesh: Mesh | None) -> Device:
    model, ragged = placed.model, placed.ragged

    def facts() -> dict[str, Any]:
        sizes = replace(config, mesh=None, logits_processors=None), sorted(config.logits_processors or {})
        model_sizes = placed.shape, placed.spec, cache.plan.num_blocks, *model_facts(cast(nnx.Module, model))
        return {"config": sizes, "model": model_sizes, "implementation": list(placed.implementations)}

    host_slots = cache.states.num_host_slots if cache.states else 0
    host = HostBlocks(pool, config.num_host_blocks, host_slots) if config.num_host_blocks else None
    channel = shared_channel(mesh, facts, num_host_blocks=config.num_host_blocks)
    if channel is not None and placed.adapters is not None:
        wanted = "one process serves adapters, on any number of its devices"
        raise Unsupported("enable_lora", "is True and several processes hold the model", wanted)
    num_scheduler_steps = config.most_scheduler_steps
    # Explicit steps are as many; to announce each to other processes takes the host longer.
    if not config.num_scheduler_steps and channel is None and outlasts_the_host(jax.tree.leaves(nnx.state(model))):
        num_scheduler_steps = 1
    runner = _runner(
        placed,
        cache,
        pool,
        replace(config, num_scheduler_steps=num_scheduler_steps),
        None if channel is None else channel.send,
    )
    return Device(
        pool,
        host,
        runner,
        # A decoded token should not run with prompts if rows are padded.
        in_turns=config.fixed_shapes or not ragged or cache.num_encoder_blocks > 0,
        # A step of a fixed shape always costs as much as the largest one.
        pads_rows=not (config.fixed_shapes or ragged),
        num_scheduler_steps=num_scheduler_steps,
        speculation=SpeculationCounts(config.num_speculative_tokens),
        watchdog=Watchdog(config.step_timeout_seconds, runner.describe, lambda: runner.programs.compiling),
        non_finite_weights=config.non_finite_weights,
        channel=channel,
    )


def _runner(
    placed: _Placed, cache: _CachePlan, pool: KVPool, config: EngineConfig, announce: Announce | None
) -> ModelRunner:
    return ModelRunner(
        placed.model,
        pool,
        config,
        placed.placement,
        cache.layers,
        max_blocks=cache.max_blocks,
        ragged=placed.ragged,
        adapters=placed.adapters,
        announce=announce,
    )


def check_types(model: object, config: object) -> None:
    """Refuses a value that is no model or no config.

    Raises:
        InvalidInput: the message names the missing attribute.
    """
    if not isinstance(model, nnx.Module):
        wanted = "it must be an nnx.Module: a jattn.llm.models.PagedModel"
        raise InvalidInput("model", f"is a {type(model).__name__}", wanted)
    if not isinstance(getattr(model, "paged_spec", None), PagedSpec):
        wanted = "give it one, a jattn.llm.models.PagedSpec, as an attribute of its class or its own"
        raise InvalidInput("model", f"is a {type(model).__name__} without a paged_spec", wanted)
    if not callable(getattr(model, "logits", None)):
        wanted = "see jattn.llm.models.PagedModel"
        raise InvalidInput("model", f"is a {type(model).__name__} without logits(hidden)", wanted)
    check_config(config)


def free_memory(config: EngineConfig, mesh: Mesh | None) -> int | None:
    """Returns the free bytes of each device that the pool is sized by; None if the config or nothing says its size."""
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    # Each process would find another number.
    is_foreign = any(device.process_index != jax.process_index() for device in devices)
    if config.num_blocks is not None or config.kv_cache_bytes is not None or is_foreign:
        return None
    try:
        # A CPU reports nothing, and needs no collection.
        free_bytes(devices[0])
        # Arrays that only a reference cycle holds are unused.
        gc.collect()
        return max(1, min(map(free_bytes, devices)))
    except Unsupported:
        return None
