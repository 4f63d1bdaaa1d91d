"""The table of supported features of each implementation: the rows of all ops, which tests read and the docs print."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from torch_core.launch.op import Served, registered_ops
from torch_core.launch.serves import IMPLEMENTATIONS

_HERE = Path(__file__).parent
_FOLDERS = [
    room.name
    for room in iter_modules([str(_HERE)])
    if "op" in {each.name for each in iter_modules([str(_HERE / room.name)])}
]

#: The rooms that have ops: their folder has an `op.py`. That of `launch` defines the record.
ROOMS: tuple[ModuleType, ...] = tuple(import_module(f"torch_core.{name}") for name in _FOLDERS if name != "launch")


def serves_table() -> str:
    """Returns the table in Markdown."""
    lines = [f"| feature | {' | '.join(IMPLEMENTATIONS)} |", "|---" * (1 + len(IMPLEMENTATIONS)) + "|"]
    lines += [f"| {row.feature} | {' | '.join(row.text[name] for name in IMPLEMENTATIONS)} |" for row in SERVES]
    return "\n".join(lines) + "\n"


def _rows() -> tuple[Served, ...]:
    """Returns one row for each feature, room by room."""
    found: dict[str, Served] = {}
    for room in ROOMS:
        for op in registered_ops():
            if op.call.__module__.startswith(f"{room.__name__}."):
                found |= {row.feature: row for row in op.serves if row.feature not in found}
    return tuple(found.values())


#: One row for each feature; ops that share one have limits of their own.
SERVES = _rows()
