"""Data parallelism: copies of an engine with a batch and a cache each, and a router that knows their prefixes."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias, cast

import jax
from flax import nnx

from jattn.llm.engine.clients.adapters import ServesAdapters
from jattn.llm.engine.clients.adding import AddsRequests
from jattn.llm.engine.clients.engine import Engine
from jattn.llm.engine.clients.follower import Follower
from jattn.llm.engine.device.placement import replica_meshes
from jattn.llm.engine.device.programs import progress
from jattn.llm.engine.device.weights import check_version
from jattn.llm.engine.options.config import EngineConfig, check_config
from jattn.llm.engine.options.params import SamplingParams
from jattn.llm.engine.options.speculation import SpeculationStats
from jattn.llm.engine.request.outputs import Outbox, TokenDelta, checked_outbox
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.request.validation import taken
from jattn.llm.engine.thread import Listener, Outcome
from jattn.llm.load import TextTokenizer
from jattn.llm.load.kv_scales import KVCacheScales
from jattn.llm.models import PagedModel
from jattn.pool import PoolPlan
from torch_core.base.owners import ClosingOwner
from torch_core.cache import CacheStats


class DataParallelEngine(AddsRequests, ServesAdapters, ClosingOwner):
    """Several engines with the interface of one. Any thread may call any method.

    Each copy has its own thread. A request stays with its first copy: the one with the fewest tokens to compute before
    it, including the uncached part of its prompt. Seeds and ids are numbered across copies, so the tokens equal those
    of one engine. Priorities hold among the requests of a copy.

    Args:
        model, tokenizer, follow: as for `Engine`; every copy has the weights.
        config: a config with `data_parallel_size`; other sizes are those of one copy.

    Attributes:
        engines: one for each copy.

    Raises:
        InvalidInput, Unsupported: as `Engine`; or there are fewer devices than the sizes need.
    """

    def __init__(
        self, model: PagedModel, config: EngineConfig, *, tokenizer: TextTokenizer | None = None, follow: bool = True
    ) -> None:
        # Their threads share one interpreter.
        steps = config.most_scheduler_steps
        # Its sizes follow from the mesh of one copy, which goes in with them.
        of_one: dict[str, Any] = {"data_parallel_size": 1, "tensor_parallel_size": 1, "num_scheduler_steps": steps}
        self.engines = tuple(
            Engine(model, dataclasses.replace(config, **of_one, mesh=mesh), tokenizer=tokenizer, follow=None)
            for mesh in replica_meshes(config)
        )
        self.adapters = self.engines[0].adapters
        for engine in self.engines:
            engine.adapters = self.adapters
        self._follower = Follower(cast(nnx.Module, model), follow)
        self._router = _Router(config.tokens_per_block, [engine.pool_plan.num_blocks for engine in self.engines])
        # Held while a request is routed and numbered.
        self._routing = threading.Lock()
        self._outbox = Outbox()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.engines[0].closed

    @property
    def asleep(self) -> bool:
        """Whether `sleep` freed the memory of the pools."""
        return self.engines[0].asleep

    @property
    def current_model(self) -> nnx.Module:
        """See `Engine.current_model`."""
        return self.engines[0].current_model

    @property
    def weights_version(self) -> int:
        """Number of the weights; see `Engine.weights_version`."""
        return self.engines[0].weights_version

    @property
    def spans_processes(self) -> bool:
        """False: the devices of all copies belong to this process."""
        return False

    @property
    def pool_plan(self) -> PoolPlan:
        """The size of each copy's pool."""
        return self.engines[0].pool_plan

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence."""
        return self.engines[0].max_model_len

    @property
    def programs(self) -> tuple[str, ...]:
        """One line for each program compiled so far."""
        return tuple(name for engine in self.engines for name in engine.programs)

    @property
    def num_compilations(self) -> int:
        """Number of programs compiled here."""
        return sum(engine.num_compilations for engine in self.engines)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling them."""
        return sum(engine.compile_seconds for engine in self.engines)

    @property
    def is_ready(self) -> bool:
        """Whether every copy is; see `Engine.is_ready`."""
        return all(engine.is_ready for engine in self.engines)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return sum(engine.num_unfinished for engine in self.engines)

    def warmup(
        self,
        report: Callable[[int, int, str], None] | None = None,
        *,
        wanted: Callable[[str], bool] | None = None,
        background: bool = False,
    ) -> None:
        """Compiles every program of every copy, all copies at the same time; see `Engine.warmup`.

        `report` gets the numbers of all copies together.
        """
        if background:
            reports = [None] * len(self.engines) if report is None else _together(report, len(self.engines))
            for engine, each in zip(self.engines, reports, strict=True):
                engine.warmup(each, wanted=wanted, background=True)
            return
        # XLA needs the interpreter's lock for little of it, and tries kernels on the device of the copy. At an error
        # `progress` ends first, which ends the other copies' work.
        with ThreadPoolExecutor(len(self.engines)) as threads, progress(report) as tell:
            pairs = zip(self.engines, _together(tell, len(self.engines)), strict=True)
            started = [threads.submit(engine.warmup, each, wanted=wanted) for engine, each in pairs]
            for done in as_completed(started):
                done.result()

    def assume_computed(self, prompts: Sequence[Sequence[int]], salts: Sequence[bytes | None] = ()) -> None:
        """`Engine.assume_computed` in every copy."""
        self._each(lambda engine: engine.assume_computed(prompts, salts))

    def cache_stats(self) -> CacheStats:
        """Returns the sums over the block allocators."""
        return _total([engine.cache_stats() for engine in self.engines])

    def speculation_stats(self) -> SpeculationStats:
        """Returns the counts of proposals of all copies together."""
        return _total([engine.speculation_stats() for engine in self.engines])

    def prepare(self, params: SamplingParams | None) -> None:
        """`Engine.prepare` for the copy that checks requests."""
        self.engines[0].prepare(params)

    def new_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        outbox: Outbox | None = None,
        **options: Any,
    ) -> Request:
        """Returns a request for `queue`; see `Engine.new_request`."""
        outbox = self._outbox if outbox is None else outbox
        return self.engines[0].new_request(prompt_token_ids, params, outbox=outbox, **options)

    def queue(self, requests: Sequence[Request]) -> None:
        """Queues each request with the copy that has the least to do until its first token; see `Engine.queue`."""
        with self._routing:
            names: set[str] = set()
            for name in filter(None, (request.given_id for request in requests)):
                if name in names or self._engine_of(name) is not None:
                    raise taken(name)
                names.add(name)
            number = max(engine.num_added for engine in self.engines)
            loads = [engine.load for engine in self.engines]
            routed: list[dict[Request, int]] = [{} for _ in self.engines]
            for request in requests:
                keys = self._router.keys(request.encoder_token_ids or request.prompt_token_ids, request.salt)
                index = self._router.choose(keys, loads)
                self._router.note(index, keys)
                loads[index] += sum(sample.most_tokens for sample in request.samples)
                routed[index][request] = number
                number += len(request.samples)
            try:
                for engine, numbers in zip(self.engines, routed, strict=True):
                    if numbers:
                        engine.queue(list(numbers), list(numbers.values()))
            except BaseException:
                for engine, numbers in zip(self.engines, routed, strict=True):
                    for request in numbers:
                        engine.abandon(request)
                raise

    def cancel(self, request_id: str) -> TokenDelta:
        """Ends an unfinished request now; see `Engine.cancel`."""
        end = (self._engine_of(request_id) or self.engines[0]).cancel(request_id)
        tokens = (token for delta in self._outbox.take(request_id) for token in delta.token_ids)
        return end._replace(token_ids=tuple(tokens))

    def step(self) -> list[TokenDelta]:
        """Runs a step of every copy that has work; returns the new deltas. See `Engine.step`."""
        self.check_model()
        for engine in [engine for engine in self.engines if engine.num_unfinished] or [self.engines[0]]:
            engine.advance()
        return self._outbox.take()

    def wait(self, outbox: Outbox) -> list[TokenDelta]:
        """Runs steps until an outbox has deltas; see `Engine.wait`. The copies run their steps at the same time."""
        while not checked_outbox(outbox):
            self.check_model()
            running = [engine for engine in self.engines if engine.runs_for(outbox)]
            if not running:
                # A copy that is asleep or closed raises the error of `Engine.wait`.
                return self.engines[0].wait(outbox)
            replies: SimpleQueue[Outcome] = SimpleQueue()
            for engine in running:
                engine.notify(outbox, replies.put)
            replies.get().result()
        return outbox.take()

    def runs_for(self, outbox: Outbox) -> bool:
        """Returns whether a request of an outbox is unfinished."""
        return any(engine.runs_for(outbox) for engine in self.engines)

    def subscribe(self, outbox: Outbox, listener: Listener, then: Callable[[], object] | None = None) -> None:
        """Passes every delta of an outbox to a listener; see `Engine.subscribe`."""
        running = [engine for engine in self.engines if engine.runs_for(outbox)]
        (running or self.engines)[0].subscribe(outbox, listener, then)

    def stop(self, request: Request, num_output_tokens: int) -> None:
        """Ends a request whose text reached a stop string; see `Engine.stop`."""
        (self._engine_of(request.request_id) or self.engines[0]).stop(request, num_output_tokens)

    def check_model(self, *, modules: bool = False) -> None:
        """Takes the arrays that were replaced in the model; see `Engine.check_model`."""
        if not self.closed:
            self._follower.check(self, modules=modules)

    def update_weights(
        self,
        state: nnx.Module | nnx.State | nnx.FlatState[Any] | Mapping[Any, Any],
        *,
        unfinished: Literal["restart", "finish"] = "restart",
        version: int | None = None,
        **options: Any,
    ) -> None:
        """Replaces the weights of every copy, or of none if one fails; see `Engine.update_weights`."""
        check_version(version)
        self._replace(lambda engine: engine.fitting_weights(state, unfinished, **options), unfinished, version)
        self._follower.mark_seen()

    def set_kv_cache_scales(self, scales: KVCacheScales) -> None:
        """Replaces the scales of an 8-bit cache in every copy, or in none; see `Engine.set_kv_cache_scales`."""
        self._replace(lambda engine: engine.fitting_scales(scales), "restart")

    def sleep(self) -> None:
        """Frees the memory of all pools until `wake`; if one fails, all stay awake."""
        self._all_or_none(Engine.sleep, Engine.wake)

    def wake(self) -> None:
        """Allocates all pools again; if one fails, all stay asleep."""
        self._all_or_none(Engine.wake, Engine.sleep)

    def abandon(self, outbox: Outbox) -> None:
        """Cancels the unfinished requests of an outbox without waiting; safe in a finalizer."""
        for engine in self.engines:
            engine.abandon(outbox)

    def follow(self) -> bool:
        """Returns False: the devices of all copies belong to this process."""
        return False

    def settle(self) -> None:
        """Waits until all copies have carried out all earlier commands."""
        self._each(Engine.settle)

    def close(self) -> None:
        """Cancels the unfinished requests and frees all memory."""
        self._each(Engine.close)

    def _engine_of(self, request_id: str) -> Engine | None:
        return next((engine for engine in self.engines if engine.request_of(request_id) is not None), None)

    def _each(self, action: Callable[[Engine], None]) -> None:
        for engine in self.engines:
            action(engine)

    def _replace(
        self, fitting: Callable[[Engine], list[jax.Array]], unfinished: str, version: int | None = None
    ) -> None:
        fitted = [fitting(engine) for engine in self.engines]
        for engine in self.engines:
            engine.finish(unfinished)
        for engine, leaves in zip(self.engines, fitted, strict=True):
            engine.replace_weights(leaves, version)
        with self._routing:
            self._router.forget()

    def _all_or_none(self, action: Callable[[Engine], None], undo: Callable[[Engine], None]) -> None:
        """Puts all copies to sleep or wakes them; if one fails, those that changed go back."""
        before = [engine.asleep for engine in self.engines]
        try:
            self._each(action)
        except BaseException:
            for engine, was_asleep in zip(self.engines, before, strict=True):
                if engine.asleep != was_asleep:
                    undo(engine)
            raise


