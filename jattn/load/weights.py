"""The weights of a folder, in one file or in shards: found, compared with the plan, then read."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from jattn.load.folder import member, read_json, read_text
from jattn.load.plan import ParameterPlan
from jattn.load.safetensors_file import SafetensorsFile, open_safetensors, read_tensor
from torch_core.errors import InvalidInput

__all__ = ["check_weights", "find_weights", "read_parameter"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 32 << 20
_MAX_SHARDS = 1000
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
#: A buffer that older writers stored next to the weights; it follows from the config.
_IGNORED_TENSOR = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


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
        return dict.fromkeys(file.shapes, file)
    if index is not None:
        return _read_index(folder, read_json(read_text(index), _INDEX))
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in _PICKLE_SUFFIXES)
    if pickles:
        raise InvalidInput(
            f"the folder has pickled weights only ({pickles[0]}); reading a pickle can run code. "
            "Convert them to safetensors."
        )
    raise InvalidInput(f"the folder has neither {_SINGLE} nor {_INDEX}.")


def check_weights(tensors: dict[str, SafetensorsFile], plan: tuple[ParameterPlan, ...]) -> None:
    """Compares what the files hold with what the config asks for.

    Raises:
        InvalidInput: a missing or extra tensor, or one of another shape.
    """
    expected = {piece.name: piece.shape for parameter in plan for piece in parameter.pieces}
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise InvalidInput(f"the weights lack {_listed(missing)}; the config asks for {len(expected)} tensors.")
    extra = sorted(name for name in tensors if name not in expected and not _IGNORED_TENSOR.fullmatch(name))
    if extra:
        hint = " (tie_word_embeddings is true, so the head is the embedding)" if extra == ["lm_head.weight"] else ""
        raise InvalidInput(f"the weights have {_listed(extra)}, which the config does not ask for{hint}.")
    for name, shape in expected.items():
        found = tensors[name].shapes[name]
        if found != shape:
            raise InvalidInput(
                f"{tensors[name].path.name}: tensor {name!r} has shape {found}; the config asks for {shape}."
            )


def read_parameter(tensors: dict[str, SafetensorsFile], parameter: ParameterPlan, dtype: np.dtype) -> np.ndarray:
    """Returns one parameter of the model, its pieces transposed and joined, as a new array of `dtype`."""
    if len(parameter.pieces) == 1 and not parameter.transposed:
        name = parameter.pieces[0].name
        return read_tensor(tensors[name], name).astype(dtype, copy=False)
    joined = np.empty(parameter.shape, dtype)
    column = 0
    for piece in parameter.pieces:
        data = read_tensor(tensors[piece.name], piece.name)
        joined[..., column : column + piece.shape[0]] = data.T
        column += piece.shape[0]
    return joined


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
        for name in file.shapes:
            if name in tensors:
                raise InvalidInput(f"tensor {name!r} is in both {tensors[name].path.name} and {shard}.")
            if weight_map.get(name) != shard:
                raise InvalidInput(f"{shard} holds tensor {name!r}, but {_INDEX} does not place it there.")
            tensors[name] = file
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise InvalidInput(f"{_INDEX} places {_listed(absent)} in a file that does not hold it.")
    return tensors


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name[:120]) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
