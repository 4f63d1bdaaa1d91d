"""DeepSeek's rotary embedding: pairs of neighbours, and YaRN's frequencies (Peng et al. 2023, arXiv:2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from torch_core.errors import InvalidInput

__all__ = ["DeepSeekRoPE"]


@dataclass(frozen=True, kw_only=True)
class DeepSeekRoPE:
    """Rotates the pairs (0, 1), (2, 3) and so on of a head; a function of x[heads, tokens, dim] and positions[tokens].

    The rotated pairs come out apart, all first elements before all second ones: what is multiplied with itself in this
    order gives the same scores.

    Attributes:
        dim: elements of a head; even.
        theta: base of the frequencies.
        factor: how much longer than `original_max_position_embeddings` the context is; 1 for plain frequencies.
        original_max_position_embeddings: the context that the model was trained with first.
        beta_fast, beta_slow: turns within it from which a frequency is kept, and up to which it is divided by factor.
        mscale, mscale_all_dim: weights of the correction of scores, of rotated parts and of all; 0 for none.

    Example:
        >>> rope = DeepSeekRoPE(dim=4, factor=40.0, mscale=1.0, mscale_all_dim=1.0)
        >>> np.asarray(rope(jnp.ones((1, 2, 4)), jnp.array([0, 1]))[0, 1]).round(2)
        array([-0.3 ,  0.99,  1.38,  1.01], dtype=float32)
        >>> round(rope.score_factor, 4)
        1.8739
    """

    dim: int
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise InvalidInput(f"dim is {self.dim}; elements are rotated in pairs: it must be even.")
        if self.factor < 1:
            raise InvalidInput(f"factor is {self.factor}; it must be at least 1.")

    @property
    def score_factor(self) -> float:
        """What the scale of the scores is multiplied with beside the rotation: the correction of all, squared."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(self) -> np.ndarray:
        """Returns the angle per position of each pair, float32[dim / 2]; computed in float64 and rounded once."""
        plain = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.factor == 1:
            return plain.astype(np.float32)
        low, high = math.floor(self._pair_of(self.beta_fast)), math.ceil(self._pair_of(self.beta_slow))
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = np.clip((np.arange(self.dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return (plain / self.factor * ramp + plain * (1 - ramp)).astype(np.float32)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns the rotated heads in the dtype of `x`; the arithmetic is float32."""
        weight = self._mscale(self.mscale or 1.0)
        if self.mscale and self.mscale_all_dim:
            weight /= self._mscale(self.mscale_all_dim)
        angles = positions.astype(jnp.float32)[:, None] * self.frequencies()
        cosine, sine = jnp.cos(angles) * weight, jnp.sin(angles) * weight
        first, second = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
        rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
        return rotated.astype(x.dtype)

    def _pair_of(self, turns: float) -> float:
        """Returns which pair makes so many turns within the first context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return self.dim * math.log(wavelength) / (2 * math.log(self.theta))

    def _mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0
