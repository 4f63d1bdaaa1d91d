"""load_model: a Hugging Face folder or a GGUF file to a Flax decoder."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track

from jattn.llm.load.plan import ParameterPlan
from jattn.llm.load.read_ahead import read_ahead
from jattn.llm.load.source import open_source
from jattn.llm.load.tensor_file import Tensors
from jattn.llm.load.tokenizer import TextTokenizer
from jattn.llm.load.weights import (
    in_two,
    is_quantized,
    ranges_of,
    read_kv_scales,
    read_parameter,
    read_places,
    read_quantized,
)
from jattn.llm.models import Decoder, ModelConfig, TensorParallel, decoder_of, parameter_shards, tensor_parallel_of
from jattn.llm.models.quantized import Fp8Kernel, dequantize, may_be_quantized, round_to_fp8
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import QUERY_DTYPES


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
    quantization: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
) -> tuple[Decoder, ModelConfig, TextTokenizer | None]:
    """Loads a Hugging Face folder of any family in `jattn.llm.load.known_families()`, or a GGUF file.

    Everything is checked before the first array is made: config.json against a list of known keys, every
    safetensors header against the shapes that follow from the config, the tokenizer against the vocabulary. Code,
    pickles and links that leave the folder are refused. From generation_config.json only the ids of tokens are taken,
    those that are forced too; they win over config.json's (`load_generation_defaults` has the rest).

    Weights are mapped into memory and copied to the device tensor by tensor, where they are cast, transposed and
    joined. FP8 weights (with scales per tensor, per output or per block of 128 x 128), MXFP4 weights and the integers
    of AWQ, GPTQ and compressed-tensors are converted to `dtype` there, or stay as stored. Quantised tensors of a GGUF
    file are converted on the host.

    Args:
        folder: a folder with config.json, model.safetensors (or its index and shards) and tokenizer.json; a name like
            `org/name` that is in huggingface_hub's cache; or a file whose name ends in .gguf.
        dtype: dtype of parameters and computation: float32, bfloat16 or float16. None for the dtype that the config
            names, but float32 if JAX's default device is a CPU, which has no fast arithmetic for the others.
        implementation: implementation of the paged ops; see `Decoder`.
        with_tokenizer: whether to read tokenizer.json; if False, the returned tokenizer is None.
        max_model_len: length of the longest sequence, in tokens, if it is shorter than the model's limit. Models with
            "longrope" use other frequencies if it does not exceed the context of their first training.
        mesh: mesh whose axis "tp" (or that of `parallel`) splits the model; each device reads only its own part.
        parallel: the split; see `jattn.llm.models.shard_model`.
        progress: show a bar on stderr.
        quantization: "keep" leaves FP8 weights, and those of 4 bits, of linear layers and experts as stored on the
            device, and each product converts them to `dtype`: this takes less memory and, with FP8, less reading in
            decoding. Integers of 8 bits and those of `desc_act` are converted all the same. "fp8"
            makes linear layers multiply E4M3 numbers, for weights stored in any dtype: weights have a scale per output,
            and rows of inputs are rounded with their own scale (see `jattn.llm.models.Fp8Linear`); experts are handled
            as with "keep". None converts all weights to `dtype` now. Weights of latent attention are always converted.
        hf_overrides: values that replace those of config.json, by key, as in vLLM; None for an unknown key, of a GGUF
            file too, that does not change the model's results.

    Returns:
        The model, on JAX's default device or split over the mesh, its config (with the dtype in use) and its tokenizer.

    Raises:
        InvalidInput: a file is missing or broken or contradicts another, or the model cannot be split this way.
        Unsupported: the model is valid, but this build does not serve it.

    Example:
        >>> model, config, tokenizer = load_model(embedded_model_folder())
        >>> tokenizer.decode(tokenizer.encode("A list")), config.dtype
        ('A list', 'float32')
    """
    if quantization == "keep" and mesh is not None:
        wanted = (
            "weights that stay as they are stored are not cut. Take quantization='fp8', leave it "
            "away, or load onto one device"
        )
        raise Unsupported("quantization", "is 'keep' and there is a mesh", wanted)
    source = open_source(folder)
    raw = source.raw_config(hf_overrides)
    config = source.parse(raw)
    if max_model_len is not None:
        check_int("max_model_len", max_model_len, 1, config.max_position_embeddings)
        # A learned table of positions stays as long as it is.
        if config.position_embedding != "learned":
            config = dataclasses.replace(config, max_position_embeddings=max_model_len)
    if dtype is not None and dtype not in QUERY_DTYPES:
        raise InvalidInput("dtype", value=dtype, wanted=f"it must be one of {', '.join(QUERY_DTYPES)}, or None")
    if quantization not in (None, "keep", "fp8"):
        raise InvalidInput("quantization", value=quantization, wanted="it must be 'keep', 'fp8' or None")
    tensors, plan = source.weights(raw, config)
    tokenizer = source.tokenizer() if with_tokenizer else None
    if tokenizer is not None:
        tokenizer = tokenizer.within(config.vocab_size)
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else config.dtype
    config = dataclasses.replace(config, dtype=dtype)
    on_host = next(iter(jnp.zeros(()).devices())).platform == "cpu"
    if mesh is not None:
        parallel = tensor_parallel_of(mesh, parallel)
        read = _reader_of_parts(tensors, config, mesh, parallel)
    else:
        read = functools.partial(read_parameter, tensors, dtype=jnp.dtype(dtype), on_host=on_host)
    values: dict[Any, Any] = {}
    # Of a model that is cut no more is read than the devices here need.
    in_memory = read_ahead([ranges_of(tensors, parameter) for parameter in plan]) if mesh is None else plan
    quantized = _reader_of_quantized(
        tensors, read, to_fp8=quantization == "fp8", is_cut=mesh is not None, on_host=on_host
    )
    bar = {"total": len(plan), "console": Console(stderr=True), "disable": not progress}
    for parameter, _ in track(zip(plan, in_memory, strict=False), "Loading", **bar):
        in_fewer_bits = quantization is not None and may_be_quantized(config, parameter.path)
        values[parameter.path] = (quantized if in_fewer_bits else read)(parameter)
    model = decoder_of(config, values, implementation, None if mesh is None else parallel)
    for layer, scales in read_kv_scales(tensors, config).items():
        attention: Any = model.layers[layer].self_attn
        attention.set_kv_scales(scales["k"], scales["v"])
    return model, config, tokenizer


def _reader_of_parts(
    tensors: Tensors, config: ModelConfig, mesh: Mesh, parallel: TensorParallel
) -> Callable[[ParameterPlan], jax.Array]:
    shards = parameter_shards(config, parallel)

    def read(parameter: ParameterPlan) -> jax.Array:
        dtype = jnp.dtype(jnp.float32 if parameter.is_float32 else config.dtype)
        return shards[parameter.path].loaded(functools.partial(read_places, tensors, parameter), dtype, mesh)

    return read


def _reader_of_quantized(
    tensors: Tensors, read: Callable[[ParameterPlan], jax.Array], *, to_fp8: bool, is_cut: bool, on_host: bool
) -> Callable[[ParameterPlan], Any]:
    def quantized(parameter: ParameterPlan) -> Any:
        to_round = to_fp8 and len(parameter.shape) == 2
        if is_cut or not is_quantized(tensors, parameter):
            parts = None if is_cut else in_two(tensors, parameter)
            if to_round:
                # Stored numbers with a scale for each output stay as they are.
                pairs = None if parts is None else zip(*map(quantized, parts), strict=True)
                return round_to_fp8(read(parameter)) if pairs is None else Fp8Kernel(*map(jnp.concatenate, pairs))
            if parts is None:
                return read(parameter)
            return (*read_quantized(tensors, parts[0], on_host=on_host), read(parts[1]))
        kernel, scale = read_quantized(tensors, parameter, on_host=on_host)
        if not to_round:
            return kernel, scale
        if kernel.dtype == jnp.float8_e4m3fn and scale.shape[0] == 1:
            return Fp8Kernel(kernel.T, scale[0])
        return round_to_fp8(dequantize(kernel, scale))

    return quantized
