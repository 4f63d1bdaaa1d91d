"""Several processes with one model: the tokens of one, differing starts refused, a death that ends the others."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jattn import __version__
from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams, join
from jattn.llm.models import quantize_fp8
from jattn.llm.processes import (
    HEARTBEAT_SECONDS,
    check_agreement,
    check_together,
    model_facts,
    shared_channel,
    tell_failure,
)
from tests.engine import followed, retrained
from torch_core.base.errors import InvalidInput

PROMPT = "The for statement is used to"
ROOT = Path(__file__).resolve().parents[2]


def start(process: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    """One of two processes that generate with one model, a CPU device each."""
    command = ["jattn", "generate", "--prompt", PROMPT, "--tensor-parallel-size", "2"]
    command += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(process)]
    return run(*command, *arguments)


def run(module: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python module as a process that has one CPU device."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def outcomes(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        texts = [process.communicate(timeout=400) for process in processes]
        return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()


def found_by_two(module: str) -> Any:
    """What the first of two processes of a module found, if both ended well."""
    port = str(free_port())
    (code, out, error), (other_code, *_) = outcomes([run(module, port, each) for each in ("0", "1")])
    assert (code, other_code) == (0, 0), error
    return json.loads(next(line for line in out.splitlines() if line.startswith("found")).removeprefix("found"))


@pytest.mark.nightly
def test_two_processes_say_what_one_says() -> None:
    port = free_port()
    (code, out, _), (other_code, *_) = outcomes(
        [start(process, port, "--max-tokens", "16", "--json") for process in (0, 1)]
    )

    params = SamplingParams(temperature=0.0, max_tokens=16)
    (expected,) = LLM(config=EngineConfig()).generate([PROMPT], params)
    assert (code, other_code) == (0, 0)
    # Gloo says on stdout that it is connected.
    assert json.loads(out[out.index("{") :])["outputs"][0]["token_ids"] == list(expected.outputs[0].token_ids)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("option", "values", "differing", "here"),
    [
        ("--dtype", ("float32", "bfloat16"), "model (dtype); here it is '", ("'float32'", "'bfloat16'")),
        ("--implementation", ("xla", "torch"), "implementation", ("", "")),
        (
            "--hf-overrides",
            ('{"rope_theta": 10000.0}', '{"rope_theta": 5000.0}'),
            "model (rope_theta); here it is ",
            ("10000.0", "5000.0"),
        ),
        ("--tensor-parallel-size", ("2", "1"), "tensor_parallel_size; here it is ", ("2", "1")),
        ("--quantization", (None, "fp8"), "model (parameters); here it is {'float32': ", ("}", "'float8_e4m3fn': ")),
    ],
)
def test_processes_that_were_started_differently_are_refused(
    option: str, values: tuple[str | None, str], differing: str, here: tuple[str, str]
) -> None:
    port = free_port()
    given = [() if value is None else (option, value) for value in values]
    found = outcomes([start(process, port, *more) for process, more in enumerate(given)])

    for (code, _, error), own in zip(found, here, strict=True):
        assert code == 2
        assert f"process 1 differs from process 0 in {differing}" in error
        assert own in error


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_what_one_process_refuses_at_its_start_the_others_are_told(victim: int, tmp_path: Path) -> None:
    port, missing = free_port(), str(tmp_path / "missing")
    found = outcomes([start(each, port, *(["--model", missing] if each == victim else [])) for each in (0, 1)])

    refusal = f"folder is {missing!r}; it is not an existing folder."
    assert [code for code, *_ in found] == [2, 2]
    assert f"jattn: {refusal}" in found[victim][2]
    assert f"jattn: process {victim} ended before the start: {refusal}" in found[1 - victim][2]


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_process_dies_the_other_ends_with_an_error_within_a_minute(victim: int) -> None:
    port = free_port()
    processes = [start(process, port, "--max-tokens", "900") for process in (0, 1)]
    assert processes[0].stdout is not None
    # What Gloo says, the prompt, and some of what follows it.
    processes[0].stdout.read(len(PROMPT) + 150)

    processes[victim].kill()
    died = time.monotonic()
    (code, _, _), _ = outcomes([processes[1 - victim], processes[victim]])

    assert code != 0
    assert time.monotonic() - died < 60


@pytest.mark.nightly
def test_processes_take_new_weights_in_their_sleep_all_or_none() -> None:
    found = found_by_two("tests.engine.retrained")
    whole = Engine(retrained.tiny_decoder(), replace(retrained.CONFIG, tensor_parallel_size=1))
    expected = [retrained.said(whole)]
    for seed in (1, 3):
        whole.update_weights(retrained.weights(seed))
        expected.append(retrained.said(whole))
    first, second, third = expected
    # Those that one process refused are nobody's.
    assert found["said"] == [first, second, second, second, third]
    awake = [text for text in found["refused"] if text.startswith("the engine has several processes and is awake")]
    assert len(awake) == 4
    elsewhere = "process 1 refused what it was given, so nothing has changed; its error says why."
    assert [text for text in found["refused"] if text not in awake] == [elsewhere] * 2


@pytest.mark.nightly
def test_two_processes_copy_and_guess_with_layers_that_keep_a_state_as_one_does() -> None:
    found = found_by_two("tests.engine.followed")
    assert found == {name: followed.said(engine) for name, engine in followed.engines(followed.decoder())}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"coordinator": "host:1"}, "num_processes is None; give coordinator, num_processes, process_id all"),
    "rank": ({"coordinator": "host:1", "num_processes": 2, "process_id": 2}, "process_id is 2; it must be"),
    "port": ({"coordinator": "host", "num_processes": 2, "process_id": 0}, "coordinator is 'host'; it must be HOST:"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_name_a_process_is_refused(case: str) -> None:
    arguments, message = BAD[case]
    with pytest.raises(InvalidInput, match=f"^{message}"):
        join(**arguments)


def test_a_process_alone_agrees_with_itself_and_needs_no_channel() -> None:
    check_agreement({"anything": np.zeros(2)})
    assert shared_channel(None, dict, num_host_blocks=0) is None
    tell_failure("There is nobody.")
    assert HEARTBEAT_SECONDS < 60


def test_sources_that_are_not_installed_are_compared_too(monkeypatch) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("jattn.llm.processes._of_all", lambda numbers: [numbers, [0, *numbers[1:]]])
    with pytest.raises(InvalidInput, match=f"process 1 differs from process 0 in jattn; here it is '{__version__}'"):
        check_agreement({"anything": np.zeros(2)})


def test_models_of_one_shape_differ_in_their_configs_kinds_and_weights() -> None:
    model = retrained.tiny_decoder()
    others = [retrained.tiny_decoder(rope_theta=5e3), retrained.tiny_decoder(), retrained.tiny_decoder()]
    quantize_fp8(others[1])
    norm: Any = others[2].norm
    norm.weight[...] = norm.weight[...] * 2

    assert model_facts(model) == model_facts(retrained.tiny_decoder())
    *configs, parameters = model_facts(model)
    changed, rounded, retuned = ({**found[-1], "config": found[:-1]} for found in map(model_facts, others))
    same = {**parameters, "config": tuple(configs)}
    assert [name for name in same if changed[name] != same[name]] == ["config"]
    assert {"parameters", "shapes"} <= {name for name in same if rounded[name] != same[name]}
    assert [name for name in same if retuned[name] != same[name]] == ["weights"]


@pytest.mark.parametrize("kind", [InvalidInput, TypeError, KeyboardInterrupt])
def test_a_check_that_fails_in_any_way_tells_the_other_processes_first(kind, monkeypatch) -> None:
    said: list[list[bool]] = []

    def gather(has_failed: np.ndarray) -> np.ndarray:
        said.append(has_failed.tolist())
        return has_failed

    def check() -> None:
        raise kind("planted")

    monkeypatch.setattr("jattn.llm.processes.multihost_utils.process_allgather", gather)
    with pytest.raises(kind, match="planted"):
        check_together(check)

    assert said == [[True]]
