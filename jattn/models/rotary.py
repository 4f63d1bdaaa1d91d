"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) with the default, linear and llama3 frequencies."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jattn.models.config import ModelConfig

__all__ = ["apply_rotary", "inverse_frequencies", "rotary_angles"]


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the angle per position of each pair of elements, float32[head_dim / 2], scaling included.

    Computed in float64 and rounded once: at position p an error of one unit in the last place of a frequency is an
    error of p units in the angle.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    if scaling.rope_type == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    # 1 where the wavelength is short enough to be kept, 0 where it is divided by the factor.
    keep = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return (keep * frequencies + (1 - keep) * frequencies / scaling.factor).astype(np.float32)


def rotary_angles(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and the sine of every angle, float32[..., tokens, 1, head_dim / 2], for `apply_rotary`.

    Args:
        positions: int32[..., tokens].
        frequencies: float32[head_dim / 2], of `inverse_frequencies`.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(heads: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotates each pair (element i, element i + head_dim / 2) of every head, the pairing of Hugging Face's weights.

    Args:
        heads: [..., tokens, num_heads, head_dim].
        cosine: float32[..., tokens, 1, head_dim / 2].
        sine: the same shape.

    Returns:
        The rotated heads in the dtype of `heads`; the arithmetic is float32.
    """
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(heads.dtype)
