"""Low-rank adapters of a decoder from a folder of PEFT, checked by name and shape."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jattn.llm.load.adapter_config import PeftConfig, read_peft_config
from jattn.llm.load.adapter_experts import expert_matrices, expert_pieces, expert_shapes, parameter_name
from jattn.llm.load.adapter_pieces import AdapterWeights, Pair, Piece, joined, pieces_of, unknown
from jattn.llm.load.config import family_of
from jattn.llm.load.folder import check_folder, member
from jattn.llm.load.plan import found_name
from jattn.llm.load.safetensors_file import open_safetensors
from jattn.llm.load.tensor_file import STORED_DTYPES, TensorFile, read_tensor, short_name
from jattn.llm.models import ModelConfig, lora_scaling
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, Unsupported

#: File of the matrices.
ADAPTER_FILE = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
# PEFT's names, with the adapter's own name where a file was written without it.
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?(A|B)(?:\.default)?(?:\.weight)?")
# The base's embedding and head, which PEFT saves beside their adapters.
_BASE = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")


def load_adapter(folder: str | os.PathLike[str], config: ModelConfig) -> AdapterWeights:
    """Reads a folder of PEFT: adapter_config.json and adapter_model.safetensors.

    Everything is checked before a tensor is read. Scales (lora_alpha / r, or by its root with use_rslora) are
    multiplied into the second matrices.

    Args:
        folder: the folder.
        config: config of the model that the adapter is for.

    Raises:
        InvalidInput: a file is missing or broken, or a tensor or the architecture is another model's.
        Unsupported: DoRA, biases, saved modules, or layers that have no adapters here; the message names it.
    """
    path = check_folder(folder)
    peft = read_peft_config(path)
    peft.check_base(config.architecture)
    found = member(path, ADAPTER_FILE)
    if found is None:
        if member(path, _PICKLE) is not None:
            wanted = "reading one can run code. Convert it to safetensors"
            raise InvalidInput(_PICKLE, "is a pickle", wanted)
        raise InvalidInput(f"the folder has no {ADAPTER_FILE}.")
    file = open_safetensors(found)
    try:
        named, embedding = _paired(file, config)
        pieces = _found_pieces(file, named, peft, config)
        for name, piece in pieces.items():
            if piece.target.is_embedding != (name in embedding):
                kind = "lora_embedding_A" if piece.target.is_embedding else "lora_A.weight"
                raise InvalidInput(f"{short_name(name)} has no {kind}, which PEFT gives it.")
        checked = {name: _checked(file, name, named[name], piece, peft) for name, piece in pieces.items()}
    except (InvalidInput, Unsupported) as error:
        raise error.under(ADAPTER_FILE) from None
    for name, piece in pieces.items():
        peft.check_module(_spelt(name, piece))
    return joined([_read(file, named[name], piece, *checked[name]) for name, piece in pieces.items()], config.dtype)


def _paired(file: TensorFile, config: ModelConfig) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Returns the two tensors of each linear layer by its name, and the names whose first one is an embedding's."""
    pairs: dict[str, dict[str, str]] = {}
    embedding: set[str] = set()
    for name in file.tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            _check_base(file, name, config)
            continue
        if (first := pairs.setdefault(match[1], {}).setdefault(match[3], name)) != name:
            raise InvalidInput(f"tensors {short_name(first)} and {short_name(name)} are one layer's; leave one out.")
        if match[2]:
            embedding.add(match[1])
    for name, pair in pairs.items():
        if len(pair) < 2:
            raise InvalidInput(f"{short_name(name)} has lora_{next(iter(pair))} alone.")
    return {name: (pair["A"], pair["B"]) for name, pair in pairs.items()}, embedding


def _check_base(file: TensorFile, name: str, config: ModelConfig) -> None:
    """Raises InvalidInput for a tensor that is neither an adapter's nor a copy of the model's embedding or head."""
    match = _BASE.fullmatch(name)
    piece = None if match is None else pieces_of(config).get(match[1])
    if piece is None or piece.target.layer is not None:
        text = f"tensor {short_name(name)} is none of an adapter's; they end with lora_A.weight or lora_B.weight."
        raise InvalidInput(text)
    wanted = (config.vocab_size, config.hidden_size)
    if file.tensors[name].shape != wanted:
        text = f"tensor {short_name(name)} has shape {file.tensors[name].shape}; the model's is {wanted}."
        raise InvalidInput(text)


def _found_pieces(
    file: TensorFile, named: Mapping[str, tuple[str, str]], peft: PeftConfig, config: ModelConfig
) -> dict[str, Piece]:
    """Returns the piece of each of a file's names; raises the error of one that has none."""
    shapes = {name: (file.tensors[first].shape, file.tensors[second].shape) for name, (first, second) in named.items()}
    found: dict[str, Piece] = expert_pieces(shapes, config, peft.target_parameters)
    left, family = {f"{name}.weight" for name in named if name not in found}, family_of(config)
    for name, piece in pieces_of(config).items():
        spellings = (found_name(f"{name}.weight", left, family, is_whole) for is_whole in (False, True))
        spelt = next((each for each in spellings if each in left), None)
        if spelt is not None:
            left.remove(spelt)
            found[spelt.removesuffix(".weight")] = piece
    if left:
        raise unknown(min(left).removesuffix(".weight"), config)
    return found


def _spelt(name: str, piece: Piece) -> str:
    """Returns the name of a module, or of a parameter, as adapter_config.json has it."""
    return parameter_name(name, piece) if piece.num_experts else name


def _checked(
    file: TensorFile, name: str, tensors: tuple[str, str], piece: Piece, peft: PeftConfig
) -> tuple[float, bool]:
    """Returns the scale of a pair, and whether inputs and outputs of experts are swapped, for shapes that fit."""
    rank, alpha = peft.of_module(_spelt(name, piece))
    stored = tuple(file.tensors[tensor].shape for tensor in tensors)
    wanted = ((rank, piece.target.in_size), (piece.out_size, rank))
    if piece.num_experts:
        wanted = expert_shapes(piece, rank)
    swapped = bool(piece.num_experts) and stored != wanted and stored == expert_shapes(piece, rank, swapped=True)
    for tensor, shape, each in zip(tensors, stored, wanted, strict=True):
        if shape != each and not swapped:
            text = f"tensor {short_name(tensor)} has shape {shape}; the model and r = {rank} ask for {each}."
            raise InvalidInput(text)
    for tensor in tensors:
        if (code := file.tensors[tensor].code) not in STORED_DTYPES:
            wanted = f"matrices of adapters may be {', '.join(STORED_DTYPES)}"
            raise Unsupported(f"tensor {short_name(tensor)} has dtype {code!r}; {wanted}.")
    return lora_scaling(rank, alpha, use_rslora=peft.use_rslora), swapped


def _read(file: TensorFile, tensors: tuple[str, str], piece: Piece, scaling: float, swapped: bool) -> Pair:
    first, second = (finite(tensor, read_tensor(file, tensor)) for tensor in tensors)
    if piece.num_experts:
        first, second = expert_matrices(piece, first, second, swapped=swapped)
    return Pair(piece, first, second, scaling)


def finite(name: str, tensor: Any) -> Any:
    """Returns a tensor of an adapter's file, whose numbers must be finite."""
    if not np.isfinite(tensor.astype(np.float32)).all():
        raise InvalidInput(ADAPTER_FILE, f"has NaN or infinite numbers in {shown(name)}")
    return tensor
