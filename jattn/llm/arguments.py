"""The commands' options for loading, devices and processes, and their conversion to keywords of model and engine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = [
    "add_device_arguments",
    "add_implementation",
    "add_loading_arguments",
    "device_settings",
    "join_processes",
    "loading_options",
    "tell_processes",
]


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `loading_options` reads."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights and computation")
    add_implementation(parser)
    parser.add_argument(
        "--quantization",
        choices=("keep", "fp8"),
        help="keep FP8 and MXFP4 weights as they are stored, or have linear layers multiply in FP8",
    )
    parser.add_argument(
        "--hf-overrides", metavar="JSON", help='in the place of config.json\'s values: {"some_key": null}'
    )


def add_implementation(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names who computes attention."""
    parser.add_argument(
        "--implementation", choices=("triton", "torch", "xla"), help="of the attention ops (default: the fastest here)"
    )


def loading_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of loading as keywords of `LLM`.

    Raises:
        InvalidInput: overrides that are no JSON object.
    """
    options = {name: getattr(arguments, name) for name in ("dtype", "implementation", "quantization")}
    if arguments.hf_overrides is None:
        return options
    # Here, so that a command's help does not wait for jax.
    from jattn.llm.load.folder import read_json

    return options | {"hf_overrides": read_json(arguments.hf_overrides, "--hf-overrides")}


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `device_settings` reads."""
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that the model is cut over (1)")
    parser.add_argument(
        "--decode-context-parallel-size",
        type=int,
        default=1,
        help="of these, neighbours that deal out each sequence's tokens where they would have copies of them (1)",
    )
    parser.add_argument("--data-parallel-size", type=int, default=1, help="copies of the model (1)")
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of process 0, where several processes hold one model; 'auto' for what JAX detects (SLURM, Kubernetes)",
    )
    parser.add_argument("--num-processes", type=int, help="that run this same command")
    parser.add_argument("--process-id", type=int, help="of this one, from 0, which takes the requests")


def join_processes(arguments: argparse.Namespace) -> None:
    """Makes this process one of several if it was told so; to be called before anything asks for a device."""
    found = {"coordinator": arguments.coordinator}
    found |= {"num_processes": arguments.num_processes, "process_id": arguments.process_id}
    if all(value is None for value in found.values()):
        return
    # Here, so that a command's help does not wait for jax.
    from jattn.llm.processes import check_agreement, join

    join(**({} if arguments.coordinator == "auto" else found))
    # A process with a model of its own would not even ask.
    check_agreement(device_settings(arguments))


def tell_processes(error: Exception) -> None:
    """Tells the others, if there are any, that this process ends with an error."""
    if "jattn.llm.processes" in sys.modules:
        from jattn.llm.processes import tell_failure

        tell_failure(str(error) or type(error).__name__)


def device_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `EngineConfig` that they mean."""
    sizes = ("tensor_parallel_size", "decode_context_parallel_size", "data_parallel_size")
    return {name: getattr(arguments, name) for name in sizes}
