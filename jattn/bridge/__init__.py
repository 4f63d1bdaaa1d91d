"""The only place where JAX arrays and torch tensors meet: DLPack views, the callback and the native custom call."""

from jattn.bridge.callback import call_torch, original_error, typed_errors
from jattn.bridge.calls import run
from jattn.bridge.dlpack import to_jax, to_torch
from jattn.bridge.partition import partitioned

__all__ = ["call_torch", "original_error", "partitioned", "run", "to_jax", "to_torch", "typed_errors"]
