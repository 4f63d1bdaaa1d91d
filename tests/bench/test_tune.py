"""The off-line search writes where it is told, never into the package, and says where its result belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jattn.bench import tune
from jattn.bench.runner import main
from torch_core.base.errors import InvalidInput
from torch_core.variants import in_use, resources
from torch_core.variants.resources import Resources, Table, read_table

ROOT = Path(__file__).parents[2]
ROW = Resources(registers=168, shared_memory=71680, spilled=0, num_warps=4)
TABLE = Table("3.6.0", {"decode: a_kernel": ROW}, {"decode: a_kernel": "a1b2"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(in_use, "variants_in_use", lambda: {"decode: a_kernel": (None, True)})
    monkeypatch.setattr(resources, "measure_all", lambda variants: TABLE)
    monkeypatch.setattr(tune, "search", lambda size: pytest.fail("the search ran"))


def test_the_compiled_table_is_written_to_the_current_directory(tmp_path, capsys):
    recorded = {path: path.read_bytes() for path in ROOT.glob("*/**/*.json")}

    assert main(tune.BENCHMARK, ["--compile-table"]) == 0

    assert read_table(tmp_path / "compiled.json") == TABLE
    assert {path: path.read_bytes() for path in recorded} == recorded
    said = capsys.readouterr().out
    assert "decode: a_kernel" in said
    assert "wrote compiled.json; to use it, put it in place of torch_core/variants/compiled.json" in said


def test_the_compiled_table_is_written_where_it_is_told(tmp_path, capsys):
    assert main(tune.BENCHMARK, ["--compile-table", "--json", str(tmp_path / "mine.json")]) == 0

    assert read_table(tmp_path / "mine.json") == TABLE
    assert not (tmp_path / "compiled.json").exists()
    assert f"wrote {tmp_path / 'mine.json'};" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["--compile-table", "--hopper-tiles"])
def test_a_folder_that_is_missing_is_refused_before_the_work(what):
    with pytest.raises(InvalidInput, match=r"--json nowhere/table\.json: there is no folder nowhere"):
        main(tune.BENCHMARK, [what, "--json", "nowhere/table.json"])


@pytest.mark.parametrize("place", tune.PLACES.values())
def test_what_is_said_to_be_replaced_exists(place):
    assert (ROOT / place).is_file()
