"""A benchmark under way: what fails, what is given up, and what JAX programs are chained of."""

from __future__ import annotations

import math

import pytest
import torch

from jattn.bench import measure
from jattn.bench.report import Row
from jattn.bench.session import Session, in_graph
from torch_core.base.errors import Unsupported


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(measure, "require_cuda", lambda name: None)
    monkeypatch.setattr(measure, "copy_bytes_per_second", lambda: 1e12)
    monkeypatch.setattr(measure, "matmul_flops", lambda: 1e15)
    monkeypatch.setattr(measure, "device_name", lambda: "a device")
    monkeypatch.setattr(measure, "graph_us", lambda calls: float(sum(call() for call in calls)))
    return Session("decode")


def fail(batches: list[int]) -> float:
    raise Unsupported("no\nroom")


def test_a_column_that_fails_is_a_note_and_the_others_are_timed(session: Session) -> None:
    columns = {"FA3": fail, "jattn": in_graph(lambda batch: lambda: batch)}

    row = session.add(Row("1 x 8", 2.0, {}), columns, [3, 4])

    assert row == session.report("decode").rows[0]
    assert row.us["jattn"] == 7.0
    assert math.isnan(row.us["FA3"])
    assert session.report("decode").notes == ("FA3 at 1 x 8: no",)


def test_a_note_names_the_place_that_it_is_given(session: Session) -> None:
    session.add(Row("8 paged", 2.0, {}), {"FA3": fail}, [], place="8")

    assert session.report("decode").notes == ("FA3 at 8: no",)


def test_a_required_column_that_fails_is_raised(session: Session) -> None:
    with pytest.raises(Unsupported, match="no\nroom"):
        session.add(Row("1 x 8", 2.0, {}), {"jattn": fail}, [], required=("jattn",))


def test_batches_are_given_up_after_their_row(session: Session) -> None:
    batches = [1, 2]
    session.add(Row("1 x 8", 2.0, {}), {}, batches)

    assert batches == []


def test_a_report_has_the_ceilings_and_the_values(session: Session) -> None:
    report = session.report("decode, fp8", values={"calls": 3.0})

    assert (report.name, report.device, report.values) == ("decode, fp8", "a device", {"calls": 3.0})
    assert (report.copy_bytes_per_second, report.matmul_flops) == (1e12, 1e15)


@pytest.mark.parametrize(("call_us", "programs"), [(600.0, [(36.0, 4)]), (150.0, [(36.0, 4), (6.0**8, 16)])])
def test_a_chained_program_feeds_each_call_with_the_result_of_the_one_before_and_is_long(
    call_us: float, programs: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def jax_us(program, arguments, *, calls, rounds, donated):
        found.append((program(*arguments, donated).item(), calls))
        return call_us

    monkeypatch.setattr(measure, "jax_us", jax_us)
    tensors = [(torch.full((1,), 2.0),), (torch.full((1,), 3.0),)]

    us = measure.chained_us(lambda query, factor: query * factor, torch.ones(1), tensors, rotations=2, rounds=5)

    assert (us, found) == (call_us, programs)


@pytest.mark.parametrize("call_us", [0.0, -3.0])
def test_a_program_of_no_measurable_time_is_followed_by_a_longer_one(
    call_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(measure, "jax_us", lambda *_, calls, **__: found.append(calls) or call_us)

    measure.chained_us(lambda query, one: query * one, torch.ones(1), [(torch.ones(1),)], rotations=2)

    assert found[0] == 2
    assert found[1] > 2


def test_what_a_row_of_programs_takes_at_its_ends_is_not_a_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def program(last: float) -> float:
        clock[0] += 3e-6
        return last

    def block_until_ready(last: float) -> float:
        clock[0] += 500e-6
        return last

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr("jax.block_until_ready", block_until_ready)

    assert measure.jax_us(program, (1.0,), calls=2) == pytest.approx(1.5)
