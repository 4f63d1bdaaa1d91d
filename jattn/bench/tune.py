"""Off-line work behind the frozen tables: what compiled kernels take, and the search of the Hopper kernel's tiles."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from jattn.bench import tiles
from jattn.table import aligned
from torch_core.base.errors import InvalidInput

__all__ = ["PLACES", "compile_table", "main"]

#: Where in the source tree the result of each kind of work is kept.
PLACES = {"compile_table": "torch_core/variants/compiled.json", "hopper_tiles": "jattn/bench/hopper_tiles.json"}


def compile_table(path: Path) -> list[str]:
    """Compiles every variant of `torch_core.variants.in_use` for sm_90, records the table and returns it as text."""
    from torch_core.variants.in_use import variants_in_use
    from torch_core.variants.resources import measure_all, write_table

    table = measure_all({label: variant for label, (variant, _) in variants_in_use().items()})
    write_table(table, path)
    cells = [(label, *map(str, astuple(row))) for label, row in table.resources.items()]
    return aligned([("variant", "registers", "shared memory", "spilled", "warps"), *cells], right=range(1, 5))


def main(argv: Sequence[str]) -> int:
    """Prints the table that it recorded, and where it belongs; returns 0.

    Raises:
        InvalidInput: the folder of the results file does not exist.
    """
    parser = argparse.ArgumentParser(prog="jattn bench tune", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--compile-table", action="store_true", help="registers, shared memory and spills; needs no GPU")
    what.add_argument("--hopper-tiles", action="store_true", help="time the Hopper prefill kernel's candidate tiles")
    parser.add_argument("--head-size", type=int, choices=tuple(tiles.CANDIDATES), help="search this one only")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="results file (compiled.json or hopper_tiles.json, right here)"
    )
    options = parser.parse_args(argv)
    place = PLACES["compile_table" if options.compile_table else "hopper_tiles"]
    path = options.json or Path(Path(place).name)
    if not path.parent.is_dir():
        raise InvalidInput(f"--json {path}: there is no folder {path.parent}; make it, or name another.")
    if options.compile_table:
        print("\n".join(compile_table(path)))
    else:
        sizes = [options.head_size] if options.head_size else tiles.CANDIDATES
        reports = {size: tiles.search(size) for size in sizes}
        tiles.write_results(reports, path)
        print("\n\n".join(report.table() for report in reports.values()))
    print(f"wrote {path}; to use it, put it in place of {place} in the source tree.")
    return 0