#: The engine of one copy of the model, or of several.
AnyEngine: TypeAlias = Engine | DataParallelEngine


def open_engine(
    model: PagedModel,
    config: EngineConfig | None = None,
    *,
    tokenizer: TextTokenizer | None = None,
    follow: bool = True,
) -> AnyEngine:
    """Returns the engine that a config asks for: one, or several with one interface."""
    check_config(config)
    if config is None or config.data_parallel_size == 1:
        return Engine(model, config, tokenizer=tokenizer, follow=follow)
    return DataParallelEngine(model, config, tokenizer=tokenizer, follow=follow)


class _Router:
    """Records the prompt blocks of each copy, as far as its pool may still hold them."""

    def __init__(self, block_size: int, capacities: Sequence[int]) -> None:
        self._block_size, self._capacities = block_size, capacities
        self._given: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]

    def keys(self, tokens: tuple[int, ...], salt: bytes | None) -> list[int]:
        """Returns a key for each whole block of a prompt, which depends on all tokens before its end."""
        # A hash will do: where two prompts share one a request goes to a copy that has to compute more.
        keys, key = [], hash(salt)
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            key = hash((key, tokens[start : start + self._block_size]))
            keys.append(key)
        return keys

    def choose(self, keys: Sequence[int], loads: Sequence[int]) -> int:
        """Returns the copy with the fewest tokens to compute until a prompt is computed."""

        def work(index: int) -> int:
            given = self._given[index]
            found = next((place for place, key in enumerate(keys) if key not in given), len(keys))
            return loads[index] - found * self._block_size

        return min(range(len(loads)), key=work)

    def note(self, index: int, keys: Sequence[int]) -> None:
        """Records that a copy got a prompt."""
        given = self._given[index]
        for key in keys:
            given[key] = None
            given.move_to_end(key)
        while len(given) > self._capacities[index]:
            given.popitem(last=False)

    def forget(self) -> None:
        """Drops all records: no copy holds a prefix any more."""
        for given in self._given:
            given.clear()


def _together(report: Callable[[int, int, str], None], num_copies: int) -> list[Callable[[int, int, str], None]]:
    """Returns a report for each copy, by which `report` gets the numbers of all copies together."""
    found: dict[int, tuple[int, int]] = {}
    lock = threading.Lock()

    def tell(copy: int, done: int, total: int, name: str) -> None:
        with lock:
            found[copy] = done, total
            dones, totals = zip(*found.values(), strict=True)
            # Copies that have not reported yet have as many programs.
            report(sum(dones), sum(totals) + (num_copies - len(found)) * max(totals), name)

    return [functools.partial(tell, copy) for copy in range(num_copies)]


def _total(records: Sequence[Any]) -> Any:
    """Returns a record of sums; those of tuples are by place."""
    found = {
        field.name: [getattr(record, field.name) for record in records] for field in dataclasses.fields(records[0])
    }
    sums = {
        name: tuple(map(sum, zip(*values, strict=True))) if isinstance(values[0], tuple) else sum(values)
        for name, values in found.items()
    }
    return dataclasses.replace(records[0], **sums)
