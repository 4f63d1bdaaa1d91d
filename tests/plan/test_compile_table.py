"""Every kernel variant in use compiles for Hopper, fits a block, does not spill where it is hot, and is on record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import triton

import torch_core
from torch_core.plan.plan import DeviceLimits
from torch_core.variants.in_use import variants_in_use
from torch_core.variants.resources import Resources, measure, read_table, write_table

VARIANTS = variants_in_use()


@pytest.mark.parametrize("label", VARIANTS)
def test_a_variant_in_use_fits_a_block_and_a_hot_one_does_not_spill(label):
    variant, hot = VARIANTS[label]
    resources = measure(variant, arch=90)
    assert resources.shared_memory <= DeviceLimits().shared_memory
    if hot:
        # Another release than the recorded one hands out registers in its own way: a few words more.
        assert resources.spilled <= (0 if triton.__version__ == read_table()[0] else 32)


def test_what_gluon_renamed_is_called_by_its_newest_name():
    old = re.compile(r"\btma\.async_|\._reinterpret\b")
    package = Path(torch_core.__file__).parent
    found = [path.name for path in package.glob("*/**/*.py") if old.search(path.read_text())]
    assert found == ["gluon_names.py"]


@pytest.mark.nightly
@pytest.mark.parametrize("label", VARIANTS)
def test_the_recorded_resources_are_those_of_the_kernel(label):
    version, recorded = read_table()
    if version == triton.__version__:
        assert measure(VARIANTS[label][0]) == recorded[label], "run `jattn bench tune --compile-table`"


def test_the_recorded_table_has_rows_for_every_plan_in_use():
    _, recorded = read_table()
    assert {label.split(":")[0] for label in recorded} == {label.split(":")[0] for label in VARIANTS}


def test_a_written_table_is_read_back(tmp_path):
    rows = {"decode: a_kernel": Resources(registers=168, shared_memory=71680, spilled=0, num_warps=4)}
    write_table(rows, tmp_path / "table.json")
    assert read_table(tmp_path / "table.json") == (triton.__version__, rows)
