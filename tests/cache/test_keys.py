"""Prefix keys: golden vectors, the canonical encoding, and who may share with whom."""

from __future__ import annotations

import hashlib
import itertools
import struct
import sys
from array import array
from dataclasses import FrozenInstanceError

import pytest

from torch_core.base.errors import InvalidInput
from torch_core.cache import CacheConfig, CacheManager
from torch_core.cache.keys import KeyChain, LineageNode, encode_root, same_lineage

FIELDS = {"salt": b"tenant", "model_fingerprint": b"model", "cache_dtype": "bfloat16", "block_size": 4}


def root(**changes) -> bytes:
    return encode_root(**{**FIELDS, **changes})


def test_the_root_encoding_does_not_change():
    assert root(extra_keys=("adapter", b"image", 7)).hex() == (
        "6a6174746e2070726566697820726f6f74203100"  # tag
        "01060000000000000074656e616e74"  # salt
        "05000000000000006d6f64656c"  # model fingerprint
        "080000000000000062666c6f61743136"  # dtype
        "04000000000000000300000000000000"  # block size, number of extra keys
        "73070000000000000061646170746572"
        "620500000000000000696d616765"
        "69010000000000000037"
    )


def test_the_keys_do_not_change():
    chain = KeyChain(root(), 4)
    chain.extend(array("i", [1, 2, 3, 4, 5, 6, 7, 8]), 2)
    assert [digest.hex() for digest in chain.digests] == [
        "bfae285aaa405072db65b9356ddfa7709e90afd60fb94148654d868f574b8efb",
        "89a6d0e357f482a02818441a152b7b16d00447ffea20c73eabc5843870351a18",
    ]


def test_a_key_is_the_digest_of_its_written_definition():
    chain = KeyChain(root(), 4)
    chain.extend(array("i", [1, 2, 3, 2**31 - 1]), 1)
    parent = hashlib.sha256(root()).digest()
    block = b"jattn block 1\0" + struct.pack("<I", 4) + parent + struct.pack("<4i", 1, 2, 3, 2**31 - 1)
    assert chain.digests == [hashlib.sha256(block).digest()]


def test_keys_are_the_same_however_far_they_are_computed_at_a_time():
    tokens = array("i", range(40))
    whole, pieces = KeyChain(root(), 4), KeyChain(root(), 4)
    whole.extend(tokens, 10)
    for count in (1, 1, 4, 3, 10):
        pieces.extend(tokens, count)
    assert pieces.digests == whole.digests == whole.recomputed(tokens, 10)


def test_no_two_field_lists_encode_alike():
    choices = {
        "salt": (None, b"a", b"ab", b"\x00"),
        "model_fingerprint": (b"", b"a", b"ab", b"bc"),
        "cache_dtype": ("", "a", "c"),
        "block_size": (1, 4),
        "extra_keys": ((), ("a",), (b"a",), (1,), ("1",), ("a", "b"), ("ab",), ("b", "a"), ("",)),
    }
    encodings = [
        encode_root(**dict(zip(choices, chosen, strict=True))) for chosen in itertools.product(*choices.values())
    ]
    assert len(set(encodings)) == len(encodings)


def test_sequences_share_if_and_only_if_salt_and_extra_keys_are_equal():
    identities = [
        {"salt": None},
        {"salt": b"one"},
        {"salt": b"two"},
        {"salt": b"one", "extra_keys": ("adapter",)},
        {"salt": b"one", "extra_keys": (b"adapter",)},
        {"extra_keys": (3,)},
    ]
    for first, second in itertools.product(identities, repeat=2):
        cache = CacheManager(CacheConfig(num_blocks=8, block_size=2))
        cache.add("a", [1, 2, 3], **first)
        cache.retire(cache.step([("a", 3)]).step_id)
        assert (cache.add("b", [1, 2, 3], **second) == 2) == (first == second)


@pytest.mark.parametrize("change", [{"model_fingerprint": b"other"}, {"cache_dtype": "float16"}, {"block_size": 8}])
def test_model_dtype_and_block_size_are_part_of_a_key(change):
    assert hashlib.sha256(root(**change)).digest() != hashlib.sha256(root()).digest()


def test_lineages_are_equal_only_if_all_tokens_are():
    def lineage(*blocks):
        node = None
        for tokens in blocks:
            node = LineageNode(node, tokens)
        return node

    assert same_lineage(lineage(b"root", b"ab", b"cd"), lineage(b"root", b"ab", b"cd"))
    assert not same_lineage(lineage(b"root", b"ab", b"cd"), lineage(b"root", b"xx", b"cd"))
    assert not same_lineage(lineage(b"root", b"ab", b"cd"), lineage(b"ab", b"cd"))


class _OneKey:
    """A hash under which everything collides."""

    def __init__(self, data: bytes) -> None:
        pass

    def copy(self) -> _OneKey:
        return self

    def update(self, data: bytes) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(32)


def test_content_that_collides_is_not_shared_when_tokens_are_verified(monkeypatch):
    monkeypatch.setattr("torch_core.cache.keys.sha256", _OneKey)
    hits = {}
    for verify in (False, True):
        cache = CacheManager(CacheConfig(num_blocks=12, block_size=2, verify_tokens=verify))
        cache.add("a", [1, 2, 3, 4, 5], salt=b"one")
        cache.retire(cache.step([("a", 5)]).step_id)
        hits[verify] = [
            cache.add("b", [1, 2, 9, 9, 9], salt=b"one"),
            cache.add("c", [1, 2, 3, 4, 5], salt=b"two"),
            cache.add("d", [1, 2, 3, 4, 5], salt=b"one"),
        ]
    assert hits == {False: [4, 4, 4], True: [2, 0, 4]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"salt": b""}, r"salt has 0 bytes; it must have 1 to 64\."),
        ({"salt": b"x" * 65}, r"salt has 65 bytes; it must have 1 to 64\."),
        ({"salt": "tenant"}, r"salt is a str; it must be bytes, or None for the shared salt\."),
        ({"extra_keys": "adapter"}, r"extra_keys is a str; pass a list or tuple of keys\."),
        ({"extra_keys": (1, 2.5)}, r"extra_keys\[1\] is a float; it must be bytes, str or int\."),
        ({"extra_keys": (True,)}, r"extra_keys\[0\] is a bool; it must be bytes, str or int\."),
        ({"extra_keys": ("x" * 5000,)}, r"extra_keys\[0\] has 5000 bytes; the limit is 4096\."),
    ],
)
def test_bad_key_fields_are_refused(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        root(**arguments)


def test_keys_do_not_depend_on_the_byte_order_of_the_machine(monkeypatch):
    tokens = array("i", [1, 2, 3, 70_000])
    swapped = tokens[:]
    swapped.byteswap()
    own = KeyChain(root(), 4)
    own.extend(tokens, 1)
    # A machine of the other order holds the same ids in swapped bytes.
    monkeypatch.setattr("sys.byteorder", "big" if sys.byteorder == "little" else "little")
    other = KeyChain(root(), 4)
    other.extend(swapped, 1)
    assert other.digests == own.digests


def test_the_sizes_of_a_cache_never_change():
    cache = CacheManager(CacheConfig(num_blocks=8, block_size=4))
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'block_size'"):
        cache.config.block_size = 8  # type: ignore[misc]
