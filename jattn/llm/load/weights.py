"""The weights of a folder, in one file or in shards: found, compared with the plan, then read."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.llm.load.families import Family
from jattn.llm.load.folder import member, read_json, read_text
from jattn.llm.load.plan import INT4_KERNEL, ParameterPlan, TensorPlan, kernel_and_scale, parts_of
from jattn.llm.load.read_ahead import FileRange
from jattn.llm.load.safetensors_file import open_safetensors
from jattn.llm.load.tensor_file import (
    STORED_DTYPES,
    Tensors,
    check_scale,
    checked_dtype,
    computed_tensor,
    num_bytes,
    read_tensor,
)
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.quantized import dequantize
from torch_core.base.errors import InvalidInput, Unsupported

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 32 << 20
_MAX_SHARDS = 1000
#: Of memory that XLA takes as it is.
_ALIGNMENT = 64
_TILE = 256
#: Tensors that are named in far less than a second.
_NAMED_AT_ONCE = 1 << 14
#: Elements of two tensors that are compared at once.
_COMPARED = 1 << 22
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
#: Scales of an fp8 cache, under the names that vLLM knows.
_KV_SCALE = re.compile(r"(?:.+\.)?layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale")
#: Buffers that older writers stored next to the weights, which follow from the config, and scales of inputs in fp8,
#: which stay in the model's dtype here.
_IGNORED_TENSOR = re.compile(r".+\.(rotary_emb\.inv_freq|masked_bias|attn\.bias|attention\.bias|input_scale)")


def find_weights(folder: Path) -> Tensors:
    """Returns, for each tensor name, the file that holds it; every header was read and checked."""
    single, index = member(folder, _SINGLE), member(folder, _INDEX, max_bytes=_MAX_INDEX_BYTES)
    if single is not None and index is not None:
        named = read_json(read_text(index), _INDEX).get("weight_map")
        if not isinstance(named, dict) or set(map(str, named.values())) != {_SINGLE}:
            raise InvalidInput(f"the folder has both {_SINGLE} and {_INDEX}, which names other files; keep one.")
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


def with_tied_head(tensors: Tensors, embedding: str, head: str) -> Tensors:
    """Returns the tensors of a model whose head is its embedding: one of the two, under the embedding's name.

    Some writers store both, which must be equal, some the head alone.
    """
    if head not in tensors:
        return tensors
    rest = {name: file for name, file in tensors.items() if name != head}
    file, stored = tensors[head], tensors[head].tensors[head]
    if embedding not in tensors:
        return rest | {embedding: replace(file, tensors={embedding: stored})}
    other = tensors[embedding].tensors[embedding]
    same = (stored.shape, stored.dtype) == (other.shape, other.dtype)
    if same:
        first, second = (read_tensor(tensors[name], name).reshape(-1) for name in (head, embedding))
        same = all(
            np.array_equal(first[start : start + _COMPARED], second[start : start + _COMPARED])
            for start in range(0, first.size, _COMPARED)
        )
    if not same:
        raise InvalidInput(
            f"the weights have {head!r}, which is not {embedding!r}, and tie_word_embeddings is true; "
            f"hf_overrides={{'tie_word_embeddings': False}} takes both, or take {head!r} out of the weights."
        )
    return rest


def with_computed(tensors: Tensors, plan: tuple[ParameterPlan, ...], config: ModelConfig, family: Family) -> Tensors:
    """Returns the tensors with those that the family computes where the files leave them out."""
    found = dict(tensors)
    for parameter in plan if tensors else ():
        piece = parameter.pieces[0]
        if piece.name in tensors:
            continue
        array = np.ones(piece.shape, np.float32) if is_norm_without_weight(parameter, config, family) else None
        if (compute := family.computed.get(".".join(map(str, parameter.path[2:])))) is not None:
            array = compute(config, int(parameter.path[1])).reshape(piece.shape)
        if array is not None:
            found[piece.name] = computed_tensor(next(iter(tensors.values())), piece.name, array)
    return found


def without_plain_norms(
    tensors: Tensors, plan: tuple[ParameterPlan, ...], config: ModelConfig, family: Family
) -> Tensors:
    """Returns the tensors without those of norms that have no parameters; some files store ones and zeros for them.

    Raises:
        InvalidInput: other numbers.
    """
    weights = [each.pieces[0] for each in plan if is_norm_without_weight(each, config, family)]
    named = {piece.name: (piece.shape, 1) for piece in weights}
    named |= {f"{piece.name.removesuffix('weight')}bias": (piece.shape, 0) for piece in weights}
    plain = [
        name for name, (shape, _) in named.items() if name in tensors and tensors[name].tensors[name].shape == shape
    ]
    for name in plain:
        if (np.asarray(read_tensor(tensors[name], name)) != named[name][1]).any():
            problem = f"tensor {name!r} is not {named[name][1]} everywhere"
            raise InvalidInput(f"{tensors[name].path.name}: {problem}; the config says that norms have no parameters.")
    return {name: file for name, file in tensors.items() if name not in plain}


def is_norm_without_weight(parameter: ParameterPlan, config: ModelConfig, family: Family) -> bool:
    """Returns whether files have no such parameter, because their norms have no weights."""
    return family.norms_without_weights(config) and parameter.path[-1] == "weight"


def check_count(tensors: Tensors, fewest: int) -> None:
    """Refuses a config whose number of tensors would take long to list, if the files have fewer."""
    if fewest > max(len(tensors), _NAMED_AT_ONCE):
        raise InvalidInput(f"the config asks for {fewest} tensors or more; the weights have {len(tensors)}.")


def check_weights(tensors: Tensors, plan: tuple[ParameterPlan, ...], *, unread: str = "") -> None:
    """Compares the tensors of the files with those of the config; names that match `unread` are not looked at."""
    expected: dict[str, tuple[int, ...]] = {}
    for parameter in plan:
        for piece in parameter.pieces:
            expected |= (parts := parts_of(piece, tensors))
            _check_dtypes(tensors, piece, tuple(parts))
    missing = [name for name in expected if name not in tensors]
    if missing:
        text = f"the weights lack {_listed(missing, expected)}; the config asks for {len(expected)} tensors."
        raise InvalidInput(text)
    unknown = (
        name
        for name in tensors
        if name not in expected and not _IGNORED_TENSOR.fullmatch(name) and not _KV_SCALE.fullmatch(name)
    )
    extra = sorted(name for name in unknown if not re.fullmatch(unread, name))
    if extra:
        raise InvalidInput(f"the weights have {_listed(extra)}, which the config does not ask for.")
    for name, shape in expected.items():
        checked_dtype(tensors[name], name)
        found = tensors[name].tensors[name].shape
        if found != shape:
            text = f"{tensors[name].path.name}: tensor {name!r} has shape {found}; the config asks for {shape}."
            raise InvalidInput(text)


def is_quantized(tensors: Tensors, parameter: ParameterPlan) -> bool:
    """Returns whether every tensor of a parameter is stored in fewer bits, with scales of one kind."""
    parts = [tuple(parts_of(piece, tensors).items()) for piece in parameter.pieces]
    kinds = {(name.rsplit("_", 1)[-1], len(shape)) for (_, *scales) in parts for name, shape in scales}
    return all(len(each) > 1 for each in parts) and len(kinds) == 1


def in_two(tensors: Tensors, parameter: ParameterPlan) -> tuple[ParameterPlan, ParameterPlan] | None:
    """Returns a linear layer's first pieces, for which `is_quantized`, and its others; None if it has no such two."""
    pieces, order = parameter.pieces, parameter.order
    count = sum(1 for _ in itertools.takewhile(lambda piece: len(parts_of(piece, tensors)) > 1, pieces))
    if not 0 < count < len(pieces) or len(parameter.shape) != 2:
        return None
    outputs = sum(piece.shape[0 if parameter.transposed else 1] for piece in pieces[:count])
    if order is not None and (order[:outputs] >= outputs).any():
        return None
    shapes = ((parameter.shape[0], size) for size in (outputs, parameter.shape[1] - outputs))
    orders = (None, None) if order is None else (order[:outputs], order[outputs:] - outputs)
    first, rest = (
        replace(parameter, shape=shape, pieces=some, order=own, num_unused=unused)
        for shape, some, own, unused in zip(
            shapes, (pieces[:count], pieces[count:]), orders, (0, parameter.num_unused), strict=True
        )
    )
    return (first, rest) if is_quantized(tensors, first) else None


