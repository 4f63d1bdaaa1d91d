"""A comparable picture of a cache manager's whole state, for tests that a refused call changed nothing."""

from __future__ import annotations

from array import array
from typing import Any

from torch_core.cache import CacheManager

_PLAIN = (int, float, str, bytes, bool, type(None))


def snapshot(cache: CacheManager) -> Any:
    """Returns nested tuples that are equal if and only if two states are, order and sharing of objects included."""
    return _picture(cache._state, {})


def _picture(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (array, tuple)) and not hasattr(value, "_fields"):
        return tuple(_picture(item, seen) for item in value)
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return ("dict", *((_picture(key, seen), _picture(item, seen)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("list", *(_picture(item, seen) for item in value))
    if isinstance(value, (set, frozenset)):
        return ("set", *sorted(value))
    return (type(value).__name__, *((name, _picture(getattr(value, name), seen)) for name in _fields(value)))


def _fields(value: Any) -> list[str]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return sorted({*names, *getattr(value, "__dict__", ())})
