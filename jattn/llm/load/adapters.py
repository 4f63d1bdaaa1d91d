"""Low-rank adapters of a decoder from a folder of PEFT or from a state in memory, checked by name and shape."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.llm.load.adapter_config import read_peft_config
from jattn.llm.load.config import family_of
from jattn.llm.load.folder import check_folder, member
from jattn.llm.load.plan import found_name, plan_parameters
from jattn.llm.load.safetensors_file import open_safetensors
from jattn.llm.load.tensor_file import TensorFile, read_tensor, short_name
from jattn.llm.models import Adapters, AdapterTarget, LoraWeights, ModelConfig, adapter_targets, lora_scaling
from torch_core.adapters.call import MAX_RANK
from torch_core.base.checks import check_int, shown
from torch_core.base.errors import InvalidInput, Unsupported

_FILE, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
# PEFT's names, with the adapter's own name where a file was written without it.
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B|embedding_A|embedding_B)(?:\.default)?(?:\.weight)?")
_STATE = re.compile(r"(.*?)\.?(?:\w+_)?lora_([abAB])(?:\.weight|\.kernel)?")
_HEADS = ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out")


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter of one model.

    Attributes:
        rank: its rank: the largest of its layers.
        weights: matrices of each layer that it changes, [slices * rank, in] and [out, rank], the second one scaled.
    """

    rank: int
    weights: Mapping[AdapterTarget, LoraWeights]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A linear layer of a file, and its place in a joined one.

    Attributes:
        target: the joined layer.
        slices: the slices that it is.
        start, stop: its outputs among those of the file's pieces, joined.
        order: place in the joined pieces of each output of the target; None if it is its own.
    """

    target: AdapterTarget
    slices: range
    start: int
    stop: int
    order: np.ndarray | None


def load_adapter(folder: str | os.PathLike[str], config: ModelConfig) -> AdapterWeights:
    """Reads a folder of PEFT: adapter_config.json and adapter_model.safetensors.

    Everything is checked before a tensor is read. Scales (lora_alpha / r, or by its root with use_rslora) are
    multiplied into the second matrices.

    Args:
        folder: the folder.
        config: config of the model that the adapter is for.

    Raises:
        InvalidInput: a file is missing or broken, or a tensor does not fit the model: an adapter of another one.
        Unsupported: DoRA, biases, saved modules, or layers that have no adapters here; the message names it.
    """
    path = check_folder(folder)
    peft = read_peft_config(path)
    found = member(path, _FILE)
    if found is None:
        if member(path, _PICKLE) is not None:
            wanted = "reading one can run code. Convert it to safetensors"
            raise InvalidInput(_PICKLE, "is a pickle", wanted)
        raise InvalidInput(f"the folder has no {_FILE}.")
    file = open_safetensors(found)
    pieces, parts, family = _pieces_of(config), _paired(file, config), family_of(config)
    known = {f"{name}.weight" for name in parts}
    read: dict[str, tuple[_Piece, np.ndarray, np.ndarray, float]] = {}
    for name, piece in pieces.items():
        spellings = (found_name(f"{name}.weight", known, family, is_whole) for is_whole in (False, True))
        spelt = next((each for each in spellings if each in known), name).removesuffix(".weight")
        if spelt not in parts:
            continue
        names = parts.pop(spelt)
        rank, alpha = peft.of_module(spelt)
        wanted = (rank, piece.target.in_size), (piece.stop - piece.start, rank)
        for tensor, shape in zip(names, wanted, strict=True):
            stored = file.tensors[tensor].shape
            if stored != shape:
                text = f"tensor {short_name(tensor)} has shape {stored}; the model and r = {rank} ask for {shape}."
                raise InvalidInput(text).under(_FILE)
        first, second = (_finite(tensor, read_tensor(file, tensor)) for tensor in names)
        scaling = lora_scaling(rank, alpha, use_rslora=peft.use_rslora)
        read[name] = piece, first, second, scaling
    if parts:
        name = min(parts)
        raise _unknown(name, config).under(_FILE)
    return _joined(list(read.values()), config)


def adapter_of(source: Any, config: ModelConfig, *, index: int = 0, alpha: float | None = None) -> AdapterWeights:
    """Returns an adapter from memory.

    Args:
        source: `jattn.llm.models.Adapters`; or an nnx module, its state, or a nested mapping with pairs of arrays that
            are named lora_a and lora_b, as flax, qwix and SkyRL-tx name them: [in..., rank] and [rank, out...], in a
            module with Hugging Face's name of the layer, or with ours. An axis before these counts adapters.
        config: config of the model.
        index: number of the adapter, where there are several.
        alpha: the products are scaled by alpha / rank; None for the source's own, or for the rank.

    Raises:
        InvalidInput: another source, an index out of range, or arrays that do not fit.
        Unsupported: layers that have no adapters here.
    """
    if isinstance(source, Adapters):
        check_int("index", index, 0, source.num_adapters - 1)
        weights = {}
        scaling = source.scaling if alpha is None else alpha / source.rank
        targets = {(target.layer, target.module): target for target in adapter_targets(config)}
        for layer, modules in enumerate(source.layers):
            for name, module in modules.items():
                target = targets.get((layer, name))
                first, second = module["lora_a"][...][index], module["lora_b"][...][index]
                shapes = () if target is None else tuple(each[1:] for each in target.shapes(1, source.rank))
                if target is None or (first.shape, second.shape) != shapes:
                    raise InvalidInput(f"layers.{layer}.{name}", "is not of the model", "make Adapters of its config")
                weights[target] = LoraWeights(first, second * scaling)
        return AdapterWeights(source.rank, weights)
    return _of_state(source, config, index, alpha)


def _of_state(source: Any, config: ModelConfig, index: int, alpha: float | None) -> AdapterWeights:
    if not isinstance(source, nnx.Module | nnx.State | Mapping):
        wanted = "it must be Adapters, an nnx module or state, or a mapping of arrays"
        raise InvalidInput("adapter", f"is a {type(source).__name__}", wanted)
    state = nnx.state(source) if isinstance(source, nnx.Module) else source
    flat = nnx.to_flat_state(state if isinstance(state, nnx.State) else nnx.State(dict(state)))
    pairs: dict[str, dict[str, Any]] = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        match = _STATE.fullmatch(".".join(map(str, path)))
        if match:
            pairs.setdefault(match[1], {})[match[2].lower()] = nnx.as_pure(leaf)
    if not pairs:
        raise InvalidInput("adapter", "has no arrays named lora_a and lora_b")
    pieces = _pieces_of(config) | _own_pieces(config)
    read = []
    for name, pair in sorted(pairs.items()):
        if len(pair) < 2:
            raise InvalidInput(name, f"has lora_{next(iter(pair))} alone", "an adapter has lora_a and lora_b")
        piece = _by_last_names(name, pieces)
        if piece is None:
            raise _unknown(name, config)
        in_size, out_size = piece.target.in_size, piece.stop - piece.start
        first, second = pair["a"], pair["b"]
        if first.ndim and second.ndim and first.size != in_size * first.shape[-1]:
            # An axis of adapters comes first.
            check_int("index", index, 0, first.shape[0] - 1)
            first, second = first[index], second[index]
        rank = first.shape[-1] if first.ndim else 0
        if first.ndim < 2 or second.ndim < 2 or first.size != in_size * rank or second.size != out_size * rank:
            problem = f"has lora_a of shape {list(pair['a'].shape)} and lora_b of {list(pair['b'].shape)}"
            raise InvalidInput(name, problem, f"they must be [{in_size}, rank] and [rank, {out_size}]")
        first, second = first.reshape(in_size, rank).T, second.reshape(rank, out_size).T
        read.append((piece, first, second, 1.0 if alpha is None else alpha / rank))
    return _joined(read, config)


def _pieces_of(config: ModelConfig) -> dict[str, _Piece]:
    """Returns the linear layers of a file of the model by name, without ".weight"."""
    plan = {parameter.path: parameter for parameter in plan_parameters(config)}
    found: dict[str, _Piece] = {}
    for target in adapter_targets(config):
        parameter, start = plan[target.kernel], 0
        for place, piece in enumerate(parameter.pieces):
            size = piece.shape[0 if parameter.transposed else -1]
            joined = len(parameter.pieces) == 1
            slices = range(target.num_slices) if joined else range(place, place + 1)
            name = piece.name.removesuffix(".weight")
            found[name] = _Piece(target, slices, start, start + size, parameter.order)
            start += size
    return found


def _own_pieces(config: ModelConfig) -> dict[str, _Piece]:
    """Returns the same of the model's own modules, by their paths."""
    return {
        f"layers.{target.layer}.{target.module}": _Piece(target, range(target.num_slices), 0, target.out_size, None)
        for target in adapter_targets(config)
    }


