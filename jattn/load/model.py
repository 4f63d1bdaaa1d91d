"""load_model: a Hugging Face folder to a Flax decoder."""

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
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track

from jattn.load.config import family_of, parse_config
from jattn.load.config_keys import is_whole
from jattn.load.folder import check_folder, read_object
from jattn.load.generation import load_generation_defaults
from jattn.load.plan import ParameterPlan, fewest_tensors, found_name, plan_parameters, spelled_as_found
from jattn.load.read_ahead import read_ahead
from jattn.load.safetensors_file import SafetensorsFile
from jattn.load.tokenizer import TextTokenizer, load_tokenizer
from jattn.load.weights import (
    check_count,
    check_weights,
    find_weights,
    is_quantized,
    ranges_of,
    read_kv_scales,
    read_parameter,
    read_places,
    read_quantized,
    with_tied_head,
)
from jattn.models import Decoder, ModelConfig, TensorParallel, decoder_of, parameter_shards, tensor_parallel_of
from jattn.models.encoder_decoder import build_model
from jattn.models.quantized import QuantizedExpertLinear, QuantizedLinear
from torch_core.checks import check_int, shown
from torch_core.errors import InvalidInput, Unsupported
from torch_core.specs import QUERY_DTYPES

__all__ = ["embedded_model_folder", "load_model"]

#: Tensors beside those of a language model.
_NOT_LANGUAGE = r"(?!language_model\.|model\.language_model\.|lm_head\.).+"
#: Modules whose kernels may stay in fewer bits.
_QUANTIZED_MODULES = ("qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj")


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
    """Loads a Hugging Face folder of any family in `jattn.load.known_families()`.

    Everything is checked before the first array is made: config.json against a list of known keys, every
    safetensors header against the shapes that follow from the config, the tokenizer against the vocabulary. Code,
    pickles and links that leave the folder are refused. From generation_config.json only the ids of tokens are taken,
    those that are forced too; they win over config.json's (`load_generation_defaults` has the rest).

    Weights are mapped into memory and go to the device tensor by tensor, where they are cast, transposed and joined.
    Those in FP8 (with scales by tensor, by output or by blocks of 128 x 128) and MXFP4 become numbers of `dtype` there,
    or stay what they are.

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
        quantization: "keep" leaves the weights of linear layers and experts that are stored in FP8 or MXFP4 so on the
            device, and they become numbers of `dtype` in each product: less memory, and in FP8 less to read in
            decoding. None makes them numbers of `dtype` now. Latent attention's are made numbers always.
        hf_overrides: values that stand in the place of config.json's, by key, as in vLLM; None for a key that is
            unknown here and does not change what the model computes.

    Returns:
        The model, on JAX's default device or cut over the mesh, its config (with the dtype in use) and its tokenizer.

    Raises:
        InvalidInput: a file is missing, broken or contradicts another, or a model that cannot be cut so.
        Unsupported: a valid model that this build does not serve.

    Example:
        >>> model, config, tokenizer = load_model(embedded_model_folder())
        >>> tokenizer.decode(tokenizer.encode("A list")), config.dtype
        ('A list', 'float32')
    """
    if quantization is not None and mesh is not None:
        raise Unsupported(
            f"quantization is {shown(quantization)} and there is a mesh; weights that stay quantised are not cut. "
            "Leave quantization away, or load onto one device."
        )
    path = check_folder(folder)
    raw = _overridden(read_object(path, "config.json"), hf_overrides)
    config = parse_config(raw)
    config = _with_generation_config(path, config)
    if max_model_len is not None:
        check_int("max_model_len", max_model_len, 1, config.max_position_embeddings)
        # A learned table of positions stays as long as it is.
        if config.position_embedding != "learned":
            config = dataclasses.replace(config, max_position_embeddings=max_model_len)
    if dtype is not None and dtype not in QUERY_DTYPES:
        raise InvalidInput(f"dtype is {shown(dtype)}; it must be one of {', '.join(QUERY_DTYPES)}, or None.")
    if quantization not in (None, "keep"):
        raise InvalidInput(f"quantization is {shown(quantization)}; it must be 'keep' or None.")
    tensors = find_weights(path)
    family = family_of(config)
    check_count(tensors, fewest_tensors(config))
    embedding = str(family.tensor_name("embed_tokens", config))
    is_bare = f"{embedding.removeprefix(family.prefix)}.weight" in tensors
    plan = plan_parameters(config, prefix="" if is_bare else None)
    whole = is_whole(raw, family)
    plan = spelled_as_found(plan, tensors, is_whole=whole)
    if config.tie_word_embeddings:
        names = {parameter.path: parameter.pieces[0].name for parameter in plan}
        head = found_name(f"{family.tensor_name('lm_head', config)}.weight", tensors, whole)
        tensors = with_tied_head(tensors, names["embed_tokens", "embedding"], head)
    unread = _NOT_LANGUAGE if whole else family.unread.replace("{layers}", str(config.num_hidden_layers))
    check_weights(tensors, plan, unread=unread)
    tokenizer = load_tokenizer(path) if with_tokenizer else None
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
    bar = {"total": len(plan), "console": Console(stderr=True), "disable": not progress}
    for parameter, _ in track(zip(plan, in_memory, strict=False), "Loading", **bar):
        if quantization == "keep" and _stays_quantized(config, parameter) and is_quantized(tensors, parameter):
            values[parameter.path] = read_quantized(tensors, parameter, on_host=on_host)
        else:
            values[parameter.path] = read(parameter)
    if mesh is not None:
        model = decoder_of(config, values, implementation, parallel)
    else:
        model = _build(config, values, implementation)
    for layer, scales in read_kv_scales(tensors, config.num_hidden_layers).items():
        model.layers[layer].self_attn.set_kv_scales(scales["k"], scales["v"])
    return model, config, tokenizer


