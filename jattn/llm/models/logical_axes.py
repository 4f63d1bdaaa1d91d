"""The logical axes of parameters, and the mesh axis that splits each: Megatron's rules, or others.

This is flax's way (`flax.linen.logical_axis_rules`): a model names an axis, a table maps the name to a mesh axis. Here
the name follows from a parameter's path, so parameters that are loaded, initialised or received from a trainer need no
metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput

#: Megatron's rules (Shoeybi et al. 2019, arXiv:1909.08053): the first product is split by columns, the second by rows,
#: so that one sum over devices ends each branch; the vocabulary and the experts are distributed.
DEFAULT_RULES: Mapping[str, str | None] = MappingProxyType(
    {
        "vocab": "tp",
        "heads": "tp",
        "kv_heads": "tp",
        "mlp": "tp",
        "experts": "tp",
        "embed": None,
        "expert_mlp": None,
    }
)

# Input and output axis of each linear module, by its name; a bias has the output's.
_LINEAR: dict[str, tuple[str | None, str | None]] = {
    "qkv_proj": ("embed", "heads"),
    "q_proj": ("embed", "heads"),
    "q_b_proj": (None, "heads"),
    "kv_b_proj": (None, "heads"),
    "o_proj": ("heads", "embed"),
    "gate_up_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
    "lm_head": ("embed", "vocab"),
}
_EXPERTS = {"gate_up_proj": ("embed", "expert_mlp"), "down_proj": ("expert_mlp", "embed")}
# Modules of flax's MultiHeadAttention, whose heads have an axis of their own.
_HEADS = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}


def logical_axes(path: Sequence[str | int], ndim: int) -> tuple[str | None, ...]:
    """Returns the logical name of each axis of a parameter; None for an axis that is never split.

    Args:
        path: path of the parameter in the nnx state of a module of `jattn.nn` or `jattn.llm.models`.
        ndim: number of axes of the parameter.

    Example:
        >>> logical_axes(("layers", 0, "mlp", "down_proj", "kernel"), 2)
        ('mlp', 'embed')
        >>> logical_axes(("attention", "query", "kernel"), 3)
        ('embed', 'heads', None)
    """
    leaf, module = path[-1], path[-2] if len(path) > 1 else ""
    axes: tuple[str | None, ...] = ()
    if leaf == "embedding":
        axes = ("vocab" if module == "embed_tokens" else None, "embed")
    elif leaf == "sinks":
        axes = ("heads",)
    elif module in ("q_norm", "k_norm") and ndim == 2:
        axes = ("heads" if module == "q_norm" else "kv_heads", None)
    elif "moe" in path and "shared_expert" not in path and module in _EXPERTS:
        inner, outer = _EXPERTS[str(module)]
        axes = ("experts", inner, outer) if leaf == "kernel" else ("experts", outer)
    elif module in _LINEAR:
        axes = _LINEAR[str(module)] if leaf == "kernel" else _LINEAR[str(module)][1:]
    elif module in _HEADS:
        axes = ("embed", _HEADS[str(module)], None) if leaf == "kernel" else (_HEADS[str(module)], None)
    elif module == "out":
        axes = ("heads", None, "embed") if leaf == "kernel" else ("embed",)
    return (*axes, *(None,) * (ndim - len(axes)))[:ndim]


def spec_of(axes: Sequence[str | None], rules: Mapping[str, str | None] = DEFAULT_RULES) -> PartitionSpec:
    """Returns how an array of these logical axes is split.

    Raises:
        InvalidInput: the rules do not know an axis.

    Example:
        >>> tuple(spec_of(("embed", "heads")))
        (None, 'tp')
    """
    unknown = [axis for axis in axes if axis is not None and axis not in rules]
    if unknown:
        raise InvalidInput("rules", f"have no axis {shown(unknown[0])}", f"they have {', '.join(rules)}")
    return PartitionSpec(*(None if axis is None else rules[axis] for axis in axes))


def partition_specs(model: nnx.Module | nnx.State, rules: Mapping[str, str | None] = DEFAULT_RULES) -> Any:
    """Returns a state of the same tree with a PartitionSpec for every parameter: for training along Auto axes.

    A parameter has the layout of one device, only split: XLA moves activations where the split does not fit their use
    (a product that computes queries, keys and values at once). For generation see `jattn.llm.models.shard_model`.

    Args:
        model: a module of `jattn.nn` or `jattn.llm.models`, or its state.
        rules: the mesh axis of each logical one, None for whole.

    Raises:
        InvalidInput: the rules lack an axis.
    """
    flat = nnx.to_flat_state(nnx.state(model) if isinstance(model, nnx.Module) else model)
    pairs: Any = zip(flat.paths, flat.leaves, strict=True)
    return nnx.from_flat_state(
        [(path, leaf.replace(spec_of(logical_axes(path, leaf.ndim), rules))) for path, leaf in pairs]
    )
