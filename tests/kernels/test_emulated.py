"""The emulator of Gluon kernels finds what is wrong with how warps wait for one another."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.emulated.language import Language
from tests.support.emulated.machine import Machine
from tests.support.emulated.run import run_emulated_launch
from tests.support.emulated.scheduler import Deadlock, Scheduler
from tests.support.emulated.values import Shared, Tensor
from tests.support.gluon_kernels import squares_kernel
from torch_core.launch.plan import Descriptor, LaunchPlan, Pointer

_TILES = 6


def _run(fault: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(_TILES * 64, 64, generator=generator).bfloat16()
    out = torch.full((64, 64), torch.nan)
    launch = LaunchPlan(
        squares_kernel,
        (1,),
        (("source", Descriptor("source", source.shape, (64, 1), (64, 64))), ("out", Pointer("out"))),
        (("TILES", _TILES), ("FAULT", fault)),
        writes=("out",),
    )
    run_emulated_launch(launch, {"source": source, "out": out}, seed)
    tiles = source.double().reshape(_TILES, 64, 64)
    return out, (tiles @ tiles.transpose(1, 2)).sum(0).float()


@pytest.mark.parametrize("order", range(5))
def test_a_kernel_without_a_fault_computes_what_it_should(order: int, seed: int) -> None:
    torch.testing.assert_close(*_run("none", seed + order), rtol=1e-5, atol=1e-3)


def test_a_tile_that_is_given_away_before_its_product_has_ended_shows_in_the_result(seed: int) -> None:
    found = [_run("early", seed + order) for order in range(20)]
    assert not all(torch.allclose(out, exact, rtol=1e-5, atol=1e-3) for out, exact in found)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("kept", Deadlock, "all wait: _square: phase 1 of a barrier; _load: phase 0 of a barrier"),
        ("running", AssertionError, "a product was read before it was waited for"),
    ],
)
def test_a_fault_that_never_ends_well_is_an_error(fault: str, error: type[Exception], message: str, seed: int) -> None:
    with pytest.raises(error, match=re.escape(message)):
        _run(fault, seed)


def test_a_copy_that_may_come_after_the_program_has_ended_is_an_error(seed: int) -> None:
    with pytest.raises(AssertionError, match="the program ended before 1 of its copies"):
        [_run("left", seed + order) for order in range(10)]


def test_threads_that_arrive_where_nobody_waits_are_an_error() -> None:
    with pytest.raises(AssertionError, match="the program ended with 128 threads at hardware barrier 9"):
        _run_roles(0, lambda machine: {"signal": lambda: machine.hardware_barrier(9, 256, waits=False)})


@pytest.mark.parametrize("order", range(8))
def test_a_phase_that_may_end_before_the_one_before_was_seen_is_an_error_in_any_order(order: int, seed: int) -> None:
    memory = Shared(np.zeros(1, np.int64))

    def roles(machine: Machine) -> dict[str, Callable[[], Any]]:
        machine.barrier(memory).open(1)
        return {
            "signal": lambda: [machine.arrive(memory) for _ in range(2)],
            "see": lambda: [machine.await_phase(memory, phase) for phase in range(2)],
        }

    # If both phases have ended before the first wait, it is for the third one.
    with pytest.raises(AssertionError, match=r"before see has seen the one before|phase 1 is over|see: phase 0"):
        _run_roles(seed + order, roles)


@pytest.mark.parametrize("order", range(8))
def test_a_role_that_does_not_know_that_a_hardware_barrier_was_full_arrives_twice(order: int, seed: int) -> None:
    def roles(machine: Machine) -> dict[str, Callable[[], Any]]:
        return {
            name: lambda waits=waits: [machine.hardware_barrier(9, 256, waits=waits) for _ in range(2)]
            for name, waits in {"signal": False, "see": True}.items()
        }

    with pytest.raises(AssertionError, match="signal may arrive twice at hardware barrier 9 before it is full"):
        _run_roles(seed + order, roles)


def test_a_program_that_waits_for_one_that_starts_after_it_is_an_error() -> None:
    scheduler, started = Scheduler(0, resident=1), list[int]()

    def program(number: int) -> None:
        started.append(number)
        scheduler.wait(lambda: len(started) == 2, "both programs")

    with pytest.raises(Deadlock, match="all wait"):
        scheduler.run((f"program {i}", 4, functools.partial(program, i)) for i in range(2))


def test_what_is_chosen_from_integers_of_a_loop_is_int32_as_in_a_kernel() -> None:
    language = Language(Machine(Scheduler(0)), program=0, programs=1)
    chosen: list[Any] = [0, 0]
    for base in range(0, 64, 32):
        chosen = [language.where(Tensor(np.arange(2) > 0), base, other) for other in chosen]
    assert [(x.dtype.name, x.array.tolist()) for x in chosen] == [("int32", [0, 32])] * 2


def test_each_role_may_be_late_by_any_time() -> None:
    orders = [_order(seed) for seed in range(40)]
    assert any("a" * 50 in order for order in orders)
    assert any("b" * 50 in order for order in orders)
    assert any("ababab" in order for order in orders)


def _order(seed: int) -> str:
    """The order in which two roles of 100 steps take them."""
    taken = list[str]()

    def role(machine: Machine, name: str) -> None:
        for _ in range(100):
            taken.append(name)
            machine.wait(lambda: True, "")

    _run_roles(seed, lambda machine: {name: functools.partial(role, machine, name) for name in "ab"})
    return "".join(taken)


def _run_roles(seed: int, roles: Callable[[Machine], Mapping[str, Callable[[], Any]]]) -> None:
    """Runs a program whose roles, of four warps each, come from its machine."""
    scheduler = Scheduler(seed)
    machine = Machine(scheduler)
    given = [(name, 4, function) for name, function in roles(machine).items()]
    scheduler.run([("program", 4, lambda: machine.run(given))])
