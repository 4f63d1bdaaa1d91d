"""The records of ops: every function that they name exists, and launch knows ops by registration alone."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

import torch_core.serves  # noqa: F401  (all rooms, whose ops are registered)
from torch_core.base.errors import InvalidInput
from torch_core.launch.call import Call
from torch_core.launch.op import loaded, registered_ops
from torch_core.launch.planner import plan_call
from torch_core.launch.run import run_on_cpu

LAUNCH = Path(__file__).resolve().parents[2] / "torch_core" / "launch"


@pytest.mark.parametrize("op", registered_ops(), ids=lambda op: op.call.name)
def test_every_function_of_an_op_can_be_loaded(op):
    assert all(callable(loaded(name)) for name in (op.reference, op.cpu, op.plan))


@dataclass(frozen=True, kw_only=True)
class UnknownCall(Call):
    name = "unknown"


@pytest.mark.parametrize("run", [run_on_cpu, plan_call])
def test_a_call_of_no_op_is_refused(run):
    with pytest.raises(InvalidInput, match="call is a UnknownCall, which is not the call of an op"):
        run(UnknownCall())


def test_launch_names_no_op():
    names = {op.call.name for op in registered_ops()} | {op.call.__name__ for op in registered_ops()}
    named = {
        (path.name, word)
        for path in LAUNCH.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (word := getattr(node, "id", None) or getattr(node, "value", None)) in names
    }
    assert named == set()
