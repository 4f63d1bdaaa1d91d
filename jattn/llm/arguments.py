"""The commands' options for loading, devices and processes, and their conversion to keywords of model and engine."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput

if TYPE_CHECKING:
    from jattn.llm.engine.options.config import EngineConfig

#: Fields of `EngineConfig` without a form in text, or without an effect in a command.
_NO_FLAGS = {"mesh", "logits_processors", "logical_axis_rules", "non_finite_weights"}
_METAVARS = {"speculative_config": "JSON", "kv_cache_scales": "FILE"}
# Before the name of a field in the namespace of all arguments.
_DEST = "engine."


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `loading_options` reads."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of weights and computation")
    parser.add_argument(
        "--implementation",
        choices=("triton", "torch", "xla"),
        help="implementation of attention (default: the fastest; crosscheck: all)",
    )
    parser.add_argument(
        "--quantization",
        choices=("keep", "fp8"),
        help="keep: weights of FP8 and of 4 bits stay as stored; fp8: linear layers multiply in FP8",
    )
    parser.add_argument(
        "--hf-overrides", metavar="JSON", help='values that replace those of config.json: {"some_key": null}'
    )


def loading_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of loading as keywords of `LLM`.

    Raises:
        InvalidInput: the overrides are not a JSON object.
    """
    options = {name: getattr(arguments, name) for name in ("dtype", "implementation", "quantization")}
    if arguments.hf_overrides is None:
        return options
    # Imported here, so that a command's help does not wait for jax.
    from jattn.llm.load.folder import read_json

    return options | {"hf_overrides": read_json(arguments.hf_overrides, "--hf-overrides")}


def add_engine_arguments(
    parser: argparse.ArgumentParser, *, without: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> None:
    """Adds a flag for each field of `EngineConfig`, such as --max-num-seqs, and --engine-config; see `engine_config`.

    Args:
        parser: parser of a command.
        without: fields without a flag, because the command has another argument of that name.
        defaults: the command's own defaults, for its help.
    """
    from jattn.llm.engine.options.config import EngineConfig

    group = parser.add_argument_group("engine", "fields of jattn.EngineConfig")
    group.add_argument(
        "--engine-config", metavar="JSON", help='several fields at once, for example {"scrub_on_free": true}'
    )
    hints, texts = get_type_hints(EngineConfig), _attribute_texts(EngineConfig)
    for field in fields(EngineConfig):
        if field.name in _NO_FLAGS or field.name in without:
            continue
        kinds = set(get_args(hints[field.name])) or {hints[field.name]}
        default = (defaults or {}).get(field.name, field.default)
        options: dict[str, Any] = {"dest": _DEST + field.name, "default": argparse.SUPPRESS}
        options["help"] = texts[field.name] + ("" if default is None else f" ({default})")
        if bool in kinds:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = next((kind for kind in (int, float) if kind in kinds), str)
            if any(get_origin(kind) is tuple for kind in kinds):
                options["nargs"] = "+"
            options["metavar"] = _METAVARS.get(field.name, options["type"].__name__.upper())
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def engine_config(arguments: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """Returns the config from the flags and from --engine-config.

    Args:
        arguments: the parsed arguments, including those of `add_engine_arguments`.
        defaults: values of fields that are given in neither way.

    Raises:
        InvalidInput: a value out of range; a field that is unknown or given twice; bad JSON.
    """
    from jattn.llm.engine.options.config import EngineConfig

    given = _given(arguments)
    text = arguments.engine_config
    more = {} if text is None else engine_fields(text, "--engine-config")
    for name in more:
        if name in given:
            raise InvalidInput(f"--engine-config has {name!r}, which is given as --{name.replace('_', '-')}, too.")
    return EngineConfig(**{**defaults, **more, **given})


def engine_fields(text: str, flag: str) -> dict[str, Any]:
    """Returns fields of `EngineConfig` from a JSON object; errors name the text by `flag`.

    Raises:
        InvalidInput: bad JSON; a field that is unknown or has no form in text.
    """
    from jattn.llm.engine.options.config import EngineConfig
    from jattn.llm.load.folder import read_json

    found, known = read_json(text, flag), EngineConfig.__dataclass_fields__.keys() - _NO_FLAGS
    for name in found:
        if name not in known:
            raise InvalidInput(f"{flag} has {shown(name)}; it may have {', '.join(sorted(known))}.")
    return found


def add_cache_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that turns the cache of compiled programs off."""
    parser.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="do not keep compiled programs for the next run (`jattn doctor` says where they are)",
    )


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `join_processes` reads."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0, if several processes hold one model; 'auto': JAX detects it (SLURM, Kubernetes)",
    )
    parser.add_argument("--num-processes", type=int, help="number of processes that run this same command")
    parser.add_argument("--process-id", type=int, help="index of this process; process 0 takes the requests")


def join_processes(arguments: argparse.Namespace) -> None:
    """Joins other processes if the arguments ask for it; call it before any use of a device."""
    found = {"coordinator": arguments.coordinator}
    found |= {"num_processes": arguments.num_processes, "process_id": arguments.process_id}
    if all(value is None for value in found.values()):
        return
    # Imported here, so that a command's help does not wait for jax.
    from jattn.llm.processes import check_agreement, join

    join(**({} if arguments.coordinator == "auto" else found))
    # A process with its own model would not ask the others.
    given = _given(arguments)
    sizes = ("tensor_parallel_size", "decode_context_parallel_size", "data_parallel_size")
    check_agreement({name: given.get(name, 1) for name in sizes})


def tell_processes(error: Exception) -> None:
    """Tells the other processes, if there are any, that this process ends with an error."""
    if "jattn.llm.processes" in sys.modules:
        from jattn.llm.processes import tell_failure

        tell_failure(str(error) or type(error).__name__)


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `EngineConfig` that have been given as flags."""
    from jattn.llm.engine.options.speculation import SpeculativeConfig
    from jattn.llm.load.kv_scales import KVCacheScales

    read = {"speculative_config": SpeculativeConfig.from_json, "kv_cache_scales": KVCacheScales.load}
    given = {name.removeprefix(_DEST): value for name, value in vars(arguments).items() if name.startswith(_DEST)}
    return {name: read[name](value) if name in read else value for name, value in given.items()}


def _attribute_texts(config: type) -> dict[str, str]:
    """Returns the first clause of each attribute in a class's docstring, for a command's help."""
    section = (config.__doc__ or "").partition("Attributes:")[2].partition("Raises:")[0]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    texts = {name: re.split(r"[.;:](?: |$)", " ".join(text.split()))[0] for name, text in found}
    return {name: texts.get(name, "").replace("%", "%%") for name in config.__dataclass_fields__}
