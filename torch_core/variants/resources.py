"""What compiled kernel variants take: registers, shared memory, spills; and the table where that is recorded."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton import knobs

from torch_core.errors import Unsupported
from torch_core.plan.compile import KernelVariant, compile_variant

__all__ = ["TABLE_PATH", "Resources", "measure", "read_table", "write_table"]

#: The table of the variants of `torch_core.variants.in_use`, compiled for sm_90.
TABLE_PATH = Path(__file__).with_name("compiled.json")


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one compiled kernel.

    Attributes:
        registers: 32-bit registers of one thread.
        shared_memory: bytes of shared memory of one block.
        spilled: bytes of one thread's stack: registers that did not fit, in a kernel without arrays of its own.
        num_warps: warps of one block.
    """

    registers: int
    shared_memory: int
    spilled: int
    num_warps: int


def measure(variant: KernelVariant, arch: int = 90) -> Resources:
    """Compiles a variant and reads its resources from the machine code; needs no GPU.

    Raises:
        Unsupported: Triton's cuobjdump is missing or does not report the resources.
    """
    compiled = compile_variant(variant, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=False)
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", report.stdout))
    if len(usage) != 2:
        raise Unsupported(f"cuobjdump does not report the resources of {variant.name}: {report.stderr.strip()}")
    return Resources(int(usage["REG"]), compiled.metadata.shared, int(usage["STACK"]), compiled.metadata.num_warps)


def read_table(path: Path = TABLE_PATH) -> tuple[str, dict[str, Resources]]:
    """Returns the Triton version that a table was recorded with, and its rows by label."""
    record = json.loads(path.read_text())
    return record["triton"], {label: Resources(**row) for label, row in record["variants"].items()}


def write_table(rows: dict[str, Resources], path: Path) -> None:
    """Records a table made with this Triton."""
    record = {"triton": triton.__version__, "variants": {label: asdict(row) for label, row in rows.items()}}
    path.write_text(json.dumps(record, indent=1) + "\n")
