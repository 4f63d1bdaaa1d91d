"""RMSNorm and LayerNorm of flax, which also take part in `jattn.llm.models.set_batch_invariant`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn import ops
from torch_core.base.errors import Unsupported


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm`, with its arguments and parameters (Zhang and Sennrich 2019, arXiv:1910.07467).

    Attributes:
        batch_invariant: a row's bits do not depend on the number of rows; by `jattn.ops.row_norm`.

    Raises:
        Unsupported: called with `batch_invariant` and a mask, or built over other axes than the last.
    """

    batch_invariant: bool = False

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalises `[..., features]`; see flax's class."""
        return by_row(self, x, mask, "rms_norm_wide") if self.batch_invariant else super().__call__(x, mask)


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm`, with its arguments and parameters (Ba et al. 2016, arXiv:1607.06450).

    Attributes:
        batch_invariant: as in `RMSNorm`.

    Raises:
        Unsupported: as in `RMSNorm`.
    """

    batch_invariant: bool = False

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises `[..., features]`; see flax's class."""
        return by_row(self, x, mask, "layer_norm") if self.batch_invariant else super().__call__(x, mask=mask)


def normalised(norm: nnx.RMSNorm, x: jax.Array) -> jax.Array:
    """Returns [..., features], x normalised by a norm of the last axis, in the dtype that the norm gives.

    XLA (jaxlib 0.10 and 0.11) computes it by one kernel on a GPU. Flax multiplies the weight with the inverse root
    before it multiplies x, which takes two, or three for many rows.
    """
    weight = norm.scale[...]  # type: ignore[index]
    dtypes = (x.dtype, weight.dtype, jnp.dtype(norm.dtype or jnp.float32), jnp.dtype(jnp.float32))
    wide = x.astype(max(dtypes, key=lambda each: each.itemsize))
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + norm.epsilon)
    wide = wide * jax.lax.broadcast_to_rank(weight.astype(wide.dtype), x.ndim)
    return wide.astype(norm.dtype or jnp.result_type(x, weight))


def by_row(norm: Any, x: jax.Array, mask: jax.Array | None, norm_type: str) -> jax.Array:
    """Normalises rows by a norm of flax in an order that does not depend on their number."""
    axes = {(axis,) if isinstance(axis, int) else tuple(axis) for axis in (norm.reduction_axes, norm.feature_axes)}
    if mask is not None or norm.axis_name is not None or not axes <= {(-1,), (x.ndim - 1,)}:
        given = {"mask": mask is not None, "axis_name": norm.axis_name is not None, "reduction_axes": True}
        name = next(name for name, is_given in given.items() if is_given)
        raise Unsupported(name, "is given and batch_invariant is True", "a row is the last axis, and all of it counts")
    features, bias = x.shape[-1], getattr(norm, "bias", None)
    parameters = {name: each[...] for name, each in (("weight", norm.scale), ("bias", bias)) if each is not None}
    x, *promoted = norm.promote_dtype((x, *parameters.values()), dtype=norm.dtype)
    # Ones that replace a missing scale decide no dtype.
    rows = {"weight": jnp.ones(features, x.dtype), **dict(zip(parameters, promoted, strict=True))}
    rows = {name: row[None] for name, row in rows.items()}
    options = {"epsilon": norm.epsilon, "norm_type": norm_type}
    return ops.row_norm(x.reshape(-1, features), **rows, **options).reshape(x.shape)
