"""The resources of compiled kernel variants: registers, shared memory, spills; and the table that records them."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton import knobs

from torch_core.base.errors import Unsupported
from torch_core.launch.compile import KernelVariant, compile_variant

#: The table of the variants of `torch_core.variants.in_use`, compiled for sm_90.
TABLE_PATH = Path(__file__).with_name("compiled.json")


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one compiled kernel."""

    registers: int  # 32-bit registers of one thread.
    shared_memory: int  # Bytes of shared memory of one block.
    spilled: int  # Bytes of one thread's stack: registers that did not fit, in a kernel without arrays of its own.
    num_warps: int  # Warps of one block.


@dataclass(frozen=True, slots=True)
class Table:
    """The resources of variants when they were last compiled."""

    triton: str  # The version that compiled them.
    resources: Mapping[str, Resources]  # Resources by label.
    # `KernelVariant.key` by label: while a variant has this one, the same version compiles it to the same code.
    keys: Mapping[str, str]

    def row_of(self, label: str, variant: KernelVariant) -> Resources | None:
        """Returns the resources of a variant, or None if it, or Triton, has changed since the record."""
        current = self.triton == triton.__version__ and self.keys.get(label) == variant.key()
        return self.resources[label] if current else None


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


def read_table(path: Path = TABLE_PATH) -> Table:
    """Returns the record."""
    record = json.loads(path.read_text())
    rows = {label: Resources(**row) for label, row in record["variants"].items()}
    return Table(record["triton"], rows, record["keys"])


def write_table(table: Table, path: Path) -> None:
    """Records a table."""
    rows = {label: asdict(row) for label, row in table.resources.items()}
    record = {"triton": table.triton, "variants": rows, "keys": dict(table.keys)}
    path.write_text(json.dumps(record, indent=1) + "\n")


def measure_all(variants: Mapping[str, KernelVariant]) -> Table:
    """Compiles variants for sm_90 and returns their table, as this Triton makes it."""
    rows = {label: measure(variant) for label, variant in variants.items()}
    return Table(triton.__version__, rows, {label: variant.key() for label, variant in variants.items()})
