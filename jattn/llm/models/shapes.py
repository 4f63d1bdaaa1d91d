"""Paths and shapes of a model's parameters, from the config alone: one layer of each kind is traced, none is built."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from flax import nnx

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.decoder_layer import DecoderLayer
from jattn.llm.models.encoder_decoder import build_model

#: The path of a parameter in the nnx state of a `Decoder`.
ParameterPath: TypeAlias = tuple[str | int, ...]
_Shapes: TypeAlias = Mapping[ParameterPath, tuple[int, ...]]
_Leaves: TypeAlias = Iterable[tuple[ParameterPath, Any]]


@functools.lru_cache(maxsize=16)
def parameter_shapes(config: ModelConfig) -> _Shapes:
    """Returns the shape of every parameter by its path; kernels are [in, out], those of experts [experts, in, out]."""
    shallow = _with_one_layer(config)
    if config.encoder is not None:
        shallow = replace(shallow, encoder=_with_one_layer(config.encoder))
    outside = _traced(lambda: build_model(shallow, rngs=nnx.Rngs(0)))
    shapes = {path: shape for path, shape in outside.items() if "layers" not in path}
    shapes |= _layers(config)
    if config.encoder is not None:
        shapes |= {("encoder", *path): shape for path, shape in _layers(config.encoder)}
    return MappingProxyType(shapes)


def num_parameters(config: ModelConfig) -> int:
    """Returns the number of parameters of a model; a tied head is counted once.

    Example:
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        >>> num_parameters(config)
        106816
    """
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def _layers(config: ModelConfig) -> Iterator[tuple[ParameterPath, tuple[int, ...]]]:
    kinds: dict[tuple[Any, ...], _Shapes] = {}
    for index in range(config.num_hidden_layers):
        has_norm = index > 0 or config.first_layer_norm
        facts = has_norm, config.kv_sharing_target(index) is None, config.is_sparse(index), config.mixers(index)
        kind = (*facts, index in config.index_layers, config.of_layer(index))
        if kind not in kinds:
            kinds[kind] = _traced(lambda index=index: DecoderLayer(config, index, rngs=nnx.Rngs(0)))
        for path, shape in kinds[kind].items():
            yield ("layers", index, *path), shape


def _with_one_layer(config: ModelConfig) -> ModelConfig:
    moe = None if config.moe is None else replace(config.moe, dense_layers=())
    latent = None if config.latent is None else replace(config.latent, index_shared_layers=())
    alike = dict.fromkeys(("layer_windows", "kv_sharing_targets", "layer_types"), ())
    return replace(
        config, num_hidden_layers=1, moe=moe, latent=latent, sliding_window=None, single_branch=False, **alike
    )


def _traced(build: Callable[[], nnx.Module]) -> _Shapes:
    state = nnx.state(nnx.eval_shape(build))
    return {path: variable.shape for path, variable in cast(_Leaves, nnx.to_flat_state(state))}
