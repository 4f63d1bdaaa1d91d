"""Layers, caches and batches for the backend tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from torch_core.vllm import AttentionBackend, AttentionSelectorConfig, DeviceInfo


@pytest.fixture
def make_config() -> Callable[..., AttentionSelectorConfig]:
    """Makes the demands of an ordinary layer, with changes."""

    def make(**changes: Any) -> AttentionSelectorConfig:
        ordinary = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16, "block_size": 16}
        return AttentionSelectorConfig(**{**ordinary, **changes})

    return make


@pytest.fixture
def refusals() -> Callable[..., list[str]]:
    """Asks a backend why it does not serve a layer on a device."""

    def ask(backend: type[AttentionBackend], config: AttentionSelectorConfig, device: DeviceInfo) -> list[str]:
        demands = {name: value for name, value in asdict(config).items() if name not in ("num_heads", "num_kv_heads")}
        return backend.validate_configuration(**demands, device_capability=device.capability)

    return ask


@pytest.fixture
def within_bound() -> Callable[..., None]:
    """Checks error <= 2 x (error of a same-dtype reference + eps x max|exact|) against an exact result."""

    def check(found: torch.Tensor, same_dtype: torch.Tensor, exact: torch.Tensor) -> None:
        exact = exact.double()
        reference_error = (same_dtype.double() - exact).abs().max().item()
        bound = 2 * (reference_error + torch.finfo(same_dtype.dtype).eps * exact.abs().max().item())
        error = (found.double() - exact).abs().max().item()
        assert error <= bound, f"error {error} is beyond {bound}"

    return check


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
