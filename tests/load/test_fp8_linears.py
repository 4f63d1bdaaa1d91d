"""`quantization="fp8"`: linear layers that multiply E4M3 numbers, from whatever a folder stores."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.load import load_model, save_model
from jattn.llm.models import Decoder, Fp8Linear, quantize_fp8, shard_model
from jattn.llm.models.quantized import QuantizedExpertLinear
from tests.load.test_kept_quantized import BLOCKWISE, BY_OUTPUT, by_block, by_output, by_tensor, in_fp8
from tests.support.devices import mesh, on_four_devices
from tests.support.family_models import write_checkpoint
from tests.support.tiny_models import tiny_config, tiny_model, write_tiny_model
from torch_core.base.errors import Unsupported


def load(folder: Path, quantization: str | None = "fp8", dtype: str = "float32") -> Decoder:
    return load_model(folder, dtype=dtype, quantization=quantization, with_tokenizer=False)[0]


def arrays(model: Decoder) -> dict[Any, np.ndarray]:
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_same_arrays(found: Decoder, expected: Decoder) -> None:
    found_arrays, expected_arrays = arrays(found), arrays(expected)
    assert found_arrays.keys() == expected_arrays.keys()
    for path, array in expected_arrays.items():
        np.testing.assert_array_equal(found_arrays[path], array, err_msg=str(path))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel"])
def test_a_folder_of_numbers_is_rounded_as_a_model_in_memory(tmp_path, architecture, seed) -> None:
    folder = write_checkpoint(tmp_path, architecture, 0, seed)
    expected = load(folder, None)
    quantize_fp8(expected)
    assert any(isinstance(module, Fp8Linear) for _, module in nnx.iter_modules(expected))
    assert_same_arrays(load(folder), expected)


@pytest.mark.parametrize(("method", "scales_of"), [(BY_OUTPUT, by_output), ({"quant_method": "fp8"}, by_tensor)])
def test_e4m3_with_a_scale_for_an_output_or_a_tensor_is_multiplied_as_it_is_stored(
    tmp_path, method, scales_of, seed
) -> None:
    folder = in_fp8(write_tiny_model(tmp_path, seed), method, scales_of)
    mlps: list[Any] = [load(folder, quantization).layers[1].mlp for quantization in ("fp8", "keep")]
    rounded, kept = (mlp.down_proj for mlp in mlps)
    np.testing.assert_array_equal(rounded.weight[...], kept.kernel[...].T)
    np.testing.assert_array_equal(rounded.scale[...], kept.scale[...][0])


def test_e4m3_with_a_scale_for_a_block_is_rounded_anew(tmp_path, seed) -> None:
    folder = in_fp8(
        write_tiny_model(tmp_path, seed, hidden_size=160, intermediate_size=272, head_dim=40), BLOCKWISE, by_block
    )
    expected = load(folder, None)
    quantize_fp8(expected)
    assert_same_arrays(load(folder), expected)


def test_experts_stay_what_they_are(tmp_path, seed) -> None:
    folder = write_checkpoint(tmp_path, "MixtralForCausalLM", 0, seed)
    kinds = {type(module) for _, module in nnx.iter_modules(load(folder))}
    assert Fp8Linear in kinds
    assert QuantizedExpertLinear not in kinds


def test_latent_attention_stays_what_it_is(tmp_path, seed) -> None:
    folder = write_checkpoint(tmp_path, "DeepseekV2ForCausalLM", 0, seed)
    rounded = [path for path, module in nnx.iter_modules(load(folder)) if isinstance(module, Fp8Linear)]
    assert rounded
    assert not [path for path in rounded if "self_attn" in path]


def test_rounded_weights_are_saved_as_their_numbers(tmp_path, seed) -> None:
    folder = in_fp8(write_tiny_model(tmp_path / "stored", seed), BY_OUTPUT, by_output)
    for name, quantization in (("rounded", "fp8"), ("plain", None)):
        model = load(folder, quantization)
        save_model(tmp_path / name, model, model.config)
    rounded, plain = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("rounded", "plain"))
    assert rounded == plain


def test_rounded_weights_take_a_byte_each(tmp_path, seed) -> None:
    folder = write_tiny_model(tmp_path, seed)
    plain, rounded = load(folder, None, "bfloat16"), load(folder, "fp8", "bfloat16")
    num_bytes = [sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) for model in (plain, rounded)]
    kernels = [leaf for path, leaf in arrays(plain).items() if path[-1] == "kernel" and path[0] == "layers"]
    # Two bytes a weight become one, and four for each output.
    assert num_bytes[0] - num_bytes[1] == sum(kernel.size - 4 * kernel.shape[-1] for kernel in kernels)


@pytest.mark.nightly
def test_the_engine_decodes_what_the_dense_forward_says(tmp_path, seed) -> None:
    folder = write_tiny_model(tmp_path, seed)
    prompt, config = [5, 9, 2, 40], EngineConfig(block_size=4, max_num_seqs=1, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(folder), quantization="fp8", config=config) as llm:
        said = list(llm.generate(prompt, params)[0].outputs[0].token_ids)
    model, tokens = load(folder), list(prompt)
    for _ in range(6):
        tokens.append(int(jnp.argmax(model.forward_dense(jnp.asarray([tokens]))[0, -1])))
    assert said == tokens[4:]


@on_four_devices
def test_each_device_of_a_mesh_rounds_its_own_part() -> None:
    over = mesh("auto", tp=2)
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_model(Path(name), 5)
        expected, found = (
            load_model(folder, quantization=quantization, mesh=over, with_tokenizer=False)[0]
            for quantization in (None, "fp8")
        )
    quantize_fp8(expected)
    assert_same_arrays(found, expected)
    for ours, others in zip(*(jax.tree.leaves(nnx.state(model)) for model in (found, expected)), strict=True):
        assert ours.sharding == others.sharding
    mlp: Any = found.layers[0].mlp
    down, up = mlp.down_proj, mlp.gate_up_proj
    places = [(each.weight[...].sharding.spec, each.scale[...].sharding.spec) for each in (down, up)]
    assert places == [(PartitionSpec(None, "tp"), PartitionSpec("tp")), (PartitionSpec("tp"), PartitionSpec("tp"))]
    # Where inputs are cut each device has the scales of all outputs.
    assert down.scale[...].shape == (2 * found.config.hidden_size,)


@on_four_devices
def test_a_rounded_model_is_cut_to_the_parts_that_a_cut_model_is_rounded_to() -> None:
    over = mesh("auto", tp=4)
    found, expected = (tiny_model(tiny_config(), 0) for _ in range(2))
    quantize_fp8(found)
    found, expected = shard_model(found, over), shard_model(expected, over)
    quantize_fp8(expected)
    assert_same_arrays(found, expected)
    for ours, others in zip(*(jax.tree.leaves(nnx.state(model)) for model in (found, expected)), strict=True):
        assert ours.sharding == others.sharding


@on_four_devices
def test_a_rounded_model_of_several_devices_is_saved_whole() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, saved = write_tiny_model(Path(name) / "plain", 6), Path(name) / "saved"
        cut = load_model(folder, quantization="fp8", mesh=mesh("auto", tp=2), with_tokenizer=False)[0]
        save_model(saved, cut, cut.config)
        plain, again = (safetensors.numpy.load_file(each / "model.safetensors") for each in (folder, saved))
    for tensor, weight in plain.items():
        # Within half a step, or half the smallest number of an output.
        step = np.abs(weight) / 16 + np.abs(weight).max(-1, keepdims=True) / 448 / 1024 if "_proj" in tensor else 0
        assert (np.abs(again[tensor] - weight) <= step * 1.0001).all(), tensor


@on_four_devices
def test_what_is_kept_as_it_is_stored_is_not_cut() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_model(Path(name), 0)
        with pytest.raises(
            Unsupported, match=r"^quantization is 'keep' and there is a mesh; .* not cut\. Take quantiza"
        ):
            load_model(folder, quantization="keep", mesh=mesh("auto", tp=2))
