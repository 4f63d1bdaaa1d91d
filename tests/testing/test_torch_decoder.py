"""TorchDecoder, the truth of the cross-check, against transformers and against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from jattn.llm.models import RopeScaling
from jattn.llm.testing import TorchDecoder
from tests.support.tiny_models import reference_bound, transformers_logits, write_tiny_model
from torch_core.base.errors import InvalidInput

LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with tied head": {"tie_word_embeddings": True},
    "llama with llama3 frequencies": {"rope_scaling": LLAMA3},
    "llama with linear frequencies": {"rope_scaling": RopeScaling(rope_type="linear", factor=2.0)},
    "llama with biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "mistral with a window": {"sliding_window": 5},
    "qwen2": {"attention_bias": True},
}


def some_tokens(seed: int, count: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(0, 257, count).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_its_float64_logits_are_transformers_within_twice_the_float32_error(
    tmp_path: Path, seed: int, family: str
) -> None:
    folder = write_tiny_model(tmp_path, seed, num_hidden_layers=1, **FAMILIES[family])
    tokens = some_tokens(seed)
    in_float64, in_float32 = (
        transformers_logits(folder, np.array([tokens]), dtype)[0] for dtype in ("float64", "float32")
    )

    logits, _ = TorchDecoder(folder, compute_dtype=torch.float64)(tokens)

    assert logits.dtype == torch.float64
    assert np.abs(logits.numpy() - in_float64).max() <= reference_bound(in_float64, in_float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_a_narrow_dtype_it_is_as_close_to_float64_as_transformers(
    tmp_path: Path, seed: int, dtype: torch.dtype
) -> None:
    folder = write_tiny_model(tmp_path, seed, num_hidden_layers=1)
    tokens = some_tokens(seed)
    truth = TorchDecoder(folder, weight_dtype=dtype, compute_dtype=torch.float64)(tokens)[0].numpy()
    theirs = transformers_logits(folder, np.array([tokens]), str(dtype).removeprefix("torch."))[0]

    logits, _ = TorchDecoder(folder, weight_dtype=dtype, compute_dtype=dtype)(tokens)

    bound = reference_bound(truth, theirs, torch.finfo(dtype).eps)
    assert logits.dtype == dtype
    assert np.abs(logits.double().numpy() - truth).max() <= bound


def test_token_by_token_gives_what_one_call_gives(tmp_path: Path, seed: int) -> None:
    folder = write_tiny_model(tmp_path, seed, sliding_window=5)
    decoder = TorchDecoder(folder, compute_dtype=torch.float64)
    tokens = some_tokens(seed, 12)
    whole, _ = decoder(tokens)

    first, past = decoder(tokens[:7])
    pieces = [first]
    for token in tokens[7:]:
        logits, past = decoder([token], past)
        pieces.append(logits)

    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-12)


def test_a_past_is_not_changed_by_the_call_that_uses_it(tmp_path: Path, seed: int) -> None:
    decoder = TorchDecoder(write_tiny_model(tmp_path, seed, num_hidden_layers=1))
    _, past = decoder(some_tokens(seed, 5))

    once, _ = decoder([3], past)
    again, _ = decoder([3], past)

    assert torch.equal(once, again)


def test_shards_are_read_like_a_single_file(tmp_path: Path, seed: int) -> None:
    folder = write_tiny_model(tmp_path, seed, num_hidden_layers=1)
    tokens = some_tokens(seed, 5)
    single, _ = TorchDecoder(folder)(tokens)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    for index, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{index}.safetensors")
    (folder / "model.safetensors").unlink()

    assert torch.equal(TorchDecoder(folder)(tokens)[0], single)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"has no config\.json\."):
        TorchDecoder(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path, seed: int) -> None:
    folder = write_tiny_model(tmp_path, seed, num_hidden_layers=1)
    (folder / "model.safetensors").unlink()

    with pytest.raises(InvalidInput, match=r"has no safetensors file\."):
        TorchDecoder(folder)
