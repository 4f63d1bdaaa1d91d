"""The code of the site's tutorials, and of the pages for Flax users, runs as it stands, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TUTORIALS = sorted(page for page in (DOCS / "tutorials").glob("*.md") if BLOCK.search(page.read_text()))
PAGES = [*TUTORIALS, DOCS / "howto" / "from_nnx.md", DOCS / "howto" / "from_flax_cache.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_tutorial_runs_in_order(page: Path) -> None:
    names: dict[str, object] = {"__name__": "tests.docs.tutorial"}

    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), names)
