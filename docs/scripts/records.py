"""Tables and plots of the records in `benchmarks/results`."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

#: Each page's title, first paragraph, and records in their order.
PAGES = {
    "attention": (
        "Attention",
        "Decoding, prompts and chunks on one H100 or H200, compared with other kernels in the same process.",
        [
            *("decode", "decode_uneven", "decode_jax", "prefill", "prefill_heads", "prefill_fp8_128", "prefill_fp8"),
            *("heads_512", "chunks", "chunks_fp8", "ejkernel"),
        ],
    ),
    "latents": (
        "Latent attention",
        "DeepSeek's attention over a cache of latents, on one H100 or H200.",
        ["latents", "latents_uneven", "latents_8bit", "latents_sparse", "latents_prefill"],
    ),
    "training": (
        "Training",
        "Gradients of dense attention on one H100 or H200. They are deterministic unless a column says otherwise.",
        ["training", "training_256", "backward", "backward_256", "backward_192", "dropout"],
    ),
    "engine": (
        "Engine and layers",
        "Whole models in the engine, layers of experts, and a Flax module.",
        [
            *("engine_vllm", "kernels_beside_vllm", "serve", "serve_long", "start", "engine", "engine_fp8"),
            *("engine_hybrid", "batch_invariance", "adapters", "adapters_h200", "experts", "experts_parts"),
            *("generate_cpu", "flax_module"),
        ],
    ),
    "states": (
        "Layers with a state",
        "Prompts and decode steps of recurrent layers, next to flash-linear-attention and vLLM.",
        ["states_delta", "states_kda", "states_mamba", "states_lightning"],
    ),
    "devices": (
        "Several devices",
        "Sequences and models over two and four GPUs of one host.",
        [
            *("devices_engine", "devices_copies", "devices_four", "devices_seventy", "devices_replicas"),
            *("devices_processes", "devices_experts", "devices_sums", "devices_spread", "devices_sequences"),
        ],
    ),
    "kernels": ("Compiled kernels", "Registers and spills of the kernels under releases of Triton.", ["compilers"]),
}  # fmt: skip
_COLORS = ("#3f51b5", "#ff8f00", "#00897b", "#8e24aa")


@functools.cache
def load(name: str) -> dict[str, Any]:
    """Returns one table's records, with the fields that all of them share."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def pages() -> dict[str, str]:
    """Returns the pages and plots of all records by file name."""
    found = {}
    for page, (title, text, names) in PAGES.items():
        found[f"{page}.md"] = f"# {title}\n\n{text} [About these figures](index.md).\n" + "".join(map(_section, names))
        found |= {f"{name}.svg": _plot(name) for name in names if "plot" in load(name)}
    return found


def table(name: str, peers: tuple[str, ...] | None = None) -> str:
    """Returns a table's records in Markdown, or the columns of some peers."""
    data = load(name)
    records = [each for each in data["records"] if peers is None or each["peer"] in peers]
    columns = list(dict.fromkeys((each.get("group"), each["peer"]) for each in records))
    cells = {(each["row"], each.get("group"), each["peer"]): _text(each) for each in records}
    lines = [[data["row"], *(f"{group}: {peer}" if group else peer for group, peer in columns)]]
    lines.append(["---"] * len(lines[0]))
    for row in dict.fromkeys(each["row"] for each in records):
        lines.append([row, *(cells.get((row, *column), "") for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def geometric_mean(name: str, peer: str, than: str = "jattn", group: str | None = None) -> float:
    """Returns how many times as long a peer takes, in the geometric mean of all rows of a group that both have."""
    data = load(name)
    found = [each for each in data["records"] if each.get("group") == group]
    values = {(each["row"], each["peer"]): each["value"] for each in found}
    pairs = [(values[row, than], value) for (row, who), value in values.items() if who == peer]
    logs = [math.log(theirs / own if data["better"] == "lower" else own / theirs) for own, theirs in pairs]
    return math.exp(sum(logs) / len(logs))


def _section(name: str) -> str:
    data = load(name)
    better = f", {data['better']} is better" if data["better"] else ""
    unit = f"Unit: {data['unit']}{better}. " if data["unit"] else ""
    versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
    run = f"Card: {data['card']}{'; ' + versions if versions else ''}. Command: `{data['command']}`."
    recorded = f" Recorded on {data['date']} in {data['commit']}." if data["commit"] else ""
    plot = f"\n![Speed relative to jattn]({name}.svg)\n" if "plot" in data else ""
    return f"\n## {data['title']}\n\n{data['caption']}\n{plot}\n{table(name)}\n\n{unit}{run}{recorded}\n"


def _text(record: dict[str, Any]) -> str:
    text = record.get("text") or str(record["value"])
    return f"*{text}*" if record.get("earlier_run") else text


def _plot(name: str) -> str:
    """Returns bars of the speed of each peer relative to jattn, the first peer, in SVG."""
    data = load(name)
    group = data["records"][0].get("group")
    values = {(r["row"], r["peer"]): r["value"] for r in data["records"] if r.get("group") == group}
    rows, peers = list(dict.fromkeys(row for row, _ in values)), data["plot"]
    left, bar, scale, top = 110, 12, 380, 46
    height = top + len(rows) * (bar * len(peers) + 10) + 8
    title = f"{data['title']}{', ' + group if group else ''}: speed relative to {peers[0]} = 1 ({data['card']})"
    parts = [f'<text x="{left}" y="16" font-weight="bold">{title}</text>']
    for index, peer in enumerate(peers):
        x = left + 150 * index
        parts.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{_COLORS[index]}"/>')
        parts.append(f'<text x="{x + 14}" y="33">{peer}</text>')
    y = top
    for row in rows:
        parts.append(f'<text x="{left - 8}" y="{y + bar * len(peers) / 2 + 4:g}" text-anchor="end">{row}</text>')
        for index, peer in enumerate(peers):
            own, value = values[row, peers[0]], values[row, peer]
            speed = own / value if data["better"] == "lower" else value / own
            parts.append(
                f'<rect x="{left}" y="{y}" width="{scale * speed:.1f}" height="{bar - 2}" fill="{_COLORS[index]}"/>'
                f'<text x="{left + scale * speed + 5:.1f}" y="{y + bar - 3}">{speed:.2f}</text>'
            )
            y += bar
        y += 10
    style = 'font-family="sans-serif" font-size="11" fill="#555"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" {style}>\n{body}\n</svg>\n'
