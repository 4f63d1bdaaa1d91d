"""compare_with_torch on tiny random models: it passes for sound ones, and sees every planted fault."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jattn.llm.load import load_model
from jattn.llm.models import num_parameters
from jattn.llm.testing import CrosscheckReport, compare, compare_with_torch
from jattn.llm.testing.torch_side import load_torch_side
from jattn.ops import available_implementations
from tests.support.saved import write_changed
from tests.support.tiny_models import tiny_config, tiny_model, write_tiny_model
from torch_core.base.errors import InvalidInput, RequestTooLong, Unsupported

SEED = 20
#: Unequal lengths, those of the default prompts for a model without a tokenizer: one set of programs serves both.
PROMPTS = [[9], list(b"paging!"), list(range(30, 46)), list(range(100, 145))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), SEED, num_hidden_layers=1)


@pytest.fixture(scope="module")
def sound(folder: Path) -> CrosscheckReport:
    pytest.importorskip("transformers")
    return compare_with_torch(folder, PROMPTS, implementations=["torch"], max_tokens=6)


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python spells "this import fails".
    monkeypatch.setitem(sys.modules, "transformers", None)


def test_a_sound_model_passes_with_every_implementation_that_runs_here_along_every_path(folder: Path) -> None:
    here = [name for name, reason in available_implementations().items() if reason is None]
    paths = [(here[0], "engine"), *((name, path) for name in here for path in ("prefill", "decode"))]

    report = compare_with_torch(folder, PROMPTS, max_tokens=6)

    assert report.passed, str(report)
    assert [(row.implementation, row.path) for row in report.rows] == paths
    assert all(row.first_difference is None for row in report.rows)
    assert {name for name, _ in report.skipped} == set(available_implementations()) - set(here)


@pytest.mark.nightly
def test_a_prompt_of_few_tokens_which_torch_rounds_less_passes() -> None:
    report = compare_with_torch(prompts=[[1, 2, 3]], implementations=["xla"], max_tokens=2)

    assert report.passed, str(report)


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_a_model_with_large_activations_passes_with_any_one_prompt(
    folder: Path, tmp_path: Path, no_transformers: None, prompt: list[int]
) -> None:
    model, *_ = load_model(folder)
    kernel = model.layers[0].mlp.down_proj.kernel
    kernel[...] = kernel[...].at[:, 3].multiply(3000.0)

    report = compare_with_torch(model, [prompt], implementations=["torch"], max_tokens=6)

    assert report.passed, str(report)


def test_torch_is_measured_in_each_order(
    sound: CrosscheckReport, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compare.logits_of

    def wrong(*arguments: Any) -> np.ndarray:
        return right(*arguments) + 1

    monkeypatch.setattr(compare, "logits_of", wrong)

    report = compare_with_torch(folder, PROMPTS, implementations=["torch"], max_tokens=6)

    assert report.torch_error > 1e3 * sound.torch_error


@pytest.mark.parametrize("names", ["transformers", "TorchDecoder"])
def test_values_that_replace_those_of_the_config_do_so_on_both_sides(
    folder: Path, names: str, request: pytest.FixtureRequest
) -> None:
    if names == "TorchDecoder":
        request.getfixturevalue("no_transformers")
    overrides = {"rms_norm_eps": 0.5, "zeta": None}

    report = compare_with_torch(folder, PROMPTS, implementations=["torch"], max_tokens=6, hf_overrides=overrides)

    assert report.passed, str(report)
    assert report.torch_name == names


@pytest.mark.parametrize("options", [{"hf_overrides": {"zeta": None}}, {"quantization": "fp8"}])
def test_options_of_loading_are_refused_for_a_decoder(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=rf"^{next(iter(options))} is .*; a Decoder is already loaded\.$"):
        compare_with_torch(tiny_model(tiny_config(num_hidden_layers=1), SEED), [[1]], **options)


def test_the_error_is_one_of_rounding_and_measured_along_each_path(sound: CrosscheckReport) -> None:
    errors = [row.error for row in sound.rows if row.error is not None]

    assert 0 < max(errors) <= sound.limit < 1e-5
    assert 0 < sound.torch_error < sound.limit


def test_the_report_says_what_was_compared(sound: CrosscheckReport, folder: Path) -> None:
    assert sound.model == f"{folder.name} ({num_parameters(tiny_config(num_hidden_layers=1)):,} parameters)"
    assert (sound.dtype, sound.prompt_lens, sound.max_tokens) == ("float32", (1, 7, 16, 45), 6)
    assert sound.torch_side.startswith("transformers ")
    assert "LlamaForCausalLM" in sound.torch_side


def test_the_numbers_are_the_same_every_time(sound: CrosscheckReport, folder: Path) -> None:
    again = compare_with_torch(folder, PROMPTS, implementations=["torch"], max_tokens=6)

    assert again.torch_error == sound.torch_error
    assert again == sound


def test_without_transformers_it_compares_with_its_own_decoder_and_says_so(
    sound: CrosscheckReport, folder: Path, no_transformers: None
) -> None:
    report = compare_with_torch(folder, PROMPTS, implementations=["torch"], max_tokens=6)

    assert report.passed, str(report)
    assert report.torch_name == "TorchDecoder"
    assert "(transformers is not installed)" in str(report)
    # The truth is the same, so our own error is.
    assert report.rows[1].error == sound.rows[1].error


def test_a_broken_transformers_is_named_with_its_own_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))

    side = load_torch_side(folder, tiny_config(num_hidden_layers=1), dtype="float32", device="cpu")

    assert side.name == "TorchDecoder"
    assert "(transformers cannot be imported: cannot import name 'AutoConfig'" in side.description


def test_one_changed_weight_fails_and_names_the_first_differing_token(folder: Path, tmp_path: Path) -> None:
    changed = write_changed(folder, tmp_path / "changed", "model.layers.0.mlp.down_proj.weight", 6.0)

    report = compare_with_torch(folder, PROMPTS, torch_model=changed, max_tokens=6, implementations=("torch",))

    assert not report.passed
    assert [row.verdict for row in report.rows] == ["FAIL: token", "FAIL: error, token", "FAIL: error, token"]
    assert len({row.first_difference for row in report.rows}) == 1
    assert str(report.rows[0].first_difference) in str(report)
    assert str(report).endswith("FAILED")


def test_other_rotary_frequencies_on_one_side_fail(folder: Path, tmp_path: Path, no_transformers: None) -> None:
    other = write_tiny_model(tmp_path, SEED, num_hidden_layers=1, rope_theta=9000.0)

    report = compare_with_torch(folder, PROMPTS, torch_model=other, implementations=["torch"], max_tokens=6)

    assert not report.passed
    assert report.torch_agrees


@pytest.mark.nightly
def test_a_torch_side_that_reads_the_folder_differently_fails_although_jattn_agrees_with_float64(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained

    def load_with_another_epsilon(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        model.model.norm.variance_epsilon = 0.5
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load_with_another_epsilon)

    report = compare_with_torch(folder, PROMPTS, implementations=["torch"], max_tokens=6)

    assert not report.torch_agrees
    assert not report.passed


def test_a_nan_in_our_logits_fails(folder: Path, no_transformers: None) -> None:
    model, _, _ = load_model(folder)
    assert model.norm is not None
    model.norm.weight[...] = model.norm.weight[...].at[0].set(np.nan)

    report = compare_with_torch(model, PROMPTS, torch_model=folder, implementations=["torch"], max_tokens=6)

    assert [row.verdict for row in report.rows] == ["FAIL: token", "FAIL: NaN, token", "FAIL: NaN, token"]


def test_a_decoder_in_memory_is_compared_through_a_temporary_folder(no_transformers: None) -> None:
    model = tiny_model(tiny_config(num_hidden_layers=1), SEED)

    report = compare_with_torch(model, implementations="torch", max_tokens=6)

    assert report.passed, str(report)
    assert report.model.startswith("Decoder (")
    assert report.prompt_lens == (1, 7, 16, 45)


def test_texts_are_encoded_with_the_folders_tokenizer(folder: Path, no_transformers: None) -> None:
    prompts = ["a", "paging!", "a" * 16, "b" * 45]

    report = compare_with_torch(folder, prompts, implementations=["torch"], max_tokens=6)

    assert report.passed, str(report)
    assert report.prompt_lens == (1, 7, 16, 45)


def test_bfloat16_is_compared_within_its_own_error(folder: Path, no_transformers: None) -> None:
    report = compare_with_torch(folder, PROMPTS, dtype="bfloat16", implementations=["torch"], max_tokens=6)

    assert report.passed, str(report)
    assert report.dtype == "bfloat16"
    assert 1e-4 < report.torch_error < report.torch_limit


def test_nothing_global_is_left_changed(folder: Path) -> None:
    logging = pytest.importorskip("transformers").utils.logging
    before = (torch.get_num_threads(), logging.is_progress_bar_enabled(), dict(jax.config.values))

    compare_with_torch(folder, PROMPTS, implementations=["torch"], max_tokens=6)

    assert (torch.get_num_threads(), logging.is_progress_bar_enabled(), dict(jax.config.values)) == before


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, InvalidInput, "prompts must be a list of at least one text or list of token ids."),
        ("text", {}, InvalidInput, "prompts must be a list of at least one text or list of token ids."),
        (["a", ""], {}, InvalidInput, "prompts[1] is empty; it needs at least one token."),
        ([[5], [1, 257]], {}, InvalidInput, "prompts[1][1] is 257; token ids are 0 to 256."),
        ([[-1]], {}, InvalidInput, "prompts[0][0] is -1; token ids are 0 to 256."),
        ([[0.5]], {}, InvalidInput, "prompts[0] must be a text or a flat list of ints."),
        ([[1] * 253], {}, RequestTooLong, "prompts[0] needs 257 tokens (253 + 4 new); the model was made for 256."),
        (None, {"max_tokens": 0}, InvalidInput, "max_tokens is 0; it must be an int of at least 1."),
        (
            None,
            {"implementations": ()},
            InvalidInput,
            "implementations is empty; name some of 'triton', 'torch', 'xla'",
        ),
        (
            None,
            {"implementations": ["cuda"]},
            InvalidInput,
            "implementations has 'cuda'; use 'triton', 'torch', 'xla'.",
        ),
        (None, {"dtype": "float8"}, InvalidInput, "dtype is 'float8'"),
    ],
)
def test_bad_input_is_refused(folder: Path, prompts: Any, options: dict, error: type, message: str) -> None:
    arguments: dict[str, Any] = {"max_tokens": 4, **options}

    with pytest.raises(error) as caught:
        compare_with_torch(folder, prompts, **arguments)

    assert message in str(caught.value)


def test_an_implementation_that_cannot_run_here_is_refused_when_named(folder: Path) -> None:
    unavailable = [name for name, reason in available_implementations().items() if reason is not None]
    if not unavailable:
        pytest.skip("everything runs on this machine")

    with pytest.raises(Unsupported, match=f"implementation '{unavailable[0]}' cannot run here: "):
        compare_with_torch(folder, implementations=unavailable)


def test_a_text_for_a_model_without_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"prompts\[0\] is a text and there is no tokenizer"):
        compare_with_torch(tiny_model(tiny_config(num_hidden_layers=1), SEED), ["text"])


def test_a_dtype_other_than_the_decoders_is_refused() -> None:
    with pytest.raises(InvalidInput, match="dtype is 'bfloat16' and the Decoder's is 'float32'; leave dtype out"):
        compare_with_torch(tiny_model(tiny_config(num_hidden_layers=1), SEED), [[1]], dtype="bfloat16")


def test_a_torch_model_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = write_changed(folder, tmp_path / "other", "model.norm.weight", 1.0)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))

    with pytest.raises(InvalidInput, match="torch_model has vocab_size 300 and the model 257"):
        compare_with_torch(folder, [[1]], torch_model=other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_native_kernels_pass_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny_model(tmp_path, SEED, head_dim=64)

    report = compare_with_torch(folder, PROMPTS, max_tokens=16, dtype=dtype)

    assert report.passed, str(report)
    assert {row.implementation for row in report.rows} == {"triton", "torch", "xla"}
