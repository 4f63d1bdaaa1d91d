"""The syntax of the product's files, for rules that look at all of them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

__all__ = ["tree_of"]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Returns the syntax tree of a file; the tests of a folder share it."""
    return ast.parse(path.read_text())
