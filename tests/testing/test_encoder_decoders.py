"""The cross-check of models with an encoder: logits, tokens, and what lies behind the layers of both stacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from jattn.llm.testing import compare_with_torch
from tests.support.encoder_decoders import write_checkpoint
from tests.support.saved import write_changed
from torch_core.base.errors import RequestTooLong

PROMPTS = [[9, 4], list(range(30, 50))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("t5"), "T5ForConditionalGeneration", 1, 5)


@pytest.mark.nightly
def test_both_stacks_are_compared(folder: Path) -> None:
    report = compare_with_torch(folder, PROMPTS, implementations=["xla"], max_tokens=3, layers=True)

    assert report.passed, str(report)
    assert [row.path for row in report.rows] == ["engine", "prefill", "decode"]
    assert [row.layer for row in report.layers] == ["encoder.embedding", "encoder.norm", "embedding", "norm"]
    assert [len(prompt) for prompt in report.layers[1].by_position] == [2, 20]
    assert [len(prompt) for prompt in report.layers[3].by_position] == [3, 3]


@pytest.mark.nightly
def test_the_first_layer_that_differs_is_named(folder: Path, tmp_path: Path) -> None:
    changed = write_changed(folder, tmp_path / "changed", "decoder.block.0.layer.1.EncDecAttention.v.weight", 1.5)

    report = compare_with_torch(
        folder, PROMPTS, torch_model=changed, implementations=["xla"], max_tokens=3, layers=True
    )

    assert [row.passed for row in report.layers] == [True, True, True, False]
    assert not report.passed


@pytest.mark.nightly
def test_bart_is_compared_too(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "BartForConditionalGeneration", 1, 3)
    report = compare_with_torch(folder, PROMPTS, implementations=["xla"], max_tokens=8, layers=True)
    assert report.passed, str(report)


def test_an_input_that_the_encoder_cannot_read_is_refused(folder: Path) -> None:
    with pytest.raises(RequestTooLong, match=r"^prompts\[0\] has 600 tokens; the model's encoder was made for 512"):
        compare_with_torch(folder, [[1] * 600], max_tokens=2)