def read_kv_scales(tensors: Tensors, config: ModelConfig) -> dict[int, dict[str, float]]:
    """Returns the scales of an fp8 cache that are stored with the weights: for each layer those of "k" and "v"."""
    scales: dict[int, dict[str, float]] = {}
    for name, file in tensors.items():
        if match := _KV_SCALE.fullmatch(name):
            value = np.asarray(read_tensor(file, name), np.float32).reshape(-1)
            if value.size != 1 or not 0 < value[0] < np.inf:
                raise InvalidInput(f"{file.path.name}: tensor {name!r} must be one finite number above 0.")
            scales.setdefault(int(match[1]), {})[match[2]] = float(value[0])
    for layer, found in scales.items():
        if layer >= config.num_hidden_layers or not config.attends(layer):
            problem = f"there is a k_scale or v_scale of layer {layer}; the model"
            has = f"has {config.num_hidden_layers}" if layer >= config.num_hidden_layers else "has no attention there"
            raise InvalidInput(f"{problem} {has}.")
        if len(found) != 2:
            raise InvalidInput(f"layer {layer} has a scale of its {min(found)} cache alone; it must have k and v.")
    return scales


def read_parameter(tensors: Tensors, parameter: ParameterPlan, dtype: np.dtype, *, on_host: bool) -> jax.Array:
    """Returns one parameter of the model on JAX's default device: its pieces cast, transposed, joined, put in order.

    The dtype is the given one, unless the parameter is float32 in all models. With `on_host` all is done in numpy, for
    a device that is the host: it would compile a program for every shape. Otherwise each tensor goes to the device as
    it is in the file, and the host never holds a copy.
    """
    dtype = np.dtype(np.float32) if parameter.is_float32 else dtype
    blocks = _dequantized(tensors, parameter, parameter.pieces, on_host)
    return _joined(blocks, parameter, parameter.shape, dtype, on_host)


