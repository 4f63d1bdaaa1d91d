"""The metadata of a GGUF file, by key, with the type that is expected of each value."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np

from torch_core.base.errors import InvalidInput

_Value = TypeVar("_Value")


class Metadata(dict[str, Any]):
    """Values by key: numbers, booleans, texts, lists of texts, and arrays of numbers.

    Each method returns the default if the file has no such key.

    Raises:
        InvalidInput: a value of another type.
    """

    def without(self, keys: Collection[str]) -> Metadata:
        """Returns the metadata without some keys."""
        return Metadata((key, value) for key, value in self.items() if key not in keys)

    def text(self, key: str, default: _Value = None) -> str | _Value:
        """Returns a text."""
        return self._of_type(key, str, default, "a text")

    def flag(self, key: str, default: _Value = None) -> bool | _Value:
        """Returns a boolean."""
        return self._of_type(key, bool, default, "a boolean")

    def number(self, key: str, default: _Value = None) -> int | _Value:
        """Returns a whole number."""
        return self._of_type(key, int, default, "a whole number")

    def texts(self, key: str) -> list[str]:
        """Returns a list of texts."""
        return self._of_type(key, list, [], "a list of texts")

    def array(self, key: str, kinds: str) -> np.ndarray | None:
        """Returns an array of numbers of one of these kinds of numpy's ("iu", "f")."""
        found = self._of_type(key, np.ndarray, None, "a list of numbers")
        if found is not None and found.dtype.kind not in kinds:
            raise InvalidInput(key, f"is a list of {found.dtype}", f"it must have elements of kind {kinds!r}")
        return found

    def _of_type(self, key: str, kind: type, default: Any, wanted: str) -> Any:
        if key not in self:
            return default
        value = self[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidInput(key, value=value, wanted=f"it must be {wanted}")
        return value
