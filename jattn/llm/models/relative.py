"""Relative position biases (Raffel et al. 2020, arXiv:1910.10683): one learned number for a bucket of distances."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jattn.llm.models.config import ModelConfig


def relative_bias(table: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns float32[num_heads, 2 * relative_attention_max_distance + 1], spread out over distances for the ops.

    Args:
        table: float[relative_attention_num_buckets, num_heads].
        config: config of the model.
    """
    return table[relative_buckets(config)].astype(jnp.float32).T


def relative_buckets(config: ModelConfig) -> np.ndarray:
    """Returns the bucket of each distance (key - query) from -relative_attention_max_distance to that, int32.

    Half of the buckets hold one distance each, the others grow with its logarithm. Where tokens see later ones, those
    have half of all buckets; elsewhere they have the first one, which is never seen.

    Example:
        >>> config = ModelConfig(
        ...     vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...     num_key_value_heads=2, head_dim=4, position_embedding="relative", relative_attention_num_buckets=4,
        ...     relative_attention_max_distance=8)
        >>> relative_buckets(config).tolist()
        [3, 3, 3, 3, 3, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    """
    num_buckets, furthest = config.relative_attention_num_buckets, config.relative_attention_max_distance
    distances = np.arange(-furthest, furthest + 1)
    first = np.zeros_like(distances)
    if config.is_encoder:
        num_buckets //= 2
        first = np.where(distances > 0, num_buckets, 0)
        distances = np.abs(distances)
    else:
        distances = np.maximum(-distances, 0)
    exact = num_buckets // 2
    # float32 in this order, as the models were trained: a bucket's edge may lie on a distance.
    growth = np.log(np.maximum(distances, exact).astype(np.float32) / exact) / np.float32(math.log(furthest / exact))
    large = exact + (growth * (num_buckets - exact)).astype(np.int32)
    return (first + np.where(distances < exact, distances, np.minimum(large, num_buckets - 1))).astype(np.int32)
