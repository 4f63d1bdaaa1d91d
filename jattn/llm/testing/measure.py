"""The numbers of the cross-check: the errors of logits and of every layer, and where greedy tokens begin to differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jattn.llm.testing.report import Deviation, LayerRow, TokenDifference


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The reference of every run: float64 logits [tokens, vocab_size] of each sequence, and torch's float32 ones.

    `scale` is the largest absolute value of the first. `torch_error` is torch's own error, relative to it, or that of
    further runs if it is larger. `limit` is the error that is allowed: 2 x (torch_error + eps of the dtype).
    """

    logits: Sequence[np.ndarray]
    scale: float
    torch_logits: Sequence[np.ndarray]
    torch_error: float
    limit: float

    @classmethod
    def of(
        cls,
        logits: Sequence[np.ndarray],
        torch_logits: Sequence[np.ndarray],
        further: Iterable[tuple[np.ndarray, np.ndarray]] = (),
        *,
        eps: float,
    ) -> Truth:
        """Measures torch, and further runs (the exact logits of each, and torch's), and derives the limit."""
        # The smallest normal number: logits that are all zero have no scale, and an error of zero stays zero.
        scale = max(float(max(np.abs(each).max() for each in logits)), np.finfo(np.float64).tiny)
        errors = [np.abs(found - each).max() / scale for found, each in zip(torch_logits, logits, strict=True)]
        errors += [np.abs(found - exact).max() / max(scale, np.abs(exact).max()) for exact, found in further]
        error = _worst(errors)
        return cls(logits=logits, scale=scale, torch_logits=torch_logits, torch_error=error, limit=2 * (error + eps))


def measure(found: Sequence[np.ndarray], truth: Truth) -> Deviation:
    """Returns the worst deviation over all positions of all sequences, computed in float64."""
    max_abs, errors, cosines, divergences = [], [], [], []
    with np.errstate(invalid="ignore", over="ignore"):
        for mine, torch_logits, exact in zip(found, truth.torch_logits, truth.logits, strict=True):
            wide, expected = mine.astype(np.float64), torch_logits.astype(np.float64)
            max_abs.append(np.abs(wide - expected).max())
            errors.append(np.abs(wide - exact).max())
            cosines.append(_cosines(wide, expected).min())
            divergences.append(_divergences(expected, wide).max())
    return Deviation(
        max_abs=_worst(max_abs),
        error=_worst(errors) / truth.scale,
        cosine=float(np.min(cosines)),
        kl=_worst(divergences),
    )


def compare_tokens(
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    truth: Truth,
    prompt_lens: Sequence[int],
    *,
    free_running: bool,
) -> tuple[TokenDifference | None, int]:
    """Returns the first greedy token that really differs, or None, and the number of ties.

    Two tokens tie when the true logits of both are closer than the allowed error: then neither choice is wrong. With
    `free_running` each of our tokens follows our own earlier ones, so that nothing can be compared after a tie;
    otherwise it follows torch's.
    """
    first: TokenDifference | None = None
    ties = 0
    for prompt, (wanted, got, exact) in enumerate(zip(expected, found, truth.logits, strict=True)):
        for position, (token, other) in enumerate(zip(wanted, got, strict=True)):
            if token == other:
                continue
            row = exact[prompt_lens[prompt] - 1 + position]
            gap = float(abs(row[token] - row[other]))
            if gap <= truth.limit * truth.scale:
                ties += 1
                if free_running:
                    break
                continue
            if first is None or position < first.position:
                first = TokenDifference(prompt=prompt, position=position, expected=token, found=other, gap=gap)
            break
    return first, ties


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

    `found` has the states of each sequence, [states, tokens, hidden_size], including the last layer's; `torch_found`
    has those of transformers in the dtype under test, and `exact` in float64: of the same sequences, and of further
    ones that show torch's error alone.
    """
    count = len(exact[0])
    names = ["embedding", *(f"layers.{index}" for index in range(count - 2)), "norm"]
    # transformers gives the last layer's state only after the norm.
    places = [*range(count - 1), -1]
    for state, (name, place) in enumerate(zip(names, places, strict=True)):
        truth = [each[state] for each in exact]
        largest = [max(float(np.abs(each).max()), np.finfo(np.float64).tiny) for each in truth]
        scale = max(largest[: len(found)])
        theirs = max(
            _errors(each[state], true).max() / max(scale, own)
            for each, true, own in zip(torch_found, truth, largest, strict=True)
        )
        errors = [_errors(each[place], true) / scale for each, true in zip(found, truth[: len(found)], strict=True)]
        yield LayerRow(
            implementation=implementation,
            layer=f"{prefix}{name}",
            error=float(np.max([each.max() for each in errors])),
            limit=float(2 * (theirs + eps)),
            by_position=tuple(tuple(each.tolist()) for each in errors),
        )


def _worst(values: Sequence[float]) -> float:
    # np.max and not max: a NaN anywhere must come out.
    return float(np.max(values))


def _cosines(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
    products = np.einsum("tv,tv->t", found, expected)
    return np.divide(products, lengths, out=np.ones_like(products), where=lengths != 0)


def _divergences(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    log_expected, log_found = _log_softmax(expected), _log_softmax(found)
    # Rounding can make the sum of a tiny divergence negative.
    return np.maximum(np.einsum("tv,tv->t", np.exp(log_expected), log_expected - log_found), 0.0)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Returns the largest difference at each position."""
    return np.abs(found.astype(np.float64) - exact).max(axis=-1)
