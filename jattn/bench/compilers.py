"""What a Triton release makes of the kernels on several devices: every variant in use, and records compared."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jattn.table import aligned
from torch_core.base.errors import InvalidInput

__all__ = ["compare", "compile_all", "main"]

#: Bytes of shared memory that a block may have, by compute capability.
_SHARED_MEMORY = {90: 232448, 80: 166912, 89: 101376, 100: 232448, 120: 101376}
# The first devices with the instructions by which Triton's warps exchange numbers.
_OLDEST = 70

#: Rows by "sm_90 label": the fields of `Resources`, or {"error": text}.
Rows = dict[str, dict[str, Any]]


def compile_all(arches: Sequence[int], only: str = "") -> Rows:
    """Compiles what plans for these devices use; needs no GPU. A variant that does not compile has its error as row.

    Args:
        arches: compute capabilities as one number each.
        only: take labels that begin so.
    """
    from torch_core.variants.in_use import variants_in_use
    from torch_core.variants.resources import measure

    rows: Rows = {}
    for arch in arches:
        for label, (variant, _) in variants_in_use(arch).items():
            if label.startswith(only):
                # Compilers fail with exceptions of every kind, and each is a finding.
                try:
                    rows[f"sm_{arch} {label}"] = asdict(measure(variant, arch))
                except Exception as error:
                    lines = str(error).strip().splitlines() or [""]
                    rows[f"sm_{arch} {label}"] = {"error": f"{type(error).__name__}: {lines[-1]}"}
    return rows


def compare(records: dict[str, Rows]) -> list[str]:
    """Returns a table with a row for each Triton version and device, registers and spills beside the first version's.

    Too large is what compiles and needs more shared memory than a block of the device may have.

    Args:
        records: rows by Triton version, the one to compare with first.
    """
    first = next(iter(records.values()))
    sides = ("fewer", "equal", "more")
    cells: list[tuple[str, ...]] = [
        (
            "triton",
            "device",
            "compiled",
            "failed",
            "too large",
            *(f"{of} {side}" for of in ("registers", "spills") for side in sides),
        )
    ]
    for version, rows in records.items():
        for device in dict.fromkeys(label.split()[0] for label in rows):
            own = {label: row for label, row in rows.items() if label.split()[0] == device}
            good = {label: row for label, row in own.items() if "error" not in row}
            both = [(first[label], row) for label, row in good.items() if "registers" in first.get(label, {})]
            limit = _SHARED_MEMORY.get(int(device[3:]), math.inf)
            large = sum(row["shared_memory"] > limit for row in good.values())
            counts = [len(good), len(own) - len(good), large]
            for field in ("registers", "spilled"):
                more = [row[field] - before[field] for before, row in both]
                counts += [sum(x < 0 for x in more), sum(x == 0 for x in more), sum(x > 0 for x in more)]
            cells.append((version, device, *map(str, counts)))
    return aligned(cells, right=range(2, 11))


def main(argv: Sequence[str]) -> int:
    """Compiles with the installed Triton and records it, or compares records; returns 0.

    Raises:
        InvalidInput: the folder of the results file, or a record, does not exist; a device that Triton has no code for.
    """
    parser = argparse.ArgumentParser(prog="jattn bench compilers", description=__doc__)
    parser.add_argument(
        "--arch", type=int, nargs="+", default=tuple(_SHARED_MEMORY), help="compute capabilities (90 80 89 100 120)"
    )
    parser.add_argument("--only", default="", metavar="LABEL", help="variants whose label begins so")
    parser.add_argument("--json", type=Path, metavar="FILE", default=Path("compilers.json"), help="where to record")
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="FILE", help="compare these records, compile nothing"
    )
    options = parser.parse_args(argv)
    if options.compare:
        records: dict[str, Rows] = {}
        for path in options.compare:
            if not path.is_file():
                raise InvalidInput(
                    f"--compare {path}: there is no such file; `jattn bench compilers --json` writes one."
                )
            record = json.loads(path.read_text())
            records.setdefault(record["triton"], {}).update(record["variants"])
        print("\n".join(compare(records)))
        return 0
    if min(options.arch) < _OLDEST:
        # LLVM would end the process.
        raise InvalidInput(
            f"--arch has {min(options.arch)}; Triton compiles for compute capabilities from {_OLDEST} on."
        )
    if not options.json.parent.is_dir():
        raise InvalidInput(
            f"--json {options.json}: there is no folder {options.json.parent}; make it, or name another."
        )
    import triton

    rows = compile_all(options.arch, options.only)
    options.json.write_text(json.dumps({"triton": triton.__version__, "variants": rows}, indent=1) + "\n")
    print("\n".join(compare({triton.__version__: rows})))
    failed = [f"{label}: {row['error']}" for label, row in rows.items() if "error" in row]
    print("\n".join([*failed, f"wrote {options.json}"]))
    return 0
