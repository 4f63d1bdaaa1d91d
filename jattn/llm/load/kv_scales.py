"""8-bit caches: their names, the ranges that their scales follow from, and a model that writes them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.load.folder import read_given, read_json
from jattn.llm.models import PagedModel, PagedSpec
from jattn.llm.reports import event
from jattn.nn.paged import KVScales, PagedAttention
from jattn.nn.scan import paged_layers
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import KV_CACHE_DTYPES, LARGEST_CODE

#: The ranges whose scales, for every 8-bit dtype, are normal numbers of float32.
LEAST_RANGE, LARGEST_RANGE = 1e-33, 3e38
#: vLLM's names of cache dtypes other than the model's own.
CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8"}
#: And of latents, whose packed rows have scales of their own.
LATENT_CACHE_DTYPES = {**CACHE_DTYPES, "fp8_ds_mla": "uint8"}
#: All names of a cache's dtype; which of them a model can have is for `cached_spec` to say.
NAMES_OF_CACHES = tuple(dict.fromkeys((*LATENT_CACHE_DTYPES, *KV_CACHE_DTYPES)))


@dataclass(frozen=True, slots=True)
class KVCacheScales:
    """The ranges of keys and values of each layer, from which the scales of an 8-bit cache follow.

    `jattn.llm.engine.calibrate_kv_cache` measures them. Larger values saturate later.

    Attributes:
        ranges: the largest absolute key and value, from 1e-33 to 3e38, by the path of a layer's `PagedAttention`.

    Raises:
        InvalidInput: a range is not such a number.

    Example:
        >>> scales = KVCacheScales({"layers.0.self_attn.paged_attention": (4.48, 0.896)})
        >>> [round(scale, 4) for scale in scales.of("layers.0.self_attn.paged_attention", "float8_e4m3fn")]
        [0.01, 0.002]
    """

    ranges: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        for path, pair in self.ranges.items():
            is_pair = isinstance(pair, tuple) and len(pair) == 2
            if not is_pair or not all(isinstance(x, float) and LEAST_RANGE <= x <= LARGEST_RANGE for x in pair):
                wanted = f"it must be two floats from {LEAST_RANGE} to {LARGEST_RANGE}"
                raise InvalidInput(f"ranges[{path!r}]", value=pair, wanted=wanted)

    def of(self, path: str, dtype: str) -> tuple[float, float]:
        """Returns k_scale and v_scale of a layer for a cache of an 8-bit dtype.

        Raises:
            InvalidInput: the layer does not exist.
        """
        if path not in self.ranges:
            raise InvalidInput("kv_cache_scales", f"has no layer {path!r}", f"it has {shown(list(self.ranges))}")
        k_max, v_max = self.ranges[path]
        return k_max / LARGEST_CODE[dtype], v_max / LARGEST_CODE[dtype]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes them as JSON."""
        layers = {name: {"k_max": k_max, "v_max": v_max} for name, (k_max, v_max) in self.ranges.items()}
        Path(path).write_text(json.dumps({"kv_cache_ranges": layers}, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVCacheScales:
        """Reads a file that `save` wrote.

        Raises:
            InvalidInput: the file does not exist, or has other content.
        """
        read = read_json(read_given("kv_cache_scales", path), str(path))
        try:
            return cls({name: (each["k_max"], each["v_max"]) for name, each in read["kv_cache_ranges"].items()})
        except (KeyError, TypeError, AttributeError):
            raise InvalidInput(str(path), 'must hold {"kv_cache_ranges": {layer: {"k_max": x, "v_max": y}}}') from None

    @classmethod
    def carried_by(cls, model: nnx.Module) -> KVCacheScales | None:
        """Returns the scales of a checkpoint, which are for e4m3; None if a layer has none."""
        unit = LARGEST_CODE["float8_e4m3fn"]
        ranges: dict[str, tuple[float, float]] = {}
        for path, layer in paged_layers(model):
            if layer.kv_scales is None:
                return None
            k_scale, v_scale = (float(each[...][0]) for each in (layer.kv_scales.k_scale, layer.kv_scales.v_scale))
            ranges[path] = k_scale * unit, v_scale * unit
        return cls(ranges)

    def values(self, dtype: str) -> dict[str, jax.Array]:
        """Returns the variables of an engine's model for the scales, by path."""
        return {
            f"{path}.kv_scales.{name}": jnp.array([scale], jnp.float32)
            for path in self.ranges
            for name, scale in zip(("k_scale", "v_scale"), self.of(path, dtype), strict=True)
        }


def cached_spec(spec: PagedSpec, kv_cache_dtype: str) -> PagedSpec:
    """Returns a model's spec with the requested dtype of its cache: "auto", the model's own, or an 8-bit one."""
    if kv_cache_dtype in ("auto", spec.dtype):
        return spec
    dtypes = CACHE_DTYPES if spec.kv_lora_rank is None else LATENT_CACHE_DTYPES
    if kv_cache_dtype not in (*dtypes, *dtypes.values()):
        wanted = f"this model's cache can be 'auto' (its own {spec.dtype}), {', '.join(map(repr, dtypes))}"
        raise InvalidInput("kv_cache_dtype", value=kv_cache_dtype, wanted=wanted)
    if spec.index_head_dim is not None:
        problem = f"is {kv_cache_dtype!r} and the model has an indexer, whose keys have the dtype of the latents here"
        raise Unsupported("kv_cache_dtype", problem, "leave it 'auto'")
    return replace(spec, dtype=dtypes.get(kv_cache_dtype, kv_cache_dtype))


def writing_8_bits(
    model: PagedModel, dtype: str, scales: KVCacheScales | None, quantize_queries: bool = False
) -> PagedModel:
    """Returns a model with the same arrays whose layers write an 8-bit cache of a dtype, and may round queries to it.

    None for `scales` takes the model's own. Without any, the scale of fp8 is 1, and int8 is refused.
    """
    if dtype == "uint8":
        if scales is not None:
            raise InvalidInput("kv_cache_scales", "is given and kv_cache_dtype is 'fp8_ds_mla', which measures its own")
        return model
    copy = nnx.merge(*nnx.split(cast(nnx.Module, model)))
    layers, count = list(paged_layers(copy)), model.paged_spec.num_layers
    if len(layers) != count:
        known = f"{len(layers)} of {count} layers with a cache are a PagedAttention or a MultiHeadLatentAttention"
        wanted = "A model that writes 8 bits itself says so in its paged_spec"
        raise Unsupported("kv_cache_dtype", f"is {dtype}, and {known}, which alone know scales. {wanted}")
    scales = scales or KVCacheScales.carried_by(copy)
    if scales is None and dtype == "int8":
        fix = "Measure them: EngineConfig(kv_cache_scales=calibrate_kv_cache(model, prompts)), or take 'fp8'"
        problem = "is int8 and there are no scales, without which it keeps nothing"
        raise InvalidInput("kv_cache_dtype", f"{problem}. {fix}")
    if scales is None:
        event(logging.WARNING, "kv_cache_without_scales", kv_cache_dtype=dtype, scale=1.0)
    for path, layer in layers:
        layer.kv_scales = KVScales(*((1.0, 1.0) if scales is None else scales.of(path, dtype)))
        if isinstance(layer, PagedAttention):
            layer.quantize_query = quantize_queries
    return cast(Any, copy)
