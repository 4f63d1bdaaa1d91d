"""The engine: takes requests, runs steps, gives back tokens; survives interrupts and lost pools by computing again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from flax import nnx

from jattn.llm.engine.device.benchmark_fill import assume_computed
from jattn.llm.engine.device.device import check_types, default_config, open_device
from jattn.llm.engine.device.placement import replica_meshes
from jattn.llm.engine.device.progress import progress
from jattn.llm.engine.device.weights import Arrivals, Weights
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.options.params import SamplingParams
from jattn.llm.engine.options.speculation import SpeculationStats
from jattn.llm.engine.owner import Owner
from jattn.llm.engine.request.outputs import News, Outbox, TokenDelta
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.request.validation import Intake
from jattn.llm.engine.turns import Turns
from jattn.llm.load import TextTokenizer
from jattn.llm.load.kv_scales import KVCacheScales
from jattn.llm.models import PagedModel
from jattn.pool import PoolPlan
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, PoolLost, Unsupported
from torch_core.base.specs import LARGEST_CODE
from torch_core.cache import CacheStats

__all__ = ["Engine"]


class Engine(contextlib.AbstractContextManager):
    """Continuous batching over one model and one pool. Token ids in, token ids out.

    Any thread may call any method: one lock serialises them, and whichever thread wants tokens runs the next step for
    all. Not from a signal handler or a finalizer that interrupts a call of the same thread.

    What stands of a request are its tokens and how it ended; all else (block tables, prefix keys, queues, steps in
    flight) is made anew from them after an interrupt, whatever it was and wherever it struck, and after the loss of the
    pool. That costs time, not answers; statistics begin anew, too.

    Args:
        model: a `Decoder`, or any `nnx.Module` that is a `jattn.llm.models.PagedModel`. Its weights are captured now: a
            later change of the model does not reach the engine, which keeps the arrays alive until it is closed or
            dropped.
        config: sizes; None for `EngineConfig()`, and on a GPU for 64 sequences and 2,048 tokens a step.
        model_fingerprint: identifies the weights in prefix keys; needed only where keys outlive the engine.
        tokenizer: of the model, for what `SamplingParams` says in text (bad_words, structured_outputs).

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
    ) -> None:
        config = default_config() if config is None else config
        check_types(model, config)
        mesh, *others = replica_meshes(config)
        if others:
            raise InvalidInput(
                f"data_parallel_size is {config.data_parallel_size}; an Engine is one copy. "
                f"jattn.llm.engine.open_engine "
                "gives a DataParallelEngine, and LLM has one."
            )
        self._intake = Intake(model.paged_spec, config, tokenizer)
        device, cache_config, self._plan = open_device(
            model,
            config,
            mesh=mesh,
            max_model_len=self._intake.max_model_len,
            model_fingerprint=model_fingerprint,
        )
        self._owner = Owner(config, cache_config, device)
        self._turns = Turns()
        self._outbox = Outbox()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._owner.closed

    @property
    def asleep(self) -> bool:
        """Whether `sleep` gave the pool's memory back."""
        return self._owner.asleep

    @property
    def pool_plan(self) -> PoolPlan:
        """The pool's size; its text gives blocks, tokens and GiB."""
        return self._plan

    @property
    def max_model_len(self) -> int:
        """Tokens of one sequence at most."""
        return self._intake.max_model_len

    @property
    def programs(self) -> tuple[str, ...]:
        """One line for each program compiled so far; engines of equal models and sizes share them."""
        return self._owner.device.runner.programs.names

    @property
    def num_compilations(self) -> int:
        """Programs that this engine compiled; constant after `warmup`."""
        return self._owner.device.runner.programs.num_compilations

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling them, in `warmup` and within the steps that needed them."""
        return self._owner.device.runner.programs.compile_seconds

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        self.settle()
        return len(self._owner.requests)

    @property
    def num_added(self) -> int:
        """Samples that were ever added, and the number of the next one's seed and id."""
        return self._owner.num_added

    @property
    def load(self) -> int:
        """Tokens of all unfinished requests, generated ones as many as there can be."""
        requests = list(self._owner.requests.values())
        return sum(len(request.prompt_token_ids) + request.max_tokens for request in requests)

    def request_of(self, request_id: str) -> Request | None:
        """Returns the unfinished request of an id, if there is one."""
        return self._owner.requests.get(request_id) if isinstance(request_id, str) else None

    def runs_for(self, outbox: Outbox) -> bool:
        """Returns whether a request of an outbox is unfinished."""
        return any(request.outbox is outbox for request in list(self._owner.requests.values()))

    def warmup(
        self,
        report: Callable[[int, int, str], None] | None = None,
        *,
        wanted: Callable[[str], bool] | None = None,
    ) -> None:
        """Compiles every program that any traffic can need, several at once; afterwards nothing compiles any more.

        With JAX's persistent cache on (`jax.config.update("jax_compilation_cache_dir", folder)`, before anything is
        compiled, and `jax_persistent_cache_min_compile_time_secs` at 0) the next process reads them from there.
        Programs with torch in a callback are never kept.

        Args:
            report: called after each program with how many are done, how many there are, and its name; by default a
                progress bar on stderr where that is a terminal.
            wanted: of a name as in `programs`, whether to compile it; others compile when a step first needs them.
                None for all of them.
        """

        def warm() -> None:
            with progress(report) as tell:
                self._owner.device.warmup(tell, wanted)

        self._turns.run(warm)

    def cache_stats(self) -> CacheStats:
        """Returns a frozen snapshot of the block allocator."""

        def look() -> CacheStats:
            work = self._owner.begin()
            try:
                work.settle()
            except PoolLost:
                work = self._owner.begin()
            self._owner.end(work)
            return work.cache.stats()

        return self._turns.run(look)

    def assume_computed(self, prompts: Sequence[Sequence[int]]) -> None:
        """Fills the pool with noise and takes prompts for computed, to measure what follows them; see `jattn.bench`.

        Raises:
            InvalidInput, Unsupported, OutOfBlocks: requests are unfinished; several processes; too small a pool.
        """
        self._turns.run(lambda: assume_computed(self._owner, prompts))

    def speculation_stats(self) -> SpeculationStats:
        """Returns how guessing went since the engine was built; see `EngineConfig.speculative_config`."""
        return self._turns.run(lambda: self._owner.device.speculation.stats())

    def prepare(self, params: SamplingParams | None) -> None:
        """Compiles what a request brings, a grammar, so that `add` need not; may take long, and disturbs no step.

        Raises:
            InvalidInput, Unsupported: as `add`.
        """
        self._intake.grammar(params)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        salt: bytes | None = None,
        priority: int = 0,
        outbox: Outbox | None = None,
        first_number: int = 0,
    ) -> Request:
        """Queues a request; nothing runs until `step` or `wait`.

        Args:
            prompt_token_ids: at least one token id below the model's vocab_size; the encoder's input if it has one.
            params: how to sample; the defaults of `SamplingParams` if None.
            request_id: unique among unfinished requests and not beginning with "#"; "#" and a number if None.
            prompt: the prompt's text, for the result.
            salt: 1 to 64 bytes; only requests of equal salt share cached prefixes. None for the engine's own.
            priority: the lower, the earlier, where requests wait or are preempted. One level is worth 64 arrivals: no
                more later requests than that overtake it for each, so that none waits forever.
            outbox: where its tokens are announced, for a caller that reads them with `wait`; None for those of `step`.
            first_number: `num_added` begins there if it is less; for engines that number their requests together.

        Raises:
            InvalidInput: an empty prompt, a token id outside the vocabulary, a bad or taken id, a bad salt or outbox.
            RequestTooLong: it can never fit the model or the pool; the message gives the numbers.
            Unsupported: structured output without its library.

        Returns:
            The request; with n above 1 the first sample, whose `samples` are all of them, each with an id of its own.
        """
        outbox = self._outbox if outbox is None else _checked(outbox)

        if self._owner.device.channel is not None and jax.process_index():
            raise InvalidInput(f"this is process {jax.process_index()}; requests go to process 0. Call follow() here.")

        # Compiled before it is this thread's turn: it takes as long as its writer likes.
        grammar = self._intake.grammar(params)

        def queue() -> Request:
            work = self._owner.begin()
            self._owner.num_added = max(self._owner.num_added, first_number)
            try:
                samples = self._intake.requests(
                    prompt_token_ids,
                    params,
                    grammar=grammar,
                    number=self._owner.num_added,
                    request_id=request_id,
                    taken=self._owner.requests,
                    prompt=prompt,
                    salt=salt,
                    priority=priority,
                    outbox=outbox,
                )
                for request in samples:
                    work.scheduler.add(request)
            except (InvalidInput, Unsupported):
                self._owner.end(work)
                raise
            return self._owner.add(work, samples)

        return self._turns.run(queue, self._owner.withdraw)

    def withdraw(self, request: Request) -> None:
        """Forgets a request and its other samples as if nobody had added it; no delta tells of their end."""
        self._turns.run(lambda: self._owner.withdraw(request))

    def cancel(self, request_id: str) -> TokenDelta:
        """Ends an unfinished request (one sample) now; tokens of it that are still on the device are dropped.

        Returns:
            Its end. Whoever reads it with `wait` learns of it there, too; `step` does not repeat it.

        Raises:
            InvalidInput: no unfinished request has this id.
        """

        def end() -> tuple[TokenDelta, News]:
            work = self._owner.begin()
            request = self.request_of(request_id)
            if request is not None:
                self._owner.finish(work, request, "cancelled")
            self._owner.end(work)
            if request is None:
                raise InvalidInput(f"no unfinished request has the id {shown(request_id)}.")
            news = self._outbox.news(request)
            deltas = self._outbox.take(news) or [TokenDelta(request_id, (), request.finish_reason)]
            return deltas[0], news

        return self._turns.run(end, lambda taken: self._outbox.put_back(taken[1]))[0]

    def step(self) -> list[TokenDelta]:
        """Dispatches the next step if there is one and reads the oldest if it must; returns what came.

        That is what came since the last call, also by the steps of other threads and by one that was interrupted. A
        step that fails after it consumed the pool costs time, not answers: every running request is computed again from
        its tokens. Only a second failure in a row is raised.

        Raises:
            PoolLost: two steps failed in a row. The engine is still usable.
            EngineAsleep, InvalidInput: the engine is asleep, or closed.
        """
        return self._advance(self._outbox, look_first=False)[0]

    def advance(self) -> None:
        """Does what `step` does and leaves what came in the outboxes.

        Raises:
            PoolLost, InvalidInput: as `step`.
        """
        self._turns.run(self._owner.advance)

    def wait(self, outbox: Outbox) -> list[TokenDelta]:
        """Runs steps until something came for the requests of an outbox, and returns it.

        Returns:
            At least one delta; none only when no unfinished request has this outbox.

        Raises:
            PoolLost: as `step`.
            InvalidInput: no outbox, or the engine is closed.
        """
        _checked(outbox)
        while True:
            deltas, unfinished = self._advance(outbox, look_first=True)
            if deltas or not unfinished:
                return deltas

    def stop(self, request: Request, num_output_tokens: int) -> None:
        """Ends a request whose text reached a stop string, and drops the tokens that came with it and lie behind.

        Args:
            request: one of this engine's; it may have ended by its last tokens.
            num_output_tokens: generated tokens to keep.
        """

        def end() -> None:
            if request.finish_reason is None:
                work = self._owner.begin()
                self._owner.finish(work, request, "stop")
                self._owner.end(work)
            del request.output_token_ids[num_output_tokens:]
            request.finish_reason = "stop"

        self._turns.run(end)

    def update_weights(
        self, state: nnx.Module | nnx.State | Mapping[Any, Any], *, unfinished: Literal["restart", "finish"] = "restart"
    ) -> None:
        """Goes on with other weights of the same model, between two steps; nothing is compiled.

        Cached prefixes of the old weights are dropped. Arrays that lie on the engine's device, or are sharded as its
        own are, are taken without a copy: do not donate them afterwards. Others are brought there. Over several
        processes every one calls this while the engine sleeps, each with the whole parameters or all with arrays that
        are spread over them; if one is refused, all are.

        Args:
            state: of the model: an `nnx.State`, a nested mapping of arrays, or a module; all parameters, and those of
                its other variables that shall change.
            unfinished: "restart" computes unfinished requests again with the new weights, from the tokens that they
                have, and they go on; "finish" first runs those that are there now to their end with the old weights.
                What others add meanwhile is restarted.

        Raises:
            InvalidInput: a parameter does not fit, and is named; it is closed; or it is asleep with requests to finish.
            PoolLost: as `step`, while requests are finished; the weights are the old ones, as after any error.
        """
        leaves = self.fitting_weights(state, unfinished)
        self.finish(unfinished)
        self.replace_weights(leaves)

    def fitting_weights(self, state: nnx.Module | nnx.State | Mapping[Any, Any], unfinished: str) -> list[jax.Array]:
        """Returns what `replace_weights` takes, and checks what `finish` takes; see `update_weights`."""

        def check(weights: Weights) -> Arrivals:
            if unfinished not in ("restart", "finish"):
                raise InvalidInput(f"unfinished is {shown(unfinished)}; it must be 'restart' or 'finish'.")
            return weights.checked(state)

        return self._owner.fitting(check, unfinished)

    def finish(self, unfinished: str) -> None:
        """Runs the requests that are there to their end, if they shall; see `update_weights`."""
        remaining = set(self._owner.requests.values()) if unfinished == "finish" and not self.asleep else set()
        while any(request.finish_reason is None for request in remaining):
            self._turns.run(self._owner.advance)

    def replace_weights(self, leaves: list[jax.Array]) -> None:
        """Goes on with what `fitting_weights` or `fitting_scales` returned; nothing in it can fail."""
        self._turns.run(lambda: self._owner.replace_weights(leaves))

    def set_kv_cache_scales(self, scales: KVCacheScales) -> None:
        """Goes on with other scales of an 8-bit cache: unfinished requests are computed again, nothing is compiled.

        Raises:
            InvalidInput: the cache is not one of 8 bits, or the scales are not those of its layers; several processes
                as in `update_weights`.
        """
        self.replace_weights(self.fitting_scales(scales))

    def fitting_scales(self, scales: KVCacheScales) -> list[jax.Array]:
        """Returns what `replace_weights` takes; see `set_kv_cache_scales`."""
        dtype = self._owner.device.pool.spec.dtype

        def check(weights: Weights) -> Arrivals:
            if not isinstance(scales, KVCacheScales):
                raise InvalidInput(f"scales is {shown(scales)}; it must be KVCacheScales.")
            if dtype not in LARGEST_CODE:
                raise InvalidInput(
                    f"the cache is {dtype}, which has no scales; EngineConfig(kv_cache_dtype='fp8') has."
                )
            return weights.checked_scales(scales.values(dtype))

        return self._owner.fitting(check)

    def sleep(self) -> None:
        """Gives the pool's memory back until `wake`: to a trainer, say. Weights and programs stay.

        Requests can be added and cancelled meanwhile; those that are unfinished are computed again afterwards, from the
        tokens that they have. `step` and `wait` are refused.

        Raises:
            InvalidInput: the engine is closed, or a torch view of the pool is alive.
        """
        self._turns.run(self._owner.sleep)

    def wake(self) -> None:
        """Takes the pool's memory again; nothing happens to an engine that is awake.

        Raises:
            InvalidInput: the engine is closed, or the memory is not free; it sleeps on then.
        """
        self._turns.run(self._owner.wake)

    def abandon(self, outbox: Outbox) -> None:
        """Cancels the unfinished requests of an outbox with the next call of any method; safe in a finalizer."""
        self._owner.abandoned.append(_checked(outbox))

    def follow(self) -> bool:
        """Does what process 0's engine does until that sleeps (call it again) or closes; False if there is none."""
        channel = self._owner.device.channel
        if channel is None or not jax.process_index():
            return False
        self._owner.follow(channel)
        return True

    def settle(self) -> None:
        """Does now what interrupts and `abandon` left to the next call; a closed engine has nothing left."""

        def settle() -> None:
            if not self._owner.closed:
                self._owner.end(self._owner.begin())

        self._turns.run(settle)

    def close(self) -> None:
        """Cancels what has not finished and gives the pool's memory back now; the engine refuses everything then."""
        self._turns.run(self._owner.close)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _advance(self, outbox: Outbox, *, look_first: bool) -> tuple[list[TokenDelta], bool]:
        """Runs a step, unless there are news to look at first; returns them and whether a request is unfinished."""

        def advance() -> tuple[list[TokenDelta], bool, News]:
            news = outbox.news() if look_first else {}
            if not news:
                self._owner.advance()
                news = outbox.news()
            unfinished = bool(news) or any(request.outbox is outbox for request in self._owner.requests.values())
            return outbox.take(news), unfinished, news

        self._turns.let_in()
        return self._turns.run(advance, lambda taken: outbox.put_back(taken[2]))[:2]


def _checked(outbox: object) -> Outbox:
    if not isinstance(outbox, Outbox):
        raise InvalidInput(f"outbox is {shown(outbox)}; it must be an Outbox.")
    return outbox
