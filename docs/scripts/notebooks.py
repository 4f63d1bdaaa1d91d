"""Runs the scripts of `examples/notebooks` and writes each as a notebook with its outputs, and as a page of the site.

    python -m docs.scripts.notebooks

A comment `# %% [markdown]` begins text, whose lines are comments, and `# %%` begins code.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "notebooks"
PAGES = ROOT / "docs" / "tutorials" / "notebooks"


def cells(script: str) -> list[tuple[str, str]]:
    """Returns the kind of each cell, "markdown" or "code", and its source."""
    found = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, source = part.partition("\n")
        kind = "markdown" if "[markdown]" in head else "code"
        text = re.sub(r"^# ?", "", source, flags=re.MULTILINE) if kind == "markdown" else source
        found.append((kind, text.strip()))
    return found


def main() -> None:
    """Writes all notebooks and pages."""
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in sorted(SCRIPTS.glob("*.py")):
        parts = [_executed(kind, source) for kind, source in _run(cells(path.read_text()), path)]
        notebook = {"cells": parts, "metadata": _METADATA, "nbformat": 4, "nbformat_minor": 5}
        path.with_suffix(".ipynb").write_text(json.dumps(notebook, indent=1) + "\n")
        _write_page(path.stem, parts)


_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def _run(parts: list[tuple[str, str]], path: Path) -> list[tuple[str, tuple[str, str, list[str]]]]:
    """Runs the code of a notebook; returns each source with what it printed and its plots in SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": path.stem}
    found = []
    for kind, source in parts:
        printed, plots = io.StringIO(), []
        if kind == "code":
            with contextlib.redirect_stdout(printed), mpl.rc_context({"svg.hashsalt": path.stem}):
                exec(compile(source, str(path), "exec"), names)
                for number in plt.get_fignums():
                    drawn = io.StringIO()
                    plt.figure(number).savefig(drawn, format="svg", metadata={"Date": None})
                    plots.append(drawn.getvalue())
                plt.close("all")
        found.append((kind, (source, printed.getvalue(), plots)))
    return found


def _executed(kind: str, content: tuple[str, str, list[str]]) -> dict[str, Any]:
    source, printed, plots = content
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}
    if kind == "code":
        text = (
            [{"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}] if printed else []
        )
        data = [{"image/svg+xml": plot.splitlines(keepends=True)} for plot in plots]
        images = [{"output_type": "display_data", "metadata": {}, "data": each} for each in data]
        cell |= {"execution_count": None, "outputs": text + images}
    return cell


def _write_page(name: str, parts: list[dict[str, Any]]) -> None:
    lines, count = [], 0
    for cell in parts:
        source = "".join(cell["source"])
        lines.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                lines.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                count += 1
                (PAGES / f"{name}-{count}.svg").write_text("".join(output["data"]["image/svg+xml"]))
                lines.append(f"![Plot {count}]({name}-{count}.svg)")
    (PAGES / f"{name}.md").write_text("\n\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
