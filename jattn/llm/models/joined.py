"""Linear layers of a checkpoint that share an input and are one product here, and their sizes."""

from __future__ import annotations

from jattn.llm.models.config import ModelConfig
from jattn.nn.states import unused_columns

#: Queries, keys and values, and the gate of attention behind them.
QKV = "self_attn.qkv_proj"
#: Queries, keys, values, their gates, step sizes and decays of the delta rule.
DELTA_IN = "linear_attn.in_proj"
#: The inputs of Mamba-2; before them queries, keys and values of the layer's attention, see `shared_sizes`.
MAMBA_IN = "mamba.in_proj"
_KIMI_IN = "kda.in_proj"


def shared_sizes(config: ModelConfig) -> tuple[int, ...] | None:
    """Returns the outputs of queries, keys, values and Mamba-2 where one product computes them all, and unused ones.

    None where attention has a product of its own. All outputs together are whole heads of attention, so that the
    result can be read as heads without a copy.
    """
    mamba, attention_in = config.mamba, config.attention_multipliers[0]
    apart = config.attention_bias or config.attn_output_gate or config.attn_head_gate or config.attention_k_eq_v
    apart = apart or config.latent or config.value_head or config.full_attention or config.kv_sharing_targets
    if mamba is None or mamba.use_bias or apart or attention_in != 1 or set(config.layer_types) != {"attention_mamba"}:
        return None
    inner = mamba.num_heads * mamba.head_dim
    own = 2 * (inner + mamba.num_groups * mamba.state_size) + mamba.num_heads
    used = config.query_size + 2 * config.key_value_size + own
    return config.query_size, config.key_value_size, config.key_value_size, own, unused_columns(used, config.head_dim)


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
    if module == MAMBA_IN and (shared := shared_sizes(config)) is not None:
        return *shared[:3], total - sum(shared[:3])
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
