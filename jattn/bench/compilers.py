"""Every kernel variant in use, compiled by a Triton release for several devices, and records of releases compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from json import dumps, loads
from pathlib import Path
from typing import Any

import numpy as np
import triton

from jattn.bench.runner import Benchmark, check_places
from jattn.table import aligned
from torch_core.base.errors import InvalidInput
from torch_core.variants import in_use, resources

#: Bytes of shared memory that a block may have, by compute capability.
_SHARED_MEMORY = {90: 232448, 80: 166912, 89: 101376, 100: 232448, 120: 101376}
# The first devices with the instructions by which Triton's warps exchange numbers.
_OLDEST = 70

#: Rows by "sm_90 label": the fields of `Resources`, or {"error": text}.
Rows = dict[str, dict[str, Any]]


def compile_all(arches: Sequence[int], only: str = "") -> Rows:
    """Compiles the variants in use on these devices, without a GPU. A variant that fails has its error as row."""
    rows: Rows = {}
    for arch in arches:
        for label, (variant, _) in in_use.variants_in_use(arch).items():
            if label.startswith(only):
                # Compilers fail with exceptions of every kind, and each is a finding.
                try:
                    rows[f"sm_{arch} {label}"] = asdict(resources.measure(variant, arch))
                except Exception as error:
                    lines = str(error).strip().splitlines() or [""]
                    rows[f"sm_{arch} {label}"] = {"error": f"{type(error).__name__}: {lines[-1]}"}
    return rows


def compare_records(records: dict[str, Rows]) -> list[str]:
    """Returns a table with a row per Triton version and device: registers and spills, compared with the first.

    A kernel is too large if it compiles and needs more shared memory than a block of the device may have.
    """
    first = next(iter(records.values()))
    more = [f"{of} {side}" for of in ("registers", "spills") for side in ("fewer", "equal", "more")]
    cells = [["triton", "device", "compiled", "failed", "too large", *more]]
    for version, rows in records.items():
        for device in dict.fromkeys(label.split()[0] for label in rows):
            own = {label: row for label, row in rows.items() if label.split()[0] == device}
            good = {label: row for label, row in own.items() if "error" not in row}
            both = [(first[label], row) for label, row in good.items() if "registers" in first.get(label, {})]
            limit = _SHARED_MEMORY.get(int(device[3:]), math.inf)
            counts = [len(good), len(own) - len(good), sum(row["shared_memory"] > limit for row in good.values())]
            for field in ("registers", "spilled"):
                signs = [np.sign(row[field] - before[field]) for before, row in both]
                counts += [signs.count(sign) for sign in (-1, 0, 1)]
            cells.append([version, device, *map(str, counts)])
    return aligned(cells, right=range(2, 11))


def run(
    *,
    arch: Sequence[int] = tuple(_SHARED_MEMORY),
    only: str = "",
    json: Path = Path("compilers.json"),
    compare: Sequence[Path] | None = None,
) -> str:
    """Compiles with the installed Triton and writes a record, or compares records; returns the table.

    Args:
        arch: compute capabilities as one number each.
        only: take variants whose label starts with it.
        json: the record to write.
        compare: records to compare; nothing is compiled then.
    """
    if compare:
        records: dict[str, Rows] = {}
        for path in compare:
            if not path.is_file():
                raise InvalidInput(
                    f"--compare {path}: there is no such file; `jattn bench compilers --json` writes one."
                )
            record = loads(path.read_text())
            records.setdefault(record["triton"], {}).update(record["variants"])
        return "\n".join(compare_records(records))
    if min(arch) < _OLDEST:
        # LLVM would end the process.
        raise InvalidInput(f"--arch has {min(arch)}; Triton compiles for compute capabilities from {_OLDEST} on.")
    check_places(json_path=json)
    rows = compile_all(arch, only)
    json.write_text(dumps({"triton": triton.__version__, "variants": rows}, indent=1) + "\n")
    failed = [f"{label}: {row['error']}" for label, row in rows.items() if "error" in row]
    return "\n".join([*compare_records({triton.__version__: rows}), *failed, f"wrote {json}"])


BENCHMARK = Benchmark("compilers", __doc__, run)
