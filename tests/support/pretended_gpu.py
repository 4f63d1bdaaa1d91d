"""A machine that seems to have a CUDA device: what goes to its kernels is planned for them, and computed by jnp."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jattn.bridge import native
from jattn.bridge.calls import array_spec
from jattn.ops import xla
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.planner import plan_call

__all__ = ["ON_CUDA", "pretended_gpu"]

#: What a refusal of "torch" ends with where JAX sees a CUDA device.
ON_CUDA = " On CUDA 'torch' launches the kernels of 'triton'."


@contextlib.contextmanager
def pretended_gpu() -> Iterator[list[Call[ArraySpec]]]:
    """Yields the calls that went to the kernels since; a call that they do not serve raises."""
    launched: list[Call[ArraySpec]] = []

    def run_native(call: Call[jax.Array]) -> dict[str, jax.Array]:
        launched.append(call.map(array_spec))
        plan_call(launched[-1])
        return xla.run(call)

    # An import would bind the function of that name.
    choose_module: Any = sys.modules["jattn.ops.choose"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        patch.setattr(native, "run_native", run_native)
        patch.setattr(native, "why_not", lambda: None)
        choose_module._availability.cache_clear()
        choose_module._say_once.cache_clear()
        yield launched
    choose_module._availability.cache_clear()
