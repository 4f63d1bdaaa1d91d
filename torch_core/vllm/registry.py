"""The backends in order of preference, the choice among them, and subclasses of them made on the fly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.vllm.backend import AttentionBackend
from torch_core.vllm.backends import (
    TorchAttentionBackend,
    TorchMLABackend,
    TritonAttentionBackend,
    TritonMLABackend,
)
from torch_core.vllm.builder import AttentionMetadataBuilder
from torch_core.vllm.config import AttentionSelectorConfig
from torch_core.vllm.types import DeviceInfo

__all__ = [
    "BACKENDS",
    "get_backend",
    "select_backend",
    "subclass_attention_backend",
    "subclass_attention_backend_with_overrides",
]

#: The backends of this project, the preferred one first. Pass a longer tuple to `select_backend` to add your own.
BACKENDS: tuple[type[AttentionBackend], ...] = (
    TritonAttentionBackend,
    TorchAttentionBackend,
    TritonMLABackend,
    TorchMLABackend,
)


def get_backend(name: str, *, backends: Sequence[type[AttentionBackend]] = BACKENDS) -> type[AttentionBackend]:
    """Returns the backend of a name.

    Raises:
        InvalidInput: there is none.

    Example:
        >>> get_backend("TORCH_ATTN").__name__
        'TorchAttentionBackend'
    """
    for backend in backends:
        if backend.get_name() == name:
            return backend
    known = ", ".join(backend.get_name() for backend in backends)
    raise InvalidInput(f"There is no attention backend {name!r}; there are {known}.")


def select_backend(
    config: AttentionSelectorConfig,
    device: DeviceInfo | torch.device | str,
    *,
    backends: Sequence[type[AttentionBackend]] = BACKENDS,
) -> type[AttentionBackend]:
    """Returns the first backend that serves a layer on a device.

    Args:
        config: the layer's requirements.
        device: a device of this machine, or the facts of one.
        backends: the candidates, the preferred one first.

    Raises:
        Unsupported: none serves it; the message lists every backend with all of its reasons.

    Example:
        >>> config = AttentionSelectorConfig(num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float32)
        >>> select_backend(config, "cpu").get_name()
        'TORCH_ATTN'
    """
    if not isinstance(device, DeviceInfo):
        device = DeviceInfo.of(device)
    refusals, demands = [], asdict(config)
    for name in ("num_heads", "num_kv_heads"):
        del demands[name]
    for backend in backends:
        reasons = backend.validate_configuration(**demands, device_capability=device.capability)
        if not reasons:
            return backend
        refusals.append(f"{backend.get_name()}: {'; '.join(reasons)}.")
    raise Unsupported("No attention backend serves this layer. " + " ".join(refusals))


def subclass_attention_backend(
    name_prefix: str, attention_backend_cls: type[AttentionBackend], builder_cls: type[AttentionMetadataBuilder]
) -> type[AttentionBackend]:
    """Returns a subclass of a backend, named with a prefix, that builds its metadata with another class.

    Example:
        >>> builder = TorchAttentionBackend.get_builder_cls()
        >>> subclass_attention_backend("My", TorchAttentionBackend, builder).__name__
        'MyTorchAttentionBackend'
    """
    return subclass_attention_backend_with_overrides(
        name_prefix, attention_backend_cls, {"get_builder_cls": staticmethod(lambda: builder_cls)}
    )


def subclass_attention_backend_with_overrides(
    name_prefix: str, attention_backend_cls: type[AttentionBackend], overrides: dict[str, Any]
) -> type[AttentionBackend]:
    """Returns a subclass of a backend, named with a prefix, whose attributes `overrides` replaces."""
    return type(name_prefix + attention_backend_cls.__name__, (attention_backend_cls,), overrides)