def read_quantized(tensors: Tensors, parameter: ParameterPlan, *, on_host: bool) -> tuple[jax.Array, jax.Array]:
    """Returns a parameter for which `is_quantized` as it is stored: a kernel and its scale, for `dequantize`."""
    kernels, scales = zip(*_pieces(tensors, parameter, parameter.pieces, on_host), strict=True)

    def joined(parts: tuple[Any, ...]) -> jax.Array:
        shape = (*parameter.shape[:-2], parts[0].shape[-2], parameter.shape[-1])
        return _joined(iter(parts), parameter, shape, parts[0].dtype, on_host)

    return joined(kernels), joined(scales)


def ranges_of(tensors: Tensors, parameter: ParameterPlan) -> list[FileRange]:
    """Returns where the bytes of a parameter lie."""
    names = [name for piece in parameter.pieces for name in parts_of(piece, tensors)]
    files = [(name, tensors[name]) for name in names]
    return [FileRange(file.path, file.tensors[name].offset, num_bytes(file, name)) for name, file in files]


def _dequantized(
    tensors: Tensors, parameter: ParameterPlan, pieces: tuple[TensorPlan, ...], on_host: bool
) -> Iterator[Any]:
    for kernel, scale in _pieces(tensors, parameter, pieces, on_host):
        yield kernel if scale is None else dequantize(kernel, scale, np if on_host else jnp)


def _pieces(
    tensors: Tensors, parameter: ParameterPlan, pieces: tuple[TensorPlan, ...], on_host: bool
) -> Iterator[tuple[Any, Any]]:
    """Yields each piece in the model's layout [in, out], and its scale; None for pieces that are not quantised."""

    def read(name: str) -> Any:
        view = read_tensor(tensors[name], name)
        if name in scales:
            check_scale(tensors[name], name, view)
        return view if on_host else jnp.asarray(view)

    transposed, home = parameter.transposed, np if on_host else jnp
    scales: tuple[str, ...] = ()
    for piece in pieces:
        parts = parts_of(piece, tensors)
        scales = tuple(parts)[1:]
        if scales:
            block, scale = kernel_and_scale(piece, read, parts, home, transposed=transposed)
        else:
            block = read(piece.name)
            # A convolution's [channels, 1, width] has an axis more, and a vector may have some.
            block = block.reshape(len(block), -1) if transposed and block.ndim > len(parameter.shape) else block
            block = block.swapaxes(-1, -2) if transposed else block
            block, scale = block.reshape(-1) if len(parameter.shape) == 1 else block, None
        if parameter.num_unused and piece is parameter.pieces[-1]:
            unused = ((0, 0), (0, parameter.num_unused))
            block, scale = (None if each is None else home.pad(each, unused) for each in (block, scale))
        yield block, scale


def _check_dtypes(tensors: Tensors, piece: TensorPlan, parts: tuple[str, ...]) -> None:
    """Refuses quantised tensors, and scales, of another dtype than their format has."""
    if piece.name + INT4_KERNEL in parts:
        return
    is_fp8 = piece.name in parts
    for index, name in enumerate(parts if len(parts) > 1 else ()):
        allowed = ("U8",) if not is_fp8 else ("F8_E4M3",) if index == 0 else tuple(STORED_DTYPES)
        if name in tensors and (code := tensors[name].tensors[name].code) not in allowed:
            problem = f"tensor {name!r} is {code}"
            raise Unsupported(
                f"{tensors[name].path.name}: {problem}; {'FP8' if is_fp8 else 'MXFP4'} has {', '.join(allowed)} there."
            )