def _by_last_names(name: str, pieces: Mapping[str, _Piece]) -> _Piece | None:
    """Returns the layer with the most last parts of a path, the number of the layer among them."""
    parts = name.split(".")
    numbers = [part for part in parts if part.isdecimal()]
    if not numbers:
        return None
    best: dict[int, list[_Piece]] = {}
    for known, piece in pieces.items():
        own = known.split(".")
        if piece.target.layer != int(numbers[0]) or own[-1] != parts[-1]:
            continue
        same = next((count for count, (x, y) in enumerate(zip(own[::-1], parts[::-1], strict=False)) if x != y), 0)
        best.setdefault(same or min(len(own), len(parts)), []).append(piece)
    found = best[max(best)] if best else []
    return found[0] if len(found) == 1 else None


def _joined(read: list[tuple[_Piece, Any, Any, float]], config: ModelConfig) -> AdapterWeights:
    """Returns the matrices of joined layers; a layer of its own of which a file has nothing is 0."""
    if not read:
        raise InvalidInput("adapter", "changes no layer of the model")
    rank = max(first.shape[0] for _, first, _, _ in read)
    if rank > MAX_RANK:
        raise InvalidInput("r", value=rank, wanted=f"it must be at most {MAX_RANK}")
    xp: Any = jnp if all(isinstance(first, jax.Array) for _, first, _, _ in read) else np
    dtype = jnp.dtype(config.dtype)
    groups: dict[AdapterTarget, list[tuple[_Piece, Any, Any]]] = {}
    for piece, first, second, scaling in read:
        more = rank - first.shape[0]
        wide = xp.asarray(second).astype(np.float32) * scaling
        padded = xp.pad(xp.asarray(first).astype(dtype), ((0, more), (0, 0)))
        groups.setdefault(piece.target, []).append((piece, padded, xp.pad(wide.astype(dtype), ((0, 0), (0, more)))))
    weights = {}
    for target, parts in groups.items():
        firsts: list[Any] = [xp.zeros((rank, target.in_size), dtype)] * target.num_slices
        seconds, end, order = [], 0, None
        for piece, first, second in sorted(parts, key=lambda part: part[0].start):
            for index in piece.slices:
                firsts[index] = first
            seconds += [xp.zeros((piece.start - end, rank), dtype), second]
            end, order = piece.stop, piece.order
        joined = xp.concatenate([*seconds, xp.zeros((target.out_size - end, rank), dtype)])
        weights[target] = LoraWeights(xp.concatenate(firsts), joined if order is None else joined[order])
    return AdapterWeights(rank, weights)


