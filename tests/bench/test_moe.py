"""`jattn bench moe` on a tiny shape: what it prints, and what it refuses."""

from __future__ import annotations

import jax
import pytest

from jattn import cli
from jattn.bench import moe
from jattn.bench.moe import measure_rows
from torch_core.base.errors import InvalidInput


def test_the_table_has_a_row_for_each_number_of_tokens(monkeypatch, capsys):
    monkeypatch.setitem(moe._COPIED, jax.default_backend(), 1 << 16)
    arguments = ["--shape", "tiny", "--tokens", "1", "3", "--layers", "1", "--dtype", "float32", "--rounds", "1"]

    assert cli.main(["bench", "moe", *arguments]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["tokens", "1", "3"]
    assert float(lines[2].split()[1]) == 2.0
    # Without the column of plain jnp, which nobody asked for.
    assert [len(line.split()) for line in lines[2:]] == [8, 8]


@pytest.mark.parametrize(
    ("shape", "tokens", "message"),
    [("huge", [1], "shape is 'huge'; use one of mixtral-8x7b, "), ("tiny", [0], "tokens is 0; it must be an int of")],
)
def test_what_cannot_be_measured_is_refused(shape, tokens, message):
    with pytest.raises(InvalidInput, match=f"^{message}"):
        measure_rows(shape, tokens, layers=1, dtype="float32", rounds=1)
