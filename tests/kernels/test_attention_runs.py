"""Runs of chunks: results in Triton's interpreter, whose bits do not depend on how many chunks a program takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.attention_cases import AttentionCase, assert_matches_reference, paged_case
from tests.support.interpret import run_interpreted_operation
from torch_core.attention.kernels.split import plan as split
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Up to 12 chunks of 128 keys or more, and about 12 runs."""
    for name, value in {
        "_SMALL_WORK": {1: 0, 2: 0, 4: 0},
        "_TARGET_PROGRAMS": 12,
        "_RUN_CHUNKS": 12,
        "_RUN_LEAST": 128,
    }.items():
        monkeypatch.setattr(split, name, value)
    monkeypatch.setattr(split, "_SHORTER", {1: {64: (128, 12, 64)}, 2: {64: (128, 12, 64)}})


def _run(case: AttentionCase, runs: int | None = None, **changes: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the output of a batch in about `runs` runs, and the most chunks of a sequence."""
    call = case.call()
    plan = plan_call.__wrapped__(call.map(array_spec), DeviceLimits(arch=89))
    first = plan.launches[-2]
    constexprs = dict(first.constexprs)
    assert constexprs["RUNS"] is not None
    if runs is not None:
        # Every chunk may be a run, and padded tokens are cleared behind them.
        most = call.num_seqs * dict(plan.scratch)["partial_max"].shape[1] + call.num_tokens
        changed = replace(first, grid=(most,), constexprs=tuple({**constexprs, "RUNS": runs}.items()))
        plan = replace(plan, launches=(*plan.launches[:-2], changed, plan.launches[-1]))
    # What no program writes is not read.
    scratch = {name: torch.full(spec.shape, torch.nan) for name, spec in plan.scratch}
    out = run_interpreted_operation(plan, {**call.arrays(), **scratch, **changes})["out"]
    return out, int((~scratch["partial_max"].isnan()).sum(1).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ((1500, 390, 130, 5, 0), (1, 1, 1, 1, 0)),
        ((1, 200, 1500, 700, 3), (1, 2, 2, 1, 2)),
        ((1500,) * 5, (1,) * 5),
        ((0, 900, 0, 1500, 0), (0, 40, 0, 1, 0)),
    ],
)
def test_runs_of_several_chunks_have_the_bits_of_single_ones(seq_lens, query_lens, dtype, seed):
    case = paged_case(
        seed, seq_lens=seq_lens, query_lens=query_lens, num_heads=2, num_kv_heads=1, head_size=16, dtype=dtype,
        padding_tokens=3, poison=float("nan"),
    )  # fmt: skip
    single, chunks = _run(case, runs=1 << 20)
    assert chunks > 4
    assert_matches_reference(case, single)
    for runs in (1, 7):
        out, found = _run(case, runs)
        assert found == chunks
        torch.testing.assert_close(out, single, rtol=0, atol=0)


def test_long_neighbours_change_the_runs_and_no_bit(seed):
    case = paged_case(
        seed, seq_lens=[700, 1500, 1500, 1500], query_lens=[1] * 4, num_heads=2, num_kv_heads=1, head_size=16
    )
    lens = case.tensors("cpu")["seq_lens"].clone()
    lens[2:] = 1
    among_long, _ = _run(case)
    among_short, _ = _run(case, seq_lens=lens)
    torch.testing.assert_close(among_short[:2], among_long[:2], rtol=0, atol=0)
