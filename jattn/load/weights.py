"""The weights of a folder, in one file or in shards: found, compared with the plan, then read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.load.folder import member, read_json, read_text
from jattn.load.plan import ParameterPlan, TensorPlan
from jattn.load.quantized import dequantized, parts_of
from jattn.load.safetensors_file import SafetensorsFile, open_safetensors, read_tensor
from torch_core.errors import InvalidInput

__all__ = ["check_weights", "find_weights", "read_parameter", "read_places"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 32 << 20
_MAX_SHARDS = 1000
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
#: Buffers that older writers stored next to the weights; they follow from the config.
_IGNORED_TENSOR = re.compile(r".+\.(rotary_emb\.inv_freq|masked_bias|attn\.bias|attention\.bias)")


def find_weights(folder: Path) -> dict[str, SafetensorsFile]:
    """Returns, for each tensor name, the file that holds it; every header was read and checked.

    Raises:
        InvalidInput: no safetensors, several candidates, a bad index or a bad file.
    """
    single, index = member(folder, _SINGLE), member(folder, _INDEX, max_bytes=_MAX_INDEX_BYTES)
    if single is not None and index is not None:
        raise InvalidInput(f"the folder has both {_SINGLE} and {_INDEX}; keep one.")
    if single is not None:
        file = open_safetensors(single)
        return dict.fromkeys(file.tensors, file)
    if index is not None:
        return _read_index(folder, read_json(read_text(index), _INDEX))
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in _PICKLE_SUFFIXES)
    if pickles:
        raise InvalidInput(
            f"the folder has pickled weights only ({pickles[0]}); reading a pickle can run code. "
            "Convert them to safetensors."
        )
    raise InvalidInput(f"the folder has neither {_SINGLE} nor {_INDEX}.")


def check_weights(tensors: dict[str, SafetensorsFile], plan: tuple[ParameterPlan, ...], *, unread: str = "") -> None:
    """Compares what the files hold with what the config asks for.

    Args:
        tensors: of `find_weights`.
        plan: of `plan_parameters`.
        unread: a regular expression of names that may be there and are not looked at.

    Raises:
        InvalidInput: a missing or extra tensor, or one of another shape.
        Unsupported: weights in a type that needs scales which are not there.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for parameter in plan:
        for piece in parameter.pieces:
            expected |= parts_of(piece, tensors)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise InvalidInput(
            f"the weights lack {_listed(missing, expected)}; the config asks for {len(expected)} tensors."
        )
    unknown = (name for name in tensors if name not in expected and not _IGNORED_TENSOR.fullmatch(name))
    extra = sorted(name for name in unknown if not re.fullmatch(unread, name))
    if extra:
        hint = " (tie_word_embeddings is true, so the head is the embedding)" if extra == ["lm_head.weight"] else ""
        raise InvalidInput(f"the weights have {_listed(extra)}, which the config does not ask for{hint}.")
    for name, shape in expected.items():
        found = tensors[name].tensors[name].shape
        if found != shape:
            raise InvalidInput(
                f"{tensors[name].path.name}: tensor {name!r} has shape {found}; the config asks for {shape}."
            )


def read_parameter(
    tensors: dict[str, SafetensorsFile], parameter: ParameterPlan, dtype: np.dtype, *, on_host: bool
) -> jax.Array:
    """Returns one parameter of the model on JAX's default device: its pieces cast, transposed, joined, put in order.

    Args:
        tensors: of `find_weights`.
        parameter: of `plan_parameters`.
        dtype: of the result, unless the parameter is float32 in all models.
        on_host: do all that in numpy, for a device that is the host: it would compile a program for every shape.
            Otherwise each tensor goes to the device as it lies in the file, and the host never holds a copy.
    """
    xp: Any = np if on_host else jnp

    def read(name: str) -> Any:
        view = read_tensor(tensors[name], name)
        return view if on_host else jnp.asarray(view)

    blocks, dtype = [], np.dtype(np.float32) if parameter.is_float32 else dtype
    for piece in parameter.pieces:
        parts = parts_of(piece, tensors)
        block = read(piece.name) if len(parts) == 1 else dequantized(piece, read, parts, xp)
        blocks.append((block.T if parameter.transposed else block).astype(dtype))
    if parameter.num_stacked:
        size = len(blocks) // parameter.num_stacked
        groups = [blocks[first : first + size] for first in range(0, len(blocks), size)]
        value = xp.stack([group[0] if size == 1 else xp.concatenate(group, -1) for group in groups])
    else:
        value = blocks[0] if len(blocks) == 1 else xp.concatenate(blocks, -1)
    if parameter.order is not None:
        value = value[..., parameter.order]
    # A copy of its own on a host: a view of the file would change with the file.
    return jnp.array(value, dtype) if on_host else value


