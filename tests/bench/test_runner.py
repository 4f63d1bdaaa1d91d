"""The command line of a benchmark: its options are the parameters of its function."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from jattn.bench import NAMES, load_benchmark
from jattn.bench.runner import Benchmark, main, sizes
from torch_core.base.errors import InvalidInput


@dataclass(frozen=True)
class Measured:
    length: int
    kind: str
    took_us: float


def run(
    *, lengths: Sequence[int] = (1, 2), kind: Literal["a", "b"] = "a", folder: Path | None = None
) -> list[Measured]:
    """Measures.

    Args:
        lengths: of each row.
        kind: of the rows, 100 %.
        folder: for files.
    """
    return [Measured(length, kind, 1.5) for length in lengths]


BENCHMARK = Benchmark("some", "Some rows.", run)
OTHER = Benchmark("other", None, lambda *, kind="a": [Measured(7, kind, 1.0)])


def test_parameters_are_options_with_types_choices_defaults_and_help(capsys) -> None:
    with pytest.raises(SystemExit):
        main(BENCHMARK, ["--help"])

    told = " ".join(capsys.readouterr().out.split())
    assert "--kind {a,b} of the rows, 100 %. (default: a)" in told
    assert "of each row. (default: 1 2)" in told
    assert "--folder FOLDER for files." in told


def test_rows_are_one_table_under_the_command(capsys) -> None:
    assert main(BENCHMARK, ["--lengths", "3", "40", "--kind", "b"]) == 0

    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("jattn bench some --lengths 3 40 --kind b on ")
    assert lines == ["length  kind  took us", "3       b         1.5", "40      b         1.5"]


def test_json_goes_to_a_file_beside_the_table_or_takes_its_place(tmp_path, capsys) -> None:
    assert main(BENCHMARK, ["--json", str(tmp_path / "some.json")]) == 0
    assert "took us" in capsys.readouterr().out
    assert main(BENCHMARK, ["--json"]) == 0

    printed, stored = json.loads(capsys.readouterr().out), json.loads((tmp_path / "some.json").read_text())
    assert (
        printed["rows"]
        == stored["rows"]
        == [
            {"length": 1, "kind": "a", "took_us": 1.5},
            {"length": 2, "kind": "a", "took_us": 1.5},
        ]
    )
    assert stored["command"] == f"jattn bench some --json {tmp_path / 'some.json'}"


def test_rows_of_an_iterator_are_told_as_they_come(capsys) -> None:
    main(Benchmark("some", None, lambda: iter(run())), [])

    assert capsys.readouterr().err.splitlines()[0] == "length 1, kind a, took us 1.5"


@pytest.mark.parametrize("text", ["", "1x", "x", "1x-2", "one"])
def test_what_is_no_list_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a list of sizes"):
        sizes(text)


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_its_name_and_documents_its_options(name: str, capsys) -> None:
    benchmark = load_benchmark(name)
    assert benchmark.name == name
    with pytest.raises(SystemExit) as ended:
        main(benchmark, ["--help"])
    assert ended.value.code == 0
    assert f"usage: jattn bench {name} " in capsys.readouterr().out


def test_a_list_of_the_benchmarks_loads_none_of_their_libraries() -> None:
    probe = "import sys; from jattn.cli import main; main(['bench']); print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout

    assert not {"torch", "jax", "matplotlib", "rich"} & set(printed.splitlines()[-1].split())
