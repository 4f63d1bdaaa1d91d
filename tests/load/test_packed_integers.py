"""Integers of AWQ, GPTQ and compressed-tensors: their values are those of the formats; malformed ones are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jattn.llm.load import load_model
from tests.support.tiny_models import write_tiny_model
from torch_core.base.errors import InvalidInput, Unsupported

UP = "model.layers.0.mlp.up_proj"
SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 1}
GROUP = 64
Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}}
        },
    },
}


def packed(numbers: np.ndarray, axis: int, bits: int = 4, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Packs numbers along an axis, one by one: place `i` of a word has the number `order[i]` of its eight."""
    each = 32 // bits
    rows = np.moveaxis(numbers, axis, 0)
    words = np.zeros((-(-len(rows) // each), *rows.shape[1:]), np.uint32)
    for word in range(len(words)):
        for place in range(each):
            row = word * each + order[place]
            if row < len(rows):
                words[word] |= rows[row].astype(np.uint32) << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(words, 0, axis)).view(np.int32)


def awq(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> dict[str, np.ndarray]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed(numbers, 1, order=order),
        "qzeros": packed(zeros, 1, order=order),
        "scales": scales.astype(np.float16),
    }


def gptq(
    numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray, less: int = 1, bits: int = 4
) -> dict[str, np.ndarray]:
    return {
        "qweight": packed(numbers, 0, bits),
        "qzeros": packed(zeros - less, 1, bits),
        "scales": scales.astype(np.float16),
        "g_idx": groups.astype(np.int32),
    }


def gptq_v2(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> dict[str, np.ndarray]:
    return gptq(numbers, zeros, scales, groups, less=0)


def compressed(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "weight_packed": packed(numbers.T, 1),
        "weight_zero_point": packed(zeros.T, 0),
        "weight_scale": scales.T.astype(np.float32),
        "weight_shape": np.array(numbers.T.shape),
    }


WRITERS = {"awq": awq, "gptq": gptq, "gptq_v2": gptq_v2, "compressed": compressed}


def values(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns (number - zero point) * scale in float32[in, out], element by element."""
    return np.array(
        [
            [
                np.float32(int(numbers[row, column]) - int(zeros[group, column])) * np.float32(scales[group, column])
                for column in range(numbers.shape[1])
            ]
            for row, group in enumerate(groups)
        ],
        np.float32,
    )


def random_parts(seed: int, bits: int = 4, group: int = GROUP) -> Parts:
    """Returns numbers [in, out], zero points, scales that float16 has, and the groups of the inputs."""
    random, (inputs, outputs) = np.random.default_rng(seed), (160, 200)
    count = -(-inputs // group)
    scales = random.integers(64, 128, (count, outputs)) / 4096
    zeros = random.integers(1, 1 << bits, (count, outputs))
    return random.integers(0, 1 << bits, (inputs, outputs)), zeros, scales, np.arange(inputs) // group


def written(folder: Path, method: dict[str, Any], parts: dict[str, np.ndarray], module: str = UP) -> Path:
    """Replaces a module's weight in a folder by parts."""
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load(file.read_bytes())
    tensors.pop(f"{module}.weight", None)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{module}.")}
    tensors |= {f"{module}.{name}": np.ascontiguousarray(part) for name, part in parts.items()}
    file.write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def up(folder: Path, **options: Any) -> Any:
    model = load_model(folder, with_tokenizer=False, **options)[0]
    return dict(nnx.to_flat_state(nnx.state(model)))[("layers", 0, "mlp", "gate_up_proj", "kernel")][...][:, 200:]


@pytest.fixture
def folder(tmp_path, seed) -> Path:
    return write_tiny_model(tmp_path, seed, **SIZES)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_weight_is_its_number_less_the_zero_point_times_the_scale(folder, kind, seed) -> None:
    parts = random_parts(seed)
    written(folder, CONFIGS[kind], WRITERS[kind](*parts))

    np.testing.assert_array_equal(np.asarray(up(folder)), values(*parts))


def test_inputs_of_gptq_have_groups_in_any_order(folder, seed) -> None:
    numbers, zeros, scales, groups = random_parts(seed)
    groups = np.random.default_rng(seed).permutation(groups)
    written(folder, CONFIGS["gptq"] | {"desc_act": True}, gptq(numbers, zeros, scales, groups))

    np.testing.assert_array_equal(np.asarray(up(folder)), values(numbers, zeros, scales, groups))


def test_a_number_may_have_8_bits_and_an_output_one_scale(folder, seed) -> None:
    parts = random_parts(seed, bits=8, group=160)
    written(folder, CONFIGS["gptq"] | {"bits": 8, "group_size": -1}, gptq(*parts, bits=8))

    np.testing.assert_array_equal(np.asarray(up(folder)), values(*parts))


def test_compressed_tensors_without_zero_points_are_symmetric(folder, seed) -> None:
    numbers, zeros, scales, groups = random_parts(seed, group=160)
    parts = compressed(numbers, zeros, scales, groups)
    del parts["weight_zero_point"]
    channel = {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "channel", "group_size": None}}}
    written(folder, CONFIGS["compressed"] | {"config_groups": channel}, parts)

    np.testing.assert_array_equal(np.asarray(up(folder)), values(numbers, np.full_like(zeros, 8), scales, groups))


def test_compressed_tensors_reads_its_own_writing(folder, seed) -> None:
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch = pytest.importorskip("torch")
    numbers, zeros, scales, groups = random_parts(seed)
    signed, points = (torch.from_numpy((each - 8).astype(np.int8).T.copy()) for each in (numbers, zeros))
    parts = compressed(numbers, zeros, scales, groups) | {
        "weight_packed": packing.pack_to_int32(signed, 4).numpy(),
        "weight_zero_point": packing.pack_to_int32(points, 4, packed_dim=0).numpy(),
    }
    written(folder, CONFIGS["compressed"], parts)

    np.testing.assert_array_equal(np.asarray(up(folder)), values(numbers, zeros, scales, groups))


def test_kept_weights_of_4_bits_give_the_bits_of_dequantised_ones(folder, seed) -> None:
    for module in ("gate_proj", "up_proj"):
        written(folder, CONFIGS["awq"], awq(*random_parts(seed)), f"model.layers.0.mlp.{module}")
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, 256, (2, 9)))

    kept, plain = (load_model(folder, with_tokenizer=False, quantization=each)[0] for each in ("keep", None))

    kernel = kept.layers[0].mlp.gate_up_proj.kernel[...]
    assert (kernel.dtype, kernel.shape) == (jnp.uint8, (80, 400))
    np.testing.assert_array_equal(kept.forward_dense(tokens), plain.forward_dense(tokens))


