"""The README's Python runs as it stands, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_python_of_the_readme_runs_in_order(capsys) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "readme"}

    for block in blocks:
        exec(compile(block, str(README), "exec"), names)

    assert len(blocks) >= 4
    assert names["output"] is not None
    assert "torch" in capsys.readouterr().out


def test_the_readme_names_no_file_that_is_missing() -> None:
    named = re.findall(r"\]\(((?!https?:|#)[^)]+)\)", README.read_text())
    named += re.findall(r"`((?:examples|jattn|torch_core|tests)/[\w/]+\.(?:py|md))`", README.read_text())

    assert [name for name in named if not (README.parent / name.split("#")[0]).exists()] == []
