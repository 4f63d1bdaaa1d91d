"""Who may ask: API keys, and the tenants whose cached prefixes stay apart."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence

from jattn.llm.load.folder import read_given
from torch_core.base.errors import InvalidInput


class KeyRing:
    """The keys of a server; it keeps their digests only.

    Args:
        keys: a mapping from key to tenant's name, or a sequence, in which each key is its own tenant.

    Example:
        >>> KeyRing({"k1": "red", "k2": "red"}).tenant("Bearer k1") == KeyRing({"k3": "red"}).tenant("bearer k3")
        True
    """

    def __init__(self, keys: Mapping[str, str] | Sequence[str]) -> None:
        named = keys if isinstance(keys, Mapping) else {}
        self._tenants = [
            (digest(key), digest(f"tenant {named[key]}" if key in named else f"key {key}"), named.get(key))
            for key in keys
        ]

    def tenant(self, authorization: str) -> tuple[bytes, str | None] | None:
        """Returns the tenant of a request's Authorization header: a digest, and the name if it has one.

        None if the key is missing or wrong, and if there are no keys.
        """
        scheme, _, key = authorization.partition(" ")
        own = digest(key)
        # Every key is compared, in constant time.
        found = [(tenant, name) for known, tenant, name in self._tenants if hmac.compare_digest(own, known)]
        return found[0] if found and scheme.lower() == "bearer" else None

    def __bool__(self) -> bool:
        return bool(self._tenants)


def read_keys(path: str | os.PathLike[str]) -> dict[str, str] | list[str]:
    """Returns the keys of a file: one a line, and after a space, on all lines or on none, its tenant's name.

    Empty lines and those that begin with "#" say nothing.
    """
    lines = [line.split() for line in read_given("api_key_file", path).splitlines()]
    entries = [words for words in lines if words and not words[0].startswith("#")]
    if not entries:
        raise InvalidInput("api_key_file", f"{str(path)!r} has no keys")
    if len({words[0] for words in entries}) < len(entries):
        raise InvalidInput("api_key_file", f"{str(path)!r} has a key twice")
    if all(len(words) == 1 for words in entries):
        return [key for (key,) in entries]
    if all(len(words) == 2 for words in entries):
        return {words[0]: words[1] for words in entries}
    problem = f"{str(path)!r} must have one key a line, followed on all lines or on none by its tenant's name"
    raise InvalidInput("api_key_file", problem)


def digest(text: str) -> bytes:
    """Returns 32 bytes that identify a text with any characters."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