def _joined(
    blocks: Iterator[Any], parameter: ParameterPlan, shape: tuple[int, ...], dtype: np.dtype, on_host: bool
) -> jax.Array:
    """Casts and joins blocks along the last axis, stacks members of a list, and reorders the last axis."""
    size = len(parameter.pieces) // max(parameter.num_stacked, 1)
    if on_host:
        value, end = _aligned_empty(shape, dtype), 0
        for index, block in enumerate(blocks):
            start = end if index % size else 0
            end = start + block.shape[-1]
            target = value[index // size] if parameter.num_stacked else value
            if parameter.order is None:
                _copy(block, target[..., start:end])
            else:
                places = np.flatnonzero((parameter.order >= start) & (parameter.order < end))
                target[..., places] = block[..., parameter.order[places] - start]
        # Aligned as XLA wants it, so it is taken and not copied.
        return jnp.asarray(np.ascontiguousarray(value.T) if parameter.is_conv else value)
    cast = [block.astype(dtype) for block in blocks]
    groups = [cast[first : first + size] for first in range(0, len(cast), size)]
    joined = [group[0] if size == 1 else jnp.concatenate(group, -1) for group in groups]
    value = jnp.stack(joined) if parameter.num_stacked else joined[0]
    value = value if parameter.order is None else value[..., parameter.order]
    return value.T if parameter.is_conv else value


def read_places(tensors: Tensors, parameter: ParameterPlan, axis: int | None, places: np.ndarray) -> np.ndarray:
    """Returns some places of one parameter along an axis (None: all of it), in numpy; no more than these are read.

    Quantised tensors are the exception: the needed part is cut from the whole tensor.
    """
    if parameter.is_conv:
        described = replace(parameter, is_conv=False)
        return read_places(tensors, described, None if axis is None else 1 - axis, places).T
    size = len(parameter.pieces) // max(parameter.num_stacked, 1)
    groups = [parameter.pieces[first : first + size] for first in range(0, len(parameter.pieces), size)]
    if parameter.num_stacked and axis == 0:
        groups, axis = [groups[place] for place in places], None
    found = [_taken(tensors, parameter, group, axis, places) for group in groups]
    return np.stack(found) if parameter.num_stacked else found[0]


def _taken(
    tensors: Tensors, parameter: ParameterPlan, pieces: tuple[TensorPlan, ...], axis: int | None, places: np.ndarray
) -> np.ndarray:
    blocks = list(_dequantized(tensors, parameter, pieces, on_host=True))
    if axis != len(parameter.shape) - 1:
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


def _read_index(folder: Path, index: dict) -> Tensors:
    weight_map = index.get("weight_map")
    if set(index) - {"metadata", "weight_map"} or not isinstance(weight_map, dict):
        raise InvalidInput(_INDEX, "must have weight_map and may have metadata, nothing else")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InvalidInput("weight_map", "must map tensor names to file names").under(_INDEX)
    shards = sorted(set(weight_map.values()))
    if len(shards) > _MAX_SHARDS:
        raise InvalidInput(_INDEX, f"names {len(shards)} files", f"at most {_MAX_SHARDS} are read")
    tensors: Tensors = {}
    for shard in shards:
        if Path(shard).suffix.lower() in _PICKLE_SUFFIXES:
            raise InvalidInput(_INDEX, f"names {shard!r}", "reading a pickle can run code. Convert it to safetensors")
        if not shard.endswith(".safetensors"):
            raise InvalidInput(_INDEX, f"names {shard!r}", "shards end in .safetensors")
        path = member(folder, shard)
        if path is None:
            raise InvalidInput(_INDEX, f"names {shard!r}, which is not in the folder")
        file = open_safetensors(path)
        for name in file.tensors:
            if name in tensors:
                raise InvalidInput(f"tensor {name!r} is in both {tensors[name].path.name} and {shard}.")
            if weight_map.get(name) != shard:
                raise InvalidInput(shard, f"holds tensor {name!r}, but {_INDEX} does not place it there")
            tensors[name] = file
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise InvalidInput(_INDEX, f"places {_listed(absent)} in a file that does not hold it")
    return tensors


def _copy(block: Any, target: np.ndarray) -> None:
    if block.ndim != 2:
        target[...] = block
        return
    # In tiles that fit the processor's caches: a transposed block is read across its rows.
    for row in range(0, block.shape[0], _TILE):
        for column in range(0, block.shape[1], _TILE):
            tile = slice(row, row + _TILE), slice(column, column + _TILE)
            target[tile] = block[tile]


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + num_bytes].view(dtype).reshape(shape)


def _listed(names: list[str], shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    shown = ", ".join(repr(name[:120]) + (f" {shapes[name]}" if shapes else "") for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
