"""LaunchPlan and OperationPlan: how to run kernels, said once for both runtimes, from shapes and dtypes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec

#: Triton's name of each element type that a kernel argument can point to.
TRITON_DTYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int64": "i64",
    "int32": "i32",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}
_SCALAR_TYPES = ("i32", "i64", "fp32")
_MAX_GRID = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The device limits that a plan may depend on.

    Attributes:
        arch: compute capability as one number, 90 for Hopper.
        num_sms: streaming multiprocessors.
        shared_memory: bytes of shared memory that one thread block may ask for.
    """

    arch: int = 90
    num_sms: int = 132
    shared_memory: int = 232448


@dataclass(frozen=True, slots=True)
class Pointer:
    """A kernel argument that points to the start of a named buffer; aligned as the buffer's spec says.

    Attributes:
        buffer: the name in the operation.
    """

    buffer: str


@dataclass(frozen=True, slots=True)
class Absent:
    """An optional pointer that is not there: the kernel sees the constexpr None."""


ABSENT = Absent()


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number passed by value.

    Attributes:
        value: the number.
        type: "i32", "i64" or "fp32".
        specialize: compile for the known properties of an integer (equal to 1, divisible by 16), as Triton's own
            launcher does. Right for strides; turn it off for counts that change from step to step.
    """

    value: int | float
    type: str
    specialize: bool = True

    def __post_init__(self) -> None:
        if self.type not in _SCALAR_TYPES:
            raise InvalidInput("type", value=self.type, wanted=f"it must be one of {', '.join(_SCALAR_TYPES)}")
        if self.type == "fp32":
            return
        bits = 31 if self.type == "i32" else 63
        if not -(2**bits) <= self.value < 2**bits:
            wanted = f"it does not fit {self.type}: use i64 or a smaller array"
            raise InvalidInput("value", value=self.value, wanted=wanted)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A host-made TMA descriptor over a named buffer, seen by a kernel as a tensor descriptor.

    Attributes:
        buffer: the name in the operation.
        shape: sizes of the view, slowest axis first.
        strides: strides of the view in elements; the last one is 1.
        box: elements that one copy moves, per axis.
        layout: the shared-memory layout object of Gluon (hashable, its repr names it), for example
            `gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)`; None for a Triton kernel, whose
            compiler chooses.
    """

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: Any = None

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.strides) == len(self.box):
            raise InvalidInput("shape", "differs in length from strides or box").under(f"descriptor of {self.buffer}")
        if self.strides[-1] != 1:
            raise InvalidInput("strides[-1]", value=self.strides[-1], wanted="TMA needs 1").under(
                f"descriptor of {self.buffer}"
            )


Argument: TypeAlias = Pointer | Absent | Scalar | Descriptor


@dataclass(frozen=True)
class LaunchPlan:
    """One kernel launch.

    Kernel arguments are given by name in the kernel's own order, constexprs apart. Arguments that point to buffers
    which this launch is the first to write (outputs, scratch) come after all the other buffer arguments: XLA passes a
    custom call its operands first and its results after them.

    Attributes:
        kernel: the `@triton.jit` or `@gluon.jit` function.
        grid: one to three grid sizes, all at least 1.
        arguments: (parameter name, argument) in the order of the kernel's parameters.
        constexprs: (parameter name, value) of the compile-time parameters.
        writes: names of the buffers that the kernel writes.
        num_warps: warps of one program (of the default partition for a warp-specialised Gluon kernel).
        num_stages: depth of Triton's software pipeline.
        maxnreg: limit on registers per thread; None for none.
        dependent: the kernel waits for the launch in front of it by itself, see `torch_core.device.dependent`: torch
            lets it begin before that one has ended; XLA's launcher cannot.
        room: bytes of shared memory that a program takes without use, so that few of them share a multiprocessor where
            others are free; torch only, and 48 KB at most.
        hot: a register spill in this variant is an error (tests/plan).
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[tuple[str, Argument], ...]
    constexprs: tuple[tuple[str, Any], ...] = ()
    writes: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    dependent: bool = False
    room: int = 0
    hot: bool = False
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.arguments] + [name for name, _ in self.constexprs]
        expected = list(self.kernel.arg_names)
        if sorted(names) != sorted(expected):
            more, less = (sorted(set(a) - set(b)) for a, b in ((names, expected), (expected, names)))
            fix = "name every kernel parameter once"
            raise InvalidInput("arguments", f"gives {more} too much and {less} too little", fix).under(self.name)
        order = [name for name in expected if name in dict(self.arguments)]
        if [name for name, _ in self.arguments] != order:
            raise InvalidInput("arguments", "are out of order", f"the kernel's order is {order}").under(self.name)
        for axis, (size, limit) in enumerate(zip(self.grid, _MAX_GRID, strict=False)):
            if not 1 <= size <= limit:
                raise InvalidInput("grid", f"axis {axis} is {size}", f"it must be from 1 to {limit}").under(self.name)
        missing = set(self.writes) - set(self.buffers)
        if missing:
            raise InvalidInput("writes", f"{sorted(missing)}, but no argument points there").under(self.name)
        object.__setattr__(
            self,
            "_hash",
            hash((self.name, self.grid, self.arguments, self.constexprs, self.num_warps, self.num_stages)),
        )

    def __hash__(self) -> int:
        return self._hash

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.__name__

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffer of each pointer and descriptor argument, in kernel order; a name may repeat if only read."""
        return tuple(value.buffer for _, value in self.arguments if isinstance(value, (Pointer, Descriptor)))


