"""Property: whatever happens to the bytes of a model folder, loading it gives a model or one of our two errors."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from jattn.llm.load.config import parse_config
from jattn.llm.load.folder import check_folder, read_config, read_json
from jattn.llm.load.plan import plan_parameters
from jattn.llm.load.weights import check_weights, find_weights, read_parameter
from tests.support.family_models import CASES, write_checkpoint
from tests.support.tiny_models import tiny_config, write_tiny_model
from torch_core.base.errors import InvalidInput, Unsupported

MUTANTS = 300
#: Keys that few files have, and that decide about whole layers or positions.
RARE = (
    "decoder_sparse_step",
    "layer_types",
    "max_window_layers",
    "mlp_only_layers",
    "no_rope_layer_interval",
    "no_rope_layers",
    "original_max_position_embeddings",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
)
NASTY = ["null", "-1", "1e9", "4611686018427387904", '""', "[]", "{}", "true", '"F64"', "NaN", '"../x"', "0.5"]


def mutate(random, data, header_end):
    """Returns one broken variant of a safetensors file: most changes hit the header, where the danger is."""
    kind = random.integers(6)
    position = int(random.integers(header_end))
    if kind == 0:
        return data[:position] + bytes([random.integers(256)]) + data[position + 1 :]
    if kind == 1:
        return data[: int(random.integers(len(data)))]
    if kind == 2:
        return data[:position] + data[position + int(random.integers(1, 9)) :]
    if kind == 3:
        return data[:position] + random.bytes(int(random.integers(1, 9))) + data[position:]
    if kind == 4:
        return struct.pack("<Q", int(random.integers(1 << 62)) >> int(random.integers(62))) + data[8:]
    header = bytearray(data[8:header_end])
    digits = [index for index, byte in enumerate(header) if chr(byte).isdigit()]
    at = digits[int(random.integers(len(digits)))]
    header[at : at + 1] = NASTY[int(random.integers(len(NASTY)))].encode()
    return struct.pack("<Q", len(header)) + bytes(header) + data[header_end:]


def test_mutated_weights_only_ever_give_our_errors(tmp_path, seed):
    folder = check_folder(write_tiny_model(tmp_path, seed, num_hidden_layers=1))
    plan = plan_parameters(tiny_config(num_hidden_layers=1))
    path = folder / "model.safetensors"
    original = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", original[:8])[0]
    random = np.random.default_rng(seed)
    refused = 0
    for _ in range(MUTANTS):
        path.write_bytes(mutate(random, original, header_end))
        try:
            tensors = find_weights(folder)
            check_weights(tensors, plan)
            for parameter in plan:
                read_parameter(tensors, parameter, np.dtype(np.float32), on_host=True)
        except (InvalidInput, Unsupported):
            refused += 1
    assert refused > 0.8 * MUTANTS


def test_mutated_configs_only_ever_give_our_errors(tmp_path, seed):
    original = (write_tiny_model(tmp_path, seed) / "config.json").read_text()
    random = np.random.default_rng(seed)
    keys = list(json.loads(original))
    refused = 0
    for _ in range(MUTANTS):
        key = keys[int(random.integers(len(keys)))]
        before, _, rest = original.partition(f'"{key}": ')
        value = NASTY[int(random.integers(len(NASTY)))]
        text = before + f'"{key}": {value}' + rest[len(json.dumps(json.loads(original)[key])) :]
        if random.random() < 0.3:
            text = text[: int(random.integers(len(text)))]
        try:
            plan_parameters(parse_config(read_json(text, "config.json")))
        except (InvalidInput, Unsupported):
            refused += 1
    assert refused > 0.6 * MUTANTS


@pytest.mark.parametrize("mutants", [MUTANTS // 4, pytest.param(10 * MUTANTS, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("architecture", CASES)
def test_mutated_configs_of_every_family_only_ever_give_our_errors(architecture, mutants, tmp_path, seed):
    folder = write_checkpoint(tmp_path, architecture, len(CASES[architecture][1]) - 1, seed)
    original = read_config(folder)
    random = np.random.default_rng(seed)
    keys, values = sorted({*original, *RARE}), [None, True, -1, 0, 2.5, 10**9, 10**400, "x", [], ["x"], {}, 1e308]
    refused = 0
    for _ in range(mutants):
        value = values[int(random.integers(len(values)))]
        kinds = [value, {"rope_type": "yarn", "factor": value}, {"full_attention": value, "sliding_attention": value}]
        key = keys[int(random.integers(len(keys)))]
        try:
            plan_parameters(parse_config(original | {key: kinds[int(random.integers(3))]}))
        except (InvalidInput, Unsupported):
            refused += 1
    assert refused > 0.3 * mutants


@pytest.mark.nightly
def test_very_many_mutated_weights_only_ever_give_our_errors(tmp_path, seed):
    for extra in range(100):
        test_mutated_weights_only_ever_give_our_errors(tmp_path / str(extra), seed + extra)