def _paired(file: TensorFile, config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Returns the two tensors of each linear layer by its name."""
    pairs: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            text = f"tensor {short_name(name)} is none of an adapter's; they end with lora_A.weight or lora_B.weight."
            raise InvalidInput(text).under(_FILE)
        if match[2] not in ("A", "B"):
            raise _unknown(match[1], config).under(_FILE)
        pairs.setdefault(match[1], {})[match[2]] = name
    for name, pair in pairs.items():
        if len(pair) < 2:
            text = f"{short_name(name)} has lora_{next(iter(pair))} alone."
            raise InvalidInput(text).under(_FILE)
    return {name: (pair["A"], pair["B"]) for name, pair in pairs.items()}


def _unknown(name: str, config: ModelConfig) -> InvalidInput | Unsupported:
    """Returns the error of a layer that has no adapter here."""
    last, shown_name = name.rpartition(".")[2], short_name(name)
    if last in _HEADS:
        return Unsupported(f"{shown_name} is an embedding or a head, which has no adapters here; train without it.")
    if "experts" in name or ".moe." in f".{name}.":
        return Unsupported(f"{shown_name} belongs to experts or their router, which have no adapters here.")
    if config.latent is not None and last == "kv_b_proj":
        return Unsupported(f"{shown_name} is multiplied into queries by latent attention, and has no adapters here.")
    if config.attn_output_gate and last in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        return Unsupported(f"{shown_name} is joined with the gate of attention, and has no adapters here.")
    if ".mlp." not in f".{name}." and ".self_attn." not in f".{name}.":
        for mixer in set(config.layer_types) - {"attention"}:
            return Unsupported(f"{shown_name} may be of a layer of {mixer}, which has no adapters here.")
    layers = re.findall(r"\.(\d{1,9})\.", f".{name}.")
    if layers and int(layers[0]) >= config.num_hidden_layers:
        return InvalidInput(f"{shown_name} is of layer {layers[0]}; the model has {config.num_hidden_layers}.")
    known = sorted({name.rpartition(".")[2] for name in _pieces_of(config)})
    return InvalidInput(f"{shown_name} is no linear layer of the model; it has {', '.join(known)}.")


def _finite(name: str, tensor: np.ndarray) -> np.ndarray:
    if not np.isfinite(tensor.astype(np.float32)).all():
        raise InvalidInput(_FILE, f"has NaN or infinite numbers in {shown(name)}")
    return tensor
