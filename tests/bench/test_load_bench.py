"""`jattn bench load` on a tiny shape: a row for each way to the weights, and nothing is left behind."""

from __future__ import annotations

from jattn import cli


def test_a_row_for_saving_reading_and_loading(tmp_path, capsys) -> None:
    assert cli.main(["bench", "load", "--shape", "tiny", "--folder", str(tmp_path)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(maxsplit=3)[0] for line in lines[2:]] == [
        "save",
        "read from disk",
        "load from disk",
        "read from the page cache",
        "load from the page cache",
    ]
    assert list(tmp_path.iterdir()) == []
