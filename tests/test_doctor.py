"""The doctor: what it says on a sound machine, and that no broken part keeps it from speaking."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import pytest
import torch

import jattn.ops
import jattn.pool
from jattn.doctor import Check, DoctorReport, collect, machine, trials
from jattn.doctor.report import Part, look_at


@pytest.fixture(scope="module")
def report() -> DoctorReport:
    return collect()


def texts(report: DoctorReport, section: str) -> dict[str, str]:
    return {check.name: check.text for check in report.checks if check.section == section}


def broken_parts(parts: Callable[[], Iterable[Part]]) -> dict[str, str]:
    return {check.name: check.text for check in look_at("section", parts) if not check.works}


def test_on_a_sound_machine_nothing_is_broken(report: DoctorReport) -> None:
    assert report.broken == ()
    assert str(report).endswith("all parts work")


def test_the_sections_come_in_order(report: DoctorReport) -> None:
    sections = list(dict.fromkeys(check.section for check in report.checks))

    assert sections == [
        "versions",
        "devices",
        "implementations",
        "bits",
        "shared memory",
        "memory",
        "environment",
        "threads",
        "compile caches",
    ]


def test_versions_are_those_that_run(report: DoctorReport) -> None:
    versions = texts(report, "versions")

    assert versions["python"] == platform.python_version()
    assert versions["jax"] == jax.__version__
    assert versions["torch"] == torch.__version__
    assert {"jattn", "jaxlib", "flax", "triton", "numpy", "transformers"} <= set(versions)


def test_every_implementation_works_or_says_why_not(report: DoctorReport) -> None:
    found = texts(report, "implementations")
    available = jattn.ops.available_implementations()

    assert set(found) == {*available, "default"}
    for name, reason in available.items():
        expected = "works (a small paged attention is " if reason is None else f"not here: {reason}"
        assert found[name].startswith(expected)


def test_devices_threads_and_caches_are_named(report: DoctorReport) -> None:
    assert f"default backend {jax.default_backend()!r}" in texts(report, "devices")["jax"]
    assert texts(report, "threads")["torch threads"].startswith(f"{torch.get_num_threads()} within an operation")
    assert set(texts(report, "compile caches")) == {"xla", "triton", "jattn kernels"}


def test_memory_of_the_host_is_counted(report: DoctorReport) -> None:
    available, total = (float(word) for word in texts(report, "memory")["host"].split() if word[0].isdigit())

    assert 0 < available <= total


def test_the_pool_and_the_bridge_are_tried(report: DoctorReport) -> None:
    assert texts(report, "shared memory") == {
        "jax to torch": "zero-copy",
        "torch to jax": "zero-copy",
        "pool address": "the same after 10 donated steps",
    }


def test_bits_are_tried_with_the_threads_that_torch_has(report: DoctorReport) -> None:
    expected = f"a sequence's bits are the same in any batch, with {torch.get_num_threads()} threads"
    assert texts(report, "bits") == {"torch on the CPU": expected}


def test_bits_that_change_with_the_batch_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_core.ops.paged_attention", lambda query, *_, **__: query + len(query))
    [(_, look)] = trials.bits()
    assert look().startswith("a sequence's bits change with its batch (")


def test_a_part_that_raises_becomes_a_line_and_the_others_are_still_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> float:
        raise RuntimeError("the driver is gone\nand a traceback follows")

    monkeypatch.setattr(trials, "_attention_error", fail)

    report = collect()

    assert {(check.name, check.text) for check in report.broken} == {
        (name, "RuntimeError: the driver is gone")
        for name, reason in jattn.ops.available_implementations().items()
        if reason is None
    }
    assert "BROKEN: RuntimeError: the driver is gone" in str(report)
    assert str(report).endswith(f"{len(report.broken)} broken: see above")


def test_a_section_that_cannot_be_listed_keeps_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_backend() -> str:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", no_backend)

    report = collect()

    memory = [check for check in report.checks if check.section == "memory"]
    assert [(check.name, check.works) for check in memory] == [("host", True), ("memory", False)]
    assert memory[1].text == "RuntimeError: Unable to initialize backend 'cuda'"


def test_a_missing_package_is_a_broken_line_and_transformers_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.setattr(machine, "_OPTIONAL", {"transformers": "not installed", "no-such-package": "fine without"})

    broken = broken_parts(machine.versions)

    assert set(broken) == {"flax"}
    assert broken["flax"].startswith("ModuleNotFoundError: ")
    assert machine._version("no-such-package") == "fine without"


def test_a_wrong_result_of_an_implementation_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = jattn.ops.paged_attention
    monkeypatch.setattr(jattn.ops, "paged_attention", lambda *args, **kwargs: honest(*args, **kwargs) + 0.5)

    broken = broken_parts(trials.implementations)

    assert broken["xla"] == "a small paged attention is off by 5.0e-01 from numpy"


def test_a_pool_that_moves_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = iter([(1, 2), (1, 2), (1, 3)])
    monkeypatch.setattr(jattn.pool.KVPool, "addresses", lambda self: next(addresses))

    assert broken_parts(trials.shared_memory) == {
        "pool address": "the donated pool moved in step 1: XLA copies it instead of writing in place",
    }


def test_variables_that_matter_are_shown_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in machine._VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XLA_SECRET", "do not show")

    assert [(name, look()) for name, look in machine.environment()] == [("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")]
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert [look() for _, look in machine.environment()] == ["none that matters here is set"]


@pytest.mark.parametrize(
    ("jax_backend", "torch_sees_cuda", "text"),
    [
        ("cpu", False, "both use the CPU"),
        ("gpu", True, "both use the GPU"),
        ("cpu", True, "torch sees a GPU and JAX does not: pip install 'jattn[cuda13]', or look at JAX_PLATFORMS"),
        (
            "gpu",
            False,
            "JAX sees a GPU and torch does not: implementation='torch' and shared memory need a CUDA build of torch",
        ),
    ],
)
def test_it_says_whether_both_sides_use_the_same_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, jax_backend: str, torch_sees_cuda: bool, text: str
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: jax_backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees_cuda)

    assert dict(machine.devices())["together"]() == text


def test_memory_on_cuda_is_split_between_jax_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"bytes_in_use": 1 << 30, "peak_bytes_in_use": 2 << 30, "bytes_limit": 60 << 30}
    device = types.SimpleNamespace(id=0, memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 3 << 30)

    found = {name: look() for name, look in machine.memory()}

    assert found["cuda:0 jax"] == "1.00 GiB in use, peak 2.00 GiB, takes up to 60.00 GiB"
    assert found["cuda:0 torch"] == "3.00 GiB reserved; 70.00 GiB of 80.00 GiB free for both"


def test_an_allocator_without_figures_is_said_to_have_none() -> None:
    device = types.SimpleNamespace(memory_stats=lambda: None)

    assert machine._jax_memory(device) == "the allocator gives no figures (XLA_PYTHON_CLIENT_ALLOCATOR=platform?)"


def test_a_cache_folder_is_counted(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "kernel").write_bytes(bytes(1 << 20))

    assert machine._folder(tmp_path) == f"{tmp_path} (1 files, 1.0 MiB)"
    assert machine._folder(tmp_path / "none") == f"{tmp_path / 'none'} (not made yet)"


def test_the_report_is_frozen_and_aligned() -> None:
    report = DoctorReport((Check("a", "x", "fine"), Check("b", "longer", "gone", works=False)))

    assert str(report) == "a\n  x       fine\n\nb\n  longer  BROKEN: gone\n\n1 broken: see above"
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.checks = ()  # type: ignore[misc]
