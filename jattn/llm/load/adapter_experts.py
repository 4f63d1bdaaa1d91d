"""PEFT's adapters of experts whose kernels are one parameter (`target_parameters`): their names and their layout."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from jattn.llm.load.adapter_pieces import Piece, whole
from jattn.llm.load.plan import plan_parameters
from jattn.llm.models import ModelConfig, adapter_targets

# The module of the experts, wrapped once for each parameter, or the parameter.
_EXPERTS = re.compile(r"(?:.+\.)?layers\.(\d{1,9})\.(?:\w+\.)*experts((?:\.base_layer)*)(?:\.(\w+_proj))?")
_FIRST, _DOWN = ("gate_up_proj", "up_proj"), "down_proj"
_Shape = tuple[int, ...]


def expert_pieces(
    shapes: Mapping[str, tuple[_Shape, _Shape]], config: ModelConfig, target_parameters: Collection[str]
) -> dict[str, Piece]:
    """Returns the parameters of experts among the names of a file.

    PEFT wraps the module of the experts once for each parameter, so that a name says how deep a wrapper lies, and not
    which parameter it is of: the first product's is inside of the second one's. Where that leaves a choice, shapes and
    the names in adapter_config.json decide.

    Args:
        shapes: shapes of both tensors by the layer's name.
        config: config of the model.
        target_parameters: parameters that adapter_config.json names.
    """
    orders = {parameter.path: parameter.order for parameter in plan_parameters(config)}
    targets = [target for target in adapter_targets(config) if target.num_experts]
    known = {target.name: whole(target, orders[target.kernel]) for target in targets}
    wrapped: dict[str, list[tuple[int, str]]] = {}
    found: dict[str, Piece] = {}
    for name in shapes:
        match = _EXPERTS.fullmatch(name)
        if match is None:
            continue
        if match[3] is None:
            wrapped.setdefault(match[1], []).append((-len(match[2]), name))
        elif (piece := known.get(f"layers.{int(match[1])}.moe.{match[3]}")) is not None:
            found[name] = piece
    for layer, names in wrapped.items():
        where = f"layers.{int(layer)}.moe."
        pieces = [piece for each in (*_FIRST, _DOWN) if (piece := known.get(where + each)) is not None]
        ordered = [name for _, name in sorted(names)]
        if len(pieces) == 2 and len(ordered) <= 2:
            found |= dict(zip(ordered, _chosen(ordered, pieces, shapes, target_parameters), strict=True))
    return found


def parameter_name(name: str, piece: Piece) -> str:
    """Returns the name of the parameter that a name of a file stands for."""
    front, last = name.replace(".base_layer", ""), piece.target.module.rpartition(".")[2]
    return f"{front}.{last}" if front.endswith("experts") else front


def expert_shapes(piece: Piece, rank: int, *, swapped: bool = False) -> tuple[_Shape, _Shape]:
    """Returns the shapes of the two tensors of all experts; `swapped` if inputs and outputs are, as in PEFT 0.17."""
    sizes = (piece.target.in_size, piece.out_size)
    in_size, out_size = reversed(sizes) if swapped else sizes
    return (piece.num_experts * rank, in_size), (out_size, piece.num_experts * rank)


def expert_matrices(piece: Piece, first: Any, second: Any, *, swapped: bool) -> tuple[Any, Any]:
    """Returns the matrices of each expert, [experts, rank, in] and [experts, out, rank], of the two tensors.

    Rows of the first tensor have an expert's ranks together; columns of the second one have a rank's experts together.
    """
    count = piece.num_experts
    first = first.reshape(count, -1, first.shape[1])
    second = second.reshape(second.shape[0], -1, count).transpose(2, 0, 1)
    return (second.swapaxes(1, 2), first.swapaxes(1, 2)) if swapped else (first, second)


def expert_tensors(first: Any, second: Any) -> tuple[Any, Any]:
    """Returns the two tensors of all experts of the matrices of each one: the inverse of `expert_matrices`."""
    return first.reshape(-1, first.shape[-1]), second.transpose(1, 2, 0).reshape(second.shape[1], -1)


def wrapped_name(name: str, *, with_down: bool) -> str:
    """Returns the module's name in a file of a parameter of experts: the inverse of `expert_pieces`."""
    front, _, last = name.rpartition(".")
    if not front.endswith("experts"):
        return name
    return f"{front}.base_layer" if with_down and last in _FIRST else front


def _chosen(
    names: list[str],
    pieces: list[Piece],
    shapes: Mapping[str, tuple[_Shape, _Shape]],
    target_parameters: Collection[str],
) -> list[Piece]:
    """Returns the parameter of each wrapper, the innermost first."""
    choices = [pieces, pieces[::-1]] if len(names) == 2 else [pieces[:1], pieces[1:]]
    ends = {each.rpartition(".")[2] for each in target_parameters}
    if len(names) == 1 and _DOWN in ends and not ends & {*_FIRST}:
        choices.reverse()
    fitting = (choice for choice in choices if all(map(_fits, choice, (shapes[name] for name in names))))
    return next(fitting, choices[0])


def _fits(piece: Piece, shapes: tuple[_Shape, _Shape]) -> bool:
    first, second = shapes
    rank = first[0] // piece.num_experts if first else 0
    return any((first, second) == expert_shapes(piece, rank, swapped=swapped) for swapped in (False, True))
