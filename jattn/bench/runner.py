"""The command line of all benchmarks: options from the parameters of `run`, one table, one JSON format."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import re
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from jattn import __version__
from jattn.bench.pictures import check_matplotlib
from jattn.bench.report import BenchReport, cells, package_versions
from torch_core.base.errors import InvalidInput

_STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class Mode:
    """A switch of one benchmark that runs another instead, with those options of the first that it also has.

    `reason` is the start of the error when an option is given that the other benchmark does not have.
    """

    flag: str
    benchmark: Benchmark
    reason: str


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark of the command line.

    Attributes:
        about: the first text of `--help`.
        run: measures. Each keyword parameter is an option: the flag is its name, type and choices are its annotation,
            the help is its entry under Args. It returns a `BenchReport`, rows (dataclasses of measured numbers), or
            text if it writes its own files. Rows of an iterator are printed on stderr as they come. A row may have
            `error`, the reason for an exit code of 1, and `details`, text below the table.
        may_be_empty: parameters that take no values, too.
        draw: draws a report into a file; None for a benchmark without `--png`.
        when_drawn: keywords of `run` that a picture needs; they are no options.
    """

    name: str
    about: str | None
    run: Callable[..., BenchReport | Iterable[Any] | str]
    modes: tuple[Mode, ...] = ()
    may_be_empty: tuple[str, ...] = ()
    draw: Callable[[BenchReport, Path], None] | None = None
    when_drawn: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Returns the parameters of `run` that are options, by name, with evaluated annotations."""
        found = inspect.signature(self.run, eval_str=True).parameters
        return {name: each for name, each in found.items() if name not in self.when_drawn}


def main(benchmark: Benchmark, argv: Sequence[str]) -> int:
    """Runs a benchmark, prints its table or JSON, and writes the files that the options name.

    Args:
        benchmark: the benchmark.
        argv: arguments after `jattn bench NAME`.

    Returns:
        0; 1 if a row failed.
    """
    parser = _parser(benchmark)
    options = vars(parser.parse_args(argv))
    command = shlex.join(["jattn", "bench", benchmark.name, *argv])
    if options.get("api_key"):
        command = command.replace(options["api_key"], "***")
    json_path = None if "json" in benchmark.parameters() else options.pop("json")
    png_path = options.pop("png", None)
    chosen = [mode for mode in benchmark.modes if options.pop(mode.flag.strip("-"))]
    for mode in chosen:
        benchmark, options = mode.benchmark, _of_mode(parser, mode, options)
    check_places(json_path=None if json_path == _STDOUT else json_path, png_path=png_path)
    result = benchmark.run(**options, **(benchmark.when_drawn if png_path is not None else {}))
    if isinstance(result, str):
        print(result)
        return 0
    report = result if isinstance(result, BenchReport) else _report(command, result)
    if png_path is not None and benchmark.draw is not None:
        benchmark.draw(report, png_path)
    text = json.dumps({"command": command, "machine": _machine(), **report.record()}, indent=1)
    print(text if json_path == _STDOUT else report.table())
    if json_path not in (None, _STDOUT):
        json_path.write_text(text + "\n")
    errors = [row.error for row in report.rows if getattr(row, "error", None)]
    sys.stderr.writelines(f"jattn: {error}\n" for error in errors)
    return int(bool(errors))


def check_places(*, json_path: Path | None = None, png_path: Path | None = None) -> None:
    """Checks that a report can be written, before anything is measured."""
    for flag, path in (("--json", json_path), ("--png", png_path)):
        if path is not None and not path.parent.is_dir():
            raise InvalidInput(flag, f"{path}: there is no folder {path.parent}", "make it, or name another")
        if path is not None and path.is_dir():
            raise InvalidInput(flag, f"{path}: this is a folder", "name a file in it")
    if png_path is not None:
        check_matplotlib()


def sizes(text: str) -> list[int]:
    """Returns the numbers of a text like "64x2048"."""
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise InvalidInput(f"{text!r} is not a list of sizes; write whole numbers with an x between, as in 64x2048.")
    return [int(size) for size in text.split("x")]


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"jattn bench {benchmark.name}", description=benchmark.about)
    documented = _documented(benchmark.run)
    for name, parameter in benchmark.parameters().items():
        told = (documented[name] + _told_default(parameter.default)).replace("%", "%%")
        keywords = _keywords(parameter, empty=name in benchmark.may_be_empty)
        parser.add_argument(f"--{name.replace('_', '-')}", help=told, **keywords)
    # argparse fails on an empty group.
    switches = parser.add_mutually_exclusive_group() if benchmark.modes else parser
    for mode in benchmark.modes:
        switches.add_argument(mode.flag, action="store_true", help=f"run `jattn bench {mode.benchmark.name}` instead")
    if "json" not in benchmark.parameters():
        told = "write the report as JSON; without FILE, print it instead of the table"
        parser.add_argument("--json", type=Path, metavar="FILE", nargs="?", const=_STDOUT, help=told)
    if benchmark.draw is not None:
        parser.add_argument("--png", type=Path, metavar="FILE", help="draw the report; needs matplotlib")
    return parser


def _keywords(parameter: inspect.Parameter, *, empty: bool) -> dict[str, Any]:
    """Returns argparse's keywords of a parameter; its annotation is bool, T, T | None, Sequence[T] or a Literal."""
    kind, keywords = parameter.annotation, {"default": parameter.default}
    if kind is bool:
        return {**keywords, "action": "store_true"}
    given = [each for each in typing.get_args(kind) if each is not NoneType]
    if len(given) == 1 and typing.get_origin(kind) not in (Sequence, typing.Literal):
        (kind,) = given
    if typing.get_origin(kind) is Sequence:
        (kind,) = typing.get_args(kind)
        keywords["nargs"] = "*" if empty else "+"
    if typing.get_origin(kind) is typing.Literal:
        keywords["choices"] = typing.get_args(kind)
        kind = type(keywords["choices"][0])
    return {**keywords, "type": kind}


