"""Weights in fewer bits: their values are those of the format, and what does not fit together is refused."""

from __future__ import annotations

import json
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from flax import nnx

from jattn.llm.load import load_model
from jattn.llm.load.folder import check_folder
from jattn.llm.load.plan import plan_parameters
from jattn.llm.load.weights import find_weights, read_parameter
from jattn.llm.models.quantized import dequantize
from tests.support.family_models import write_checkpoint
from tests.support.tiny_models import tiny_config, write_tiny_model
from torch_core.base.errors import InvalidInput, Unsupported

CONFIG = tiny_config(hidden_size=160, intermediate_size=200, num_hidden_layers=1)
UP = "model.layers.0.mlp.up_proj.weight"


def tensors_of(folder):
    return safetensors.numpy.load((folder / "model.safetensors").read_bytes())


def kernel(folder, *path):
    model = load_model(folder, with_tokenizer=False)[0]
    return np.asarray(dict(nnx.to_flat_state(nnx.state(model)))[("layers", 0, *path)][...])


@pytest.fixture
def fp8_folder(tmp_path, seed):
    """A model of which one projection is stored as E4M3, with a scale for each block of 128 x 128."""
    torch = pytest.importorskip("torch")
    folder = write_tiny_model(tmp_path, seed, hidden_size=160, intermediate_size=200, num_hidden_layers=1)
    random = np.random.default_rng(seed)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    stored = random.normal(size=(200, 160)).astype(ml_dtypes.float8_e4m3fn)
    tensors[UP] = torch.from_numpy(stored.view(np.uint8)).view(torch.float8_e4m3fn)
    tensors[f"{UP}_scale_inv"] = torch.from_numpy(random.uniform(0.5, 2, (2, 2)).astype(np.float32))
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    method = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config = json.loads((folder / "config.json").read_text()) | method
    (folder / "config.json").write_text(json.dumps(config))
    return folder, stored, tensors


def test_fp8_weights_are_worth_their_value_times_the_scale_of_their_block(fp8_folder):
    folder, stored, tensors = fp8_folder
    scale = tensors[f"{UP}_scale_inv"].numpy()
    expected = [
        [float(stored[row, column]) * scale[row // 128, column // 128] for column in range(160)] for row in range(200)
    ]
    found = kernel(folder, "mlp", "gate_up_proj", "kernel")[:, 200:]
    np.testing.assert_array_equal(found.T, np.asarray(expected, np.float32))
    files = find_weights(check_folder(folder))
    (parameter,) = (each for each in plan_parameters(CONFIG) if each.pieces[-1].name == UP)
    on_device = read_parameter(files, parameter, np.dtype(np.float32), on_host=False)[:, 200:]
    np.testing.assert_array_equal(on_device, found)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_every_mxfp4_exponent_is_an_exact_power_of_two(xp):
    exponents = np.arange(1, 255, dtype=np.uint8)
    # Of 32 rows, the first is worth 1 and the others nothing.
    kernel = np.zeros((16, exponents.size), np.uint8)
    kernel[0] = 2
    found = np.asarray(dequantize(xp.asarray(kernel), xp.asarray(exponents[None]), xp))
    np.testing.assert_array_equal(found[0], np.ldexp(np.float32(1), exponents.astype(np.int32) - 127))
    assert not found[1:].any()


def test_fp8_weights_without_scales_are_refused(fp8_folder):
    folder, _, tensors = fp8_folder
    del tensors[f"{UP}_scale_inv"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = f"model.safetensors: tensor '{UP}' has dtype float8_e4m3fn and no '{UP}_scale_inv' beside it; this build"
    with pytest.raises(Unsupported, match="^" + re.escape(message)):
        load_model(folder)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_fp8_scale_that_is_no_number_is_refused(fp8_folder, value, on_host):
    folder, _, tensors = fp8_folder
    tensors[f"{UP}_scale_inv"][1, 0] = value
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (parameter,) = (each for each in plan_parameters(CONFIG) if each.pieces[-1].name == UP)
    message = f"model.safetensors: tensor '{UP}_scale_inv' is NaN or infinite at [1, 0]; a scale is a number."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        read_parameter(find_weights(check_folder(folder)), parameter, np.dtype(np.float32), on_host=on_host)


@pytest.mark.parametrize(("name", "allowed"), [(f"{UP}_scale_inv", "F32, BF16, F16"), (UP, "F8_E4M3")])
def test_bytes_in_the_place_of_an_fp8_tensor_or_its_scales_are_refused(fp8_folder, name, allowed):
    torch = pytest.importorskip("torch")
    folder, _, tensors = fp8_folder
    tensors[name] = torch.full(tensors[name].shape, 127, dtype=torch.uint8)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = f"model.safetensors: tensor '{name}' is U8; FP8 has {allowed} there."
    with pytest.raises(Unsupported, match=re.escape(message)):
        load_model(folder)


def test_scales_of_another_shape_are_refused(fp8_folder):
    folder, _, tensors = fp8_folder
    tensors[f"{UP}_scale_inv"] = tensors[f"{UP}_scale_inv"][:1]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=re.escape("_scale_inv' has shape (1, 2); the config asks for (2, 2).")):
        load_model(folder)


def test_mxfp4_weights_are_read_as_transformers_reads_them(tmp_path, seed):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch = pytest.importorskip("torch")
    folder = write_checkpoint(tmp_path, "GptOssForCausalLM", 0, seed, intermediate_size=64, num_hidden_layers=1)
    random = np.random.default_rng(seed)
    tensors = tensors_of(folder)
    expected = {}
    for name, outputs, inputs in (("gate_up_proj", 128, 32), ("down_proj", 32, 64)):
        place = f"model.layers.0.mlp.experts.{name}"
        blocks = random.integers(0, 256, (6, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = random.integers(118, 130, (6, outputs, inputs // 32), dtype=np.uint8)
        del tensors[place]
        tensors |= {f"{place}_blocks": blocks, f"{place}_scales": scales}
        expected[name] = (
            mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
            .float()
            .numpy()
        )
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    fused = expected["gate_up_proj"]
    by_turns = np.concatenate([fused[..., ::2], fused[..., 1::2]], -1)
    np.testing.assert_array_equal(kernel(folder, "moe", "gate_up_proj", "kernel"), by_turns)
    np.testing.assert_array_equal(kernel(folder, "moe", "down_proj", "kernel"), expected["down_proj"])
