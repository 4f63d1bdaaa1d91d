"""Faults that other engines shipped, planted here on purpose: each must be caught by one of our own checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torch_core.base.errors import InvalidInput
from torch_core.metadata import SequenceRow, build_common_metadata, check_metadata, metadata_layout
from torch_core.metadata import tables as tables_module
from torch_core.vllm import StepBuffers

ROWS = [SequenceRow([5, 6], 3, 3), SequenceRow([9, 7], 4, 1)]
SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 16, "num_seqs": 4, "num_tokens": 8, "max_blocks": 3}


def test_fault_16_a_table_without_its_last_column_is_caught_while_building(monkeypatch):
    honest = tables_module.write_tables

    def loses_last_column(tables, out, live, totals, **options):
        honest(tables, out, live, totals, **options)
        out[np.arange(len(tables)), live - 1] = 0

    monkeypatch.setattr(tables_module, "write_tables", loses_last_column)

    with pytest.raises(InvalidInput, match=r"^block_tables\[0, 1\] is the null block but tokens 4..5 are visible"):
        build_common_metadata(ROWS, **SIZES)


def test_fault_17_a_running_sum_that_ends_before_the_padding_is_caught():
    step = build_common_metadata(ROWS, **SIZES)
    assert step.layout is not None
    assert step.packed is not None
    assert step.query_start_loc.base is not None
    step.query_start_loc.base.setflags(write=True)
    layout = step.layout["query_start_loc"]
    step.packed[layout.offset + 3 : layout.offset + 5] = 0

    with pytest.raises(InvalidInput, match=r"^query_start_loc\[3\] is 0 after 4; it cannot decrease"):
        check_metadata(step)


def buffers_in_flight_differ(buffers: StepBuffers) -> bool:
    return not np.shares_memory(buffers.host_buffer(1), buffers.host_buffer(2))


def test_fault_18_a_ring_that_reuses_a_buffer_in_flight_is_caught():
    class OneBuffer(StepBuffers):
        def host_buffer(self, step):
            buffer = super().host_buffer(step)
            self._free.append(self._taken[step])
            return buffer

    layout = metadata_layout(num_seqs=4, num_tokens=8, max_blocks=3)

    assert buffers_in_flight_differ(StepBuffers(layout, "cpu", depth=2))
    assert not buffers_in_flight_differ(OneBuffer(layout, "cpu", depth=1))


def test_fault_18_a_record_whose_buffer_was_written_again_is_caught():
    layout = metadata_layout(num_seqs=4, num_tokens=8, max_blocks=3)
    buffer = np.zeros(layout.num_elements, np.int32)
    step = build_common_metadata(ROWS, layout=layout, buffer=buffer, **SIZES)
    build_common_metadata([SequenceRow([3], 0, 1)], layout=layout, buffer=buffer, **SIZES)

    with pytest.raises(InvalidInput, match=r"^query_start_loc\[2\] equals query_start_loc\[1\]"):
        check_metadata(step)


def test_fault_19_a_stale_tail_in_a_wider_table_is_caught(monkeypatch):
    def leaves_the_tail(tables, out, live, totals, **options):
        for index, ids in enumerate(tables):
            out[index, : live[index]] = ids[: live[index]]

    layout = metadata_layout(num_seqs=4, num_tokens=8, max_blocks=3)
    buffer = np.zeros(layout.num_elements, np.int32)
    build_common_metadata([SequenceRow([1, 2, 3], 9, 1)], layout=layout, buffer=buffer, **SIZES)
    monkeypatch.setattr(tables_module, "write_tables", leaves_the_tail)

    step_rows = [SequenceRow([5, 6], 3, 3)]
    with pytest.raises(InvalidInput, match=r"^block_tables\[0, 2\] is 3, beyond the 2 blocks of sequence 0"):
        check_metadata(build_common_metadata(step_rows, layout=layout, buffer=buffer, **SIZES))
