"""Objects that own a thread, device memory or connections, of which there is one."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import NoReturn, SupportsIndex

from torch_core.base.errors import Unsupported


class Owner:
    """A base whose objects refuse `copy.copy`, `copy.deepcopy` and `pickle`: a copy would share what it must own."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Unsupported(
            f"an object of {type(self).__name__} cannot be copied or pickled; it owns threads or device memory. Build "
            "another one from the same arguments."
        )


class ClosingOwner(Owner, contextlib.AbstractContextManager):
    """An owner that the end of a `with` block closes."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it owns."""

    def __exit__(self, *error: object) -> None:
        self.close()
