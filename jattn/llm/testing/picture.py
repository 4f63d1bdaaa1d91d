"""The cross-check as a picture: the error after every layer at every position, on a logarithmic scale."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from jattn.llm.testing.layers import LayerRow
from jattn.llm.testing.report import CrosscheckReport
from torch_core.base.errors import InvalidInput, Unsupported


def check_picture_path(path: str | os.PathLike[str]) -> None:
    """Checks that a picture can be written there, before anything is compared.

    Raises:
        InvalidInput: the folder does not exist, or the ending names no known format.
        Unsupported: matplotlib is not installed.
    """
    known = _figure().canvas.get_supported_filetypes()
    place, ending = Path(path), Path(path).suffix.removeprefix(".").lower()
    if ending not in known:
        raise InvalidInput(f"the picture is {str(place)!r}; its ending must be one of {', '.join(sorted(known))}.")
    if not place.parent.is_dir():
        raise InvalidInput(f"the picture is {str(place)!r}; there is no folder {str(place.parent)!r}.")


def _figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported("a picture needs matplotlib; pip install jattn[plot].") from None
    return Figure(**options)


def save_picture(report: CrosscheckReport, path: str | os.PathLike[str]) -> None:
    """Writes one panel for each implementation: layers from bottom to top, positions of all prompts from left to right.

    An encoder, whose positions are others than the decoder's, has a panel of its own.

    Args:
        report: result of `compare_with_torch(..., layers=True)`.
        path: path of the picture; its ending says in which format (png, svg, pdf).

    Raises:
        InvalidInput: the report has no layers; as `check_picture_path`.
        Unsupported: matplotlib is not installed.
    """
    if not report.layers:
        raise InvalidInput("report", "has no layers", "make it with compare_with_torch(..., layers=True)")
    check_picture_path(path)
    panels_of: dict[str, list[LayerRow]] = {}
    for row in report.layers:
        panels_of.setdefault(row.implementation + ", encoder" * row.layer.startswith("encoder."), []).append(row)
    figure = _figure(figsize=(9, 1.5 + 2.5 * len(panels_of)), layout="constrained")
    panels = figure.subplots(len(panels_of), 1, squeeze=False)[:, 0]
    figure.suptitle(f"{report.model}, {report.dtype}: log10 of the error against float64")
    for panel, (name, rows) in zip(panels, panels_of.items(), strict=True):
        errors = np.array([[error for prompt in row.by_position for error in prompt] for row in rows])
        # An error of zero has no logarithm; a NaN stays one and is left blank.
        image = panel.imshow(np.log10(np.maximum(errors, 1e-20)), origin="lower", aspect="auto", vmin=-16, vmax=0)
        panel.set_yticks(range(len(rows)), [row.layer + ("" if row.passed else "  FAIL") for row in rows])
        panel.set_title(name)
        for end in np.cumsum([len(prompt) for prompt in rows[0].by_position])[:-1]:
            panel.axvline(end - 0.5, color="white", linewidth=1)
        figure.colorbar(image, ax=panel)
    panels[-1].set_xlabel("position, prompt after prompt")
    figure.savefig(os.fspath(path))
