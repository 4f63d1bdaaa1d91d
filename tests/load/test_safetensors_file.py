"""One safetensors file: whatever breaks a rule of the format, or a limit of ours, is refused by name."""

from __future__ import annotations

import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jattn.llm.load.safetensors_file import open_safetensors
from jattn.llm.load.tensor_file import read_tensor
from torch_core.base.errors import InvalidInput, Unsupported

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(tmp_path, header, data=b"\0" * 8):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def refused(path, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        open_safetensors(path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_a_file_of_the_library_is_read_back(dtype, tmp_path, seed):
    value = np.random.default_rng(seed).normal(size=(3, 5)).astype(dtype)
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors.numpy.save({"a": value, "empty": np.zeros((0, 4), dtype)}, {"format": "pt"}))
    file = open_safetensors(path)
    np.testing.assert_array_equal(read_tensor(file, "a"), value)
    assert read_tensor(file, "empty").shape == (0, 4)


BROKEN = "x.safetensors is truncated or no safetensors file: "
HEADERS = {
    "rest behind the JSON": (b"{}x", InvalidInput, BROKEN),
    "a list": (b"[1, 2]", InvalidInput, BROKEN),
    "not UTF-8": (b'{"\xff": 1}', InvalidInput, BROKEN),
    "NaN": (b'{"a": NaN}', InvalidInput, BROKEN),
    "a name twice": (
        f'{{"a": {json.dumps(F32)}, "a": {json.dumps(F32)}}}'.encode(),
        InvalidInput,
        "x.safetensors: the header has the key 'a' more than once.",
    ),
    "too deep": (b"{" + b'"a":{' * 100_000, InvalidInput, BROKEN),
    "an entry that is no object": ({"a": 3}, InvalidInput, BROKEN),
    "an unknown field": (
        {"a": F32 | {"x": 1}},
        InvalidInput,
        "x.safetensors: tensor 'a' must have exactly dtype, shape and data_offsets.",
    ),
    "a missing field": ({"a": {"dtype": "F32", "shape": [2]}}, InvalidInput, BROKEN),
    "an unknown dtype": ({"a": F32 | {"dtype": "F31"}}, InvalidInput, BROKEN),
    "a list of dtypes": ({"a": F32 | {"dtype": ["F32"]}}, InvalidInput, BROKEN),
    "a negative size": ({"a": F32 | {"shape": [-2]}}, InvalidInput, BROKEN),
    "a size with a fraction": ({"a": F32 | {"shape": [2.0]}}, InvalidInput, BROKEN),
    "sizes whose product overflows": ({"a": F32 | {"shape": [1 << 62, 4]}}, InvalidInput, BROKEN),
    "too many axes": (
        {"a": F32 | {"shape": [1] * 8 + [2]}},
        InvalidInput,
        "x.safetensors: tensor 'a' has shape [1, 1, 1, 1, 1, 1, 1, 1, 2]; it must be up to 8 sizes.",
    ),
    "one offset": ({"a": F32 | {"data_offsets": [0]}}, InvalidInput, BROKEN),
    "offsets that go back": ({"a": F32 | {"data_offsets": [8, 0]}}, InvalidInput, BROKEN),
    "fewer bytes than the shape": ({"a": F32 | {"shape": [3]}}, InvalidInput, BROKEN),
    "an overlap": ({"a": F32, "b": F32}, InvalidInput, BROKEN),
    "a gap": ({"a": F32 | {"data_offsets": [4, 12]}}, InvalidInput, BROKEN),
    "a tensor behind the end": ({"a": F32, "b": F32 | {"data_offsets": [8, 16]}}, InvalidInput, BROKEN),
    "bytes that belong to no tensor": ({}, InvalidInput, BROKEN),
}


@pytest.mark.parametrize(("header", "error", "message"), HEADERS.values(), ids=HEADERS)
def test_a_broken_header_is_refused_with_the_rule_it_breaks(header, error, message, tmp_path):
    refused(write(tmp_path, header), error, message)


@pytest.mark.parametrize("dtype", ["I8", "F8_E5M2"])
def test_a_tensor_of_a_type_that_weights_do_not_have_is_listed_and_not_read(dtype, tmp_path):
    file = open_safetensors(write(tmp_path, {"a": F32 | {"dtype": dtype, "shape": [8]}}))
    assert file.tensors["a"].shape == (8,)
    message = f"x.safetensors: tensor 'a' has dtype '{dtype}'; weights may be F32, BF16, F16, F8_E4M3, U8."
    with pytest.raises(Unsupported, match="^" + re.escape(message)):
        read_tensor(file, "a")


def test_an_absurd_header_length_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 63) + b"{")
    refused(path, InvalidInput, "x.safetensors: the header length is 9223372036854775808; at most 16777216 are read.")


def test_a_header_that_ends_behind_the_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 100) + b"{}")
    refused(path, InvalidInput, BROKEN)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.touch()
    refused(path, InvalidInput, BROKEN)


def test_too_many_tensors_are_refused(tmp_path):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = {str(index): entry for index in range(50_001)}
    refused(write(tmp_path, header, b""), InvalidInput, "x.safetensors: the header lists 50001 tensors; at most 50000")


@pytest.mark.parametrize(
    "start", [b"PK\x03\x04", b"\x80\x02}q\x00", b"\x80\x05\x95"], ids=["zip", "pickle2", "pickle5"]
)
def test_a_pickle_in_disguise_is_refused_by_its_first_bytes(start, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(start + b"\0" * 64)
    refused(path, InvalidInput, "x.safetensors is a pickle, whatever its name says; reading one can run code.")


def test_a_header_length_that_looks_like_a_pickle_is_still_read(tmp_path):
    header = json.dumps({"a": F32}).encode()
    path = write(tmp_path, header + b" " * (0x0280 - len(header)))
    assert set(open_safetensors(path).tensors) == {"a"}


def test_a_file_that_shrinks_after_the_check_is_refused(tmp_path):
    path = write(tmp_path, {"a": F32})
    file = open_safetensors(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InvalidInput, match=r"^x\.safetensors was changed while it was read\.$"):
        read_tensor(file, "a")


def test_a_file_that_is_replaced_after_the_check_is_refused(tmp_path):
    file = open_safetensors(write(tmp_path, {"a": F32}))
    write(tmp_path, {"a": F32 | {"shape": [1, 2]}})
    with pytest.raises(InvalidInput, match=r"^x\.safetensors was changed while it was read\.$"):
        read_tensor(file, "a")
