"""A wheel holds every file of the packages: what is no Python module is named by the package data."""

from __future__ import annotations

import tomllib
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
