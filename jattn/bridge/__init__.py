"""The only place where JAX arrays and torch tensors meet: DLPack views, the callback and the native custom call.

Names that need torch load on first use: a program of kernels or of jnp runs without torch, and starts seconds earlier.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jattn.bridge.calls import run
from jattn.bridge.errors import original_error, typed_errors
from jattn.bridge.partition import may_be_split, partitioned

if TYPE_CHECKING:
    from jattn.bridge.callback import call_torch
    from jattn.bridge.dlpack import to_jax, to_torch

__all__ = ["call_torch", "may_be_split", "original_error", "partitioned", "run", "to_jax", "to_torch", "typed_errors"]

_HOME_OF = {"call_torch": "callback", "to_jax": "dlpack", "to_torch": "dlpack"}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jattn.bridge' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jattn.bridge.{_HOME_OF[name]}"), name)
