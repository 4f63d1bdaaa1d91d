"""Our operations have the parameters of vLLM's: names, order and defaults."""

from __future__ import annotations

import pytest

from tests.vllm.signatures import OPERATIONS, main, of_ours, recorded
from torch_core.vllm import ops


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_parameters_of_vllms(name):
    assert of_ours(OPERATIONS[name]) == recorded()[name]


def test_every_operation_is_in_the_table():
    assert set(recorded()) == set(OPERATIONS)
    assert {function.__name__ for function in OPERATIONS.values()} == set(ops.__all__)


@pytest.mark.parametrize(("source", "code"), [("def f(a, b=1): ...", 1), ("def {name}({parameters}): ...", 0)])
def test_the_command_compares_a_checkout_with_the_table(source, code, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "vllm/v1/attention/ops"
    folder.mkdir(parents=True)
    for name, parameters in recorded().items():
        file, function = name.split(".")
        text = source.format(name=function, parameters=", ".join(parameters)).replace("def f(", f"def {function}(")
        with (folder / f"{file}.py").open("a") as stream:
            stream.write(f"{text}\n")
    monkeypatch.setattr("sys.argv", ["signatures", str(tmp_path)])
    assert main() == code
    assert f"{0 if code else len(OPERATIONS)} of {len(OPERATIONS)} operations" in capsys.readouterr().out
