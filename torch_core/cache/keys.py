"""Prefix keys: a SHA-256 chain over a canonical, length-prefixed encoding of everything that decides a block's content.

    root  = SHA-256(ROOT_TAG | salt | model fingerprint | cache dtype | block size | extra keys)
    key_i = SHA-256(BLOCK_TAG | number of tokens | key_(i-1) or root | token ids as little-endian int32)

Every field of the root carries its type and length, so no two field lists have the same encoding; None differs from
empty. Only full blocks have keys. The scheme is vLLM's (vllm/v1/core/kv_cache_utils.py) with a fixed binary encoding
instead of pickled tuples, and always with the whole digest: Python's `hash` and short digests can collide, on purpose
or by chance (CVE-2025-25183).
"""

from __future__ import annotations

import copy
import struct
import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from torch_core.base.errors import InvalidInput

ROOT_TAG = b"jattn prefix root 1\0"
BLOCK_TAG = b"jattn block 1\0"

_MAX_SALT_BYTES = 64
_MAX_EXTRA_KEY_BYTES = 4096


def encode_root(
    *,
    salt: bytes | None,
    model_fingerprint: bytes,
    cache_dtype: str,
    block_size: int,
    extra_keys: Iterable[bytes | str | int] = (),
) -> bytes:
    """Returns the canonical encoding of the fields that all blocks of a sequence have in common.

    `salt` is 1 to 64 bytes that isolate a tenant: sequences with different salts never share, and None is a salt of its
    own. The order of `extra_keys` counts. Raises InvalidInput for a salt or an extra key of the wrong type or length.

    Example:
        >>> a = encode_root(salt=b"ab", model_fingerprint=b"c", cache_dtype="float32", block_size=16)
        >>> b = encode_root(salt=b"a", model_fingerprint=b"bc", cache_dtype="float32", block_size=16)
        >>> a == b
        False
    """
    if salt is not None:
        if not isinstance(salt, bytes):
            raise InvalidInput("salt", f"is a {type(salt).__name__}", "it must be bytes, or None for the shared salt")
        if not 1 <= len(salt) <= _MAX_SALT_BYTES:
            raise InvalidInput("salt", f"has {len(salt)} bytes", f"it must have 1 to {_MAX_SALT_BYTES}")
    if isinstance(extra_keys, (bytes, str)):
        raise InvalidInput("extra_keys", f"is a {type(extra_keys).__name__}", "pass a list or tuple of keys")
    encoded_keys = [_encode_extra_key(index, key) for index, key in enumerate(extra_keys)]
    return b"".join(
        (
            ROOT_TAG,
            b"\x00" if salt is None else b"\x01" + _field(salt),
            _field(model_fingerprint),
            _field(cache_dtype.encode()),
            struct.pack("<QQ", block_size, len(encoded_keys)),
            *encoded_keys,
        )
    )


class LineageNode(NamedTuple):
    """The token ids of one block and, through `parent`, of all earlier blocks: the content that a key identifies."""

    parent: LineageNode | None
    tokens: bytes


def same_lineage(first: LineageNode | None, second: LineageNode | None) -> bool:
    """Says whether two nodes identify for the same tokens from the root on."""
    while first is not second:
        if first is None or second is None or first.tokens != second.tokens:
            return False
        first, second = first.parent, second.parent
    return True


class KeyChain:
    """The keys of one sequence's full blocks at one block size, computed as far as requested.

    Attributes:
        digests: the keys so far, 32 bytes each. Grown by `extend` only.
        nodes: the lineage of each key, when `verify` was asked for; else empty.
    """

    __slots__ = ("_begun", "_root", "_root_node", "block_size", "digests", "nodes")

    def __init__(self, root: bytes, block_size: int, *, verify: bool = False) -> None:
        self.block_size = block_size
        self.digests: list[bytes] = []
        self.nodes: list[LineageNode] = []
        # A block is so short that a good part of OpenSSL's time goes into setting a context up; copying one that has
        # read the header takes a tenth less than a new one.
        self._begun = sha256(BLOCK_TAG + struct.pack("<I", block_size)).copy
        self._root = sha256(root).digest()
        self._root_node = LineageNode(None, root) if verify else None

    def extend(self, tokens: array[int], num_blocks: int) -> None:
        """Computes the keys up to block `num_blocks - 1`; `tokens` must hold that many full blocks."""
        digests = self.digests
        start = len(digests)
        if num_blocks <= start:
            return
        size = self.block_size
        stride = 4 * size
        data = _little_endian(tokens[start * size : num_blocks * size])
        begun, found = self._begun, []
        parent = digests[-1] if digests else self._root
        for (piece,) in struct.iter_unpack(f"{stride}s", data):
            block = begun()
            block.update(parent + piece)
            found.append(parent := block.digest())
        digests += found
        if self._root_node is not None:
            node = self.nodes[-1] if self.nodes else self._root_node
            for (piece,) in struct.iter_unpack(f"{stride}s", data):
                node = LineageNode(node, piece)
                self.nodes.append(node)

    def recomputed(self, tokens: array[int], num_blocks: int) -> list[bytes]:
        """Computes the first `num_blocks` keys again, for the audit."""
        fresh = self.copy()
        fresh.digests, fresh.nodes, fresh._root_node = [], [], None
        fresh.extend(tokens, num_blocks)
        return fresh.digests

    def copy(self) -> KeyChain:
        """Returns a chain of its own with the same keys, for a fork."""
        twin = copy.copy(self)
        twin.digests, twin.nodes = self.digests.copy(), self.nodes.copy()
        return twin


def _field(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _encode_extra_key(index: int, key: object) -> bytes:
    if isinstance(key, bool) or not isinstance(key, (bytes, str, int)):
        raise InvalidInput(f"extra_keys[{index}]", f"is a {type(key).__name__}", "it must be bytes, str or int")
    if isinstance(key, bytes):
        kind, value = b"b", key
    elif isinstance(key, str):
        kind, value = b"s", key.encode("utf-8", "surrogatepass")
    else:
        kind, value = b"i", str(key).encode()
    if len(value) > _MAX_EXTRA_KEY_BYTES:
        raise InvalidInput(f"extra_keys[{index}]", f"has {len(value)} bytes", f"the limit is {_MAX_EXTRA_KEY_BYTES}")
    return kind + _field(value)


def _little_endian(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()
