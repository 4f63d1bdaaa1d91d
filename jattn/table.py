"""Aligned plain text for printed tables."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

# More columns than any line has: no terminal width wraps a line.
_WIDTH = 10_000


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Returns one line for each row, its cells in columns two spaces apart, without lines, colours or markup.

    Args:
        rows: cells of one line each; as many in every row.
        right: indices of the columns that are flush right, as numbers are.

    Example:
        >>> print("\\n".join(aligned([("kernel", "us"), ("split", "9.5")], right={1})))
        kernel   us
        split   9.5
    """
    grid = Table.grid(padding=(0, 2))
    for index in range(len(rows[0]) if rows else 0):
        grid.add_column(justify="right" if index in right else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*map(Text, row))
    lines = io.StringIO()
    Console(file=lines, width=_WIDTH, color_system=None, force_jupyter=False, _environ={}).print(grid)
    return [line.rstrip() for line in lines.getvalue().splitlines()]
