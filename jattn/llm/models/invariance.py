"""set_batch_invariant: a model whose training pass, prompts and decoded tokens have the same bits."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jattn.llm.models.attention import Attention
from jattn.llm.models.experts import SparseMLP
from jattn.llm.models.layers import batch_invariant_dot_general, dot_general
from jattn.nn import MultiHeadAttention, MultiHeadLatentAttention, SparseLatentAttention
from torch_core.base.errors import Unsupported

# Modules without arithmetic.
_NEUTRAL = (nnx.List, nnx.Dict, nnx.Embed, nnx.Dropout)
_LINEAR = (nnx.Linear, nnx.LinearGeneral)
_FLAX = (*_NEUTRAL, *_LINEAR)
# Products that the switch may replace: they compute what it computes, in another order.
_PRODUCTS = (None, jax.lax.dot_general, dot_general, batch_invariant_dot_general)


def set_batch_invariant(model: nnx.Module) -> None:
    """Switches a model to arithmetic in which a token's bits depend on its own sequence's tokens and the weights alone.

    Every sum then has one order, which follows from the index of its terms: products, norms and log-softmax row by row,
    attention by the keys' positions. So `Decoder.forward_dense`, prompts in any chunks, and decoded tokens in any batch
    have the same bits. It costs speed (docs/explanation/numerics.md). Gradients are those of the default arithmetic.

    A module takes part if its class has an attribute `batch_invariant`, which is set, or if it is an `nnx.Linear` or an
    `nnx.LinearGeneral` with the products of flax. A class of your own with such an attribute promises that its other
    arithmetic depends on a token's row alone: norms by `jattn.ops.row_norm`, products by `jattn.ops.row_product`.
    `nnx.Embed` takes part, and its method `attend`, whose product does not, raises Unsupported from then on.
    `nnx.LayerNorm` and `nnx.RMSNorm` do not take part: use `jattn.nn.LayerNorm` and `jattn.nn.RMSNorm`.

    Args:
        model: a model of `jattn.llm.models`, or a module of your own.

    Raises:
        Unsupported: a module does not take part, or not on this backend; the message has its path. Nothing is changed.
    """
    found = dict(nnx.iter_modules(model))
    # These compute their norms themselves.
    of_owners = {MultiHeadLatentAttention: nnx.RMSNorm, MultiHeadAttention: nnx.LayerNorm}
    found = {
        path: module
        for path, module in found.items()
        if not any(isinstance(found.get(path[:-1]), each) and type(module) is norm for each, norm in of_owners.items())
    }
    for path, module in found.items():
        _refuse(path, module)
    for path, module in found.items():
        if isinstance(module, _LINEAR):
            module.dot_general = batch_invariant_dot_general
        elif isinstance(module, nnx.Embed):
            module.attend = _NoAttend(_name(path))
        elif not isinstance(module, _NEUTRAL):
            setattr(module, "batch_invariant", True)  # noqa: B010


@dataclass(frozen=True)
class _NoAttend:
    """Takes the place of a method of an `nnx.Embed`; equal ones keep programs of equal models shared."""

    name: str

    def __call__(self, *_: Any, **__: Any) -> Any:
        problem = f"{self.name} is an Embed, whose attend sums in an order that depends on the batch"
        remedy = "use jattn.ops.row_product(rows, embedding, transposed=True)"
        raise Unsupported("batch_invariant", "is True", f"{problem}; {remedy}")


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "the model"


def _is_own(module: Any) -> bool:
    """Returns whether a class of flax is computed by a method of a subclass."""
    call = inspect.getattr_static(type(module), "__call__", None)
    return not any(
        isinstance(module, each) and call is inspect.getattr_static(each, "__call__", None) for each in _FLAX
    )


def _refuse(path: tuple[Any, ...], module: Any) -> None:
    reason = None
    parallel = getattr(module, "parallel", None)
    if parallel is not None and parallel.context_size > 1:
        reason = f"has its cache on {parallel.context_size} devices, each of which sums over its keys"
    elif isinstance(module, SparseLatentAttention):
        reason = "chooses keys by scores that depend on the batch"
    elif isinstance(module, MultiHeadLatentAttention) and jax.default_backend() != "cpu":
        reason = "attends to latents, which is batch-invariant on a CPU alone"
    elif isinstance(module, SparseMLP) and jax.default_backend() != "cpu":
        reason = "has experts, which are batch-invariant on a CPU alone"
    elif isinstance(module, Attention) and module.scales_by_element:
        reason = "gates its results or scales its queries, which is not done row by row"
    elif not hasattr(type(module), "batch_invariant") and _is_own(module):
        reason = f"is a {type(module).__name__}, whose results may depend on the batch; {_remedy(module)}"
    elif isinstance(module, _LINEAR) and not _has_known_product(module):
        reason = "has a dot_general of its own, whose sums may have any order"
    if reason is not None:
        raise Unsupported("batch_invariant", "is True", f"{_name(path)} {reason}")


def _remedy(module: Any) -> str:
    if isinstance(module, (nnx.LayerNorm, nnx.RMSNorm)):
        return f"use jattn.nn.{type(module).__name__}, whose rows are normalised one by one"
    return "give its class the attribute batch_invariant = False if its arithmetic depends on a token's row alone"


def _has_known_product(module: Any) -> bool:
    return module.dot_general in _PRODUCTS and getattr(module, "dot_general_cls", None) is None
