"""save_model: a Flax decoder to a Hugging Face folder, tensor by tensor; convert_model: a model in one file to one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from jattn.llm.load.config import family_of, render_config
from jattn.llm.load.generation import GenerationDefaults
from jattn.llm.load.model import load_model
from jattn.llm.load.plan import ParameterPlan, TensorPlan, plan_parameters
from jattn.llm.load.source import open_source
from jattn.llm.load.tensor_file import STORED_DTYPES
from jattn.llm.load.tokenizer import MORE_TEMPLATES, TOOL_TEMPLATE, TextTokenizer
from jattn.llm.load.weights import is_norm_without_weight
from jattn.llm.models import Decoder, ModelConfig, ParameterShards, parameter_shards
from jattn.llm.models.quantized import dequantize, widened_from_fp8
from torch_core.base.errors import InvalidInput, Unsupported


def save_model(
    folder: str | os.PathLike[str],
    model: Decoder,
    config: ModelConfig,
    tokenizer: TextTokenizer | Tokenizer | None = None,
    *,
    dtype: str | None = None,
    defaults: GenerationDefaults | None = None,
) -> None:
    """Writes a folder that `load_model` and transformers read: config, weights and, if given, the tokenizer.

    Each file is written under another name and then renamed, so a reader never sees half of one. The host holds one
    tensor of a device's weights at a time. Quantised weights are written as numbers of `dtype`.

    Args:
        folder: the folder to write, created if it does not exist; files of the same names are replaced.
        model: the model, whose parameters are written one by one; parameters that are split over devices are written
            whole.
        config: config of the model.
        tokenizer: tokenizer to write as tokenizer.json, with a tokenizer_config.json for transformers and its chat
            template.
        dtype: dtype of the stored weights; None for the config's.
        defaults: settings of sampling to write to generation_config.json.

    Raises:
        InvalidInput: dtype is not float32, bfloat16 or float16, or two arguments are swapped.
        Unsupported: no supported architecture stores this config.

    Example:
        >>> import os, tempfile
        >>> from jattn.llm.load import embedded_model_folder, load_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(folder, *load_model(embedded_model_folder()))
        ...     sorted(os.listdir(folder))
        ['config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json']
    """
    for name, given, kinds in (
        ("folder", folder, (str, os.PathLike)),
        ("model", model, (nnx.Module,)),
        ("config", config, (ModelConfig,)),
    ):
        if not isinstance(given, kinds):
            raise InvalidInput(name, f"is a {type(given).__name__}", "the order is save_model(folder, model, config)")
    dtype = config.dtype if dtype is None else dtype
    codes = {str(stored): code for code, stored in STORED_DTYPES.items()}
    if dtype not in codes:
        raise InvalidInput("dtype", value=dtype, wanted=f"it must be one of {', '.join(codes)}, or None")
    rendered = render_config(config, dtype=dtype)
    values = dict(nnx.to_flat_state(nnx.state(model)))
    parallel = getattr(model, "parallel", None)
    shards = {} if parallel is None else parameter_shards(config, parallel)
    plan, scales, family = plan_parameters(config), _scales(values), family_of(config)
    without_weight = [each for each in plan if is_norm_without_weight(each, config, family)]
    for parameter in without_weight:
        if (np.asarray(values[parameter.path][...]) != 1).any():
            name = ".".join(map(str, parameter.path))
            raise Unsupported(name, "is not 1 everywhere", f"files of {family.architecture} have no weights of norms")
    plan = tuple(parameter for parameter in plan if parameter not in without_weight)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    _write_weights(path / "model.safetensors", plan, values, STORED_DTYPES[codes[dtype]], scales, shards)
    write_json(path / "config.json", rendered)
    end = list(config.eos_token_ids) or None
    tokens: dict[str, Any] = {
        "bos_token_id": config.bos_token_id, "eos_token_id": end, "forced_eos_token_id": config.forced_eos_token_id
    }  # fmt: skip
    write_json(path / "generation_config.json", tokens | ({} if defaults is None else defaults.in_file))
    if isinstance(tokenizer, TextTokenizer) and tokenizer.chat_template is not None:
        write_file(path / "chat_template.jinja", tokenizer.chat_template.encode())
        if tokenizer.tool_chat_template is not None:
            (path / MORE_TEMPLATES).mkdir(exist_ok=True)
            write_file(path / MORE_TEMPLATES / TOOL_TEMPLATE, tokenizer.tool_chat_template.encode())
    if tokenizer is not None:
        _save_tokenizer(path, tokenizer.tokenizer if isinstance(tokenizer, TextTokenizer) else tokenizer, config)


def _scales(values: dict[Any, Any]) -> dict[str, np.ndarray]:
    """Returns the scales of 8-bit caches that the model carries, by the names that `load_model` reads."""
    return {
        f"model.layers.{path[1]}.self_attn.attn.{path[-1]}": np.asarray(value[...], np.float32)
        for path, value in values.items()
        if path[0] == "layers" and path[-2] == "kv_scales"
    }


def _write_weights(
    path: Path,
    plan: tuple[ParameterPlan, ...],
    values: dict[Any, Any],
    dtype: np.dtype,
    scales: dict[str, np.ndarray],
    shards: Mapping[Any, ParameterShards],
) -> None:
    """Writes the tensors of a plan one by one, at places that follow from it, in the library's order; then scales."""
    wide = STORED_DTYPES["F32"]
    stored = {piece: wide if parameter.is_float32 else dtype for parameter in plan for piece in parameter.pieces}
    codes = {dtype: code for code, dtype in STORED_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in sorted(stored, key=lambda piece: (-stored[piece].itemsize, piece.name)):
        start, end = end, end + math.prod(piece.shape) * stored[piece].itemsize
        header[piece.name] = {"dtype": codes[stored[piece]], "shape": piece.shape, "data_offsets": [start, end]}
    for name, array in scales.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": codes[wide], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _replaced(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for parameter in plan:
            for piece, data in _pieces(parameter, _value(values, parameter, shards.get(parameter.path))):
                file.seek(8 + len(text) + header[piece.name]["data_offsets"][0])
                # A transposition runs on the device, and one tensor at a time lies on the host.
                file.write(np.ascontiguousarray(np.asarray(data.astype(stored[piece]))).reshape(-1).view(np.uint8).data)
        for name, array in scales.items():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(array.tobytes())


def _value(values: dict[Any, Any], parameter: ParameterPlan, shards: ParameterShards | None) -> Any:
    """Returns a parameter as numpy sees it on a host, or as it lies on a device; a quantised kernel as its worth."""
    weight = values.get((*parameter.path[:-1], "weight")) if parameter.path[-1] == "kernel" else None
    if weight is not None:
        value = widened_from_fp8(weight[...], values[*parameter.path[:-1], "scale"][...])
        return value if shards is None else shards.whole(value)
    value = values[parameter.path][...]
    if shards is not None:
        return shards.whole(value)
    home = np if next(iter(value.devices())).platform == "cpu" else jnp
    scale = values.get((*parameter.path[:-1], "scale")) if parameter.path[-1] == "kernel" else None
    value = home.asarray(value)
    if scale is None:
        return value
    value, rest = dequantize(value, home.asarray(scale[...]), home), values.get((*parameter.path[:-1], "rest"))
    return value if rest is None else home.concatenate([value, home.asarray(rest[...]).astype(value.dtype)], -1)


def _pieces(parameter: ParameterPlan, value: Any) -> Iterator[tuple[TensorPlan, Any]]:
    """Cuts one parameter of the model into the tensors of the file; the inverse of `read_parameter`."""
    value = value.T if parameter.is_conv else value
    if parameter.order is not None:
        value = value[..., np.argsort(parameter.order)]
    size = len(parameter.pieces) // max(parameter.num_stacked, 1)
    for index, piece in enumerate(parameter.pieces):
        group, place = divmod(index, size)
        first = sum(_outputs(parameter, each) for each in parameter.pieces[:place])
        part = (value[group] if parameter.num_stacked else value)[..., first : first + _outputs(parameter, piece)]
        yield piece, part.swapaxes(-1, -2).reshape(piece.shape) if parameter.transposed else part


def _outputs(parameter: ParameterPlan, piece: TensorPlan) -> int:
    if len(parameter.shape) == 1:
        return math.prod(piece.shape)
    return piece.shape[-1 if not parameter.transposed else 0 if parameter.is_conv else -2]


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    write_file(folder / "tokenizer.json", tokenizer.to_str().encode())
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    if config.bos_token_id is not None:
        described["bos_token"] = tokenizer.id_to_token(config.bos_token_id)
    if config.eos_token_ids:
        described["eos_token"] = tokenizer.id_to_token(config.eos_token_ids[0])
    write_json(folder / "tokenizer_config.json", described)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes an object as JSON, as `write_file` does."""
    write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole, or leaves the one that has its name."""
    with _replaced(path) as file:
        file.write(data)


@contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file under another name, which takes the place of this one once it is whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        yield file
    os.replace(partial, path)


def convert_model(
    model: str | os.PathLike[str], folder: str | os.PathLike[str], *, dtype: str | None = None, progress: bool = False
) -> None:
    """Writes the config, weights, tokenizer and generation defaults of a model as a Hugging Face folder.

    Args:
        model: a GGUF file, or another folder, such as one with FP8 weights.
        folder: the folder to write; see `save_model`.
        dtype: dtype of the stored weights; None for that of the model's matrices, or bfloat16 if they are quantised.
            float32 keeps every bit of quantised ones.
        progress: show a bar on stderr.

    Raises:
        InvalidInput: the model is broken, or the dtype is not float32, bfloat16 or float16.
        Unsupported: this build does not read the model.
    """
    source = open_source(model)
    dtype = source.parse(source.raw_config()).dtype if dtype is None else dtype
    loaded, config, tokenizer = load_model(model, dtype=dtype, progress=progress)
    save_model(folder, loaded, config, tokenizer, defaults=source.generation_defaults())
