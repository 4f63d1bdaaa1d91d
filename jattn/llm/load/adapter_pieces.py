"""The parts of a decoder that adapters may change, as files and modules in memory name them, and their join."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.llm.load.config import family_of
from jattn.llm.load.plan import ParameterPlan, plan_parameters
from jattn.llm.load.tensor_file import short_name
from jattn.llm.models import HEAD, AdapterTarget, LoraWeights, ModelConfig, adapter_targets
from jattn.llm.models.joined import tensor_layers
from torch_core.adapters.call import MAX_RANK
from torch_core.base.errors import InvalidInput, Unsupported


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter of one model.

    Attributes:
        rank: its rank: the largest of its layers.
        weights: matrices of each part that it changes, of `AdapterTarget.shapes`, the second one scaled.
    """

    rank: int
    weights: Mapping[AdapterTarget, LoraWeights]


@dataclass(frozen=True, slots=True)
class Piece:
    """A linear layer of a file, and its place in a joined one.

    Attributes:
        target: the joined layer.
        slices: the slices that it is.
        start, stop: its outputs among those of the file's pieces, joined.
        order: place in the joined pieces of each output of the target's kernel; None if it is its own.
        expert: the expert that it is of; None for all experts of the target, or without experts.
    """

    target: AdapterTarget
    slices: tuple[int, ...]
    start: int
    stop: int
    order: np.ndarray | None
    expert: int | None = None

    @property
    def out_size(self) -> int:
        """Number of its outputs."""
        return self.stop - self.start

    @property
    def num_experts(self) -> int:
        """Experts that it is of together; 0 for one layer."""
        return self.target.num_experts if self.expert is None else 0


@dataclass(frozen=True, slots=True)
class Pair:
    """The matrices of a piece: [rank, in] and [out, rank], of experts together with an axis before these."""

    piece: Piece
    lora_a: Any
    lora_b: Any
    scaling: float


def pieces_of(config: ModelConfig) -> dict[str, Piece]:
    """Returns the linear layers of a file of the model by name, without ".weight"."""
    plan = {parameter.path: parameter for parameter in plan_parameters(config)}
    found: dict[str, Piece] = {}
    for target in adapter_targets(config):
        if target.module == HEAD and config.tie_word_embeddings:
            found[str(family_of(config).tensor_name(HEAD, config))] = whole(target)
        else:
            found |= _named(target, plan[target.kernel])
    return found


def own_pieces(config: ModelConfig) -> dict[str, Piece]:
    """Returns the same of the model's own modules, by their paths."""
    return {target.name: whole(target) for target in adapter_targets(config)}


def whole(target: AdapterTarget, order: np.ndarray | None = None) -> Piece:
    """Returns all of a target as one piece."""
    return Piece(target, tuple(range(target.num_slices)), 0, target.out_size, order)


def by_last_names(name: str, pieces: Mapping[str, Piece]) -> Piece | None:
    """Returns the piece with the most last parts of a path, the number of the layer among them."""
    parts = name.split(".")
    layer = next((int(part) for part in parts if part.isdecimal()), None)
    best: dict[int, list[Piece]] = {}
    for known, piece in pieces.items():
        own = known.split(".")
        if piece.target.layer != layer or own[-1] != parts[-1]:
            continue
        same = next((count for count, (x, y) in enumerate(zip(own[::-1], parts[::-1], strict=False)) if x != y), 0)
        best.setdefault(same or min(len(own), len(parts)), []).append(piece)
    found = best[max(best)] if best else []
    # A file and the model may have one name for a module.
    return found[0] if len({(piece.target, piece.slices, piece.expert) for piece in found}) == 1 else None


def joined(pairs: Iterable[Pair], dtype: Any) -> AdapterWeights:
    """Returns the matrices of joined layers; a layer of its own, or an expert, of which there is nothing is 0.

    Raises:
        InvalidInput: there is no pair, a rank is too large, or a layer occurs twice.
    """
    apart = [each for pair in pairs for each in _apart(pair)]
    if not apart:
        raise InvalidInput("adapter", "changes no layer of the model")
    rank = max(pair.lora_a.shape[0] for pair in apart)
    if rank > MAX_RANK:
        raise InvalidInput("r", value=rank, wanted=f"it must be at most {MAX_RANK}")
    xp: Any = jnp if all(isinstance(pair.lora_a, jax.Array) for pair in apart) else np
    groups: dict[AdapterTarget, dict[int | None, list[Pair]]] = {}
    for pair in apart:
        groups.setdefault(pair.piece.target, {}).setdefault(pair.piece.expert, []).append(pair)
    weights, dtype = {}, jnp.dtype(dtype)
    for target, experts in groups.items():
        if target.num_experts:
            each = [_joined(target, experts.get(one, []), rank, dtype, xp) for one in range(target.num_experts)]
            weights[target] = LoraWeights(*(xp.stack(arrays) for arrays in zip(*each, strict=True)))
        else:
            weights[target] = _joined(target, experts[None], rank, dtype, xp)
    return AdapterWeights(rank, weights)


