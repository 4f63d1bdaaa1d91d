"""load_model and save_model: a Hugging Face folder to a Flax decoder and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from jattn.load.config import family_of, parse_config, render_config
from jattn.load.folder import check_folder, read_object
from jattn.load.generation import load_generation_defaults
from jattn.load.plan import ParameterPlan, plan_parameters
from jattn.load.safetensors_file import STORED_DTYPES, SafetensorsFile
from jattn.load.tokenizer import TextTokenizer, load_tokenizer
from jattn.load.weights import check_weights, find_weights, read_parameter, read_places
from jattn.models import Decoder, ModelConfig, TensorParallel, decoder_of, parameter_shards, tensor_parallel_of
from torch_core.checks import check_int, shown
from torch_core.errors import InvalidInput
from torch_core.specs import QUERY_DTYPES

__all__ = ["embedded_model_folder", "load_model", "save_model"]


def embedded_model_folder() -> Path:
    """Returns the folder of the small model that ships with the package."""
    return Path(str(resources.files("jattn"))) / "assets"


def load_model(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    implementation: str | None = None,
    with_tokenizer: bool = True,
    max_model_len: int | None = None,
    mesh: Mesh | None = None,
    parallel: TensorParallel | None = None,
    progress: bool = False,
) -> tuple[Decoder, ModelConfig, TextTokenizer | None]:
    """Loads a Hugging Face folder of any family in `jattn.load.known_families()`.

    Everything is checked before the first array is made: config.json against a list of known keys, every
    safetensors header against the shapes that follow from the config, the tokenizer against the vocabulary. Code,
    pickles and links that leave the folder are refused. From generation_config.json only the token ids
    `bos_token_id` and `eos_token_id` are taken; they win over config.json's (`load_generation_defaults` has the rest).

    Weights are mapped into memory and go to the device tensor by tensor, where they are cast, transposed and joined.
    Those in FP8 (with scales by blocks of 128 x 128) and MXFP4 become numbers of `dtype` there.

    Args:
        folder: with config.json, model.safetensors (or its index and shards) and tokenizer.json; or a name like
            `org/name` that huggingface_hub has in its cache.
        dtype: of parameters and computation: float32, bfloat16 or float16. None for the dtype that the config
            names, but float32 where JAX's default device is a CPU, which has no fast arithmetic for the others.
        implementation: of the paged ops; see `Decoder`.
        with_tokenizer: whether to read tokenizer.json; None is returned in its place otherwise.
        max_model_len: the longest sequence that will be computed, where it is shorter than the model's own. Models
            with "longrope" have other frequencies where this is not above the context of their first training.
        mesh: whose axis "tp" (or that of `parallel`) cuts the model; each device's part alone is read, into its memory.
        parallel: how to cut; see `jattn.models.shard_model`.
        progress: show a bar on stderr.

    Returns:
        The model, on JAX's default device or cut over the mesh, its config (with the dtype in use) and its tokenizer.

    Raises:
        InvalidInput: a file is missing, broken or contradicts another, or a model that cannot be cut so.
        Unsupported: a valid model that this build does not serve.
    """
    path = check_folder(folder)
    config = parse_config(read_object(path, "config.json"))
    config = _with_generation_config(path, config)
    if max_model_len is not None:
        check_int("max_model_len", max_model_len, 1, config.max_position_embeddings)
        # A learned table of positions stays as long as it is.
        if config.position_embedding != "learned":
            config = dataclasses.replace(config, max_position_embeddings=max_model_len)
    if dtype is not None and dtype not in QUERY_DTYPES:
        raise InvalidInput(f"dtype is {shown(dtype)}; it must be one of {', '.join(QUERY_DTYPES)}, or None.")
    tensors = find_weights(path)
    family = family_of(config)
    is_bare = not any(name.startswith(family.prefix) for name in tensors)
    plan = plan_parameters(config, prefix="" if is_bare else None)
    check_weights(tensors, plan, unread=family.unread)
    tokenizer = load_tokenizer(path) if with_tokenizer else None
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise InvalidInput(
            f"tokenizer.json has token ids up to {tokenizer.vocab_size - 1}; vocab_size is {config.vocab_size}."
        )
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else config.dtype
    config = dataclasses.replace(config, dtype=dtype)
    if mesh is not None:
        parallel = tensor_parallel_of(mesh, parallel)
        read = _reader_of_parts(tensors, config, mesh, parallel)
    else:
        on_host = next(iter(jnp.zeros(()).devices())).platform == "cpu"
        read = functools.partial(read_parameter, tensors, dtype=jnp.dtype(dtype), on_host=on_host)
    values = {
        parameter.path: read(parameter)
        for parameter in track(plan, "Loading", console=Console(stderr=True), disable=not progress)
    }
    return decoder_of(config, values, implementation, parallel), config, tokenizer


def save_model(
    folder: str | os.PathLike[str],
    model: Decoder,
    config: ModelConfig,
    tokenizer: TextTokenizer | Tokenizer | None = None,
    *,
    dtype: str | None = None,
) -> None:
    """Writes a folder that `load_model` and transformers read: config, weights and, if given, the tokenizer.

    Each file is written under another name and then renamed, so a reader never sees half of one.

    Args:
        folder: made if it does not exist; files of the same names are replaced.
        model: its parameters are copied to the host.
        config: of the model.
        tokenizer: written as tokenizer.json, with a tokenizer_config.json for transformers, and its chat template.
        dtype: in which to store the weights; None for the config's.

    Raises:
        InvalidInput: dtype is not float32, bfloat16 or float16.
        Unsupported: no supported architecture stores this config.
    """
    dtype = config.dtype if dtype is None else dtype
    codes = {str(stored): code for code, stored in STORED_DTYPES.items()}
    if dtype not in codes:
        raise InvalidInput(f"dtype is {shown(dtype)}; it must be one of {', '.join(codes)}, or None.")
    rendered = render_config(config, dtype=dtype)
    values = dict(nnx.to_flat_state(nnx.state(model)))
    tensors = {}
    for parameter in plan_parameters(config):
        stored = STORED_DTYPES[codes["float32" if parameter.is_float32 else dtype]]
        for name, data in _pieces(parameter, np.asarray(values[parameter.path][...])):
            tensors[name] = np.ascontiguousarray(data.astype(stored))
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    _write(path / "model.safetensors", safetensors.numpy.save(tensors, {"format": "pt"}))
    _write_json(path / "config.json", rendered)
    end = list(config.eos_token_ids) or None
    _write_json(path / "generation_config.json", {"bos_token_id": config.bos_token_id, "eos_token_id": end})
    if isinstance(tokenizer, TextTokenizer) and tokenizer.chat_template is not None:
        _write(path / "chat_template.jinja", tokenizer.chat_template.encode())
    if tokenizer is not None:
        _save_tokenizer(path, tokenizer.tokenizer if isinstance(tokenizer, TextTokenizer) else tokenizer, config)


def _with_generation_config(folder: Path, config: ModelConfig) -> ModelConfig:
    defaults = load_generation_defaults(folder)
    named = {name: getattr(defaults, name) for name in ("bos_token_id", "eos_token_ids")}
    try:
        return dataclasses.replace(config, **{name: value for name, value in named.items() if value is not None})
    except InvalidInput as error:
        raise InvalidInput(f"generation_config.json: {error}") from None


def _reader_of_parts(
    tensors: dict[str, SafetensorsFile], config: ModelConfig, mesh: Mesh, parallel: TensorParallel
) -> Callable[[ParameterPlan], jax.Array]:
    shards = parameter_shards(config, parallel)

    def read(parameter: ParameterPlan) -> jax.Array:
        dtype = jnp.dtype(jnp.float32 if parameter.is_float32 else config.dtype)
        return shards[parameter.path].loaded(functools.partial(read_places, tensors, parameter), dtype, mesh)

    return read


def _pieces(parameter: ParameterPlan, value: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Cuts one parameter of the model into the tensors of the file; the inverse of `read_parameter`."""
    if parameter.order is not None:
        value = value[..., np.argsort(parameter.order)]
    groups = list(value) if parameter.num_stacked else [value]
    size = len(parameter.pieces) // len(groups)
    axis = 0 if parameter.transposed else -1
    ends = np.cumsum([piece.shape[axis] for piece in parameter.pieces[:size]])
    parts = [part for group in groups for part in np.split(group, ends[:-1], axis=-1)]
    return [
        (piece.name, part.T if parameter.transposed else part)
        for piece, part in zip(parameter.pieces, parts, strict=True)
    ]


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    _write(folder / "tokenizer.json", tokenizer.to_str().encode())
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    if config.bos_token_id is not None:
        described["bos_token"] = tokenizer.id_to_token(config.bos_token_id)
    if config.eos_token_ids:
        described["eos_token"] = tokenizer.id_to_token(config.eos_token_ids[0])
    _write_json(folder / "tokenizer_config.json", described)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write(path, (json.dumps(value, indent=2) + "\n").encode())


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)
