"""The sum over devices, in Triton's interpreter: two workspaces in the memory of one CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.interpret import run_interpreted_operation
from torch_core.all_reduce.plan import plan_all_reduce, plan_exchange, sums, workspace_words
from torch_core.errors import InvalidInput
from torch_core.plan.plan import OperationPlan
from torch_core.run import dtype_name, torch_dtype
from torch_core.specs import ArraySpec

WORLD = 2


class Devices:
    """Ranks that take their turns one after the other: what a rank waits for must be there already."""

    def __init__(self) -> None:
        self.workspaces = [torch.zeros(workspace_words(WORLD), dtype=torch.int32) for _ in range(WORLD)]
        addresses = [workspace.data_ptr() for workspace in self.workspaces]
        rows = np.asarray([[rank, own, *addresses] for rank, own in enumerate(addresses)], np.uint64)
        self.tables = torch.from_numpy(rows.view(np.int32))

    def run(self, rank: int, x: torch.Tensor, plan: OperationPlan | None = None) -> torch.Tensor:
        plan = plan_all_reduce(ArraySpec(tuple(x.shape), dtype_name(x.dtype)), WORLD) if plan is None else plan
        return run_interpreted_operation(_impatient(plan), {"x": x, "peers": self.tables[rank]})["out"]

    def summed(self, parts: list[torch.Tensor], plan: OperationPlan | None = None) -> list[torch.Tensor]:
        """What every rank gets: the first one's blocks run again, once the others have sent theirs."""
        before = self.workspaces[0].clone()
        self.run(0, parts[0], plan)
        self.workspaces[0].copy_(before)
        others = [self.run(rank, part, plan) for rank, part in enumerate(parts[1:], 1)]
        after = [workspace.clone() for workspace in self.workspaces[1:]]
        result = self.run(0, parts[0], plan)
        for workspace, kept in zip(self.workspaces[1:], after, strict=True):
            # What has been read comes a second time.
            workspace.copy_(kept)
        return [result, *others]


def _impatient(plan: OperationPlan) -> OperationPlan:
    (launch,) = plan.launches
    constants = dict(launch.constexprs) | {"MAX_POLLS": 1}
    return replace(plan, launches=(replace(launch, constexprs=tuple(constants.items())),))


def parts_of(shape: tuple[int, ...], dtype: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(torch_dtype(dtype)) for _ in range(WORLD)]


@pytest.mark.parametrize("shape", [(1, 64), (3, 514), (2,)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_rank_has_the_float32_sum_rounded_once(dtype: str, shape: tuple[int, ...], seed: int) -> None:
    parts = parts_of(shape, dtype, seed)

    results = Devices().summed(parts)

    expected = (parts[0].float() + parts[1].float()).to(torch_dtype(dtype))
    assert all(torch.equal(result, expected) for result in results)


def test_calls_of_other_sizes_in_turn_take_nothing_from_each_other(seed: int) -> None:
    devices = Devices()
    for call, size in enumerate((700, 2, 1400, 2, 700, 1400)):
        parts = parts_of((size,), "float32", seed + call)
        expected = parts[0] + parts[1]
        assert all(torch.equal(result, expected) for result in devices.summed(parts))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_a_rank_never_sent_is_nan(dtype: str, seed: int) -> None:
    (part, _) = parts_of((6,), dtype, seed)

    assert Devices().run(0, part).isnan().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_nan_of_all_ones_is_sent_as_words_that_can_be_told_from_none(dtype: str) -> None:
    ones = torch.full((8,), -1, dtype=torch.int32).view(torch_dtype(dtype))
    devices = Devices()

    devices.run(0, ones)

    assert torch.count_nonzero(devices.workspaces[1]) == 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_of_zeros_are_zeros(dtype: str) -> None:
    zeros = torch.zeros(6, dtype=torch_dtype(dtype))
    devices = Devices()

    for _ in range(3):
        assert all(torch.equal(result, zeros) for result in devices.summed([zeros, zeros]))


@pytest.mark.parametrize(("size", "dtype"), [(3, "bfloat16"), (0, "float32"), (4, "int32"), (1 << 20, "float32")])
def test_what_is_no_small_array_of_whole_words_is_refused_with_the_limit(size: int, dtype: str) -> None:
    x = ArraySpec((size,), dtype)
    assert not sums(x, WORLD)
    with pytest.raises(InvalidInput, match="1048576 bytes"):
        plan_all_reduce(x, WORLD)


@pytest.mark.parametrize("parts", [1, WORLD])
def test_every_rank_has_the_parts_of_all_that_are_for_it(parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = [
        torch.randint(-(2**31), 2**31 - 1, (parts, 300), generator=generator, dtype=torch.int32) for _ in range(WORLD)
    ]

    results = Devices().summed(given, plan_exchange(ArraySpec((parts, 300), "int32"), WORLD))

    for rank, result in enumerate(results):
        assert torch.equal(result, torch.stack([part[rank % parts] for part in given]))
