"""`Engine`: the public interface of an engine, whose methods are commands to its thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import jax
from flax import nnx

from jattn.llm.engine.benchmark_fill import assume_computed
from jattn.llm.engine.clients.adapters import AdapterRegistry, ServesAdapters
from jattn.llm.engine.clients.adding import AddsRequests
from jattn.llm.engine.clients.follower import Follower
from jattn.llm.engine.core import EngineCore
from jattn.llm.engine.device.device import check_types, open_device
from jattn.llm.engine.device.invariance import switched
from jattn.llm.engine.device.placement import replica_meshes
from jattn.llm.engine.device.programs import progress
from jattn.llm.engine.device.weights import Arrivals, Weights, check_version
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.options.defaults import default_config
from jattn.llm.engine.options.params import SamplingParams
from jattn.llm.engine.options.speculation import SpeculationStats
from jattn.llm.engine.request.lora import LoRARequest
from jattn.llm.engine.request.outputs import Outbox, TokenDelta, checked_outbox
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.request.validation import Validator
from jattn.llm.engine.thread import EngineThread, Listener, Outcome
from jattn.llm.load import TextTokenizer
from jattn.llm.load.kv_scales import KVCacheScales
from jattn.llm.models import PagedModel
from jattn.pool import PoolPlan
from torch_core.base.errors import InvalidInput
from torch_core.base.owners import ClosingOwner
from torch_core.cache import CacheStats


class Engine(AddsRequests, ServesAdapters, ClosingOwner):
    """Continuous batching over one model and one pool. Token ids in, token ids out.

    Any thread may call any method: each is a command to the one thread that owns the `EngineCore`. An interrupt of a
    caller (KeyboardInterrupt) never reaches a step; the next call returns the outputs that it delayed.

    Only the tokens and the finish reason of a request are kept. After an exception of a step, and after the loss of
    the pool, everything else is rebuilt from them: that costs time and no answers, and statistics begin again at zero.

    Args:
        model: a `Decoder`, or any `nnx.Module` that is a `jattn.llm.models.PagedModel`. The engine keeps its arrays
            alive, and not the module.
        config: sizes and options; None for `EngineConfig()`, and on a GPU for the sizes that `LLM` has.
        model_fingerprint: identifies the weights in prefix keys; needed only if keys outlive the engine.
        tokenizer: tokenizer of the model, for the texts in `SamplingParams` (bad_words, structured_outputs); None
            refuses these.
        follow: an array that is replaced in the model (by `nnx.Optimizer.update` or `nnx.update`) replaces the engine's
            at the next call of `step` or `wait`, as by `update_weights(model)`. False keeps the old ones until
            `update_weights`, and logs the first difference; so do engines over several processes. None does not look.

    Raises:
        InvalidInput: sizes that do not fit the model or the memory.
        Unsupported: the model's implementation of attention cannot run here.

    Example:
        >>> from jattn.llm.load import embedded_model_folder, load_model
        >>> with Engine(load_model(embedded_model_folder())[0]) as engine:
        ...     request = engine.add([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
        ...     while engine.num_unfinished:
        ...         deltas = engine.step()
        >>> len(request.output_token_ids)
        2
    """

    def __init__(
        self,
        model: PagedModel,
        config: EngineConfig | None = None,
        *,
        model_fingerprint: bytes = b"",
        tokenizer: TextTokenizer | None = None,
        follow: bool | None = True,
    ) -> None:
        config = default_config(model) if config is None else config
        check_types(model, config)
        config = switched(model, config)
        self._follower = None if follow is None else Follower(cast(nnx.Module, model), follow)
        mesh, *others = replica_meshes(config)
        if others:
            raise InvalidInput(
                f"data_parallel_size is {config.data_parallel_size}; an Engine is one copy. jattn.llm.engine."
                "open_engine gives a DataParallelEngine, and LLM has one."
            )
        self._validator = validator = Validator(model.paged_spec, config, tokenizer)
        self.adapters = AdapterRegistry(model, config)
        plans: list[PoolPlan] = []

        def build() -> EngineCore:
            device, cache_config, plan = open_device(
                model, config, mesh=mesh, max_model_len=validator.max_model_len, model_fingerprint=model_fingerprint
            )
            plans.append(plan)
            return EngineCore(config, cache_config, device)

        self._thread = EngineThread(build)
        self._core = self._thread.core
        (self._plan,) = plans
        self._outbox = Outbox()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._core.closed

    @property
    def asleep(self) -> bool:
        """Whether `sleep` freed the pool's memory."""
        return self._core.asleep

    @property
    def pool_plan(self) -> PoolPlan:
        """The pool's size; its text has blocks, tokens and GiB."""
        return self._plan

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence."""
        return self._validator.max_model_len

    @property
    def programs(self) -> tuple[str, ...]:
        """One line for each program compiled so far; engines of equal models and sizes share them."""
        return self._core.device.runner.programs.names

    @property
    def num_compilations(self) -> int:
        """Programs that this engine compiled; constant after `warmup`."""
        return self._core.device.runner.programs.num_compilations

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling them, in `warmup` and in the steps that needed them."""
        return self._core.device.runner.programs.compile_seconds

    @property
    def is_ready(self) -> bool:
        """Whether every step has a compiled program, if `warmup` runs in the background; else True."""
        return self._core.device.runner.is_ready

    @property
    def current_model(self) -> nnx.Module:
        """A module of the model's structure with the weights in use: `update_weights` leaves the model as it was."""
        return self._core.device.runner.weights.model()

    @property
    def weights_version(self) -> int:
        """Number of the weights: 0 at first, and then one more for each update, or as `update_weights` was told."""
        return self._core.weights_version

    @property
    def spans_processes(self) -> bool:
        """Whether other processes have parts of the model."""
        return self._core.device.channel is not None

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        if self._core.abandoned:
            self.settle()
        return len(self._core.requests)

    @property
    def num_added(self) -> int:
        """Number of samples ever added, and so the number in the next one's seed and id."""
        return self._core.num_added

    @property
    def load(self) -> int:
        """Tokens of all unfinished requests, including the most tokens that they can generate."""
        return self._core.load

    def request_of(self, request_id: str) -> Request | None:
        """Returns the unfinished request of an id, if there is one."""
        return self._core.requests.get(request_id) if isinstance(request_id, str) else None

    def runs_for(self, outbox: Outbox) -> bool:
        """Returns whether a request of an outbox is unfinished."""
        return self._core.runs_for(outbox)

    def warmup(
        self,
        report: Callable[[int, int, str], None] | None = None,
        *,
        wanted: Callable[[str], bool] | None = None,
        background: bool = False,
    ) -> None:
        """Compiles every program that any request can need, several at once; after this nothing compiles.

        In the background likely programs come first. A step whose program is missing runs in a larger one meanwhile; if
        there is none, its own is next.

        On a GPU each program then runs twice, until a request comes: its first run loads kernels and its second records
        a graph, 10 to 100 ms each. With an 8B model on an H100 this takes about 5 s.

        JAX's persistent cache (`jax_compilation_cache_dir`) keeps programs for later processes, if none calls torch.

        Args:
            report: function called after each program with the number of compiled programs, the total, and the
                program's name; by default a progress bar on stderr if that is a terminal.
            wanted: function from a program's name to whether to compile it now; the others compile when a step first
                needs them. None compiles all.
            background: return at once; without a bar, and with `report` on other threads.
        """
        if background:
            # The background must not keep an engine that its owner dropped, and requests come between two programs.
            go_on = self._thread.later(lambda core: core.rehearse_next() and go_on())
            finished = self._thread.later(lambda core: (core.device.runner.warm_small_programs(), go_on()))
            self._thread.call(lambda core: core.device.start_warmup(report, finished, wanted))
        else:
            with progress(report) as tell:
                self._thread.call(EngineCore.warmup, tell, wanted)

    def cache_stats(self) -> CacheStats:
        """Returns a frozen snapshot of the block allocator."""
        return self._thread.call(EngineCore.cache_stats)

    def assume_computed(self, prompts: Sequence[Sequence[int]], salts: Sequence[bytes | None] = ()) -> None:
        """Fills the pool with random contents and takes prompts for computed, for benchmarks; see `jattn.bench`.

        Raises:
            InvalidInput, Unsupported, OutOfBlocks: requests are unfinished; several processes; too small a pool.
        """
        self._thread.call(assume_computed, prompts, salts)

    def speculation_stats(self) -> SpeculationStats:
        """Returns the counts of proposals since the engine was built; see `EngineConfig.speculative_config`."""
        return self._thread.call(EngineCore.speculation_stats)

    def prepare(self, params: SamplingParams | None) -> None:
        """Compiles the grammar of a request, if it has one, so that `add` finds it compiled.

        Raises:
            InvalidInput, Unsupported: as `add`.
        """
        self._validator.grammar(params)

    def new_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        lora: str | LoRARequest | None = None,
        outbox: Outbox | None = None,
        **options: Any,
    ) -> Request:
        """Returns a request for `queue`; arguments and errors are those of `add`."""
        outbox = self._outbox if outbox is None else checked_outbox(outbox)
        options["adapter"] = self.adapters.of(lora)
        return self._validator.requests(prompt_token_ids, params, outbox=outbox, **options)[0]

    def queue(self, requests: Sequence[Request], numbers: Sequence[int] | None = None) -> None:
        """Queues new requests: all of them or, after an error, none.

        Args:
            requests: results of `new_request`.
            numbers: minima of `num_added` at each, for engines that number their requests together.

        Raises:
            InvalidInput, RequestTooLong: as `add`.
        """
        if self.spans_processes and jax.process_index():
            raise InvalidInput(f"this is process {jax.process_index()}; requests go to process 0. Call follow() here.")
        try:
            self._thread.call(EngineCore.add, requests, numbers)
        except BaseException:
            # An interrupted caller does not know the requests, and could not cancel them.
            for request in requests:
                self.abandon(request)
            raise

    def cancel(self, request_id: str) -> TokenDelta:
        """Ends an unfinished request (one sample) now; its tokens that are still on the device are dropped.

        Returns:
            Its last delta. A caller that reads its outbox with `wait` gets it there too; `step` does not repeat it.

        Raises:
            InvalidInput: no unfinished request has this id.
        """
        end = self._thread.call(EngineCore.cancel, request_id)
        tokens = (token for delta in self._outbox.take(request_id) for token in delta.token_ids)
        return end._replace(token_ids=tuple(tokens))

    def step(self) -> list[TokenDelta]:
        """Dispatches the next step, if there is one, and reads the oldest one if necessary; returns the new deltas.

        These are all deltas since the last call, including those of other threads' steps and of an interrupted step. A
        step that fails after it consumed the pool costs time, but no answers: every running request is computed again
        from its tokens. Only a second failure in a row is raised.

        Raises:
            PoolLost: two steps failed in a row. The engine is still usable.
            InvalidInput: a trainer donated arrays of the model, which has no others yet; its requests wait for them.
            EngineAsleep, EngineClosed: the engine is asleep, or closed.
        """
        self.advance()
        return self._outbox.take()

    def advance(self) -> None:
        """Like `step`, but leaves the deltas in their outboxes.

        Raises:
            PoolLost, InvalidInput: as `step`.
        """
        self.check_model()
        self._thread.call(EngineCore.step)

    def wait(self, outbox: Outbox) -> list[TokenDelta]:
        """Runs steps until the requests of an outbox have deltas, and returns these.

        Returns:
            At least one delta; none only when no unfinished request has this outbox.

        Raises:
            PoolLost: as `step`.
            InvalidInput: no outbox, or the engine is closed.
        """
        while not checked_outbox(outbox):
            self.check_model()
            self._thread.wait(outbox)
            if not outbox and not self._core.runs_for(outbox):
                break
        return outbox.take()

    def notify(self, outbox: Outbox, reply: Callable[[Outcome], object]) -> None:
        """Like `wait`, but returns at once; `reply` is called on the engine's thread at the end."""
        self._thread.notify(outbox, reply)

    def subscribe(self, outbox: Outbox, listener: Listener, then: Callable[[], object] | None = None) -> None:
        """Runs steps as long as an outbox has an unfinished request, and passes its deltas to a listener.

        Args:
            listener: called on the engine's thread, with deltas or with the error of a step; it must not block.
            then: called there when all listeners of a step were told, once for listeners that share it.
        """
        self._thread.subscribe(outbox, listener, then)

    def stop(self, request: Request, num_output_tokens: int) -> None:
        """Ends a request whose text reached a stop string, and drops the tokens after it.

        Args:
            request: a request of this engine; its last tokens may have ended it.
            num_output_tokens: number of generated tokens to keep.
        """
        self._thread.call(EngineCore.stop, request, num_output_tokens)

    def check_model(self, *, modules: bool = False) -> None:
        """Takes the arrays that were replaced in the model, as `step` and `wait` do; see `Engine`.

        Args:
            modules: look for replaced modules, too.

        Raises:
            InvalidInput: a replaced array does not fit (the message names it); the next call tries again.
        """
        if self._follower is not None and not self.closed:
            self._follower.check(self, modules=modules)

    def update_weights(
        self,
        state: nnx.Module | nnx.State | nnx.FlatState[Any] | Mapping[Any, Any],
        *,
        unfinished: Literal["restart", "finish"] = "restart",
        partial: bool = False,
        prefix: str = "",
        cast: bool = False,
        version: int | None = None,
    ) -> None:
        """Replaces the weights between two steps; nothing is compiled.

        Cached prefixes of the old weights are dropped. Arrays on the engine's device, or with the sharding of its own
        arrays, are not copied: do not donate them afterwards. Other arrays are copied. Over several processes every
        process calls this while the engine sleeps, each with the whole parameters, or all with arrays that are spread
        over the processes; if one refuses, all do.

        Args:
            state: state of the model: an `nnx.State`, flat or not, a nested mapping of arrays, or a module; all
                parameters, and the other variables that change.
            unfinished: "restart" computes unfinished requests again with the new weights, from their tokens, and
                continues them; "finish" first runs the present requests to their end with the old weights. Requests
                that are added meanwhile are restarted.
            partial: the state may lack parameters, such as all but those of LoRA; the engine keeps its own.
            prefix: path of the state in the engine's model, with dots, such as "model" for its attribute of this name.
            cast: arrays of another floating dtype are converted to the engine's.
            version: new value of `weights_version`, from 0 on; None for one more.

        Raises:
            InvalidInput: an argument does not fit or is not finite; it is closed, or asleep with requests to finish.
            PoolLost: as `step`, while requests are finished; after any error the weights are the old ones.
        """
        check_version(version)
        leaves = self.fitting_weights(state, unfinished, partial=partial, prefix=prefix, cast=cast)
        self.finish(unfinished)
        self.replace_weights(leaves, version)
        if self._follower is not None:
            self._follower.mark_seen()

    def fitting_weights(
        self, state: nnx.Module | nnx.State | nnx.FlatState[Any] | Mapping[Any, Any], unfinished: str, **options: Any
    ) -> list[jax.Array]:
        """Returns the arguments of `replace_weights`, and checks those of `finish`; see `update_weights`."""

        def check(weights: Weights) -> Arrivals:
            if unfinished not in ("restart", "finish"):
                raise InvalidInput("unfinished", value=unfinished, wanted="it must be 'restart' or 'finish'")
            return weights.checked(state, **options)

        return self._thread.call(EngineCore.fitting, check, unfinished)

    def finish(self, unfinished: str) -> None:
        """Runs the present requests to their end, if requested; see `update_weights`."""
        remaining = set(self._core.requests.values()) if unfinished == "finish" and not self.asleep else set()
        while any(request.finish_reason is None for request in remaining):
            self._thread.call(EngineCore.step)

    def replace_weights(self, leaves: list[jax.Array], version: int | None = None) -> None:
        """Replaces the weights by the result of `fitting_weights` or `fitting_scales`; this cannot fail."""
        self._thread.call(EngineCore.replace_weights, leaves, version)

    def set_kv_cache_scales(self, scales: KVCacheScales) -> None:
        """Replaces the scales of an 8-bit cache: unfinished requests are computed again, nothing is compiled.

        Raises:
            InvalidInput: the cache is not an 8-bit cache, or the scales are not those of its layers; over several
                processes as in `update_weights`.
        """
        self.replace_weights(self.fitting_scales(scales))

    def fitting_scales(self, scales: KVCacheScales) -> list[jax.Array]:
        """Returns the arguments of `replace_weights`; see `set_kv_cache_scales`."""
        dtype = self._core.device.pool.spec.dtype
        return self._thread.call(EngineCore.fitting, lambda weights: weights.checked_scales(scales, dtype))

    def sleep(self) -> None:
        """Frees the pool's memory until `wake`, for a trainer for example. Weights and programs stay.

        Requests can be added and cancelled meanwhile; unfinished requests are computed again afterwards from their
        tokens. `step` and `wait` are refused.

        Raises:
            InvalidInput: the engine is closed, or a torch view of the pool is alive.
        """
        self._thread.call(EngineCore.sleep)

    def wake(self) -> None:
        """Allocates the pool again; an engine that is awake does not change.

        Raises:
            InvalidInput: the engine is closed, or the memory is not free; the engine then stays asleep.
        """
        self._thread.call(EngineCore.wake)

    def abandon(self, unread: Outbox | Request) -> None:
        """Cancels the unfinished requests of an outbox, or of a prompt, without waiting; safe in a finalizer."""
        self._core.abandoned.append(unread if isinstance(unread, Request) else checked_outbox(unread))
        self._thread.post(EngineCore.drop_abandoned)

    def follow(self) -> bool:
        """Repeats process 0's operations until its engine sleeps (call again then) or closes; False in process 0."""
        return self._thread.call(EngineCore.follow)

    def settle(self) -> None:
        """Waits until the engine has carried out all earlier commands; a closed engine has none left."""
        self._thread.call(EngineCore.drop_abandoned)

    def close(self) -> None:
        """Cancels the unfinished requests and frees the pool's memory now; the engine then refuses every call."""
        try:
            self._thread.call(EngineCore.close)
        finally:
            self._thread.end()
