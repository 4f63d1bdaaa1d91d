"""Every kernel variant in use compiles for Hopper, fits a block, does not spill where it is hot, and is on record."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton

import torch_core
from torch_core.launch.plan import DeviceLimits
from torch_core.variants.in_use import variants_in_use
from torch_core.variants.resources import Resources, Table, measure, read_table, write_table

VARIANTS = variants_in_use()
TABLE = read_table()
ROW = Resources(registers=168, shared_memory=71680, spilled=0, num_warps=4)
ONE = Table(triton.__version__, {"decode: a_kernel": ROW}, {"decode: a_kernel": "a1b2"})


@pytest.mark.parametrize("label", VARIANTS)
def test_a_variant_in_use_fits_a_block_and_a_hot_one_does_not_spill(label):
    variant, hot = VARIANTS[label]
    # A variant that is the recorded one, word for word, need not be compiled again: what the record says of it the
    # nightly run verifies. One that has changed since is compiled here, before somebody records it.
    resources = TABLE.row_of(label, variant) or measure(variant, arch=90)
    assert resources.shared_memory <= DeviceLimits().shared_memory
    # Another release than the recorded one hands out registers in its own way.
    if hot and triton.__version__ == TABLE.triton:
        assert resources.spilled == 0


def test_what_gluon_renamed_is_called_by_its_newest_name():
    old = re.compile(r"\b(tma|async_copy)\.async_|\._reinterpret\b")
    package = Path(torch_core.__file__).parent
    found = [path.name for path in package.glob("*/**/*.py") if old.search(path.read_text())]
    assert found == ["gluon_names.py"]


@pytest.mark.nightly
@pytest.mark.parametrize("label", VARIANTS)
def test_the_recorded_resources_are_those_of_the_kernel(label):
    if TABLE.triton == triton.__version__:
        assert measure(VARIANTS[label][0]) == TABLE.resources[label], "run `jattn bench tune --compile-table`"


def test_the_recorded_table_has_rows_for_every_plan_in_use():
    plans = {label.split(":")[0] for label in VARIANTS}
    assert {label.split(":")[0] for label in TABLE.resources} == plans
    assert {label.split(":")[0] for label in TABLE.keys} == plans


def test_a_written_table_is_read_back(tmp_path):
    write_table(ONE, tmp_path / "table.json")
    assert read_table(tmp_path / "table.json") == ONE


def test_a_key_does_not_depend_on_which_kernel_was_looked_at_first():
    keys = []
    for labels in (list(VARIANTS), list(reversed(VARIANTS))):
        for module in [module for name, module in sys.modules.items() if name.startswith("torch_core.")]:
            for function in vars(module).values():
                if hasattr(type(function), "cache_key"):
                    function.hash = None
        keys.append({label: VARIANTS[label][0].key() for label in labels})
    assert keys[0] == keys[1]


def test_a_row_stands_for_the_very_variant_and_triton_that_it_was_recorded_with():
    variant = VARIANTS["copy blocks: copy_blocks_kernel"][0]
    table = replace(ONE, keys={"decode: a_kernel": variant.key()})
    assert table.row_of("decode: a_kernel", variant) == ROW
    assert table.row_of("decode: a_kernel", replace(variant, num_warps=2 * variant.num_warps)) is None
    assert replace(table, triton="3.5.0").row_of("decode: a_kernel", variant) is None
    assert table.row_of("a new one", variant) is None
