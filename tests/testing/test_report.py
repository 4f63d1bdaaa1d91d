"""The report of a cross-check: its verdict and its table."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from jattn.llm.testing import CrosscheckReport, CrosscheckRow, TokenDifference
from jattn.llm.testing.report import torch_limit

DIFFERENCE = TokenDifference(prompt=1, position=3, expected=7, found=41, gap=0.125)


def row(**changes: Any) -> CrosscheckRow:
    values: dict[str, Any] = {
        "implementation": "xla",
        "path": "decode",
        "max_abs": 2e-6,
        "error": 1e-7,
        "cosine": 1 - 3e-13,
        "kl": 4e-14,
        "limit": 5e-7,
        "first_difference": None,
        "ties": 0,
    }
    return CrosscheckRow(**(values | changes))


def report(*rows: CrosscheckRow, **changes: Any) -> CrosscheckReport:
    values: dict[str, Any] = {
        "model": "small (1,000 parameters)",
        "dtype": "float32",
        "prompt_lens": (1, 17),
        "max_tokens": 8,
        "jax_side": "jax 0 on cpu",
        "torch_side": "transformers 0",
        "torch_name": "transformers",
        "torch_error": 1.3e-7,
        "torch_limit": 3e-4,
        "limit": 5e-7,
        "rows": rows or (row(),),
    }
    return CrosscheckReport(**(values | changes))


def test_a_row_within_the_limit_with_equal_tokens_passes() -> None:
    assert row().passed
    assert row().verdict == "pass"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"error": 6e-7}, "FAIL: error"),
        ({"error": math.nan}, "FAIL: NaN"),
        ({"first_difference": DIFFERENCE}, "FAIL: token"),
        ({"error": 1.0, "first_difference": DIFFERENCE}, "FAIL: error, token"),
    ],
)
def test_a_row_fails_on_its_error_and_on_its_tokens(changes: dict, verdict: str) -> None:
    failed = row(**changes)

    assert not failed.passed
    assert failed.verdict == verdict
    assert not report(row(), failed).passed


def test_a_row_without_logits_is_judged_by_its_tokens() -> None:
    assert row(max_abs=None, error=None, cosine=None, kl=None).passed


def test_a_report_fails_where_torch_itself_is_further_off_than_rounding() -> None:
    failed = report(torch_error=1e-2)

    assert not failed.passed
    assert (
        "torch's own error 1.0e-02 is above 3.0e-04, beyond rounding: torch and jattn read this folder differently."
        in str(failed)
    )
    assert str(failed).endswith("FAILED")


@pytest.mark.parametrize(
    ("own", "limit"),
    [((2e-5, 1e-5), 1e-3), ((4e-4, None), 1.6e-3), ((4e-4, 2e-3), 1e-3), ((math.nan,), 1e-3), ((None,), 1e-3)],
    ids=["small", "near the limit", "beyond it", "NaN", "tokens alone"],
)
def test_the_limit_of_torchs_error_grows_with_jattns_rounding(own, limit) -> None:
    assert torch_limit(1e-6, [row(error=error) for error in own]) == pytest.approx(limit)


def test_the_table_of_a_passed_report_is_aligned_plain_text() -> None:
    engine = row(path="engine", max_abs=None, error=None, cosine=None, kl=None, ties=2)

    assert str(report(engine, row(), skipped=(("triton", "it needs CUDA."),))) == "\n".join(
        [
            "model      small (1,000 parameters), float32",
            "prompts    2 of 1, 17 tokens, 8 greedy tokens each",
            "jattn      jax 0 on cpu",
            "torch      transformers 0",
            "truth      jattn.llm.testing.TorchDecoder in float64",
            "no triton  it needs CUDA.",
            "",
            "              path    max abs  error    1 - cosine  max KL   ties  verdict  first differing token",
            "transformers                   1.3e-07",
            "xla           engine                                         2     pass     none",
            "xla           decode  2.0e-06  1.0e-07  3.0e-13     4.0e-14  0     pass     none",
            "",
            "error = max |logits - truth| / max |truth|; allowed: 2 x (torch's own + eps) = 5.0e-07.",
            "PASSED",
        ]
    )


def test_a_failed_report_names_the_first_differing_token() -> None:
    text = str(report(row(first_difference=DIFFERENCE)))

    assert "FAIL: token  prompt 1, token 3: 41, not 7 (gap 1.2e-01)" in text
    assert text.endswith("FAILED")


def test_a_report_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        report().limit = 1.0  # type: ignore[misc]