def test_biases_of_zeros_that_gptq_adds_are_left_out(folder, seed) -> None:
    parts = random_parts(seed)
    written(folder, CONFIGS["gptq"], gptq(*parts) | {"bias": np.zeros(200, np.float16)})
    np.testing.assert_array_equal(np.asarray(up(folder)), values(*parts))

    written(folder, CONFIGS["gptq"], gptq(*parts) | {"bias": np.ones(200, np.float16)})
    with pytest.raises(InvalidInput, match=re.escape(f"the weights have '{UP}.bias', which the config does not ask")):
        load_model(folder)


@pytest.mark.parametrize(
    ("kind", "part", "change", "message"),
    [
        ("awq", "qweight", lambda words: words[:, :-1], "has shape (160, 24); the config asks for (160, 25)."),
        ("awq", "qweight", lambda words: words.astype(np.float32), "is F32; the format has I32 there."),
        ("awq", "qzeros", lambda words: words[:2], "has shape (2, 25); the config asks for (3, 25)."),
        ("awq", "scales", lambda scales: scales.astype(np.int32), "is I32; the format has F32, BF16, F16 there."),
        ("gptq", "scales", lambda scales: scales * np.float16(np.nan), "is NaN or infinite at [0, 0]; a scale is a"),
        ("gptq", "g_idx", lambda groups: groups + 1, "has 3 at 128; there are 3 groups."),
        ("gptq", "g_idx", lambda groups: groups - 1, "has -1 at 0; there are 3 groups."),
        ("gptq", "qzeros", lambda words: None, f"the weights lack '{UP}.qzeros', a part of the packed '{UP}.weight'."),
        ("compressed", "weight_shape", lambda shape: shape + 1, "is [201, 161]; it must be [200, 160]."),
    ],
)
def test_parts_that_do_not_fit_are_refused(folder, kind, part, change, message, seed) -> None:
    parts = WRITERS[kind](*random_parts(seed))
    changed = change(parts.pop(part))
    written(folder, CONFIGS[kind], parts if changed is None else parts | {part: changed})

    with pytest.raises((InvalidInput, Unsupported), match=re.escape(message)) as caught:
        load_model(folder)
    assert f"{UP}.{part}" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("awq", {"bits": 3}, "bits is 3; this build reads 4."),
        ("awq", {"version": "gemv"}, "version is 'gemv'; this build reads gemm."),
        ("awq", {"zero_point": False}, "zero_point is False; this build reads AWQ with zero points."),
        ("awq", {"group_size": 0}, "group_size is 0; it must be from 1 to 1048576."),
        ("gptq", {"bits": 3}, "bits is 3; this build reads 4 and 8."),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; this build reads gptq, gptq_v2."),
        ("gptq", {"checkpoint_format": ["gptq"]}, "checkpoint_format is ['gptq']; this build reads gptq, gptq_v2."),
        ("gptq", {"dynamic": {"-:x": {}}}, "dynamic is {'-:x': {}}; this build reads models without it."),
        ("compressed", {"config_groups": 1}, "config_groups is 1; each group must have weights."),
        (
            "compressed",
            {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "group"}}}},
            "config_groups.weights.type is 'float'; this build reads int.",
        ),
    ],
)
def test_methods_that_are_not_read_are_refused_by_key(folder, kind, change, message, seed) -> None:
    written(folder, CONFIGS[kind] | change, WRITERS[kind](*random_parts(seed)))

    with pytest.raises((InvalidInput, Unsupported), match=re.escape(f"config.json: quantization_config.{message}")):
        load_model(folder)
