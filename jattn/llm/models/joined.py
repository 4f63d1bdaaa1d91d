"""Linear layers of a checkpoint that share an input and are one product here, and their sizes."""

from __future__ import annotations

from jattn.llm.models.config import ModelConfig

#: Queries, keys and values, and the gate of attention behind them.
QKV = "self_attn.qkv_proj"
#: Queries, keys, values, their gates, step sizes and decays of the delta rule.
DELTA_IN = "linear_attn.in_proj"
_KIMI_IN = "kda.in_proj"


def joined_sizes(module: str, total: int, config: ModelConfig) -> tuple[int, ...]:
    """Returns the outputs of each linear layer that a module joins, `total` together: unused ones are the last one's.

    Args:
        module: path of the module in its decoder layer.
        total: its outputs, or those of a device's part.
        config: config of the layer, or of a device's part of it.
    """
    if module.endswith("gate_up_proj"):
        return (total // 2, total // 2)
    if module == QKV:
        query, key = config.query_size, config.key_value_size
        gate = (query,) if config.attn_output_gate else ()
        # Keys and values may be another layer's, or values the keys, or projected apart.
        without_values = config.attention_k_eq_v or config.value_head is not None
        num_keys = 0 if total == query + sum(gate) else 2 - without_values
        return (query, *(key,) * num_keys, *gate)
    if (delta := config.delta_net) is not None and module == DELTA_IN:
        *sizes, _ = delta.input_sizes
        return *sizes, total - sum(sizes)
    if (kimi := config.kimi_delta) is not None and module == _KIMI_IN:
        size = kimi.num_heads * kimi.head_dim
        gate = size if kimi.full_rank_gates else kimi.head_dim
        return size, size, size, gate, gate, total - 3 * size - 2 * gate
    return (total,)


def tensor_layers(module: str, count: int, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Returns which of the joined layers each of a file's `count` tensors holds."""
    if count == num_layers:
        return tuple((layer,) for layer in range(num_layers))
    if count == 1:
        return (tuple(range(num_layers)),)
    if module == DELTA_IN:
        # Queries, keys and values may lie together, and gates with them, and step sizes with decays.
        return ((0, 1, 2), (3,), (4,), (5,)) if count == 4 else ((0, 1, 2, 3), (4, 5))
    # The gate lies with the queries.
    return ((0, num_layers - 1), *((layer,) for layer in range(1, num_layers - 1)))
