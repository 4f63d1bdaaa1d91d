"""A wheel holds every file of the packages: what is no Python module is named by the package data."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]


@pytest.mark.parametrize("package", ["jattn", "torch_core"])
def test_every_file_that_is_no_module_is_in_the_package_data(package: str) -> None:
    files = [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    matched = {path for pattern in PATTERNS[package] for path in (ROOT / package).glob(pattern)}

    assert [str(path.relative_to(ROOT)) for path in files if path.suffix != ".py" and path not in matched] == []


@pytest.mark.parametrize("package", ["jattn", "torch_core"])
def test_every_pattern_of_the_package_data_finds_something(package: str) -> None:
    assert [pattern for pattern in PATTERNS[package] if not any((ROOT / package).glob(pattern))] == []


@pytest.mark.parametrize("package", ["jattn", "torch_core"])
def test_every_folder_with_modules_is_a_package(package: str) -> None:
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}

    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_packages_find_their_names_and_rooms_in_a_zip_archive(tmp_path: Path) -> None:
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in [ROOT / "jattn" / "__init__.py", *(ROOT / "torch_core").rglob("*.py")]:
            packed.write(path, path.relative_to(ROOT))
    numbers = "len(s.ROOMS), len(s.SERVES)"
    code = f"import jattn, torch_core.serves as s; print(s.__file__, jattn.OutOfBlocks.__name__, {numbers})"
    environment = {**os.environ, "PYTHONPATH": str(archive)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)

    from torch_core.serves import ROOMS, SERVES

    assert done.stderr == ""
    assert done.stdout.split() == [f"{archive}/torch_core/serves.py", "OutOfBlocks", str(len(ROOMS)), str(len(SERVES))]
