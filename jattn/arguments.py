"""What commands are told about devices, as arguments and as settings of an engine."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_device_arguments", "device_settings"]


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `device_settings` reads."""
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that the model is cut over (1)")
    parser.add_argument("--data-parallel-size", type=int, default=1, help="copies of the model (1)")


def device_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `EngineConfig` that they mean."""
    return {name: getattr(arguments, name) for name in ("tensor_parallel_size", "data_parallel_size")}