def read_places(
    tensors: dict[str, SafetensorsFile], parameter: ParameterPlan, axis: int | None, places: np.ndarray
) -> np.ndarray:
    """Returns some places of one parameter along an axis, in numpy; of the files no more than these are read.

    Quantised tensors are the exception: what is needed of one is taken from the whole.

    Args:
        tensors: of `find_weights`.
        parameter: of `plan_parameters`.
        axis: of the parameter; None for all of it.
        places: along the axis.
    """
    size = len(parameter.pieces) // max(parameter.num_stacked, 1)
    groups = [parameter.pieces[first : first + size] for first in range(0, len(parameter.pieces), size)]
    if parameter.num_stacked and axis == 0:
        groups, axis = [groups[place] for place in places], None
    found = [_joined(tensors, parameter, group, axis, places) for group in groups]
    return np.stack(found) if parameter.num_stacked else found[0]


def _joined(
    tensors: dict[str, SafetensorsFile],
    parameter: ParameterPlan,
    pieces: tuple[TensorPlan, ...],
    axis: int | None,
    places: np.ndarray,
) -> np.ndarray:
    blocks, last = [], len(parameter.shape) - 1
    for piece in pieces:
        parts = parts_of(piece, tensors)
        read = lambda name: read_tensor(tensors[name], name)  # noqa: E731
        block = read(piece.name) if len(parts) == 1 else dequantized(piece, read, parts, np)
        blocks.append(block.T if parameter.transposed else block)
    if axis != last:
        # An axis of stacked experts stands before those of a block.
        inner = None if axis is None else axis - bool(parameter.num_stacked)
        joined = np.concatenate([block if inner is None else block.take(places, inner) for block in blocks], -1)
        return joined if parameter.order is None else joined[..., parameter.order]
    columns = places if parameter.order is None else parameter.order[places]
    found = np.empty((*blocks[0].shape[:-1], len(columns)), blocks[0].dtype)
    first = 0
    for block in blocks:
        here = (columns >= first) & (columns < first + block.shape[-1])
        found[..., here] = block[..., columns[here] - first]
        first += block.shape[-1]
    return found


def _read_index(folder: Path, index: dict) -> dict[str, SafetensorsFile]:
    weight_map = index.get("weight_map")
    if set(index) - {"metadata", "weight_map"} or not isinstance(weight_map, dict):
        raise InvalidInput(f"{_INDEX} must have weight_map and may have metadata, nothing else.")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InvalidInput(f"{_INDEX}: weight_map must map tensor names to file names.")
    shards = sorted(set(weight_map.values()))
    if len(shards) > _MAX_SHARDS:
        raise InvalidInput(f"{_INDEX} names {len(shards)} files; at most {_MAX_SHARDS} are read.")
    tensors: dict[str, SafetensorsFile] = {}
    for shard in shards:
        if Path(shard).suffix.lower() in _PICKLE_SUFFIXES:
            raise InvalidInput(f"{_INDEX} names {shard!r}; reading a pickle can run code. Convert it to safetensors.")
        if not shard.endswith(".safetensors"):
            raise InvalidInput(f"{_INDEX} names {shard!r}; shards end in .safetensors.")
        path = member(folder, shard)
        if path is None:
            raise InvalidInput(f"{_INDEX} names {shard!r}, which is not in the folder.")
        file = open_safetensors(path)
        for name in file.tensors:
            if name in tensors:
                raise InvalidInput(f"tensor {name!r} is in both {tensors[name].path.name} and {shard}.")
            if weight_map.get(name) != shard:
                raise InvalidInput(f"{shard} holds tensor {name!r}, but {_INDEX} does not place it there.")
            tensors[name] = file
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise InvalidInput(f"{_INDEX} places {_listed(absent)} in a file that does not hold it.")
    return tensors


def _listed(names: list[str], shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    shown = ", ".join(repr(name[:120]) + (f" {shapes[name]}" if shapes else "") for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
