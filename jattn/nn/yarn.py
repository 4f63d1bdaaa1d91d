"""DeepSeek's rotary embedding: pairs of neighbours, and YaRN's frequencies (Peng et al. 2023, arXiv:2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from torch_core.base.errors import InvalidInput

__all__ = ["DeepSeekRoPE", "yarn_kept", "yarn_weight"]


@dataclass(frozen=True, kw_only=True)
class DeepSeekRoPE:
    """Rotates the pairs (0, 1), (2, 3) and so on of a head; a function of x[heads, tokens, dim] and positions[tokens].

    The result has all first elements of the rotated pairs before all second ones: queries and keys in the same order
    give the same scores. Without `interleaved`, as in DeepSeek-V3.2's indexer, they also come in like this.

    Attributes:
        dim: elements of a head; even.
        theta: base of the frequencies.
        factor: how much longer than `original_max_position_embeddings` the context is; 1 for plain frequencies.
        original_max_position_embeddings: the context that the model was trained with first.
        beta_fast, beta_slow: turns within it from which a frequency is kept, and up to which it is divided by factor.
        mscale, mscale_all_dim: weights of the correction of scores, of rotated parts and of all; 0 for none.
        interleaved: pairs are neighbours.

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
    interleaved: bool = True

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise InvalidInput(f"dim is {self.dim}; elements are rotated in pairs: it must be even.")
        if self.factor < 1:
            raise InvalidInput(f"factor is {self.factor}; it must be at least 1.")

    @property
    def score_factor(self) -> float:
        """The factor of the scores' scale, in addition to the rotation: the square of the overall correction."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(self) -> np.ndarray:
        """Returns the angle per position of each pair, float32[dim / 2]; computed in float64 and rounded once."""
        plain = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.factor == 1:
            return plain.astype(np.float32)
        kept = yarn_kept(self.dim, self.theta, self.original_max_position_embeddings, (self.beta_fast, self.beta_slow))
        return (kept * plain + (1 - kept) * plain / self.factor).astype(np.float32)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns the rotated heads in the dtype of `x`; the arithmetic is float32."""
        if x.shape[-1] != self.dim:
            size = x.shape[-1]
            raise InvalidInput(
                f"x has heads of {size} elements and the rope is for {self.dim}; build it with dim={size}."
            )
        weight = self._mscale(self.mscale or 1.0)
        if self.mscale and self.mscale_all_dim:
            weight /= self._mscale(self.mscale_all_dim)
        angles = positions.astype(jnp.float32)[:, None] * self.frequencies()
        cosine, sine = jnp.cos(angles) * weight, jnp.sin(angles) * weight
        wide = x.astype(jnp.float32)
        first, second = (wide[..., 0::2], wide[..., 1::2]) if self.interleaved else jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
        return rotated.astype(x.dtype)

    def _mscale(self, weight: float) -> float:
        return yarn_weight(self.factor, weight)


def yarn_kept(
    dim: int, theta: float, original_max_position_embeddings: int, betas: tuple[float, float], *, truncate: bool = True
) -> np.ndarray:
    """Returns how much of each pair's frequency stays, float64[dim / 2]; the rest is divided by the factor.

    1 for pairs below the one that turns `betas[0]` times within the first context, 0 above the one that turns
    `betas[1]` times, a line in between, from whole pair to whole pair if `truncate`.
    """
    low, high = (
        dim // 2 * math.log(original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)
        for turns in betas
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return 1 - np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)


def yarn_weight(factor: float, weight: float) -> float:
    """Returns the factor that counters the flatter attention over a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