def split(piece: Piece, weights: LoraWeights) -> Pair:
    """Returns one piece of joined layers, by numpy: the inverse of `joined`.

    A piece of several layers, whose first matrices differ, has those of all below each other.
    """
    first, second = (np.asarray(each) for each in weights[:2])
    if piece.expert is not None:
        first, second = first[piece.expert], second[piece.expert]
    target, rank = piece.target, second.shape[-1]
    first = first.T if target.is_embedding else first
    firsts = first.reshape(*first.shape[:-2], target.num_slices, rank, target.in_size)[..., list(piece.slices), :, :]
    if (firsts == firsts[..., :1, :, :]).all():
        first = firsts[..., 0, :, :]
    else:
        first = firsts.reshape(*first.shape[:-2], -1, target.in_size)
        layer_of = np.repeat(np.arange(target.num_slices), target.slices)[:, None]
        nothing = np.zeros((), second.dtype)
        second = np.concatenate([np.where(layer_of == each, second, nothing) for each in piece.slices], axis=-1)
    if piece.order is not None:
        second = second[..., np.argsort(piece.order), :]
    return Pair(piece, first, second[..., piece.start : piece.stop, :], 1.0)


def unknown(name: str, config: ModelConfig) -> InvalidInput | Unsupported:
    """Returns the error of a layer that has no adapter here."""
    last, shown_name = name.rpartition(".")[2], short_name(name)
    layers = re.findall(r"\.(\d{1,9})\.", f".{name}.")
    if layers and int(layers[0]) >= config.num_hidden_layers:
        return InvalidInput(f"{shown_name} is of layer {layers[0]}; the model has {config.num_hidden_layers}.")
    if "conv" in last:
        return Unsupported(f"{shown_name} is a convolution, which has no adapters here; linear layers have.")
    if "per_layer" in last:
        return Unsupported(f"{shown_name} is computed once for all layers, and has no adapters here.")
    known = sorted({name.rpartition(".")[2] for name in pieces_of(config)})
    return InvalidInput(f"{shown_name} is no linear layer of the model; it has {', '.join(known)}.")


def _named(target: AdapterTarget, parameter: ParameterPlan) -> dict[str, Piece]:
    names = [piece.name.removesuffix(".weight") for piece in parameter.pieces]
    count = len(names) // parameter.num_stacked if target.num_experts and parameter.num_stacked else len(names)
    if count == 1 and (len(names) == 1 or not target.num_experts):
        return {names[0]: whole(target, parameter.order)}
    found: dict[str, Piece] = {}
    start = 0
    for place, (name, piece) in enumerate(zip(names, parameter.pieces, strict=True)):
        expert, own = divmod(place, count) if target.num_experts else (None, place)
        start = start if own else 0
        size = piece.shape[0 if parameter.transposed else -1]
        slices = tensor_layers(target.module, count, target.num_slices)[own]
        found[name] = Piece(target, slices, start, start + size, parameter.order, expert)
        start += size
    return found


def _apart(pair: Pair) -> Iterable[Pair]:
    """Yields the pairs of each expert."""
    if not pair.piece.num_experts:
        yield pair
        return
    for expert, (lora_a, lora_b) in enumerate(zip(pair.lora_a, pair.lora_b, strict=True)):
        yield Pair(replace(pair.piece, expert=expert), lora_a, lora_b, pair.scaling)


def _joined(target: AdapterTarget, pairs: list[Pair], rank: int, dtype: Any, xp: Any) -> LoraWeights:
    firsts: list[Any] = [xp.zeros((rank, target.in_size), dtype)] * target.num_slices
    seconds, end, order = [], 0, None
    for pair in sorted(pairs, key=lambda pair: pair.piece.start):
        piece, more = pair.piece, rank - pair.lora_a.shape[0]
        if piece.start < end:
            raise InvalidInput("adapter", f"has matrices of {target.name} twice", "leave one out")
        for index in piece.slices:
            firsts[index] = xp.pad(xp.asarray(pair.lora_a).astype(dtype), ((0, more), (0, 0)))
        scaled = (xp.asarray(pair.lora_b).astype(np.float32) * pair.scaling).astype(dtype)
        seconds += [xp.zeros((piece.start - end, rank), dtype), xp.pad(scaled, ((0, 0), (0, more)))]
        end, order = piece.stop, piece.order
    second = xp.concatenate([*seconds, xp.zeros((target.out_size - end, rank), dtype)])
    first = xp.concatenate(firsts)
    second = second if order is None else second[order]
    return LoraWeights(first.T if target.is_embedding else first, second)
