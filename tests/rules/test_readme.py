"""The README's Python runs as it stands, from top to bottom."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

README = Path(__file__).parents[2] / "README.md"


def test_the_python_of_the_readme_runs_in_order(capsys) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "tests.readme"}

    for block in blocks:
        exec(compile(block, str(README), "exec"), names)

    assert len(blocks) >= 4
    assert names["output"] is not None
    assert "torch" in capsys.readouterr().out


def test_the_readme_names_no_file_that_is_missing() -> None:
    named = re.findall(r"\]\(((?!https?:|#)[^)]+)\)", README.read_text())
    named += re.findall(r"`((?:examples|jattn|torch_core|tests)/[\w/]+\.(?:py|md))`", README.read_text())

    assert [name for name in named if not (README.parent / name.split("#")[0]).exists()] == []


def test_ci_runs_the_very_test_command_of_the_readme() -> None:
    commands = re.findall(r"^pip install .*&& (?:jattn|pytest).*$", README.read_text(), re.MULTILINE)

    assert len(commands) == 2
    assert all("-c constraints.txt" in command for command in commands)
    assert commands[1] in (README.parent / ".ci" / "run").read_text().splitlines()


def test_constraints_pin_every_dependency_inside_the_window() -> None:
    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    for extra in ("crosscheck", "plot", "test", "train"):
        wanted += [Requirement(line) for line in project["optional-dependencies"][extra]]
    lines = (README.parent / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))

    outside = [str(want) for want in wanted if want.name != "jattn" and pinned.get(want.name) not in want.specifier]

    assert outside == []
