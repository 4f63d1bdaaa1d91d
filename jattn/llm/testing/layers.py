"""Where two models part: the error of every layer, and the first layer whose error is more than rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """The error of hidden states after one layer.

    Attributes:
        implementation: "triton", "torch" or "xla".
        layer: "embedding", "layers.0" and so on, or "norm", which is the last layer and the norm after it; those of
            an encoder begin with "encoder.".
        error: largest absolute difference to the truth, divided by the truth's largest absolute value there.
        limit: the error that is allowed: 2 x (torch's own + eps of the dtype).
        by_position: the error at each position of each prompt.
    """

    implementation: str
    layer: str
    error: float
    limit: float
    by_position: tuple[tuple[float, ...], ...]

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error <= self.limit


def layer_rows(
    implementation: str,
    found: Sequence[np.ndarray],
    torch_found: Sequence[Sequence[np.ndarray]],
    exact: Sequence[Sequence[np.ndarray]],
    *,
    eps: float,
    prefix: str = "",
) -> Iterator[LayerRow]:
    """Yields a row for each hidden state that transformers gives.

    Args:
        implementation: implementation that computed the states.
        found: states of each sequence, [states, tokens, hidden_size], including the last layer's.
        torch_found: transformers' states of each sequence, in the dtype under test.
        exact: likewise in float64.
        eps: eps of the dtype.
        prefix: prefix of the names.

    Example:
        >>> truth = [[np.array([[1.0, -4.0]])] * 2]
        >>> found = [np.array([[[1.0, -4.0]], [[0.0, 0.0]], [[1.0, -3.0]]])]
        >>> [(row.layer, row.error, row.passed) for row in layer_rows("xla", found, truth, truth, eps=0.1)]
        [('embedding', 0.0, True), ('norm', 0.25, False)]
    """
    count = len(exact[0])
    names = ["embedding", *(f"layers.{index}" for index in range(count - 2)), "norm"]
    # transformers gives the last layer's state behind the norm alone.
    places = [*range(count - 1), -1]
    for state, (name, place) in enumerate(zip(names, places, strict=True)):
        truth = [each[state] for each in exact]
        scale = max(float(max(np.abs(each).max() for each in truth)), np.finfo(np.float64).tiny)
        theirs = max(_errors(each[state], true).max() for each, true in zip(torch_found, truth, strict=True)) / scale
        errors = [_errors(each[place], true) / scale for each, true in zip(found, truth, strict=True)]
        yield LayerRow(
            implementation=implementation,
            layer=f"{prefix}{name}",
            error=float(np.max([each.max() for each in errors])),
            limit=float(2 * (theirs + eps)),
            by_position=tuple(tuple(each.tolist()) for each in errors),
        )


def _errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Returns the largest difference at each position."""
    return np.abs(found.astype(np.float64) - exact).max(axis=-1)
