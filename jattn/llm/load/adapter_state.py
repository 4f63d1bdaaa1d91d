"""Low-rank adapters of a decoder from memory: `Adapters`, or an nnx module or state, checked by name and shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jattn.llm.load.adapter_config import check_alpha
from jattn.llm.load.adapter_pieces import AdapterWeights, Pair, by_last_names, joined, own_pieces, pieces_of, unknown
from jattn.llm.models import Adapters, LoraWeights, ModelConfig, adapter_targets
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput

_STATE = re.compile(r"(.*?)\.?(?:\w+_)?lora_([abAB])(?:\.weight|\.kernel)?")


def adapter_of(
    source: Any, config: ModelConfig, *, index: int = 0, alpha: float | None = None, keeps_dtype: bool = False
) -> AdapterWeights:
    """Returns an adapter from memory.

    Args:
        source: `jattn.llm.models.Adapters`; or an nnx module, its state, or a nested mapping with pairs of arrays that
            are named lora_a and lora_b, as flax, qwix and SkyRL-tx name them: [in..., rank] and [rank, out...], in a
            module with Hugging Face's name of the layer, or with ours; of the embedding [vocab_size, rank] and
            [rank, hidden]. An axis of experts comes before these where a module is of all of them, and an axis of
            adapters first.
        config: config of the model.
        index: number of the adapter, where there are several.
        alpha: the products are scaled by alpha / rank; None for the source's own, or for the rank.
        keeps_dtype: the matrices of modules and states, too, have their own dtype, and not the model's.

    Raises:
        InvalidInput: another source, an index or alpha out of range, or arrays that do not fit.
        Unsupported: layers that have no adapters here.
    """
    if alpha is not None:
        check_alpha("alpha", alpha)
    if not isinstance(source, Adapters):
        return _of_state(source, config, index, alpha, keeps_dtype)
    check_int("index", index, 0, source.num_adapters - 1)
    weights, scaling = {}, source.scaling if alpha is None else alpha / source.rank
    targets = {target.name: target for target in adapter_targets(config)}
    names = [f"layers.{layer}.{name}" for layer, modules in enumerate(source.layers) for name in modules]
    for name in (*names, *source.outside):
        target = targets.get(name)
        module = None if target is None else source.of(target)
        pair = [] if module is None else [module[each][...][index] for each in ("lora_a", "lora_b")]
        if target is None or tuple(each.shape for each in pair) != target.shapes(source.rank):
            raise InvalidInput(name, "is not of the model", "make Adapters of its config")
        weights[target] = LoraWeights(pair[0], pair[1] * scaling)
    return AdapterWeights(source.rank, weights)


def _of_state(source: Any, config: ModelConfig, index: int, alpha: float | None, keeps_dtype: bool) -> AdapterWeights:
    if not isinstance(source, nnx.Module | nnx.State | Mapping):
        wanted = "it must be Adapters, an nnx module or state, or a mapping of arrays"
        raise InvalidInput("adapter", f"is a {type(source).__name__}", wanted)
    state = nnx.state(source) if isinstance(source, nnx.Module) else source
    flat = nnx.to_flat_state(state if isinstance(state, nnx.State) else nnx.State(dict(state)))
    arrays: dict[str, dict[str, Any]] = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        match = _STATE.fullmatch(".".join(map(str, path)))
        if match:
            arrays.setdefault(match[1], {})[match[2].lower()] = nnx.as_pure(leaf)
    if not arrays:
        raise InvalidInput("adapter", "has no arrays named lora_a and lora_b")
    pieces = pieces_of(config) | own_pieces(config)
    pairs = []
    for name, pair in sorted(arrays.items()):
        if len(pair) < 2:
            raise InvalidInput(name, f"has lora_{next(iter(pair))} alone", "an adapter has lora_a and lora_b")
        piece = by_last_names(name, pieces)
        if piece is None:
            raise unknown(name, config)
        experts = (piece.num_experts,) if piece.num_experts else ()
        count, in_size, out_size = piece.num_experts or 1, piece.target.in_size, piece.out_size
        first, second = pair["a"], pair["b"]
        if first.ndim and second.ndim and first.size != count * in_size * first.shape[-1]:
            # An axis of adapters comes first.
            check_int("index", index, 0, first.shape[0] - 1)
            first, second = first[index], second[index]
        rank = first.shape[-1] if first.ndim else 0
        fits = first.size == count * in_size * rank and second.size == count * out_size * rank
        if first.ndim < 2 or second.ndim < 2 or not fits or first.shape[: len(experts)] != experts:
            problem = f"has lora_a of shape {list(pair['a'].shape)} and lora_b of {list(pair['b'].shape)}"
            wanted = f"they must be {[*experts, in_size, 'rank']} and {[*experts, 'rank', out_size]}"
            raise InvalidInput(name, problem, wanted.replace("'", ""))
        first, second = first.reshape(*experts, in_size, rank), second.reshape(*experts, rank, out_size)
        scaling = 1.0 if alpha is None else alpha / rank
        pairs.append(Pair(piece, first.swapaxes(-1, -2), second.swapaxes(-1, -2), scaling))
    dtype = jnp.result_type(*(pair.lora_b for pair in pairs)) if keeps_dtype else config.dtype
    return joined(pairs, dtype)
