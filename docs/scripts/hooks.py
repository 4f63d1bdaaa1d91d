"""Hooks of mkdocs: links that leave `docs/` become the names of files, because the site has no copy of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page's text with each link to a file outside of the site as the file's name."""
    folder = Path(page.file.abs_src_path).parent

    def outside(match: re.Match[str]) -> str:
        target = (folder / match[2].split("#")[0]).resolve()
        if "://" in match[2] or target.is_relative_to(_DOCS) or not target.is_relative_to(_DOCS.parent):
            return match[0]
        name = str(target.relative_to(_DOCS.parent))
        return f"`{name}`" if match[1].strip("`") in (target.name, name) else f"{match[1]} (`{name}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#\s][^)\s]*)\)", outside, markdown)
