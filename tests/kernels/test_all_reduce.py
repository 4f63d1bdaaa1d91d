"""The sum over devices, in Triton's interpreter: two workspaces in the memory of one CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.interpret import run_interpreted_operation
from torch_core.all_reduce import plan as plans
from torch_core.all_reduce.plan import (
    plan_all_reduce,
    plan_all_reduce_norm,
    plan_exchange,
    plan_merge,
    workspace_words,
)
from torch_core.attention.context_parallel import merge_parts
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import OperationPlan
from torch_core.launch.tensors import dtype_name, torch_dtype

WORLD = 2


@pytest.fixture(autouse=True)
def small_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test copies workspaces many times."""
    monkeypatch.setattr(plans, "_MAX_SUM", 1 << 17)
    monkeypatch.setattr(plans, "_EXCHANGES", plans._EXCHANGES._replace(max_blocks=16))


class Devices:
    """Ranks that take their turns one after the other: what a rank waits for must be there already."""

    def __init__(self, world: int = WORLD) -> None:
        self.world = world
        self.workspaces = [torch.zeros(workspace_words(world), dtype=torch.int32) for _ in range(world)]
        addresses = [workspace.data_ptr() for workspace in self.workspaces]
        rows = np.asarray([[rank, own, *addresses] for rank, own in enumerate(addresses)], np.uint64)
        self.tables = torch.from_numpy(rows.view(np.int32))

    def run(self, rank: int, x: Any, plan: OperationPlan | None = None, **others: Any) -> dict[str, Any]:
        """Runs a plan, or the sum, on a rank's x, or on its arrays by name."""
        plan = plan_all_reduce(spec_of(x), self.world) if plan is None else plan
        arrays = x if isinstance(x, dict) else {"x": x}
        return run_interpreted_operation(_impatient(plan), {**arrays, "peers": self.tables[rank], **others})

    def summed(self, parts: list[torch.Tensor], plan: OperationPlan | None = None) -> list[torch.Tensor]:
        return [found["out"] for found in self.found(parts, plan)]

    def found(
        self, parts: Sequence[Any], plan: OperationPlan | None = None, **others: torch.Tensor
    ) -> list[dict[str, Any]]:
        """What every rank gets: each runs once to send each shot, and again with what the others have sent it."""
        before = self._kept()
        brought = before
        for _ in range(_shots(plan)):
            sent = self._kept()
            for rank, part in enumerate(parts):
                self._restore([brought[at] if at == rank else before[at] for at in range(self.world)])
                self.run(rank, part, plan, **others)
                for other, workspace in enumerate(self.workspaces):
                    if other != rank:
                        sent[other] = torch.where(workspace == before[other], sent[other], workspace)
            self._restore(before)
            brought = sent
        results, after = [], []
        for rank, part in enumerate(parts):
            self._restore([brought[at] if at == rank else before[at] for at in range(self.world)])
            results.append(self.run(rank, part, plan, **others))
            after.append(self.workspaces[rank].clone())
        self._restore(after)
        return results

    def _kept(self) -> list[torch.Tensor]:
        return [workspace.clone() for workspace in self.workspaces]

    def _restore(self, kept: list[torch.Tensor]) -> None:
        for workspace, words in zip(self.workspaces, kept, strict=True):
            workspace.copy_(words)


def spec_of(x: torch.Tensor) -> ArraySpec:
    return ArraySpec(tuple(x.shape), dtype_name(x.dtype))


def _shots(plan: OperationPlan | None) -> int:
    return 1 + (plan is not None and "SHARE" in dict(plan.launches[0].constexprs))


def _impatient(plan: OperationPlan) -> OperationPlan:
    (launch,) = plan.launches
    constants = dict(launch.constexprs) | {"MAX_POLLS": 1}
    return replace(plan, launches=(replace(launch, constexprs=tuple(constants.items())),))


def parts_of(shape: tuple[int, ...], dtype: str, seed: int, world: int = WORLD) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(torch_dtype(dtype)) for _ in range(world)]


