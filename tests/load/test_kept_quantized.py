"""Weights that stay in fewer bits on the device: the numbers of those that were dequantised, in less memory."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.load import load_model, save_model
from jattn.llm.models import Decoder
from tests.support.devices import on_four_devices
from tests.support.family_models import write_checkpoint
from tests.support.tiny_models import reference_bound, write_tiny_model
from torch_core.base.errors import InvalidInput, Unsupported

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 9)))
BLOCKWISE = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BY_OUTPUT = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def num_bytes(model: Decoder) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def logits(model: Decoder) -> np.ndarray:
    return np.asarray(model.forward_dense(TOKENS), np.float64)


def loaded(folder: Path, dtype: str = "float32") -> tuple[Decoder, Decoder]:
    kept, plain = (
        load_model(folder, dtype=dtype, quantization=quantization, with_tokenizer=False)[0]
        for quantization in ("keep", None)
    )
    return kept, plain


def rewritten(folder: Path, tensors: dict[str, np.ndarray], method: dict[str, Any]) -> Path:
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_fp8(folder: Path, method: dict[str, Any], scales_of: Any, names: str = "_proj.weight") -> Path:
    """Writes the linear layers of a folder as E4M3 with these scales, [out, in] -> an array or None for no scale."""
    tensors = safetensors.numpy.load((folder / "model.safetensors").read_bytes())
    for name in [name for name in tensors if name.endswith(names)]:
        suffix, scale, wide = scales_of(tensors[name])
        tensors[name] = (tensors[name] / wide).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}{suffix}"] = scale
    return rewritten(folder, tensors, method)


def by_block(weight: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
    scale = np.random.default_rng(1).uniform(0.01, 0.02, [-(-size // 128) for size in weight.shape]).astype(np.float32)
    wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: weight.shape[0], : weight.shape[1]]
    return "_scale_inv", scale, wide


def by_output(weight: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
    scale = np.abs(weight).max(1, keepdims=True) / 448
    return "_scale", scale.astype(np.float32), scale


def by_tensor(weight: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
    scale = np.float32(np.abs(weight).max() / 448)
    return "_scale", np.asarray(scale), np.asarray(scale)


def test_block_scaled_fp8_weights_give_the_bits_of_dequantised_ones(tmp_path, seed) -> None:
    sizes: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 272, "num_hidden_layers": 1, "head_dim": 40}
    folder = in_fp8(write_tiny_model(tmp_path, seed, **sizes), BLOCKWISE, by_block)

    kept, plain = loaded(folder)

    kernel = kept.layers[0].mlp.gate_up_proj.kernel[...]
    assert (kernel.dtype, kernel.shape) == (jnp.float8_e4m3fn, (160, 544))
    np.testing.assert_array_equal(logits(kept), logits(plain))


@pytest.mark.parametrize(
    ("method", "scales_of"),
    [(BY_OUTPUT, by_output), ({"quant_method": "fp8"}, by_tensor)],
    ids=["compressed-tensors", "one scale"],
)
def test_fp8_weights_with_a_scale_for_an_output_or_a_tensor_are_kept(tmp_path, method, scales_of, seed) -> None:
    folder = in_fp8(write_tiny_model(tmp_path, seed), method, scales_of)
    kept, plain = loaded(folder, "bfloat16")

    wide = logits(loaded(folder)[1])

    # Products of E4M3 are scaled behind the sum; dequantised weights were rounded to bfloat16 before it.
    error = np.abs(logits(kept) - wide).max()
    assert error <= reference_bound(wide, logits(plain), 2.0**-8)


def test_a_joined_layer_keeps_those_of_its_pieces_that_are_in_fp8(tmp_path, seed) -> None:
    folder = in_fp8(write_checkpoint(tmp_path, "Qwen3NextForCausalLM", 0, seed), BY_OUTPUT, by_output, "_qkvz.weight")
    models: Any = loaded(folder)

    linear, whole = (model.layers[0].linear_attn.in_proj for model in models)
    assert (linear.kernel.dtype, linear.rest.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    x = np.random.default_rng(seed).normal(size=(3, linear.kernel.shape[0])).astype(np.float32)
    exact = np.matmul(x, whole.kernel[...], dtype=np.float64)
    assert np.abs(linear(x) - exact).max() <= reference_bound(exact, np.asarray(whole(x)), 2.0**-24)
    for name, model in zip(("kept", "plain"), models, strict=True):
        save_model(tmp_path / name, model, model.config)
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("kept", "plain")]
    assert saved[0] == saved[1]


def test_quantization_fp8_takes_pieces_of_a_joined_layer_that_are_in_fp8_as_they_are(tmp_path, seed) -> None:
    folder = in_fp8(write_checkpoint(tmp_path, "Qwen3NextForCausalLM", 0, seed), BY_OUTPUT, by_output, "_qkvz.weight")
    models: Any = [load_model(folder, quantization=each, with_tokenizer=False)[0] for each in ("keep", "fp8")]

    kept, rounded = (model.layers[0].linear_attn.in_proj for model in models)
    count = kept.kernel.shape[1]
    assert count < len(rounded.weight)
    np.testing.assert_array_equal(rounded.weight[:count].view(np.uint8), kept.kernel[...].T.view(np.uint8))
    np.testing.assert_array_equal(rounded.scale[:count], kept.scale[0])


def in_mxfp4(path: Path, seed: int) -> tuple[Path, dict[str, np.ndarray]]:
    """Writes a model of MXFP4 experts; returns its folder and its tensors."""
    folder = write_checkpoint(path, "GptOssForCausalLM", 0, seed, intermediate_size=64, num_hidden_layers=1)
    random = np.random.default_rng(seed)
    tensors = safetensors.numpy.load((folder / "model.safetensors").read_bytes())
    for name, outputs, inputs in (("gate_up_proj", 128, 32), ("down_proj", 32, 64)):
        place = f"model.layers.0.mlp.experts.{name}"
        del tensors[place]
        tensors[f"{place}_blocks"] = random.integers(0, 256, (6, outputs, inputs // 32, 16), dtype=np.uint8)
        tensors[f"{place}_scales"] = random.integers(118, 124, (6, outputs, inputs // 32), dtype=np.uint8)
    return rewritten(folder, tensors, {"quant_method": "mxfp4"}), tensors


@pytest.mark.parametrize("quantization", ["keep", None])
def test_an_mxfp4_scale_that_is_no_number_is_refused(tmp_path, quantization, seed) -> None:
    folder, tensors = in_mxfp4(tmp_path, seed)
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    rewritten(folder, tensors, {"quant_method": "mxfp4"})

    with pytest.raises(InvalidInput, match=r"experts\.down_proj_scales' is NaN or infinite at \[1, 2, 0\]; a scale"):
        load_model(folder, quantization=quantization, with_tokenizer=False)


@pytest.mark.nightly
def test_mxfp4_experts_give_the_bits_of_dequantised_ones(tmp_path, seed) -> None:
    kept, plain = loaded(in_mxfp4(tmp_path, seed)[0])

    kernel = kept.layers[0].moe.down_proj.kernel[...]
    assert (kernel.dtype, kernel.shape) == (jnp.uint8, (6, 32, 32))
    # Of whole experts a CUDA device has kernels, which add up in another order.
    eps = 0 if jax.default_backend() == "cpu" else 64 * 2.0**-24
    for tokens in (TOKENS, jnp.asarray([[7]])):
        found, expected = (np.asarray(model.forward_dense(tokens)) for model in (kept, plain))
        np.testing.assert_allclose(found, expected, rtol=0, atol=eps * np.abs(expected).max())


def test_kept_weights_take_a_byte_each(tmp_path, seed) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
    folder = in_fp8(write_tiny_model(tmp_path, seed, **sizes), BLOCKWISE, by_block)

    kept, plain = loaded(folder, "bfloat16")

    linear = sum(leaf.nbytes for path, leaf in nnx.to_flat_state(nnx.state(plain)) if path[-1] == "kernel")
    linear -= plain.lm_head.kernel[...].nbytes if plain.lm_head is not None else 0
    # A scale of 4 bytes for 128 weights.
    assert num_bytes(plain) - num_bytes(kept) == linear // 2 - linear // 64


@pytest.mark.nightly
def test_the_engine_says_with_kept_weights_what_it_says_with_dequantised_ones(tmp_path, seed) -> None:
    sizes: dict[str, Any] = {"hidden_size": 160, "num_hidden_layers": 1, "max_position_embeddings": 32}
    folder = in_fp8(write_tiny_model(tmp_path, seed, **sizes), BLOCKWISE, by_block)
    prompt, params = [5, 9, 2], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    config = EngineConfig(block_size=4, max_num_seqs=1, max_num_batched_tokens=8)

    said = [
        LLM(str(folder), quantization=quantization, config=config).generate(prompt, params)[0].outputs[0].token_ids
        for quantization in ("keep", None)
    ]

    assert said[0] == said[1]


def test_kept_weights_are_saved_as_their_numbers(tmp_path, seed) -> None:
    folder = in_fp8(write_tiny_model(tmp_path / "fp8", seed, hidden_size=160), BLOCKWISE, by_block)
    for name, model in zip(("kept", "plain"), loaded(folder), strict=True):
        save_model(tmp_path / name, model, model.config)

    kept, plain = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("kept", "plain"))

    assert kept == plain


@on_four_devices
def test_a_model_with_kept_weights_is_not_cut_over_devices() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept, _ = loaded(in_fp8(write_tiny_model(Path(folder), 0), BY_OUTPUT, by_output))
    message = (
        r"^layers\.0\.mlp\.down_proj has weights that stay as they are stored, which are not cut over devices\. Load"
    )
    with pytest.raises(Unsupported, match=message):
        LLM(kept, config=EngineConfig(block_size=4, max_num_seqs=1, max_num_batched_tokens=8, tensor_parallel_size=2))


def test_another_quantization_is_refused(tmp_path, seed) -> None:
    folder = write_tiny_model(tmp_path, seed)

    with pytest.raises(InvalidInput, match=r"^quantization is 'int4'; it must be 'keep', 'fp8' or None\.$"):
        load_model(folder, quantization="int4")
