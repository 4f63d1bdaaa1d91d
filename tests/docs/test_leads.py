"""Which rows of a record another library leads in."""

from __future__ import annotations

from typing import Any

import pytest

from docs.scripts import leads


def found(cells: dict[str, Any], better: str = "lower", **fields: Any) -> list[tuple[str, ...]]:
    made = [
        {"row": "1 x 8", "peer": peer, "value": 1.0, **({"text": cell} if isinstance(cell, str) else {"value": cell})}
        for peer, cell in cells.items()
    ]
    data = {"title": "Decode", "unit": "us", "better": better, "card": "H100"}
    return list(leads._rows({**data, "records": [{**each, **fields} for each in made]}))  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("theirs", "better", "leads_there"), [(4, "lower", True), (6, "lower", False), (6, "higher", True)]
)
def test_less_or_more_leads_as_the_record_says(theirs: float, better: str, leads_there: bool) -> None:
    row = ("Decode, 1 x 8", "FlashMLA", str(theirs), "5", "us", "H100")
    assert found({"jattn": 5, "FlashMLA": theirs}, better) == [row] * leads_there


def test_a_column_of_a_kind_is_compared_with_that_kind() -> None:
    cells = {"jattn": 5, "jattn fp8": 3, "vLLM Triton": 6, "vLLM Triton fp8": 4, "FlashAttention-3 paged": 4}
    assert [(row[1], row[3]) for row in found(cells)] == [("FlashAttention-3 paged", "5")]


def test_each_percentile_is_a_row_and_an_earlier_kernel_is_none() -> None:
    cells = {"jattn": "1,171 / 20 / 62.2", "vLLM 0.26": "1,174 / 20 / 54.2"}
    (row,) = found(cells)
    assert row[:4] == ("Decode, 1 x 8, 99th percentile", "vLLM 0.26", "54.2", "62.2")
    assert found(cells, group="before") == []


def test_a_unit_of_its_own_counts_up() -> None:
    assert [row[1] for row in found({"jattn": 7, "cuDNN": 8}, unit="tokens/s")] == ["cuDNN"]
