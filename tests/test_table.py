"""Tables are plain text wherever they are made."""

from __future__ import annotations

import pytest
import rich.console

from jattn.table import aligned


def test_a_cell_is_shown_as_it_stands() -> None:
    assert aligned([("[red]a[/red]", ":smile:"), ("", "wide 漢")]) == ["[red]a[/red]  :smile:", "              wide 漢"]


def test_a_table_without_rows_has_no_lines() -> None:
    assert [line for line in aligned([]) if line] == []


def test_a_long_line_is_not_wrapped() -> None:
    assert aligned([("x", "word " * 400 + "end")]) == ["x  " + "word " * 400 + "end"]


def test_a_notebook_or_a_terminal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "3")
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)

    assert aligned([("kernel", "us")]) == ["kernel  us"]
