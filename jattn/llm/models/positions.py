"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), and relative ones (Raffel et al. 2020)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.parts import RopeScaling, TemperatureConfig
from jattn.nn.yarn import yarn_kept, yarn_weight


def inverse_frequencies(config: ModelConfig, *, local: bool = False) -> np.ndarray:
    """Returns the angle per position of each rotated pair of elements, float32[rotary_dim / 2], scaling included.

    Computed in float64 and rounded once: at position p an error of one unit in the last place of a frequency is an
    error of p units in the angle. `local` is for layers with a window, which may have a base of their own.
    """
    scaling, rotary_dim = config.rope_scaling, config.rotary_dim
    if config.full_attention is not None and not local:
        full = config.full_attention
        rotary_dim = int(full.head_dim * (full.partial_rotary_factor or config.partial_rotary_factor))
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    if local and config.rope_local_theta is not None:
        return (config.rope_local_theta**-exponents).astype(np.float32)
    frequencies = config.rope_theta**-exponents
    if scaling is None or scaling.rope_type in ("default", "dynamic"):
        return frequencies.astype(np.float32)
    if scaling.rope_type == "longrope":
        is_long = config.max_position_embeddings > scaling.original_max_position_embeddings
        return (frequencies / np.array(scaling.long_factor if is_long else scaling.short_factor)).astype(np.float32)
    if scaling.rope_type == "proportional":
        rotated = int(scaling.partial_rotary_factor * rotary_dim // 2)
        frequencies[rotated:] = 0.0
    if scaling.rope_type in ("linear", "proportional"):
        return (frequencies / scaling.factor).astype(np.float32)
    if scaling.rope_type == "llama3":
        keep = _kept_by_llama3(frequencies, scaling)
    else:
        original, betas = scaling.original_max_position_embeddings, (scaling.beta_fast, scaling.beta_slow)
        keep = yarn_kept(rotary_dim, config.rope_theta, original, betas, truncate=scaling.truncate)
    return (keep * frequencies + (1 - keep) * frequencies / scaling.factor).astype(np.float32)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Returns the factor of cosine and sine, which counters the flatter attention over a long context."""
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.rope_type == "yarn":
        weights = (scaling.mscale, scaling.mscale_all_dim) if scaling.mscale and scaling.mscale_all_dim else (1.0, 0.0)
        above, below = (yarn_weight(scaling.factor, weight) for weight in weights)
        return above / below
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))


def temperature_factors(positions: jax.Array, temperature: TemperatureConfig) -> jax.Array:
    """Returns the factors of queries, float32[..., tokens, 1, 1], at positions int32[..., tokens]."""
    steps = jnp.floor((positions.astype(jnp.float32) + temperature.offset) / temperature.interval)
    return (1 + temperature.beta * jnp.log1p(steps))[..., None, None]


def rotary_angles(positions: jax.Array, frequencies: np.ndarray, factor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Returns factor * cosine and sine, float32[..., tokens, 1, rotary_dim / 2], of positions int32[..., tokens]."""
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies.reshape((1,) * (positions.ndim + 1) + (-1,))
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    return (cosine, sine) if factor == 1 else (cosine * factor, sine * factor)


def apply_rotary(heads: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotates each pair (element i, element i + rotary_dim / 2) of every head, the pairing of Hugging Face's weights.

    Heads are [..., tokens, num_heads, head_dim]; elements past rotary_dim stay as they are. The arithmetic is float32.
    """
    half = cosine.shape[-1]
    cosine, sine = (jax.lax.broadcast_to_rank(each, heads.ndim) for each in (cosine, sine))
    rotated, rest = heads[..., : 2 * half], heads[..., 2 * half :]
    first, second = jnp.split(rotated.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    rotated = rotated.astype(heads.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def relative_bias(table: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns float32[num_heads, distances] of a table float[buckets, num_heads], for the ops."""
    return table[relative_buckets(config)].astype(jnp.float32).T


def relative_buckets(config: ModelConfig) -> np.ndarray:
    """Returns the bucket of each distance (key - query) from -relative_attention_max_distance to that, int32.

    Half of the buckets hold one distance each, the others grow with its logarithm. Where tokens see later ones, those
    have half of all buckets; elsewhere they have the first one, which is never seen.
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


def _kept_by_llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Returns 1 where the wavelength is short enough to be kept, 0 where it is divided by the factor."""
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return np.clip(keep, 0.0, 1.0)
