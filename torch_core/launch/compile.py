"""From a LaunchPlan to a compiled Triton or Gluon kernel, the same one for torch and for XLA."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from torch_core.base.errors import Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import TRITON_DTYPES, Absent, Descriptor, DeviceLimits, LaunchPlan, Pointer, Scalar

# Python's parser fails in two threads at once (3.11.7), and this part of a compilation holds its lock anyway.
_PARSING = threading.RLock()


class _Parsed:
    """A source that is parsed by one thread at a time."""

    def hash(self) -> str:
        with _PARSING:
            return super().hash()  # type: ignore[misc]

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        with _PARSING:
            return super().make_ir(*args, **kwargs)  # type: ignore[misc]


class _TritonSource(_Parsed, ASTSource):
    pass


class _GluonSource(_Parsed, GluonASTSource):
    pass


@dataclass(frozen=True)
class KernelVariant:
    """The compiler's inputs for a launch: many launches, of many shapes, share one variant.

    Attributes:
        kernel: the `@triton.jit` or `@gluon.jit` function.
        signature: (parameter name, Triton type) in kernel order.
        constants: (parameter index, value) of the parameters that are known when compiling.
        divisible: indices of the pointers and integers that are multiples of 16.
        num_warps: as in LaunchPlan.
        num_stages: as in LaunchPlan.
        maxnreg: as in LaunchPlan.
        dependent: as in LaunchPlan.
    """

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    divisible: tuple[int, ...]
    num_warps: int
    num_stages: int
    maxnreg: int | None
    dependent: bool = False
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        key = (self.kernel.__name__, self.signature, str(self.constants), self.divisible, self.num_warps)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.__name__

    @property
    def is_gluon(self) -> bool:
        """The kernel is written in Gluon."""
        return bool(self.kernel.is_gluon())

    def key(self) -> str:
        """A digest of all that the compiled code depends on, except for Triton's version and the device.

        It is the same in every process and folder. Lines before the kernel in its file count too: Triton's own hash
        covers where a kernel begins.
        """
        # source().hash() covers the text of the kernel and of everything it calls, types and constants.
        parts = (self.source().hash(), _tuple_fields(self.kernel), sorted(self.options().items()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def source(self) -> ASTSource:
        """The compiler's view of the variant; its `hash()` covers the kernel's source and everything it calls."""
        with _PARSING:
            _hash_callees_first(self.kernel)
        source_class = _GluonSource if self.is_gluon else _TritonSource
        return source_class(
            fn=self.kernel,
            signature=dict(self.signature),
            constexprs={(index,): value for index, value in self.constants},
            attrs={(index,): [["tt.divisibility", 16]] for index in self.divisible},
        )

    def options(self) -> dict[str, Any]:
        """The compiler's options."""
        # Triton 3.9 fuses products and sums only on request; earlier versions always did.
        options: dict[str, Any] = {"num_warps": self.num_warps, "enable_fp_fusion": True}
        if not self.is_gluon:
            options["num_stages"] = self.num_stages
        if self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        if self.dependent:
            options["launch_pdl"] = True
        return options


def kernel_variant(launch: LaunchPlan, specs: Mapping[str, ArraySpec]) -> KernelVariant:
    """Returns the variant that a launch needs.

    Args:
        launch: the launch.
        specs: the operation's buffers by name.
    """
    arguments = dict(launch.arguments)
    constexprs = dict(launch.constexprs)
    signature: list[tuple[str, str]] = []
    constants: list[tuple[int, Any]] = []
    divisible: list[int] = []
    for index, name in enumerate(launch.kernel.arg_names):
        argument = arguments.get(name)
        if argument is None or isinstance(argument, Absent):
            signature.append((name, "constexpr"))
            constants.append((index, constexprs.get(name)))
        elif isinstance(argument, Pointer):
            spec = specs[argument.buffer]
            signature.append((name, "*" + TRITON_DTYPES[spec.dtype]))
            if spec.aligned:
                divisible.append(index)
        elif isinstance(argument, Descriptor):
            signature.append((name, _descriptor_type(argument, specs[argument.buffer])))
        else:
            _add_scalar(name, index, argument, signature, constants, divisible)
    return KernelVariant(
        kernel=launch.kernel,
        signature=tuple(signature),
        constants=tuple(constants),
        divisible=tuple(divisible),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.maxnreg,
        dependent=launch.dependent,
    )


def compile_variant(variant: KernelVariant, arch: int) -> Any:
    """Compiles a variant for CUDA compute capability `arch` (90 for Hopper); needs no GPU.

    Returns:
        Triton's CompiledKernel: `asm["ptx"]`, `asm["cubin"]`, `metadata`. Triton keeps it in its own disk cache too.
    """
    return triton.compile(variant.source(), target=GPUTarget("cuda", arch, 32), options=variant.options())


def check_fits(name: str, shared_memory: int, limits: DeviceLimits) -> None:
    """Refuses a kernel that needs more shared memory than a thread block of the device can have.

    Raises:
        Unsupported: it does not fit.
    """
    if shared_memory > limits.shared_memory:
        device = f"this device (compute capability {limits.arch / 10}) gives a block {limits.shared_memory}"
        fix = "use implementation='xla', a smaller head_size, or a Hopper device"
        raise Unsupported(f"kernel {name}", f"needs {shared_memory} bytes of shared memory and {device}", fix)


def _hash_callees_first(function: Any) -> None:
    """Makes Triton hash the callees of a function before the function.

    Triton 3.6 (runtime/jit.py, DependenciesFinder._update_hash) takes over the constants of a callee that was hashed
    before, and forgets those of one that it hashes on the way: which hash a kernel has would depend on who came first.
    """
    if getattr(function, "hash", "") is not None:
        return
    for name in function.fn.__code__.co_names:
        callee = function.fn.__globals__.get(name)
        if callee is not function and hasattr(type(callee), "cache_key"):
            _hash_callees_first(callee)
    # Hashed by being asked for it.
    _ = function.cache_key


def _tuple_fields(kernel: Any) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the fields of the named tuples that a hashed kernel and its callees build: the hash omits them."""
    found = {value for value, _ in kernel.used_global_vals.values() if isinstance(value, type)}
    return sorted((f"{made.__module__}.{made.__qualname__}", getattr(made, "_fields", ())) for made in found)


def _descriptor_type(descriptor: Descriptor, spec: ArraySpec) -> str:
    box = ", ".join(str(size) for size in descriptor.box)
    layout = "" if descriptor.layout is None else f",{descriptor.layout!r}"
    return f"tensordesc<{TRITON_DTYPES[spec.dtype]}[{box}]{layout}>"


def _add_scalar(
    name: str,
    index: int,
    scalar: Scalar,
    signature: list[tuple[str, str]],
    constants: list[tuple[int, Any]],
    divisible: list[int],
) -> None:
    is_integer = scalar.type != "fp32"
    if is_integer and scalar.specialize and scalar.value == 1:
        signature.append((name, "constexpr"))
        constants.append((index, 1))
        return
    signature.append((name, scalar.type))
    if is_integer and scalar.specialize and scalar.value % 16 == 0:
        divisible.append(index)
