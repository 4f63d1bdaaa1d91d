"""Our operations have the parameters of vLLM's (names, order and defaults), and our metadata its fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.vllm.signatures import BUILDERS, METADATA, OF_KERNELS, OF_STATES, OPERATIONS, main, of_ours, recorded
from torch_core.vllm import ops
from torch_core.vllm.ops import states


@pytest.mark.parametrize("name", [*OPERATIONS, *OF_STATES])
def test_an_operation_has_the_parameters_of_vllms(name):
    assert of_ours((OPERATIONS | OF_STATES)[name]) == recorded()[name]


def test_every_operation_is_in_the_table():
    assert set(recorded()) == {*OPERATIONS, *OF_STATES, *BUILDERS}
    assert {function.__name__ for function in OPERATIONS.values()} == set(ops.__all__)
    assert all(hasattr(states, function.__name__) for function in OF_STATES.values())


@pytest.mark.parametrize("name", METADATA)
def test_metadata_has_the_fields_of_vllms_but_plans_of_its_kernels(name):
    own = {field.name for field in dataclasses.fields(METADATA[name][0])}
    assert set(recorded("metadata")[name]) - own <= OF_KERNELS


@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_takes_its_arguments_in_vllms_order(name):
    build: Any = BUILDERS[name].build  # type: ignore[attr-defined]
    theirs = recorded()[name]
    assert of_ours(build)[: len(theirs)] == theirs


@pytest.mark.parametrize("differs", [False, True])
def test_the_command_compares_a_checkout_with_the_table(differs, tmp_path, monkeypatch, capsys):
    for name, parameters in recorded().items():
        folder = "backends" if name in BUILDERS else "ops"
        text = "def {}({}): ...\n" if name not in BUILDERS else "class {}:\n    def build({}): ...\n"
        shown = "" if differs else ", ".join(parameters).replace("inf)", "float('inf'))")
        _add(
            tmp_path, name, f"v1/attention/{folder}" if "/" not in name else "", text.format(name.split(".")[1], shown)
        )
    for name, fields in recorded("metadata").items():
        base = METADATA[name][1]
        own = "".join(f"    {field}: int\n" for field in fields)
        _add(tmp_path, name, "v1/attention/backends", f"class {name.split('.')[1]}:\n{own}")
        if base:
            _add(tmp_path, base, "v1/attention/backends", f"class {base.split('.')[1]}:\n    pass\n", once=True)
    monkeypatch.setattr("sys.argv", ["signatures", str(tmp_path)])
    assert main() == differs
    count, out = len(recorded()), capsys.readouterr().out
    assert f"{0 if differs else count} of {count} operations" in out
    assert f"{len(METADATA)} of {len(METADATA)} metadata" in out


def _add(root: Any, name: str, folder: str, text: str, *, once: bool = False) -> None:
    path = root / "vllm" / folder / f"{name.split('.')[0]}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (once and path.exists()):
        with path.open("a") as stream:
            stream.write(text)