def _overridden(raw: dict[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(overrides, Mapping | None):
        raise InvalidInput(
            f"hf_overrides is {shown(overrides)}; it must be a mapping of keys of config.json to values."
        )
    for key in overrides or {}:
        if not isinstance(key, str):
            raise InvalidInput(f"hf_overrides has the key {shown(key)}; keys of config.json are text.")
    return {**raw, **(overrides or {})}


def _with_generation_config(folder: Path, config: ModelConfig) -> ModelConfig:
    defaults = load_generation_defaults(folder)
    names = ("bos_token_id", "eos_token_ids", "forced_eos_token_id")
    if config.encoder is not None:
        names += ("decoder_start_token_id", "forced_bos_token_id")
    named = {name: getattr(defaults, name) for name in names}
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


def _stays_quantized(config: ModelConfig, parameter: ParameterPlan) -> bool:
    # Latent attention reads kernels itself.
    is_latent = config.latent is not None and "self_attn" in parameter.path
    return parameter.path[-1] == "kernel" and parameter.path[-2] in _QUANTIZED_MODULES and not is_latent


def _build(config: ModelConfig, values: dict[Any, Any], implementation: str | None) -> Decoder:
    """Makes the model around the given parameters, without ever initialising random ones.

    A parameter of two values, a quantised kernel and its scale, makes a quantised module of its own.
    """
    abstract = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0), implementation=implementation))
    for path in [path for path, value in values.items() if isinstance(value, tuple)]:
        *front, name, _ = path
        parent: Any = abstract
        for key in front:
            parent = parent[key] if isinstance(key, int) else getattr(parent, key)
        old, (kernel, scale) = getattr(parent, name), values.pop(path)
        bias = values.get((*front, name, "bias"))
        if isinstance(old, nnx.Linear):
            new = QuantizedLinear(kernel, scale, bias, old.preferred_element_type)
        else:
            new = QuantizedExpertLinear(kernel, scale, bias)
        setattr(parent, name, new)
        values |= {(*front, name, "kernel"): kernel, (*front, name, "scale"): scale}
    graph, state = nnx.split(abstract)
    filled = [(path, variable.replace(values[path])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))