@dataclass(frozen=True)
class OperationPlan:
    """Launches that belong together, over one set of named buffers.

    Attributes:
        name: the operation's name in errors and profiles.
        inputs: (name, spec) of the arrays that the caller gives, in-place ones included.
        in_place: names among the inputs that the operation writes. The caller owns them and sees the change.
        outputs: (name, spec) of the results, in the order in which they are returned. Contiguous.
        scratch: (name, spec) of memory that lives only during the operation. Contiguous.
        launches: in order; each sees the results of the earlier ones.
    """

    name: str
    inputs: tuple[tuple[str, ArraySpec], ...]
    launches: tuple[LaunchPlan, ...]
    outputs: tuple[tuple[str, ArraySpec], ...] = ()
    in_place: tuple[str, ...] = ()
    scratch: tuple[tuple[str, ArraySpec], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    @classmethod
    def of(
        cls,
        name: str,
        inputs: Mapping[str, ArraySpec],
        launches: tuple[LaunchPlan, ...],
        outputs: Mapping[str, ArraySpec],
        scratch: Mapping[str, ArraySpec] | None = None,
    ) -> OperationPlan:
        """Returns the plan whose buffers are given by name; nothing is written in place."""
        return cls(name, tuple(inputs.items()), launches, tuple(outputs.items()), (), tuple((scratch or {}).items()))

    def __post_init__(self) -> None:
        specs = self.specs
        if len(specs) != len(self.inputs) + len(self.outputs) + len(self.scratch):
            raise InvalidInput("inputs", "share a name with other buffers", "each needs its own").under(self.name)
        given = dict(self.inputs)
        if unknown := sorted(set(self.in_place) - set(given)):
            raise InvalidInput("in_place", f"names {unknown}, not an input").under(self.name)
        written: set[str] = set()
        for launch in self.launches:
            self._check_launch(launch, specs, set(given) | written)
            written |= set(launch.writes)
        unwritten = [name for name, _ in self.outputs if name not in written]
        if unwritten:
            raise InvalidInput("outputs", f"has {unwritten}, which no launch writes").under(self.name)
        object.__setattr__(self, "_hash", hash((self.name, self.inputs, self.outputs, self.scratch, self.launches)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def specs(self) -> dict[str, ArraySpec]:
        """Every buffer's spec by name."""
        return dict(self.inputs + self.outputs + self.scratch)

    def _check_launch(self, launch: LaunchPlan, specs: dict[str, ArraySpec], existing: set[str]) -> None:
        def refused(problem: str, wanted: str | None = None) -> InvalidInput:
            return InvalidInput(launch.name, problem, wanted).under(self.name)

        fresh_seen = ""
        for buffer in launch.buffers:
            if buffer not in specs:
                raise refused(f"points to {buffer!r}, which is no buffer of the plan")
            if buffer not in existing:
                if buffer not in launch.writes:
                    raise refused(f"reads {buffer!r} before any launch wrote it")
                fresh_seen = buffer
            elif fresh_seen:
                wanted = "pointers to new buffers must come last in the kernel's parameters"
                raise refused(f"takes {buffer!r} after {fresh_seen!r}, which it is the first to write", wanted)
        for buffer in launch.writes:
            if buffer in dict(self.inputs) and buffer not in self.in_place:
                raise refused(f"writes the input {buffer!r}", "name it in in_place")
            if launch.buffers.count(buffer) != 1:
                raise refused(f"takes {buffer!r} twice and writes it", "once is allowed")
