"""LoRA: a trainable low-rank adapter around a linear layer of flax, whose own weights stay as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from torch_core.adapters.call import MAX_RANK
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput


class LoRA(nnx.Module):
    """`base_module(x) + alpha / rank * (x @ lora_a) @ lora_b` (Hu et al. 2021, arXiv:2106.09685).

    It takes the place of a projection, such as those of `jattn.MultiHeadAttention`, whose features may have several
    axes; `nnx.LoRA` takes one axis. Differentiate by `nnx.LoRAParam` alone, and the base is frozen. At first it changes
    nothing: `lora_b` is 0.

    Args:
        base_module: an `nnx.Linear` or `nnx.LinearGeneral` whose inputs are the last axes.
        rank: the rank, up to 256.
        alpha: the product is scaled by alpha / rank; None for the rank.
        param_dtype: dtype of the parameters; None for that of the base's kernel.
        rngs: source of the initial values.

    Raises:
        InvalidInput: another module, or a rank out of range.

    Example:
        >>> linear = nnx.LinearGeneral(4, (2, 3), rngs=nnx.Rngs(0))
        >>> adapted = LoRA(linear, rank=1, rngs=nnx.Rngs(1))
        >>> adapted(jnp.ones((5, 4))).shape, adapted.lora_a.shape, adapted.lora_b.shape
        ((5, 2, 3), (4, 1), (1, 6))
        >>> wrt = nnx.DiffState(0, nnx.LoRAParam)
        >>> sorted(nnx.grad(lambda module: module(jnp.ones((5, 4))).sum(), argnums=wrt)(adapted))
        ['lora_a', 'lora_b']
    """

    def __init__(
        self, base_module: nnx.Module, *, rank: int, alpha: float | None = None, param_dtype: Any = None, rngs: nnx.Rngs
    ) -> None:
        if not isinstance(base_module, nnx.Linear | nnx.LinearGeneral):
            wanted = "it must be an nnx.Linear or nnx.LinearGeneral"
            raise InvalidInput("base_module", f"is a {type(base_module).__name__}", wanted)
        check_int("rank", rank, 1, MAX_RANK)
        inputs, outputs = _axes(base_module.in_features), _axes(base_module.out_features)
        axis = tuple(sorted(_axes(getattr(base_module, "axis", -1))))
        if axis != tuple(range(-len(inputs), 0)) or getattr(base_module, "batch_axis", None):
            raise InvalidInput("base_module", f"has inputs along the axes {axis}", "they must be the last axes of x")
        self.base_module, self.num_inputs = base_module, len(inputs)
        self.scaling = 1.0 if alpha is None else alpha / rank
        dtype = base_module.kernel[...].dtype if param_dtype is None else param_dtype
        uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.lora_a = nnx.LoRAParam(uniform(rngs.params(), (math.prod(inputs), rank), dtype))
        self.lora_b = nnx.LoRAParam(jnp.zeros((rank, math.prod(outputs)), dtype))

    def __call__(self, x: jax.Array, **options: Any) -> jax.Array:
        """Maps the last axes of x as the base does; options are the base's."""
        y = self.base_module(x, **options)
        rows = x.reshape(*x.shape[: x.ndim - self.num_inputs], -1).astype(y.dtype)
        inner = (rows @ self.lora_a[...].astype(y.dtype)) * jnp.asarray(self.scaling, y.dtype)
        return y + (inner @ self.lora_b[...].astype(y.dtype)).reshape(y.shape)


def _axes(sizes: int | Sequence[int]) -> tuple[int, ...]:
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)