@pytest.mark.parametrize("shape", [(1, 64), (3, 514), (2,)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_rank_has_the_float32_sum_rounded_once(dtype: str, shape: tuple[int, ...], seed: int) -> None:
    parts = parts_of(shape, dtype, seed)

    results = Devices().summed(parts)

    expected = (parts[0].float() + parts[1].float()).to(torch_dtype(dtype))
    assert all(torch.equal(result, expected) for result in results)


def test_four_ranks_add_in_their_order(seed: int) -> None:
    parts = parts_of((3, 514), "bfloat16", seed, world=4)

    results = Devices(4).summed(parts)

    expected = (((parts[0].float() + parts[1].float()) + parts[2].float()) + parts[3].float()).bfloat16()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize(
    ("world", "shape", "dtype"),
    [(2, (3, 514), "bfloat16"), (3, (2,), "float16"), (4, (3, 1024), "bfloat16"), (4, (2600,), "float32")],
)
def test_two_shots_have_the_bits_of_one(world: int, shape: tuple[int, ...], dtype: str, seed: int) -> None:
    parts = parts_of(shape, dtype, seed, world)
    devices = Devices(world)

    # The same blocks, and both of their slots, in turn.
    one, *others = (devices.summed(parts, plan_all_reduce(spec_of(parts[0]), world, shots)) for shots in (1, 2, 1))

    for found in others:
        assert all(torch.equal(each, one[0]) for each in found)


@pytest.mark.parametrize("shots", [1, 2])
def test_nothing_that_was_sent_is_left(shots: int, seed: int) -> None:
    parts = parts_of((5, 1024), "bfloat16", seed, world=4)
    devices = Devices(4)

    devices.summed(parts, plan_all_reduce(spec_of(parts[0]), 4, shots))

    # One or two programs and blocks, whose calls are counted.
    assert [torch.count_nonzero(workspace) for workspace in devices.workspaces] == [3 if shots == 1 else 2] * 4


def test_calls_of_other_sizes_in_turn_take_nothing_from_each_other(seed: int) -> None:
    devices = Devices()
    for call, size in enumerate((700, 2, 1400, 2, 700, 1400)):
        parts = parts_of((size,), "float32", seed + call)
        expected = parts[0] + parts[1]
        assert all(torch.equal(result, expected) for result in devices.summed(parts))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_a_rank_never_sent_is_nan(dtype: str, seed: int) -> None:
    (part, _) = parts_of((6,), dtype, seed)

    assert Devices().run(0, part)["out"].isnan().all()


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


@pytest.mark.parametrize("parts", [1, WORLD])
def test_every_rank_has_the_parts_of_all_that_are_for_it(parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = [
        torch.randint(-(2**31), 2**31 - 1, (parts, 300), generator=generator, dtype=torch.int32) for _ in range(WORLD)
    ]

    results = Devices().summed(given, plan_exchange(ArraySpec((parts, 300), "int32"), WORLD))

    for rank, result in enumerate(results):
        assert torch.equal(result, torch.stack([part[rank % parts] for part in given]))


# A row of one block and of two; of three, where a program has the room of four.
@pytest.mark.parametrize(
    ("shape", "dtype", "round_first", "add_one"),
    [
        ((3, 64), "bfloat16", True, False),
        ((3, 64), "float16", False, False),
        ((3, 64), "bfloat16", False, True),
        ((2, 2, 2560), "float16", False, False),
        ((2, 5120), "bfloat16", True, False),
    ],
)
def test_a_row_is_added_to_what_was_there_and_divided_by_its_root_mean_square(
    shape: tuple[int, ...], dtype: str, round_first: bool, add_one: bool, seed: int
) -> None:
    *parts, residual = parts_of(shape, dtype, seed, world=3)
    (weight,) = parts_of(shape[-1:], dtype, seed + 1, world=1)
    plan = plan_all_reduce_norm(
        spec_of(residual), spec_of(weight), WORLD, epsilon=0.5, round_first=round_first, add_one=add_one
    )

    found = Devices().found(parts, plan, residual=residual, weight=weight)

    total = residual + (parts[0].float() + parts[1].float()).to(residual.dtype)
    wide = total.double()
    wide = wide / ((wide * wide).mean(-1, keepdim=True) + 0.5).sqrt()
    expected = wide * (weight.double() + add_one)
    # One rounding or two, and what float32 has of the division; of the smallest numbers, a step of theirs.
    numbers = torch.finfo(residual.dtype)
    bound = (expected.abs() * (1 if round_first else 0.5) * 1.01 + numbers.smallest_normal) * numbers.eps
    for each in found:
        assert torch.equal(each["out"], total)
        assert torch.equal(each["normed"], found[0]["normed"])
        assert ((each["normed"].double() - expected).abs() <= bound).all()


PLAIN = 0


ORDERS = [*itertools.permutations((PLAIN, 64, 2560)), (2560, PLAIN, 2560, PLAIN)]


@pytest.mark.parametrize(
    "widths", [pytest.param(each, marks=[] if at % 3 == 0 else pytest.mark.nightly) for at, each in enumerate(ORDERS)]
)
def test_words_of_a_rank_that_is_a_call_ahead_wait_for_theirs(widths: tuple[int, ...], seed: int) -> None:
    """Sums with and without a norm follow each other in the same blocks, of which their rows take different ones."""
    devices = Devices()
    calls = [Call(width, seed + at) for at, width in enumerate((*widths, widths[0], PLAIN))]
    for rank in range(WORLD):
        calls[0].send(devices, rank)
    for call, following in itertools.pairwise(calls):
        for rank in range(WORLD):
            assert torch.equal(call.read(devices, rank), call.expected)
            following.send(devices, rank)
    for rank in range(WORLD):
        assert torch.equal(calls[-1].read(devices, rank), calls[-1].expected)
    # All that was sent has been read, and is there no more.
    for rank in range(WORLD):
        for width in (PLAIN, 2560):
            assert Call(width, seed).read(devices, rank).isnan().all()


class Call:
    """A sum, with a norm behind it where rows have a width."""

    def __init__(self, width: int, seed: int) -> None:
        self.parts = parts_of((2, width or 3000), "bfloat16", seed)
        self.expected = (self.parts[0].float() + self.parts[1].float()).bfloat16()
        self.plan = None
        self.others: dict[str, torch.Tensor] = {}
        if width:
            weight = torch.ones(width, dtype=torch.bfloat16)
            self.plan = plan_all_reduce_norm(
                spec_of(self.parts[0]), spec_of(weight), WORLD, epsilon=1e-6, round_first=True, add_one=False
            )
            self.others = {"residual": torch.zeros_like(self.parts[0]), "weight": weight}

    def send(self, devices: Devices, rank: int) -> None:
        self._run(devices, rank, keeps=rank)

    def read(self, devices: Devices, rank: int) -> torch.Tensor:
        """What a rank finds, which sends for a second time what the other has already."""
        return self._run(devices, rank, keeps=1 - rank)

    def _run(self, devices: Devices, rank: int, keeps: int) -> torch.Tensor:
        kept = devices.workspaces[keeps].clone()
        found = devices.run(rank, self.parts[rank], self.plan, **self.others)["out"]
        devices.workspaces[keeps].copy_(kept)
        return found


@pytest.mark.parametrize(("width", "shots"), [(2560, 1), (66, 2), (5120, 2)])
def test_four_ranks_norm_what_they_add_in_their_order(width: int, shots: int, seed: int) -> None:
    *parts, residual = parts_of((2, width), "bfloat16", seed, world=5)
    weight = torch.ones(width, dtype=torch.bfloat16)
    plan = plan_all_reduce_norm(
        spec_of(residual), spec_of(weight), 4, epsilon=0.5, round_first=True, add_one=False, shots=shots
    )
    devices = Devices(4)

    # In blocks that have had calls before, of which a row of two blocks has one more often.
    devices.summed([part[:1, :66].contiguous() for part in parts])
    found = devices.found(parts, plan, residual=residual, weight=weight)

    summed = (((parts[0].float() + parts[1].float()) + parts[2].float()) + parts[3].float()).bfloat16()
    for each in found:
        assert torch.equal(each["out"], residual + summed)
        assert torch.equal(each["normed"], found[0]["normed"])
    wide = found[0]["out"].double()
    wide = wide / ((wide * wide).mean(-1, keepdim=True) + 0.5).sqrt()
    # One rounding.
    assert ((found[0]["normed"].double() - wide).abs() <= wide.abs() * 1.01 * 2**-8).all()


def attention_parts(shape: tuple[int, ...], dtype: str, seed: int, world: int) -> list[dict[str, torch.Tensor]]:
    """What each rank has of [tokens, heads, head_size]: one rank saw nothing of row 0, none of row 1 of head 0."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        {"x": x, "x_lse": 20 * torch.randn(shape[:2], generator=generator)} for x in parts_of(shape, dtype, seed, world)
    ]
    for rank, part in enumerate(parts):
        nothing = [0, 1] if rank == 1 else [1]
        part["x"][nothing, 0], part["x_lse"][nothing, 0] = float("nan"), -float("inf")
    return parts


@pytest.mark.parametrize(
    ("shape", "dtype", "out_dtype", "world", "splits", "has_sinks"),
    [
        ((2, 2, 128), "bfloat16", "bfloat16", 2, False, True),
        ((3, 4, 18), "float16", "float32", 2, True, True),
        ((2, 4, 64), "bfloat16", "bfloat16", 4, True, False),
        ((2, 1, 128), "float32", "float32", 2, False, False),
    ],
)
def test_every_rank_has_the_merge_of_all_parts(
    shape: tuple[int, int, int], dtype: str, out_dtype: str, world: int, splits: bool, has_sinks: bool, seed: int
) -> None:
    parts = attention_parts(shape, dtype, seed, world)
    num_heads = shape[1] // world if splits else shape[1]
    sinks = torch.linspace(-20, 20, num_heads) if has_sinks else None
    others = {} if sinks is None else {"sinks": sinks}
    plan = plan_merge(spec_of(parts[0]["x"]), None if sinks is None else spec_of(sinks), num_heads, out_dtype, world)
    devices = Devices(world)

    # In the same blocks as an exchange of other words before.
    devices.found([torch.ones((1, 300), dtype=torch.int32)] * world, plan_exchange(ArraySpec((1, 300), "int32"), world))
    results = devices.found(parts, plan, **others)

    outs, lses = (torch.stack([part[name] for part in parts]).double() for name in ("x", "x_lse"))
    for rank, found in enumerate(results):
        own = slice(rank * num_heads, (rank + 1) * num_heads) if splits else slice(None)
        wide, lse = merge_parts(outs[:, :, own], lses[:, :, own], sinks, library=torch)
        # Float32's exponentials of differences of some tens, and one rounding.
        bound = 2**-17 * outs[:, :, own].nan_to_num().abs().amax(0)
        bound += wide.abs() * (torch.finfo(torch_dtype(out_dtype)).eps if out_dtype != "float32" else 0)
        assert ((found["out"].double() - wide).abs() <= bound).all()
        np.testing.assert_allclose(found["lse"], lse, rtol=1e-6, atol=1e-5)
        if not splits:
            assert torch.equal(found["out"], results[0]["out"])
            assert torch.equal(found["lse"], results[0]["lse"])


def test_what_a_rank_never_sent_makes_the_merge_nan(seed: int) -> None:
    (part, _) = attention_parts((2, 4, 64), "bfloat16", seed, WORLD)

    found = Devices().run(0, part, plan_merge(spec_of(part["x"]), None, 4, "bfloat16", WORLD))

    assert all(each.isnan().all() for each in found.values())
