"""set_batch_invariant: a model whose training pass, prompts and decoded tokens have the same bits."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jattn.llm.models.attention import Attention
from jattn.llm.models.experts import SparseMLP
from jattn.llm.models.layers import batch_invariant_dot_general
from jattn.nn import MultiHeadLatentAttention, SparseLatentAttention
from torch_core.base.errors import Unsupported

# Modules without arithmetic.
_NEUTRAL = (nnx.List, nnx.Dict, nnx.Embed, nnx.Dropout)
_LINEAR = (nnx.Linear, nnx.LinearGeneral)


def set_batch_invariant(model: nnx.Module) -> None:
    """Switches a model to arithmetic in which a token's bits depend on its own sequence's tokens and the weights alone.

    Every sum then has one order, which follows from the index of its terms: products, norms and log-softmax row by row,
    attention by the keys' positions. So `Decoder.forward_dense`, prompts in any chunks, and decoded tokens in any batch
    have the same bits. It costs speed (docs/explanation/numerics.md). Gradients are those of the default arithmetic.

    A module takes part if its class has an attribute `batch_invariant`, which is set, or if it is an `nnx.Linear` or an
    `nnx.LinearGeneral`. A class of your own with such an attribute promises that its other arithmetic depends on a
    token's row alone.

    Args:
        model: a model of `jattn.llm.models`, or a module of your own.

    Raises:
        Unsupported: a module does not take part, or not on this backend; the message has its path. Nothing is changed.
    """
    found = dict(nnx.iter_modules(model))
    # Latent attention computes its norms itself.
    owners = [path for path, module in found.items() if isinstance(module, MultiHeadLatentAttention)]
    found = {
        path: module
        for path, module in found.items()
        if not (isinstance(module, nnx.RMSNorm) and tuple(path[:-1]) in owners)
    }
    for path, module in found.items():
        _refuse(path, module)
    for module in found.values():
        if isinstance(module, _LINEAR):
            module.dot_general = batch_invariant_dot_general
        elif not isinstance(module, _NEUTRAL):
            setattr(module, "batch_invariant", True)  # noqa: B010


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
    elif not (hasattr(type(module), "batch_invariant") or isinstance(module, (*_LINEAR, *_NEUTRAL))):
        reason = f"is a {type(module).__name__}, whose results may depend on the batch"
    if reason is not None:
        name = ".".join(map(str, path)) or "the model"
        raise Unsupported("batch_invariant", "is True", f"{name} {reason}")
