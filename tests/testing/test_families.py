"""The cross-check beyond Llama: other families, layer by layer, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import pytest

from jattn import cli
from jattn.llm.load import load_model
from jattn.llm.testing import CrosscheckReport, TorchDecoder, compare_with_torch, save_picture
from tests.support.family_models import write_checkpoint
from tests.support.saved import write_changed
from torch_core.base.errors import InvalidInput, Unsupported

PROMPTS = [[9], list(range(30, 50))]
LAYERS = ["embedding", "layers.0", "norm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 2: soft caps, norms on both sides, a window on one layer of two."""
    return write_checkpoint(tmp_path_factory.mktemp("gemma2"), "Gemma2ForCausalLM", 0, 5)


@pytest.fixture(scope="module")
def report(folder: Path) -> CrosscheckReport:
    return compare_with_torch(folder, PROMPTS, implementations=["xla"], max_tokens=4, layers=True)


def test_a_family_with_options_is_compared_with_transformers_in_float64(report: CrosscheckReport) -> None:
    assert report.passed, str(report)
    assert report.truth == "transformers in float64"
    assert [row.path for row in report.rows] == ["engine", "prefill", "decode"]


def test_every_layer_is_compared_at_every_position(report: CrosscheckReport) -> None:
    assert [row.layer for row in report.layers] == LAYERS
    assert all([len(prompt) for prompt in row.by_position] == [4, 23] for row in report.layers)
    assert report.first_different_layer is None
    assert "Every layer is within its limit." in str(report)


@pytest.mark.nightly
def test_the_first_layer_that_differs_is_named(folder: Path, tmp_path: Path) -> None:
    other = write_changed(folder, tmp_path / "changed", "model.layers.0.mlp.down_proj.weight", 1.5)

    changed = compare_with_torch(folder, PROMPTS, torch_model=other, implementations=["xla"], max_tokens=4, layers=True)

    assert not changed.passed
    assert [row.passed for row in changed.layers] == [True, False, False]
    assert "The first layer that differs is layers.0, with 'xla'." in str(changed)


def test_the_json_holds_what_the_report_does_and_no_nan(report: CrosscheckReport) -> None:
    broken = dataclasses.replace(report.rows[1], error=math.nan)

    found = json.loads(dataclasses.replace(report, rows=(broken,)).to_json())

    assert found["rows"][0] | {"error": None} == found["rows"][0]
    assert (found["passed"], found["rows"][0]["verdict"], found["first_different_layer"]) == (False, "FAIL: NaN", None)
    assert [row["layer"] for row in found["layers"]] == LAYERS


def test_the_picture_has_a_row_for_each_layer(report: CrosscheckReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    save_picture(report, tmp_path / "errors.svg")

    assert (tmp_path / "errors.svg").read_text().startswith("<?xml")


def test_a_picture_of_a_report_without_layers_is_refused(report: CrosscheckReport, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^report has no layers; make it with compare_with_torch\(\.\.\., layers="):
        save_picture(dataclasses.replace(report, layers=()), tmp_path / "errors.png")


def test_a_picture_without_matplotlib_says_what_to_install(
    report: CrosscheckReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(Unsupported, match=r"^a picture needs matplotlib; pip install jattn\[plot\]\.$"):
        save_picture(report, tmp_path / "errors.png")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/errors.png", r"jattn: the picture is '.*errors\.png'; there is no folder '.*nowhere'\."),
        ("errors.txt", r"jattn: the picture is '.*errors\.txt'; its ending must be one of .*pdf.*png.*svg.*\."),
        ("errors", r"jattn: the picture is '.*errors'; its ending must be one of "),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_compared(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    assert cli.main(["crosscheck", "--model", str(tmp_path), "--picture", str(tmp_path / name)]) == 2
    assert re.match(message, capsys.readouterr().err)


def test_the_command_prints_json_with_layers(
    folder: Path, report: CrosscheckReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {}

    def compare(*args: object, **options: object) -> CrosscheckReport:
        asked.update(options)
        return report

    monkeypatch.setattr("jattn.llm.testing.compare_with_torch", compare)

    assert cli.main(["crosscheck", "--model", str(folder), "--layers", "--json"]) == 0
    assert asked["layers"] is True
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_without_transformers_such_a_family_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    compared = r"^Gemma2ForCausalLM is compared with transformers, which is not installed"
    with pytest.raises(Unsupported, match=compared) as refused:
        compare_with_torch(folder, PROMPTS)
    assert refused.value.argument is None
    with pytest.raises(Unsupported, match=r"^Gemma2ForCausalLM has options that TorchDecoder does not compute\.$"):
        TorchDecoder(folder)


@pytest.mark.nightly
def test_of_an_indexers_equal_scores_the_first_count_on_both_sides(tmp_path: Path, seed: int) -> None:
    """Scores that no head raises above 0 are equal, and torch's topk takes any of them: another in float64."""
    folder = write_checkpoint(tmp_path, "DeepseekV32ForCausalLM", 0, seed, num_hidden_layers=1)

    report = compare_with_torch(folder, [list(range(3, 43))], implementations=["xla"], max_tokens=2)

    assert report.passed, str(report)


@pytest.mark.nightly
def test_longrope_is_compared_at_the_length_of_the_prompts(tmp_path: Path, seed: int) -> None:
    """transformers takes the short factors for sequences within the first context, whatever the model was made for."""
    folder = write_checkpoint(tmp_path, "Phi3ForCausalLM", 2, seed, num_hidden_layers=1)

    report = compare_with_torch(folder, [[3] * 8], implementations=["xla"], max_tokens=4)

    assert load_model(folder, with_tokenizer=False)[1].max_position_embeddings == 128
    assert report.passed, str(report)
