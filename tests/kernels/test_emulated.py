"""The emulator of Gluon kernels finds what is wrong with how warps wait for one another."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from tests.support.emulated.machine import Deadlock, Machine
from tests.support.emulated.run import run_emulated_launch
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
    found = [_run("early", seed + order) for order in range(10)]
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
    machine = Machine(0)
    with pytest.raises(AssertionError, match="the program ended with 128 threads at hardware barrier 9"):
        machine.run([("signal", 4, lambda: machine.hardware_barrier(9, 256, waits=False))])


def test_each_role_may_be_late_by_any_time() -> None:
    orders = [_order(seed) for seed in range(40)]
    assert any("a" * 50 in order for order in orders)
    assert any("b" * 50 in order for order in orders)
    assert any("ababab" in order for order in orders)


def _order(seed: int) -> str:
    """The order in which two roles of 100 steps take them."""
    machine, taken = Machine(seed), list[str]()

    def role(name: str) -> None:
        for _ in range(100):
            taken.append(name)
            machine.wait(lambda: True, "")

    machine.run([(name, 4, functools.partial(role, name)) for name in "ab"])
    return "".join(taken)
