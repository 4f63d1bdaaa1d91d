"""The allocator benchmark runs in small, names its rows, and prints a table or JSON."""

from __future__ import annotations

import json
import sys
import types

from jattn.bench import allocator
from jattn.bench.runner import main

SMALL = {"batch": 4, "context": 32, "long_prompt": 1024, "audit_blocks": 50, "repeats": 3}
ARGUMENTS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_every_measurement_has_a_row_with_positive_times():
    rows = allocator.run(**SMALL)
    assert len(rows) == 8
    assert all(0 < row.best <= row.median for row in rows)
    assert [row.limit for row in rows] == [500, None, 200, 100, 15, 10, None, None]


def test_the_table_names_each_measurement(capsys):
    assert main(allocator.BENCHMARK, ARGUMENTS) == 0
    table = capsys.readouterr().out
    names = (
        "plan + commit + retire, 4",
        "metadata build, 4",
        "key hashing",
        "add with a cached prefix of 1k",
        "audit of 50",
    )
    for text in names:
        assert text in table


def test_json_has_the_fields_of_a_row(capsys):
    assert main(allocator.BENCHMARK, [*ARGUMENTS, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert set(rows[0]) == {"name", "unit", "median", "best", "limit", "vllm"}


def test_vllm_is_measured_when_it_can_be_imported(monkeypatch):
    class BlockPool:
        def __init__(self, num_gpu_blocks: int, enable_caching: bool) -> None:
            self.blocks = list(range(num_gpu_blocks))

        def get_new_blocks(self, count: int) -> list[int]:
            return [self.blocks.pop() for _ in range(count)]

        def free_blocks(self, blocks: list[int]) -> None:
            self.blocks.extend(blocks)

    module = types.ModuleType("vllm.v1.core.block_pool")
    module.BlockPool = BlockPool  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.core.block_pool", module)
    peer = allocator.run(**SMALL)[-1].vllm
    assert peer is not None
    assert peer > 0
