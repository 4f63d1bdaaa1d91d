"""The functions of Gluon that kernels call, over the values and the machine of this package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.emulated.assembly import emulated_assembly
from tests.support.emulated.machine import Machine
from tests.support.emulated.values import DTYPES, DType, Pointer, PointerType, Shared, Tensor, plain

__all__ = ["Language"]


class Language:
    """`gl` and what kernels import beside it, for one program; `names` maps imported names to what stands for them."""

    def __init__(self, machine: Machine, program: int, programs: int) -> None:
        self._machine = machine
        self._program, self._programs = program, programs
        for name, dtype in DTYPES.items():
            setattr(self, name, dtype)
        self.names = {
            "as_boxes": _as_boxes,
            "async_load": self._async_load,
            "async_gather": machine.gather,
            "thread_barrier": self._thread_barrier,
            "async_copy": SimpleNamespace(
                mbarrier_arrive=lambda memory, increment_count: machine.arrive_after_gathers(memory),
            ),
            "fence_async_shared": lambda: None,
            "let_next_begin": lambda: None,
            "warpgroup_mma": machine.multiply,
            "warpgroup_mma_init": lambda sums: sums,
            "warpgroup_mma_wait": lambda running=0, deps=(): machine.finish_products(running, deps),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=_nothing,
                init=lambda memory, count: machine.barrier(memory).open(count),
                expect=lambda memory, size: machine.arrive(memory, 1, size),
                arrive=lambda memory, count=1: machine.arrive(memory, count),
                wait=machine.await_phase,
            ),
        }

    static_range = staticmethod(range)
    pointer_type = PointerType

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return _nothing
        raise AttributeError(name)

    def program_id(self, axis: int) -> Tensor:
        return Tensor(np.int32(self._program))

    def num_programs(self, axis: int) -> Tensor:
        return Tensor(np.int32(self._programs))

    def num_warps(self) -> int:
        return self._machine.num_warps()

    def to_tensor(self, value: Any) -> Any:
        return value if isinstance(value, Tensor) else Tensor(np.int32(value))

    def arange(self, start: int, end: int, layout: Any = None) -> Tensor:
        return Tensor(np.arange(start, end, dtype=np.int32))

    def full(self, shape: Sequence[int], value: Any, dtype: DType, layout: Any = None) -> Tensor:
        return Tensor(np.full(shape, plain(value), dtype.numpy))

    def zeros(self, shape: Sequence[int], dtype: DType, layout: Any = None) -> Tensor:
        return self.full(shape, 0, dtype)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        # The numbers of a loop are Python's here, and an integer of the language is an int32.
        a = np.int32(a) if isinstance(a, int) and isinstance(b, int) else plain(a)
        return Tensor(np.where(plain(condition), a, plain(b)))

    # Of a NaN and a number, the number, as the hardware's.
    def maximum(self, a: Any, b: Any) -> Tensor:
        return Tensor(np.fmax(plain(a), plain(b)))

    def minimum(self, a: Any, b: Any) -> Tensor:
        return Tensor(np.fmin(plain(a), plain(b)))

    def sum(self, x: Tensor, axis: int) -> Tensor:
        return Tensor(x.array.sum(axis, dtype=x.array.dtype if x.array.dtype != np.bool_ else np.int32))

    def max(self, x: Tensor, axis: int) -> Tensor:
        return Tensor(np.fmax.reduce(x.array, axis))

    def min(self, x: Tensor, axis: int) -> Tensor:
        return Tensor(np.fmin.reduce(x.array, axis))

    def exp2(self, x: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(np.exp2(x.array))

    def floor(self, x: Tensor) -> Tensor:
        return Tensor(np.floor(x.array))

    def log2(self, x: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(np.log2(x.array))

    def div_rn(self, a: Tensor, b: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(np.true_divide(a.array, b.array))

    def expand_dims(self, x: Tensor, axis: int) -> Tensor:
        return Tensor(np.expand_dims(x.array, axis))

    def broadcast(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(Tensor(x) for x in np.broadcast_arrays(a.array, b.array))

    def associative_scan(self, x: Tensor, axis: int, combine: Any) -> Tensor:
        return Tensor(np.cumsum(x.array, axis, dtype=x.array.dtype))

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return Tensor(np.stack([a.array, b.array], -1))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return Tensor(x.array[..., 0]), Tensor(x.array[..., 1])

    def convert_layout(self, x: Any, layout: Any = None, assert_trivial: bool = False) -> Any:
        return x

    def _thread_barrier(self) -> None:
        # The warps of a role run as one.
        pass

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
        return pointer.load(mask, other)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        pointer.store(value, mask)

    def allocate_shared_memory(self, dtype: DType, shape: Sequence[int], layout: Any = None) -> Shared:
        # What nobody has written yet is poison.
        memory = np.empty(shape, dtype.numpy)
        memory.view(np.uint8)[...] = 0xFF
        return Shared(memory)

    def warp_specialize(self, roles: Sequence[tuple[Any, Sequence[Any]]], warps: Sequence[int], registers: Any) -> None:
        counts = [self._machine.num_warps(), *warps]
        self._machine.run(
            [
                (function.__name__, count, lambda function=function, arguments=arguments: function(*arguments))
                for count, (function, arguments) in zip(counts, roles, strict=True)
            ]
        )

    def inline_asm_elementwise(self, asm: str, constraints: str, args: list[Any], dtype: Any, **options: Any) -> Any:
        barrier = re.search(r"bar\.(sync|arrive) \$1, (\d+);", asm)
        if barrier:
            if len(args) == 1 or plain(args[1]):
                number, waits = int(args[0]), barrier[1] == "sync"
                self._machine.hardware_barrier(number, int(barrier[2]), waits=waits)
            return None
        if "ld.acquire" in asm:
            counter, wanted = args
            self._machine.wait(lambda: bool(counter.load().array >= wanted.array), "a turn")
            return None
        if "global" in asm:
            pointer, *values = args
            if "v4" in asm:
                # Of the four elements of a thread that lie together the first one's address counts: those of a product
                # are two columns of a row, and of the row eight below.
                rows, columns = np.indices(pointer.shape)
                pointer = pointer + Tensor(rows % 16 // 8 * 2 + columns % 2)
            # With a value there may be a word, whether it is the first; without, one whether sums are read.
            if "ld." in asm:
                return pointer.load() if not values or values[0] else Tensor(np.zeros(pointer.shape, np.float32))
            first = bool(values[1]) if len(values) > 1 else "st." in asm
            if first:
                pointer.store(values[0])
            else:
                pointer.add_to(values[0])
            return None
        if "bar.warp" in asm:
            return None
        return emulated_assembly(asm, [x.array for x in args])

    def _async_load(self, source: Shared, coordinates: Sequence[Any], barrier: Shared, memory: Shared) -> None:
        # The box may reach out of the array: zeros.
        box = memory.shape
        starts = [int(i) for i in coordinates]
        found = np.zeros(box, memory.array.dtype)
        inside = [
            slice(max(start, 0), max(0, min(start + size, whole)))
            for start, size, whole in zip(starts, box, source.array.shape, strict=True)
        ]
        part = source.array[tuple(inside)]
        if part.size:
            places = zip(inside, starts, part.shape, strict=True)
            at = tuple(slice(i.start - start, i.start - start + size) for i, start, size in places)
            found[at] = part
        self._machine.copy(found, memory, barrier)


def _as_boxes(tile: Shared, rows: int) -> Shared:
    # Where which row lies is the layout's: here the rows of a tile are one after the other.
    parts = tile.shape[1] // 64
    return Shared(tile.array.reshape(-1, rows // 8, 8, parts, 64).transpose(0, 1, 3, 2, 4))


def _nothing(*_: Any, **__: Any) -> None:
    return None
