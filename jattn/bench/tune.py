"""Off-line work behind the frozen tables: what compiled kernels take, and the search of the Hopper kernel's tiles."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jattn.bench import tiles

__all__ = ["compile_table", "main"]


def compile_table() -> list[str]:
    """Compiles every variant of `torch_core.variants.in_use` for sm_90, records the table and returns it as text."""
    from torch_core.variants.in_use import variants_in_use
    from torch_core.variants.resources import measure, write_table

    rows = {label: measure(variant) for label, (variant, _) in variants_in_use().items()}
    write_table(rows)
    width = max(len(label) for label in rows)
    lines = [f"{'variant':<{width}}  registers  shared memory  spilled  warps"]
    lines += [
        f"{label:<{width}} {row.registers:>10} {row.shared_memory:>14} {row.spilled:>8} {row.num_warps:>6}"
        for label, row in rows.items()
    ]
    return lines


def main(argv: Sequence[str]) -> int:
    """Prints the table that it recorded; returns 0."""
    parser = argparse.ArgumentParser(prog="jattn bench tune", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--compile-table", action="store_true", help="registers, shared memory and spills; needs no GPU")
    what.add_argument("--hopper-tiles", action="store_true", help="time the Hopper prefill kernel's candidate tiles")
    parser.add_argument("--head-size", type=int, choices=tuple(tiles.CANDIDATES), help="search this one only")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        default=tiles.RESULTS_PATH,
        help=f"results file ({tiles.RESULTS_PATH.name})",
    )
    options = parser.parse_args(argv)
    if options.compile_table:
        print("\n".join(compile_table()))
        return 0
    reports = {size: tiles.search(size) for size in ([options.head_size] if options.head_size else tiles.CANDIDATES)}
    tiles.write_results(reports, options.json)
    print("\n\n".join(report.table() for report in reports.values()))
    return 0
