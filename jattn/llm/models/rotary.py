"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), with every type of `RopeScaling`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.rope_scaling import RopeScaling
from jattn.nn.yarn import yarn_kept, yarn_weight


def inverse_frequencies(config: ModelConfig, *, local: bool = False) -> np.ndarray:
    """Returns the angle per position of each rotated pair of elements, float32[rotary_dim / 2], scaling included.

    Computed in float64 and rounded once: at position p an error of one unit in the last place of a frequency is an
    error of p units in the angle.

    Args:
        config: config of the model.
        local: the embedding of layers with a window, if `rope_local_theta` is their own base.
    """
    scaling = config.rope_scaling
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    if local and config.rope_local_theta is not None:
        return (config.rope_local_theta**-exponents).astype(np.float32)
    frequencies = config.rope_theta**-exponents
    if scaling is None or scaling.rope_type in ("default", "dynamic"):
        return frequencies.astype(np.float32)
    if scaling.rope_type == "longrope":
        is_long = config.max_position_embeddings > scaling.original_max_position_embeddings
        return (frequencies / np.array(scaling.long_factor if is_long else scaling.short_factor)).astype(np.float32)
    if scaling.rope_type == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    if scaling.rope_type == "llama3":
        keep = _kept_by_llama3(frequencies, scaling)
    else:
        original, betas = scaling.original_max_position_embeddings, (scaling.beta_fast, scaling.beta_slow)
        keep = yarn_kept(config.rotary_dim, config.rope_theta, original, betas, truncate=scaling.truncate)
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


def rotary_angles(positions: jax.Array, frequencies: np.ndarray, factor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and the sine of every angle, float32[..., tokens, 1, rotary_dim / 2], for `apply_rotary`.

    Args:
        positions: int32[..., tokens].
        frequencies: float32[rotary_dim / 2], of `inverse_frequencies`.
        factor: factor of both; the result of `attention_factor`.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    return (cosine, sine) if factor == 1 else (cosine * factor, sine * factor)


def apply_rotary(heads: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotates each pair (element i, element i + rotary_dim / 2) of every head, the pairing of Hugging Face's weights.

    Args:
        heads: [..., tokens, num_heads, head_dim]; elements past rotary_dim stay as they are.
        cosine: float32[..., tokens, 1, rotary_dim / 2].
        sine: the same shape.

    Returns:
        The rotated heads in the dtype of `heads`; the arithmetic is float32.
    """
    half = cosine.shape[-1]
    rotated, rest = heads[..., : 2 * half], heads[..., 2 * half :]
    first, second = jnp.split(rotated.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    rotated = rotated.astype(heads.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def _kept_by_llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Returns 1 where the wavelength is short enough to be kept, 0 where it is divided by the factor."""
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return np.clip(keep, 0.0, 1.0)
