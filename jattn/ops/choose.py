"""Which implementation of an op runs: the caller's word, or a written rule."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import jax
import jax.numpy as jnp

from jattn.bridge import native, torch_runtime
from jattn.bridge.calls import Runtime
from jattn.bridge.platforms import refused_on
from jattn.ops import xla
from torch_core.attention.call import PagedCall
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec, AttentionSpec, KVCacheSpec, LatentCacheSpec
from torch_core.latent.call import LatentCall
from torch_core.launch.call import Call
from torch_core.launch.serves import IMPLEMENTATIONS, unserved

_LOG = logging.getLogger(__name__)


def choose(implementation: str | None, call: Call[Any] | None = None) -> str:
    """Returns the implementation to use; an explicit request is honoured or refused, never replaced.

    None means the default of the platform: "triton" if the default backend is CUDA, `_CPU_DEFAULT` on a CPU, "xla"
    anywhere else. A call that the default does not serve, by the table `torch_core.serves.SERVES`, goes to "xla" if
    that serves it. A call that only the current device cannot run (e4m3 on old ones, shared memory) is refused with the
    fix.

    Args:
        implementation: the caller's name, or None.
        call: a checked call of arrays or specs; None for the default itself, for any call.

    Raises:
        InvalidInput: an unknown name.
        Unsupported: a known one that cannot run here, with the reason.
    """
    if implementation is None:
        default = {"gpu": "triton", "cpu": _CPU_DEFAULT}.get(jax.default_backend(), "xla")
        if call is None or default == "xla":
            return default
        reason = unserved(call, default)
        if reason is None or unserved(call, "xla") is not None:
            return default
        # Every step of a generation would be slow, without a visible reason.
        _say_once(logging.WARNING if call.reads_cache else logging.INFO, call.name, default, reason)
        return "xla"
    check_implementation("implementation", implementation)
    reason = available_implementations()[implementation]
    if reason is not None:
        raise Unsupported(f"implementation={implementation!r} cannot run here: {reason}")
    return implementation


def check_implementation(name: str, value: object) -> None:
    """Raises InvalidInput unless a value is the name of an implementation."""
    if not isinstance(value, str) or value not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise InvalidInput(name, value=value, wanted=f"use one of {known}, or None to let jattn choose")


def choose_for_cache(implementation: str | None, spec: KVCacheSpec | LatentCacheSpec, dtype: str) -> str:
    """Returns the implementation of attention by queries of `dtype` to a cache of this layout; raises as `choose`."""
    cache = ArraySpec(spec.shape(1), spec.dtype)
    one = {name: ArraySpec(shape, "int32") for name, shape in _ONE_SEQUENCE.items()}
    options = {**one, "spec": AttentionSpec(scale=1.0), "max_query_len": 1}
    if isinstance(spec, LatentCacheSpec):
        query = ArraySpec((1, 1, spec.kv_lora_rank + spec.rope_dim), dtype)
        return choose(
            implementation, LatentCall(query=query, latent_cache=cache, kv_lora_rank=spec.kv_lora_rank, **options)
        )
    query = ArraySpec((1, spec.num_kv_heads, spec.head_size), dtype)
    return choose(implementation, PagedCall(query=query, kv_cache=cache, **options))


_ONE_SEQUENCE = {"block_tables": (1, 1), "seq_lens": (1,), "query_start_loc": (2,)}


def launches_kernels(implementation: str | None) -> bool:
    """Returns whether an op becomes a kernel launch on arrays that are whole on a device.

    They are in a shard_map, under a mesh of one device, and where the process sees one device. There a call that takes
    several steps at once saves launches; XLA joins jnp's steps by itself, those of a call that the kernels do not serve
    too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_whole = not mesh.empty and (mesh.size == 1 or set(mesh.manual_axes) == set(mesh.axis_names))
    return (is_whole or jax.device_count() == 1) and choose(implementation) == "triton"


def for_this_platform(call: Call[jax.Array]) -> Call[jax.Array]:
    """Returns the call as one whose implementation the rule chose: lowering it for CUDA is refused.

    jax.export and `lower(lowering_platforms=...)` would keep the choice that was made for this machine's CPU.
    """
    if jax.default_backend() != "cpu":
        return call
    name, array = next(iter(call.arrays().items()))
    return call.with_arrays({name: _chosen_here(jnp.asarray(array))})


def runtime_of(implementation: str) -> tuple[Runtime, str]:
    """Returns the runtime of an implementation, and the column of `torch_core.serves.SERVES` with its features.

    On CUDA torch launches the same kernels as "triton".
    """
    if implementation != "torch":
        return {"triton": native.run_native, "xla": xla.run}[implementation], implementation
    return torch_runtime.run_torch, "triton" if jax.default_backend() == "gpu" else "torch"


# The jnp ops were the faster of the two in every row of `jattn bench generate` (README, "Measured"): for a small model
# a crossing costs more than the attention itself. The torch callback is how the torch core runs on a CPU.
_CPU_DEFAULT = "xla"


_chosen_here = refused_on(
    "cuda",
    "implementation_chosen_here",
    lambda: Unsupported(
        "implementation=None chose 'xla' because JAX runs on a CPU here, and the program is lowered for CUDA. Name the "
        "implementation: 'xla', or 'triton' where JAX sees the CUDA device that its kernels are compiled for."
    ),
)


@functools.cache
def _say_once(level: int, name: str, default: str, reason: str) -> None:
    _LOG.log(
        level,
        "%s: %s, which implementation %r does not serve; 'xla' computes it, slower than the kernels would. Name "
        "implementation='xla' where that is meant.",
        name,
        reason,
        default,
    )


def available_implementations() -> dict[str, str | None]:
    """Returns every implementation with None if it can run here, else the reason why not."""
    return dict(_availability(jax.default_backend()))


@functools.cache
def _availability(backend: str) -> tuple[tuple[str, str | None], ...]:
    triton = None
    if backend != "gpu":
        triton = f"it needs CUDA and JAX runs on {backend!r}; use implementation='torch' or 'xla'."
    else:
        triton = native.why_not()
    torch = None
    if importlib.util.find_spec("torch") is None:
        torch = "torch is not installed; pip install 'jattn[torch]', or use implementation='xla'."
    elif backend == "gpu":
        import torch as torch_module

        if not torch_module.cuda.is_available():
            torch = "JAX runs on CUDA but torch was built without it; use implementation='triton' or 'xla'."
    elif backend != "cpu":
        torch = f"torch shares no memory with JAX's backend {backend!r}; use implementation='xla'."
    return (("triton", triton), ("torch", torch), ("xla", None))
