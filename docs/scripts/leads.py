"""The rows of the records in which another library leads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.scripts import records

_OURS = "jattn"
_PEERS = (
    *("FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "FlashInfer", "FlashMLA", "flash-linear-attention"),
    *("cuDNN in JAX", "cuDNN in torch", "cuDNN (torch)", "cuDNN", "vLLM Triton", "vLLM 0.26", "mamba_ssm"),
)
# Columns that a later run of ours replaced.
_OLD = "before"


def table() -> str:
    """Returns the rows of all pages as a table."""
    lines = ["| row | leads | its figure | jattn's | unit | card |", "| --- | --- | --- | --- | --- | --- |"]
    for _, _, names in records.PAGES.values():
        for name in names:
            lines += [f"| {' | '.join(line)} |" for line in _rows(records.load(name))]
    return "\n".join(lines)


def _rows(data: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    cells = {(each["row"], each.get("group"), each["peer"]): each for each in data["records"]}
    for (row, group, peer), each in cells.items():
        name = next((known for known in _PEERS if peer.startswith(known)), None)
        if name is None or group == _OLD:
            continue
        # A column of a kind, such as fp8, is compared with ours of that kind if there is one.
        own = cells.get((row, group, _OURS + peer.removeprefix(name))) or cells.get((row, group, _OURS))
        if own is None or own["value"] is None or each["value"] is None:
            continue
        unit = each.get("unit", data["unit"])
        is_lower = each.get("better", data["better"] if unit == data["unit"] else "higher") == "lower"
        for place, theirs, ours in zip(_places(own), _parts(each), _parts(own), strict=True):
            if theirs != ours and (_number(theirs) < _number(ours)) == is_lower:
                label = ", ".join(filter(None, (data["title"], group, row, place)))
                yield label, peer, theirs, ours, "" if (group or "").endswith(unit) else unit, data["card"]


def _parts(record: dict[str, Any]) -> list[str]:
    """Returns the percentiles of a cell, or its one figure."""
    text = record.get("text") or str(record["value"])
    return text.split(" / ") if " / " in text else [text]


def _places(record: dict[str, Any]) -> list[str]:
    return ["median", "90th percentile", "99th percentile"] if len(_parts(record)) > 1 else [""]


def _number(text: str) -> float:
    return float(text.split(" ")[0].split(";")[0].replace(",", ""))
