"""Measures the range of a model's keys and values, from which the scales of an 8-bit cache follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.llm.load.kv_scales import LEAST_RANGE, KVCacheScales
from jattn.llm.models import PagedModel, PagedSpec
from jattn.llm.models.request_inputs import of_each, packed, unpacked
from jattn.metadata import AttentionMetadata
from jattn.nn.paged import KVRange, KVScale
from jattn.nn.scan import paged_layers
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.metadata import SequenceRow

_BLOCK_SIZE = 16
# The null slot and one of the prompt's own.
_NUM_SLOTS = 2
_RANDOM_PROMPTS = 8
_RANDOM_TOKENS = 128


def calibrate_kv_cache(
    model: PagedModel,
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    seed: int = 0,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
) -> KVCacheScales:
    """Runs each prompt through a model and returns the ranges of the keys and values that its layers cache.

    Use prompts like those that will be served: values beyond these ranges saturate. One program is compiled, for the
    longest prompt; the caches of one prompt are allocated meanwhile.

    Args:
        model: a model with layers of `PagedAttention` or latent attention; it is not changed.
        prompts: token ids of each prompt; None for eight random prompts of up to 128 tokens.
        seed: seed of the random tokens.
        inputs: numbers for a model that declares some, one mapping for all prompts or one for each.

    Returns:
        The scales, for `EngineConfig(kv_cache_dtype="fp8", kv_cache_scales=...)` or for a file.

    Raises:
        InvalidInput: there are no prompts, token ids outside the vocabulary, too many tokens, or inputs that are
            missing or undeclared.
        Unsupported: a model without such layers, with an indexer, or split over devices.

    Example:
        >>> from jattn.llm.load import embedded_model_folder, load_model
        >>> model, *_ = load_model(embedded_model_folder())
        >>> len(calibrate_kv_cache(model, [[1, 2, 3]]).ranges) == model.paged_spec.num_layers
        True
    """
    spec, parallel = model.paged_spec, getattr(model, "parallel", None)
    if parallel is not None:
        problem = f"is cut over {parallel.size} devices, of which each would see its own heads alone"
        wanted = "measure the whole model (jattn.llm.load.load_model) and give EngineConfig(kv_cache_scales=...)"
        raise Unsupported("model", problem, wanted)
    rows = (
        _random_prompts(spec, seed) if prompts is None else [_checked(i, each, spec) for i, each in enumerate(prompts)]
    )
    if not rows:
        raise InvalidInput("prompts", "is empty", "pass at least one, or None for random ones")
    numbers = [packed(each, spec.inputs)[None] for each in of_each(inputs, len(rows))]
    watched = nnx.merge(*nnx.split(cast(nnx.Module, model)))
    layers = list(paged_layers(watched))
    if not layers or spec.index_head_dim is not None:
        lacks = "has an indexer" if layers else "has no PagedAttention"
        raise Unsupported(f"{type(model).__name__} {lacks}, and so no scales for its cache.", argument="model")
    for _, layer in layers:
        layer.kv_scales, layer.kv_range = None, KVRange()
    graph, seen, rest = nnx.split(watched, KVScale, ...)
    num_blocks = -(-max(map(len, rows)) // _BLOCK_SIZE) + 1
    caches = tuple(jnp.zeros(each.shape(num_blocks), each.dtype) for each in spec.cache_specs(_BLOCK_SIZE))
    for layer in spec.states:
        caches += tuple(map(jnp.zeros, layer.array_shapes(_NUM_SLOTS), layer.dtypes))
    # A graph may have objects without a hash, which no static argument may.
    look = jax.jit(lambda *arrays: _look(graph, *arrays))
    for row, own in zip(rows, numbers, strict=True):
        token_ids, positions, metadata = _step(row, num_blocks)
        metadata = replace(metadata, inputs=unpacked(jnp.asarray(own), spec.inputs))
        seen = look(seen, rest, (token_ids, positions, metadata), caches)
    ranges: dict[str, tuple[float, float]] = {}
    for path, layer in paged_layers(nnx.merge(graph, seen, rest)):
        if layer.kv_range is not None:
            k_max, v_max = (float(each[...][0]) for each in (layer.kv_range.k_max, layer.kv_range.v_max))
            ranges[path] = _range(k_max), _range(v_max)
    return KVCacheScales(ranges)


def _look(graph: Any, seen: nnx.State, rest: nnx.State, step: tuple[Any, ...], caches: Any) -> nnx.State:
    model = nnx.merge(graph, seen, rest)
    token_ids, positions, metadata = step
    model(token_ids, positions, caches, metadata)
    return nnx.state(model, KVScale)


def _step(row: np.ndarray, num_blocks: int) -> tuple[np.ndarray, np.ndarray, AttentionMetadata]:
    """Returns one prompt as a step, padded to all blocks: tokens, positions and metadata."""
    size = (num_blocks - 1) * _BLOCK_SIZE
    blocks = list(range(1, -(-len(row) // _BLOCK_SIZE) + 1))
    metadata = AttentionMetadata.build(
        [SequenceRow(blocks, 0, len(row), state_slot=_NUM_SLOTS - 1)],
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        num_tokens=size,
        max_blocks=num_blocks - 1,
        max_query_len=size,
        num_slots=_NUM_SLOTS,
    )
    return np.pad(row, (0, size - len(row))), np.arange(size, dtype=np.int32) % max(len(row), 1), metadata


def _range(largest: float) -> float:
    # Zeros fit any range.
    return max(largest, LEAST_RANGE) if largest else 1.0


def _random_prompts(spec: PagedSpec, seed: int) -> list[np.ndarray]:
    random, most = np.random.default_rng(seed), min(_RANDOM_TOKENS, spec.max_model_len)
    return [random.integers(0, spec.vocab_size, most, np.int32) for _ in range(_RANDOM_PROMPTS)]


def _checked(index: int, prompt: Sequence[int], spec: PagedSpec) -> np.ndarray:
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidInput(f"prompts[{index}]", "must be a flat sequence of token ids")
    check_int(f"the length of prompts[{index}]", len(tokens), 1, spec.max_model_len)
    bad = np.flatnonzero((tokens < 0) | (tokens >= spec.vocab_size))
    if bad.size:
        text = f"token {int(bad[0])} of prompts[{index}] is {int(tokens[bad[0]])}; ids are 0 to {spec.vocab_size - 1}."
        raise InvalidInput(text)
    return tokens.astype(np.int32)
