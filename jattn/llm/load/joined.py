"""How the pieces of a joined parameter lie in a file: their sizes, and the order of their outputs."""

from __future__ import annotations

import numpy as np

from jattn.llm.load.families import Family
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.joined import DELTA_IN, MAMBA_IN, QKV, joined_sizes, shared_sizes, tensor_layers
from jattn.llm.models.mixers import DeltaNetConfig

_EXPERTS = "moe.gate_up_proj"


def output_sizes(module: str, total: int, count: int, config: ModelConfig) -> tuple[int, ...]:
    """Returns the outputs of each of the `count` tensors that are joined to a parameter of `total` outputs."""
    if count > 1 and module.startswith("linear_attn.conv1d") and (delta := config.delta_net) is not None:
        keys = delta.num_kv_heads * delta.key_dim
        return keys, keys, delta.num_heads * delta.value_dim
    sizes = joined_sizes(module, total, config)
    if len(sizes) == 1:
        return (total // count,) * count
    return tuple(sum(sizes[each] for each in layers) for layers in tensor_layers(module, count, len(sizes)))


def num_unused(module: str, total: int, config: ModelConfig) -> int:
    """Returns how many of the `total` outputs of a parameter, the last ones, no tensor has: they are zeros."""
    if module == MAMBA_IN and (shared := shared_sizes(config)) is not None:
        return shared[-1]
    return total - sum(config.delta_net.input_sizes) if module == DELTA_IN and config.delta_net is not None else 0


def orders(config: ModelConfig, family: Family) -> dict[str, np.ndarray]:
    """Returns, by module, the place in the joined pieces of each element of a parameter's last axis, if it differs."""
    found: dict[str, np.ndarray | None] = {QKV: qkv_order(config, family, config.num_key_value_heads)}
    if family.order.get(_EXPERTS) == "alternating" and config.moe is not None:
        found[_EXPERTS] = np.arange(2 * config.moe.intermediate_size).reshape(-1, 2).T.ravel()
    if family.rotates_neighbours:
        found |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), _halves(config))
    # One of two tensors has queries, keys, values and gates, the other one step sizes and decays, by groups of heads.
    if config.delta_net is not None and len(family.tensor_name(DELTA_IN, config)) == 2:
        found[DELTA_IN] = _delta_order(config.delta_net)
    return {module: order for module, order in found.items() if order is not None}


def qkv_order(config: ModelConfig, family: Family, num_kv_heads: int) -> np.ndarray | None:
    """Returns the order of queries, keys, values and gates, of a layer that has this number of key heads."""
    heads, size = config.num_attention_heads, config.head_dim
    names, gated = family.tensor_name(QKV, config), config.attn_output_gate
    count = heads * (1 + gated) + 2 * num_kv_heads
    columns = np.arange(count * size).reshape(count, size)
    if family.order.get(QKV) == "by_group":
        groups = columns.reshape(num_kv_heads, -1, size)
        return np.concatenate([each.ravel() for each in (groups[:, :-2], groups[:, -2], groups[:, -1])])
    gate_apart, swaps = not gated or len(names) == 4, family.order.get(QKV) == "second_half_first"
    if gate_apart and not family.rotates_neighbours and not swaps:
        return None
    if not gate_apart:
        # Each head's gate comes after its query.
        queries, rest = columns[: 2 * heads].reshape(heads, 2, size), columns[2 * heads :]
        columns = np.concatenate([queries[:, 0], rest, queries[:, 1]])
    if family.rotates_neighbours or swaps:
        rotated, places = heads + num_kv_heads, np.roll(np.arange(size), size // 2) if swaps else _halves(config)
        columns = np.concatenate([columns[:rotated, places], columns[rotated:]])
    return columns.ravel()


def _delta_order(delta: DeltaNetConfig) -> np.ndarray:
    """Returns the order of the delta rule's inputs, of which each tensor of the file has a group's heads together."""
    sizes, places = delta.input_sizes, []
    for layers in tensor_layers(DELTA_IN, 2, len(sizes)):
        each = [sizes[layer] // delta.num_kv_heads for layer in layers]
        start = sum(map(len, places))
        columns = start + np.arange(delta.num_kv_heads * sum(each)).reshape(delta.num_kv_heads, -1)
        places += [part.ravel() for part in np.split(columns, np.cumsum(each)[:-1], axis=1)]
    return np.concatenate(places)


def _halves(config: ModelConfig) -> np.ndarray:
    """Returns the places, among neighbours that rotate together, of the first of each pair and then of the second."""
    rotated = np.arange(config.rotary_dim).reshape(-1, 2).T.ravel()
    return np.concatenate([rotated, np.arange(config.rotary_dim, config.head_dim)])
