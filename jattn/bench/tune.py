"""Writes down what every kernel variant in use takes of a multiprocessor; needs no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["compile_table", "main"]


def compile_table() -> list[str]:
    """Compiles every variant of `torch_core.plans.in_use` for sm_90, records the table and returns it as text."""
    from torch_core.plans.in_use import variants_in_use
    from torch_core.plans.resources import measure, write_table

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
    parser.add_argument("--compile-table", action="store_true", required=True, help="the only thing to do so far")
    parser.parse_args(argv)
    print("\n".join(compile_table()))
    return 0