def _told_default(default: Any) -> str:
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    return "" if default is None or default is False or default == "" else f" (default: {default})"


def _documented(run: Callable[..., Any]) -> dict[str, str]:
    """Returns the entries under Args of a docstring, by parameter."""
    section = (inspect.getdoc(run) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^ {4}(?=\w)", section, flags=re.MULTILINE)[1:]
    pairs = (entry.split(": ", 1) for entry in entries)
    return {name: " ".join(text.split()) for names, text in pairs for name in names.split(", ")}


def _of_mode(parser: argparse.ArgumentParser, mode: Mode, options: dict[str, Any]) -> dict[str, Any]:
    taken = mode.benchmark.parameters()
    refused = [f"--{name}" for name in options if name not in taken and options[name] != parser.get_default(name)]
    if refused:
        parser.error(f"{mode.reason}: leave out {', '.join(refused).replace('_', '-')}")
    return {name: value for name, value in options.items() if name in taken}


def _report(command: str, rows: Iterable[Any]) -> BenchReport:
    rows = rows if isinstance(rows, Sequence) else list(map(_told, rows))
    # JAX is loaded by now if the rows are of its device.
    jax = sys.modules.get("jax")
    device = platform.machine() if jax is None else jax.devices()[0].device_kind
    details = tuple(row.details for row in rows if getattr(row, "details", None))
    return BenchReport(command, device, package_versions(), None, None, tuple(rows), summary=details)


def _told(row: Any) -> Any:
    print(", ".join(f"{head} {cell}" for head, cell in cells(row).items() if cell), file=sys.stderr, flush=True)
    return row


def _machine() -> dict[str, Any]:
    python = platform.python_version()
    return {"platform": platform.platform(), "processors": os.cpu_count(), "python": python, "jattn": __version__}
