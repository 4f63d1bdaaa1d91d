"""The compiled steps of an engine: each bucket is compiled once, ahead of time, and never behind the engine's back."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from jattn.llm.engine.device.adapters import AdapterLayout, AdapterMemory
from jattn.llm.engine.device.buckets import Bucket
from jattn.llm.engine.device.placement import Placement, shard_bytes
from jattn.llm.engine.device.program import jitted_step
from jattn.llm.engine.device.tables import SamplerState
from jattn.llm.engine.device.weights import Structure, Weights
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.options.params import SamplingKind
from jattn.llm.models import PagedSpec
from jattn.llm.models.batch_adapters import runs_beside
from jattn.llm.reports import Compiling, event
from jattn.pool import KVPool, free_bytes
from torch_core.cache import LayerGroups

# From these numbers of rows on, of several sequences and of one, XLA's choice of products is slower than cuBLAS: it
# ignores the operations after a product, and compiles longer. On an H200 a step of 64 and of 128 rows took 2.8 and 3.9%
# longer, on an H100 a prompt of 512, 2,048 and 8,192 tokens 1.5, 3.7 and 2%. With 32 rows it is 3% faster.
_CUBLAS_ROWS, _CUBLAS_PROMPT = 64, 512
# Bytes of a device that choosing the kernel of a product takes beside its operands and two results: cuBLAS's workspace,
# and margins around each array, where XLA looks for stray writes; 96 to 112 MiB on an H100.
_TUNING_MARGIN = 128 << 20
#: XLA makes one product of two that read the same rows, if one of the weights is small, and then copies both weights
#: together in every step.
PRODUCT_OPTIONS: Mapping[str, Any] = MappingProxyType({"xla_gpu_dot_merger_threshold_mb": 0})
# Kernels that read nothing that the other writes run side by side. With two mixers in a layer a step of Falcon-H1 7B
# takes 5% less with 64 sequences, 8% with one; with adapters, whose kernels do not read the base's products, one of
# Llama 8B takes 12% less with one sequence and 11% with eight (H200), 1.6% with 64 (H100). XLA tells by operands and
# results of each, so they may share nothing else: on several devices `all_reduce` has memory that is no operand. Their
# intermediate arrays lie apart: a prompt of 8,192 tokens, which fills the device anyway, would take 895 MiB, not 676.
_DECODE_OPTIONS: Mapping[str, Any] = MappingProxyType({"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"})
_MAX_COMPILERS = 16
# Tracing holds the interpreter's lock, but not while Triton compiles and assembles the kernels of a program.
_TRACERS = 4
# Compiled programs of one kind of model and one set of shapes, by bucket.
_Compiled = dict[Bucket, Any]


class Programs:
    """Compiles a model's steps ahead of time, so that no call of one can compile by itself.

    For the thread that runs the steps, but for `ensure`, by which other threads compile in advance.

    Engines of equally built models and equal shapes share compiled programs.

    Args:
        weights: those that the steps are first run with.
        pool: the cache arrays that steps consume.
        placement: the devices.
        layers: the model's cache groups.
        state_of: shapes of a full step's sampler state, by the number of its sequences.
        peers: the memory in which devices sum small arrays; see `jattn.parallel.Peers`.
        config: the engine's sizes.
        spec: the model's.
        max_blocks: columns of a block table.
        multiplies_fp8: there are linear layers of `jattn.llm.models.Fp8Linear`.
        has_branches: a layer has attention and a state side by side.
        adapters: the memory of adapters; None without.

    Attributes:
        compiled: the programs so far, by bucket.
        last: buckets of the programs that were run last, as many as steps can be in flight.
        num_compilations: programs that were compiled here.
        compile_seconds: time that steps and `compile` took for it.
        on_gpu: whether the devices are GPUs.
        tuning_bytes: bytes of a device that compiling one program may take; 0 where no kernels are compared.
    """

    def __init__(
        self,
        weights: Weights,
        pool: KVPool,
        placement: Placement,
        layers: LayerGroups,
        state_of: Callable[[int], SamplerState],
        peers: jax.Array | None,
        *,
        config: EngineConfig,
        spec: PagedSpec,
        max_blocks: int,
        multiplies_fp8: bool,
        has_branches: bool = False,
        adapters: AdapterMemory | None = None,
    ) -> None:
        max_num_seqs = config.max_num_seqs
        self.num_compilations = 0
        self.compile_seconds = 0.0
        self._present: tuple[str, float] | None = None
        self.last: deque[Bucket] = deque(maxlen=2)
        self._lock = threading.Lock()
        self._under_way: dict[Bucket, Future[None]] = {}
        self._tracing = threading.Semaphore(_TRACERS)
        self._default_device = cast(Any, jax.config).jax_default_device
        self._max_num_seqs, self._max_blocks, self._num_groups = max_num_seqs, max_blocks, len(layers.groups)
        self._on_all = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=placement.whole)
        self._operands = (
            tuple(
                jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
                for (shape, dtype), sharding in zip(pool.shapes, pool.shardings, strict=True)
            ),
            [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in weights.leaves],
            self._on_all((max_num_seqs,)),
        )
        self._state_of = state_of
        self._peers = jax.tree.map(
            lambda table: jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=table.sharding), peers
        )
        self._adapters: Any = None
        if adapters is not None:
            self._adapters = tuple(
                jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding) for each in adapters.arrays
            )
        operands = tuple(jax.tree.leaves((self._operands, self._peers, state_of(max_num_seqs), self._adapters)))
        # Triton multiplies quantized weights where they lie; in front of cuBLAS they would be widened in memory.
        is_wide = multiplies_fp8 or all(leaf.dtype.itemsize > 1 for leaf in weights.leaves)
        self.on_gpu = any(device.platform == "gpu" for leaf in weights.leaves for device in leaf.devices())
        self._device = next(iter(weights.leaves[0].sharding.addressable_devices)) if weights.leaves else None
        sizes = config.max_num_batched_tokens, spec.vocab_size
        products = [tuning_bytes(leaf, *sizes) for leaf in weights.leaves if leaf.ndim > 1]
        self.tuning_bytes = max(products, default=0) if self.on_gpu else 0
        self._has_cublas = is_wide and self.on_gpu
        self._multiplies_fp8, self._num_request_inputs = multiplies_fp8, len(spec.inputs)
        self._has_branches, self._is_alone = has_branches, placement.mesh is None or placement.mesh.size == 1
        cache_specs = tuple(PartitionSpec() if each is None else each.spec for each in pool.shardings)
        cut = (placement, layers, cache_specs, weights.specs)
        layout = None if adapters is None else adapters.layout
        routes = config.enable_return_routed_experts
        self._step, self.compiled = _shared(weights.structure, *cut, operands, max_blocks, routes, layout)

    @property
    def compiling(self) -> Compiling:
        """The compiling so far; any thread may ask."""
        present = self._present
        if present is None:
            return Compiling(self.compile_seconds)
        program, started = present
        seconds = time.monotonic() - started
        return Compiling(self.compile_seconds + seconds, program, seconds)

    @property
    def names(self) -> tuple[str, ...]:
        """One line for each compiled program."""
        return tuple(map(str, tuple(self.compiled)))

    def __call__(self, bucket: Bucket) -> Callable[..., Any]:
        """Returns the program of a bucket, compiled if it must be; for the thread that runs the steps."""
        if bucket not in self.compiled:
            self._timed(str(bucket), lambda: self.ensure(bucket))
        return self.compiled[bucket]

    def ensure(self, bucket: Bucket) -> None:
        """Compiles a missing program, or waits for the thread that compiles it; for any thread."""
        with self._lock:
            if bucket in self.compiled:
                return
            done = self._under_way.get(bucket)
            is_new = done is None
            if done is None:
                done = self._under_way[bucket] = Future()
        if is_new:
            event(logging.INFO, "program_compiling", program=str(bucket))
            try:
                self._keep(bucket, self._compile(self._lowered(bucket), bucket))
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
            finally:
                with self._lock:
                    del self._under_way[bucket]
        done.result()

    def doubt_last(self) -> None:
        """Forgets the programs that ran last, one of which failed: they are compiled again.

        XLA keeps the recorded graph of a program on a GPU (jaxlib 0.11.2), and a program that fails meanwhile fails for
        ever: "Command buffer has to be finalized first before it can be updated".
        """
        for bucket in self.last:
            self.compiled.pop(bucket, None)
        # Compiled again from JAX's cached trace, it would be the same executable.
        self._step.clear_cache()
        self.last.clear()

    def compile(self, buckets: Iterable[Bucket], report: Callable[[int, int, str], None]) -> None:
        """Compiles the missing programs of some buckets, several at once.

        Args:
            buckets: buckets of the programs.
            report: called with the number that is done, that of all, and the name of the last.
        """
        missing = [bucket for bucket in buckets if bucket not in self.compiled]

        def compile_all() -> None:
            threads = ThreadPoolExecutor(self.num_compilers())
            try:
                made = threads.map(lambda bucket: self._compile(self._lowered(bucket), bucket), missing)
                for done, (bucket, compiled) in enumerate(zip(missing, made, strict=True), 1):
                    self._keep(bucket, compiled)
                    report(done, len(missing), str(bucket))
            finally:
                # After an interrupt the programs that wait are not begun.
                threads.shutdown(cancel_futures=True)

        self._timed(f"{len(missing)} programs", compile_all)

    def num_compilers(self) -> int:
        """Returns the number of programs that `compile` compiles at once, by the free memory."""
        room = free_bytes(self._device) // self.tuning_bytes if self.tuning_bytes else _MAX_COMPILERS
        return max(1, min(os.cpu_count() or 1, _MAX_COMPILERS, room))

    def step_bytes(self, bucket: Bucket) -> int:
        """Returns the bytes of a program's intermediate arrays and results on a device, by XLA's own figure."""
        # To choose among kernels takes most of a compilation's time and does not change the large arrays.
        options = {"xla_gpu_autotune_level": 0, **self._options(bucket)} if self.on_gpu else None
        sizes = self._lowered(bucket).compile(compiler_options=options).memory_analysis()
        return sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes

    def _lowered(self, bucket: Bucket) -> Any:
        device = self._default_device
        with (
            self._tracing,
            jax.default_device(device) if device is not None else contextlib.nullcontext(),
            jax.transfer_guard("allow"),
        ):
            return self._traced(bucket).lower()

    def _traced(self, bucket: Bucket) -> Any:
        layout = bucket.layout(self._max_blocks, self._num_groups, self._num_request_inputs)
        buffer = self._on_all((layout.num_elements,))
        is_full = bucket.sampler.kind is SamplingKind.FULL
        state = self._state_of(bucket.num_seqs) if is_full else SamplerState(None, None)
        operands = (*self._operands, state, buffer, self._peers, self._adapters if bucket.adapters else None)
        return self._step.trace(*operands, bucket=bucket, max_blocks=self._max_blocks)

    def _compile(self, lowered: Any, bucket: Bucket) -> Any:
        # In front of cuBLAS the output product of one row takes longer, which shows with few tokens.
        prefers_cublas = bucket.num_inputs >= (_CUBLAS_ROWS if bucket.num_seqs > 1 else _CUBLAS_PROMPT)
        # To try Triton's products of E4M3 for 2,048 rows XLA took minutes (jaxlib 0.11.2 on an H200).
        prefers_cublas |= self._multiplies_fp8 and bucket.num_inputs >= _CUBLAS_ROWS
        prefers_cublas &= self._has_cublas
        options = {"xla_gpu_enable_triton_gemm": False} if prefers_cublas else {}
        return lowered.compile(compiler_options={**options, **self._options(bucket)} if self.on_gpu else None)

    def _options(self, bucket: Bucket) -> dict[str, Any]:
        has_adapters = bucket.adapters and runs_beside(bucket.num_inputs)
        is_concurrent = self._is_alone and bucket.decodes and (self._has_branches or has_adapters)
        return {**PRODUCT_OPTIONS, **(_DECODE_OPTIONS if is_concurrent else {})}

    def _keep(self, bucket: Bucket, compiled: Any) -> None:
        with self._lock:
            self.compiled[bucket] = compiled
            self.num_compilations += 1
        event(logging.DEBUG, "program_compiled", program=str(bucket))

    def _timed(self, program: str, work: Callable[[], None]) -> None:
        started = time.monotonic()
        self._present = program, started
        try:
            work()
        finally:
            # In this order: another thread may count the time twice for a moment, and never misses it.
            self.compile_seconds += time.monotonic() - started
            self._present = None


def tuning_bytes(weight: jax.Array, num_tokens: int, vocab_size: int) -> int:
    """Returns the bytes of a device that choosing the kernel of a weight's product takes.

    XLA runs the candidates on operands of their own, the pool being allocated already, and keeps the first result.
    """
    *_, size, num_outputs = weight.sharding.shard_shape(weight.shape)
    # Tokens have a row of an embedding; only those that are sampled have logits.
    rows = num_tokens if max(weight.shape) < vocab_size else 0
    of_row = (size + 2 * num_outputs) * max(2, weight.dtype.itemsize)
    return shard_bytes(weight) + rows * of_row + _TUNING_MARGIN


@contextlib.contextmanager
def progress(report: Callable[[int, int, str], None] | None) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function of count, total and label: `report`, or a bar on stderr if that is None.

    After an interrupt of the body the function raises InterruptedError, on the thread that compiles.
    """
    interrupted = threading.Event()
    console = Console(stderr=True)
    is_hidden = report is not None or not console.is_terminal
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console, disable=is_hidden) as bar:
        task = bar.add_task("compiling", total=None)

        def tell(done: int, total: int, name: str) -> None:
            if interrupted.is_set():
                raise InterruptedError("the caller of warmup was interrupted.")
            if report is None:
                bar.update(task, completed=done, total=total)
            else:
                report(done, total, name)

        try:
            yield tell
        except BaseException:
            interrupted.set()
            raise


@functools.lru_cache(maxsize=8)
def _shared(
    structure: Structure,
    placement: Placement,
    layers: LayerGroups,
    cache_specs: tuple[Any, ...],
    leaf_specs: tuple[Any, ...],
    operands: tuple[Any, ...],
    max_blocks: int,
    routes: bool,
    adapters: AdapterLayout | None,
) -> tuple[Any, _Compiled]:
    return jitted_step(structure, placement, layers, cache_specs, leaf_specs, routes=routes, adapters=adapters), {}
