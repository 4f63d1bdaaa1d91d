"""The README's Python runs as it stands, from top to bottom; all pages name what exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jattn
from docs.scripts.architectures import families_table
from jattn.llm.load import known_families
from torch_core.serves import serves_table

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PLACES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "torch_core/**/*.md", "jattn/**/*.md")
PAGES = sorted(path for place in PLACES for path in ROOT.glob(place))


def test_the_python_of_the_readme_runs_in_order() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "tests.readme"}

    for block in blocks:
        exec(compile(block, str(README), "exec"), names)

    assert len(blocks) >= 2
    assert names["output"] is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_file_that_is_missing_or_outside(page: Path) -> None:
    text = page.read_text()
    linked = [page.parent / name.split("#")[0] for name in re.findall(r"\]\(((?!#)[^)]+)\)", text)]
    named = re.findall(r"`((?:\.ci|docs|examples|jattn|torch_core|tests)/[\w/.]+)`", text)

    paths = [path.resolve() for path in linked + [ROOT / name for name in named]]

    assert [str(path) for path in paths if not path.exists() or not path.is_relative_to(ROOT)] == []


def test_the_readme_is_what_a_stranger_reads() -> None:
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "index.md"], ids=lambda page: page.name)
def test_a_front_page_counts_the_architectures_that_load(page: Path) -> None:
    assert set(re.findall(r"(\d+) architectures", page.read_text())) == {str(len(known_families()))}


def test_the_limits_are_the_table_that_the_code_reads() -> None:
    assert serves_table() in (ROOT / "docs" / "reference" / "limits.md").read_text()


def test_the_models_are_the_table_that_follows_from_the_families() -> None:
    assert families_table() in (ROOT / "docs" / "reference" / "architectures.md").read_text()


def test_ci_runs_the_very_test_command_of_the_readme() -> None:
    commands = re.findall(r"^pip install .*&& (?:jattn|pytest).*$", README.read_text(), re.MULTILINE)

    assert len(commands) == 2
    assert all("-c constraints.txt" in command for command in commands)
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_constraints_pin_every_dependency_inside_the_window() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    for extra in ("crosscheck", "plot", "test", "torch", "train"):
        wanted += [Requirement(line) for line in project["optional-dependencies"][extra]]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))

    outside = [
        str(want) for want in wanted if want.name != "jattn" and pinned.get(want.name, "none") not in want.specifier
    ]

    assert outside == []


def test_pre_commit_checks_what_ci_checks() -> None:
    hooks = re.findall(
        r"^ +entry: (\S+(?: check| format)?)", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE
    )
    checks = re.findall(r"^(ruff \w+|pyright)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)

    assert hooks == checks


def test_the_changelog_begins_with_the_version_and_is_short() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [(number, line) for number, line in enumerate(lines) if line.startswith("## ")]

    assert versions[0][1] == f"## {jattn.__version__}"
    assert versions[1][0] - versions[0][0] <= 80
