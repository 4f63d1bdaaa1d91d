"""Off-line work for the frozen tables: resources of compiled kernels, and the search of the Hopper tiles."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Literal

from jattn.bench import tiles
from jattn.bench.runner import Benchmark, check_places
from jattn.table import aligned
from torch_core.base.errors import InvalidInput

#: Where in the source tree the result of each kind of work is kept.
PLACES = {"compile_table": "torch_core/variants/compiled.json", "hopper_tiles": "jattn/bench/hopper_tiles.json"}


def run(
    *,
    compile_table: bool = False,
    hopper_tiles: bool = False,
    head_size: Literal[64, 128, 256] | None = None,
    json: Path | None = None,
) -> str:
    """Does one kind of work, writes its results file, and returns the table.

    Args:
        compile_table: record registers, shared memory and spills of all variants; needs no GPU.
        hopper_tiles: time the candidate tiles of the Hopper prefill kernel.
        head_size: search this one only.
        json: the results file (compiled.json or hopper_tiles.json in the current directory).

    Raises:
        InvalidInput: both or none of the two kinds; the folder of the results file does not exist.
    """
    if compile_table == hopper_tiles:
        raise InvalidInput("jattn bench tune needs one of --compile-table and --hopper-tiles.")
    place = PLACES["compile_table" if compile_table else "hopper_tiles"]
    path = json or Path(Path(place).name)
    check_places(json_path=path)
    if compile_table:
        text = "\n".join(_compile_table(path))
    else:
        reports = {size: tiles.search(size) for size in ([head_size] if head_size else tiles.CANDIDATES)}
        tiles.write_results(reports, path)
        text = "\n\n".join(report.table() for report in reports.values())
    return f"{text}\nwrote {path}; to use it, put it in place of {place} in the source tree."


def _compile_table(path: Path) -> list[str]:
    """Compiles every variant of `torch_core.variants.in_use` for sm_90, records the table and returns it as text."""
    from torch_core.variants.in_use import variants_in_use
    from torch_core.variants.resources import measure_all, write_table

    table = measure_all({label: variant for label, (variant, _) in variants_in_use().items()})
    write_table(table, path)
    cells = [(label, *map(str, astuple(row))) for label, row in table.resources.items()]
    return aligned([("variant", "registers", "shared memory", "spilled", "warps"), *cells], right=range(1, 5))


BENCHMARK = Benchmark("tune", __doc__, run)
