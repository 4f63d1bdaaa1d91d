"""The notebooks run from top to bottom and draw their plots; `tests/docs` compares them with their scripts."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path: Path) -> None:
    with mpl.rc_context({"backend": "Agg"}):
        import matplotlib.pyplot as plt

        names: dict[str, object] = {"__name__": "tests.examples.notebook"}
        for cell in cells(path):
            exec(compile("".join(cell["source"]), str(path), "exec"), names)
        drawn = plt.get_fignums()
        plt.close("all")
    assert drawn
