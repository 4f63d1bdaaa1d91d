"""`jattn serve` as a process: it says where it listens, and finishes what runs when it is told to end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from jattn.cli import main
from tests.support.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ("--engine-config", '{"max_logprobs": 1, "num_scheduler_steps": 2}')


def test_it_runs_as_it_was_told_and_what_runs_is_finished_after_sigterm(tmp_path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", 0, num_hidden_layers=1)
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    command = [sys.executable, "-m", "jattn", "serve", str(folder), "--port", "0", "--api-key-file", str(keys)]
    process = subprocess.Popen(
        [*command, "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--no-warmup", *ENGINE],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        url = next(found.group() for line in process.stderr if (found := re.search(r"http://[0-9.:]+", line)))
        body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        headers = {"Authorization": "Bearer second"}
        refused = httpx.post(f"{url}/v1/completions", json=body | {"logprobs": 2}, headers=headers)
        assert "this engine's max_logprobs is 1." in refused.json()["error"]["message"]
        texts = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=600) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    if not texts:
                        process.send_signal(signal.SIGTERM)
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0])
        assert texts[-1]["finish_reason"] == "length"
        assert process.wait(60) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        assert main(["serve", "--port", str(port)]) == 2

    assert f"jattn: nothing can listen at host '127.0.0.1' and port {port}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "jattn: folder is '/nowhere'; it is not an existing folder."),
        (["--api-key-file", "/nowhere"], "jattn: api_key_file '/nowhere' cannot be read: "),
        (["--port", "99999"], "jattn: port is 99999; it must be from 0 to 65535."),
        (["--host", "192.0.2.1"], "jattn: nothing can listen at host '192.0.2.1' and port 8000: "),
        (["--drain-seconds", "-1"], "jattn: drain_seconds is -1; it must be an int of at least 0."),
        (["--body-seconds", "0"], "jattn: body_seconds is 0.0; it must be above 0."),
        (["--max-body-bytes", "0"], "jattn: max_body_bytes is 0; it must be an int of at least 1."),
        (["--max-num-seqs", "0"], "jattn: max_num_seqs is 0; it must be from 1 to 65536."),
        (["--engine-config", "{"], "jattn: --engine-config is not valid JSON: "),
        (["--engine-config", "[]"], "jattn: --engine-config holds a JSON list; it must be an object."),
        (["--engine-config", '{"scrub_on_free": 1}'], "jattn: scrub_on_free is 1; it must be True or False."),
        (
            ["--engine-config", '{"max_num_seqs": 1}', "--max-num-seqs", "2"],
            "jattn: --engine-config has 'max_num_seqs', which is given as --max-num-seqs, too.",
        ),
        (
            ["--engine-config", '{"mesh": 1}'],
            "jattn: --engine-config has 'mesh'; it may have batch_invariant, block_size, ",
        ),
        (
            ["--engine-config", '{"num_scheduler_steps": 1, "block_size": 0}'],
            "jattn: block_size is 0; it must be from 1 to ",
        ),
    ],
)
def test_a_server_that_cannot_start_says_why(arguments, message, capsys) -> None:
    assert main(["serve", *arguments]) == 2

    assert capsys.readouterr().err.splitlines()[-1].startswith(message)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "tiny"], "model is 'tiny'; it must be NAME=PATH, such as small=models/small."),
        (["--model", "a={}", "--model", "a={}"], "model 'a' is there twice; names differ."),
        (["--model", "a={}", "--served-model-name", "b"], "served_model_name is given; it is the first argument's"),
        (["--model", "a=/no/such"], "folder is '/no/such'"),
    ],
)
def test_names_of_models_are_checked_before_anything_is_loaded(tmp_path, capsys, arguments, problem) -> None:
    assert main(["serve", "--port", "0", *(each.format(tmp_path) for each in arguments)]) == 2

    assert problem in capsys.readouterr().err
