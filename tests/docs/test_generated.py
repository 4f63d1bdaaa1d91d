"""Pages that follow from code and records are what the scripts write; the site has an entry for every public name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jattn
from docs.scripts import generate, notebooks, records, reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_generated_pages_equal_what_the_script_writes() -> None:
    pages = generate.pages()
    folders = [path for name in ("benchmarks", "reference/api") for path in (DOCS / name).iterdir()]
    written = {DOCS / "benchmarks" / "index.md", *pages}

    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]

    assert stale + [path for path in folders if path not in written] == [], "run python -m docs.scripts.generate"


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    entries = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    modules = [name for name in reference.MODULES if name != "jattn"]
    main = {f"jattn.{name}" for name in jattn.__all__}
    others = {f"{module}.{name}" for module in modules for name in reference.names(module)}

    without = {name for name in others - entries if f"jattn.{name.rpartition('.')[2]}" not in main}

    assert main <= entries
    assert without == set()
    assert {"torch_core.cache.CacheManager", "torch_core.cache.CacheConfig"} <= entries


def test_every_page_is_in_the_navigation_and_no_page_is_long() -> None:
    pages = list(DOCS.rglob("*.md"))
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]

    assert [page for page in pages if str(page.relative_to(DOCS)) not in nav] == []
    assert [page for page in pages if len(page.read_text().splitlines()) > 300 and "api" not in page.parts] == []


def test_the_means_and_ratios_of_the_pages_are_those_of_the_records() -> None:
    decode = [records.geometric_mean("decode", peer) for peer in ("FlashAttention-3", "vLLM Triton")]
    of_fp8 = [
        records.geometric_mean("decode", f"{peer} fp8", "jattn fp8") for peer in ("FlashAttention-3", "vLLM Triton")
    ]
    dense = [records.geometric_mean("prefill", f"FlashAttention-{n} dense", "jattn dense") for n in (3, 4)]
    blocks = records.geometric_mean("prefill", "FlashAttention-3, blocks of 16", "jattn, blocks of 16")
    training = records.geometric_mean("training", "cuDNN in JAX", group="128")
    engine = {
        (each["row"], each["peer"]): each["value"]
        for each in records.load("engine_vllm")["records"]
        if each["group"] == "e4m3"
    }
    of_rows = [
        engine[row, "vLLM 0.26"] / engine[row, "jattn"] for row in ("decode 1 x 1024", "a prompt of 8,192 tokens")
    ]
    main = [decode[0], blocks, decode[1], *of_rows]
    index = [decode[0], of_fp8[0], decode[1], of_fp8[1], dense[0], blocks, dense[1], training]

    for page, expected in (("README.md", main), ("docs/index.md", main), ("docs/benchmarks/index.md", index)):
        paragraphs = (ROOT / page).read_text().split("\n\n")
        text = next(each for each in paragraphs if "FlashAttention-3" in each)
        assert re.findall(r"\b\d\.\d\d\b", text) == [f"{value:.2f}" for value in expected], page


def test_a_record_names_its_run() -> None:
    for path in records.FOLDER.glob("*.json"):
        data = records.load(path.stem)
        assert {"title", "page", "card", "versions", "command", "date", "commit", "unit", "records"} <= data.keys(), (
            path
        )
        assert path.stem in records.PAGES[data["page"]][2]
        assert all({"row", "peer", "value"} <= record.keys() for record in data["records"]), path


def test_a_notebook_is_its_script_with_outputs() -> None:
    scripts = sorted(notebooks.SCRIPTS.glob("*.py"))
    for path in scripts:
        found = json.loads(path.with_suffix(".ipynb").read_text())["cells"]
        assert [(cell["cell_type"], "".join(cell["source"])) for cell in found] == notebooks.cells(path.read_text())
        kinds = {output["output_type"] for cell in found for output in cell.get("outputs", [])}
        assert "display_data" in kinds, path
    assert len(scripts) >= 2
