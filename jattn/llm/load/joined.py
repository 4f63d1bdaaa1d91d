"""How the pieces of a joined parameter lie in a file: their sizes, and the order of their outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jattn.llm.load.families import Family
from jattn.llm.models.config import ModelConfig

QKV = "self_attn.qkv_proj"
_EXPERTS = "moe.gate_up_proj"
_DELTA_QKVZ, _DELTA_BA = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
_KIMI_IN = "kda.in_proj"


def output_sizes(module: str, total: int, count: int, config: ModelConfig) -> tuple[int, ...]:
    """Returns the outputs of each of the `count` tensors that are joined to a parameter of `total` outputs."""
    if count == 1:
        return (total,)
    if module == QKV:
        if config.attention_k_eq_v:
            return config.query_size, config.key_value_size
        gate = config.query_size * config.attn_output_gate
        sizes = config.query_size, config.key_value_size, config.key_value_size, gate
        return sizes if count == len(sizes) else (config.query_size + gate, *sizes[1:3])
    if module == _DELTA_QKVZ and config.delta_net is not None:
        keys, values = _delta_sizes(config)
        return (keys, keys, values, values) if count == 4 else (2 * keys + values, values)
    if module.startswith("linear_attn.conv1d") and config.delta_net is not None:
        keys, values = _delta_sizes(config)
        return keys, keys, values
    if module == _KIMI_IN and config.kimi_delta is not None:
        size, dim = config.kimi_delta.num_heads * config.kimi_delta.head_dim, config.kimi_delta.head_dim
        return size, size, size, dim, dim, config.kimi_delta.num_heads
    return (total // count,) * count


def orders(config: ModelConfig, family: Family) -> dict[str, np.ndarray]:
    """Returns, by module, the place in the joined pieces of each element of a parameter's last axis, if it differs."""
    found: dict[str, np.ndarray | None] = {QKV: qkv_order(config, family, config.num_key_value_heads)}
    if family.order.get(_EXPERTS) == "alternating" and config.moe is not None:
        found[_EXPERTS] = np.arange(2 * config.moe.intermediate_size).reshape(-1, 2).T.ravel()
    if family.rotates_neighbours:
        found |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), _halves(config))
    if config.delta_net is not None:
        heads, groups = config.delta_net.num_heads, config.delta_net.num_kv_heads
        keys, values = _delta_sizes(config)
        for module, sizes in ((_DELTA_QKVZ, (keys, keys, values, values)), (_DELTA_BA, (heads, heads))):
            if not isinstance(family.tensor_name(module, config), str):
                found[module] = _by_group(sizes, groups)
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
    gate_apart = not gated or len(names) == 4
    if gate_apart and not family.rotates_neighbours:
        return None
    if not gate_apart:
        # Each head's gate lies behind its query.
        queries, rest = columns[: 2 * heads].reshape(heads, 2, size), columns[2 * heads :]
        columns = np.concatenate([queries[:, 0], rest, queries[:, 1]])
    if family.rotates_neighbours:
        rotated = heads + num_kv_heads
        columns = np.concatenate([columns[:rotated, _halves(config)], columns[rotated:]])
    return columns.ravel()


def _by_group(sizes: Sequence[int], groups: int) -> np.ndarray:
    """Returns the order of parts that lie one after the other, of which the model has each group's together."""
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return np.concatenate([part.reshape(groups, -1) for part in parts], axis=1).ravel()


def _delta_sizes(config: ModelConfig) -> tuple[int, int]:
    sizes = config.delta_net
    return (0, 0) if sizes is None else (sizes.num_kv_heads * sizes.key_dim, sizes.num_heads * sizes.value_dim)


def _halves(config: ModelConfig) -> np.ndarray:
    """Returns the places, among neighbours that rotate together, of the first of each pair and then of the second."""
    rotated = np.arange(config.rotary_dim).reshape(-1, 2).T.ravel()
    return np.concatenate([rotated, np.arange(config.rotary_dim, config.head_dim)])
