"""Steps JAX's mesh aside: a trainer sets one for its arrays, and an engine's lie on devices of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

__all__ = ["no_mesh"]

_NONE = Mesh(np.empty((), object), ())


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Runs a block, or as a decorator a function, as if `jax.set_mesh` had not been called.

    Under a mesh new arrays lie on all of its devices, and along Explicit axes its types are those of every array.
    """
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(_NONE):
        yield
