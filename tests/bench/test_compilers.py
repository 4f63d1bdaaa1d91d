"""Every variant in use is compiled by the Triton at hand, a failure is a row, and records of releases are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton

from jattn.bench import compilers
from jattn.bench.runner import main
from torch_core.base.errors import InvalidInput
from torch_core.variants import resources
from torch_core.variants.in_use import variants_in_use


def row(registers: int, spilled: int = 0) -> dict[str, int]:
    return {"registers": registers, "shared_memory": 0, "spilled": spilled, "num_warps": 4}


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_a_portable_kernel_compiles_for_devices_other_than_hopper(arch):
    [(label, found)] = compilers.compile_all([arch], only="merge").items()
    assert label.startswith(f"sm_{arch} merge: ")
    assert found["registers"] > 0
    assert found["spilled"] == 0


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_devices_other_than_hopper_run_no_kernel_of_hopper(arch):
    assert not any(variant.is_gluon for variant, _ in variants_in_use(arch).values())


def test_a_variant_that_does_not_compile_is_recorded_with_its_error(tmp_path: Path, monkeypatch, capsys):
    def fail(variant: object, arch: int) -> None:
        raise RuntimeError(f"in a pass\nno such thing on {arch}")

    monkeypatch.setattr(resources, "measure", fail)
    assert main(compilers.BENCHMARK, ["--arch", "80", "--only", "merge", "--json", str(tmp_path / "new.json")]) == 0
    record = json.loads((tmp_path / "new.json").read_text())
    assert record["triton"] == triton.__version__
    assert list(record["variants"].values()) == [{"error": "RuntimeError: no such thing on 80"}]
    assert ": RuntimeError: no such thing on 80" in capsys.readouterr().out


def test_records_are_compared_with_the_first(tmp_path: Path, capsys):
    rows = {
        "1.0": {"sm_90 a": row(100), "sm_90 b": row(168), "sm_90 c": row(64), "sm_90 d": {"error": "E"}},
        "2.0": {
            "sm_90 a": row(90) | {"shared_memory": 232449},
            "sm_90 b": row(170, spilled=8),
            "sm_90 c": row(64),
            "sm_90 d": row(1, spilled=4),
        },
    }
    paths = [tmp_path / f"{version}.json" for version in rows]
    for path, (version, variants) in zip(paths, rows.items(), strict=True):
        path.write_text(json.dumps({"triton": version, "variants": variants}))
    assert main(compilers.BENCHMARK, ["--compare", *map(str, paths)]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[-2:] == [
        ["1.0", "sm_90", "3", "1", "0", "0", "3", "0", "0", "3", "0"],
        ["2.0", "sm_90", "4", "0", "1", "1", "1", "1", "0", "2", "1"],
    ]


def test_a_folder_that_is_missing_is_refused_before_the_work():
    with pytest.raises(InvalidInput, match=r"--json nowhere/new\.json: there is no folder nowhere"):
        main(compilers.BENCHMARK, ["--json", "nowhere/new.json"])


def test_a_record_that_is_missing_is_refused():
    with pytest.raises(InvalidInput, match=r"--compare nowhere\.json: there is no such file"):
        main(compilers.BENCHMARK, ["--compare", "nowhere.json"])


def test_a_device_that_the_compiler_would_die_of_is_refused():
    with pytest.raises(InvalidInput, match="--arch has 12; Triton compiles for compute capabilities from 70 on"):
        main(compilers.BENCHMARK, ["--arch", "90", "12"])
