"""Writes what follows from code and records: benchmarks with plots, tables of features and models, the reference.

`python -m docs.scripts.generate` writes them; `tests/docs/test_generated.py` compares them with what this file returns.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.scripts import leads, records, reference
from docs.scripts.architectures import families_table
from torch_core.serves import serves_table

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def inserted_parts() -> dict[str, str]:
    """Returns the parts of written pages that are generated, by the name in their markers."""
    return {
        "architectures": families_table(),
        "features": serves_table().strip(),
        "headline decode": records.table("decode", peers=("jattn", "FlashAttention-3", "vLLM Triton")),
        "headline prefill": records.table("prefill", peers=("jattn dense", "FlashAttention-3 dense", "cuDNN dense")),
        "leads": leads.table(),
    }


def pages() -> dict[Path, str]:
    """Returns each generated page, and each written page with its generated parts."""
    found = {DOCS / "benchmarks" / name: text for name, text in records.pages().items()}
    found |= {DOCS / "reference" / "api" / name: text for name, text in reference.pages().items()}
    parts = inserted_parts()
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        if page not in found and "<!-- begin " in page.read_text():
            found[page] = _with_parts(page.read_text(), parts)
    return found


def _with_parts(text: str, parts: dict[str, str]) -> str:
    def part(match: re.Match[str]) -> str:
        return f"<!-- begin {match[1]} -->\n{parts[match[1]]}\n<!-- end {match[1]} -->"

    found, count = re.subn(r"<!-- begin (.+?) -->\n.*?<!-- end \1 -->", part, text, flags=re.DOTALL)
    if count != text.count("<!-- begin "):
        raise ValueError("a page has the beginning of a generated part without its end")
    return found


def main() -> None:
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
