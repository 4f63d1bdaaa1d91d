"""DeepSeek's rotary embedding: pairs of adjacent elements, YaRN frequencies (Peng et al. 2023, arXiv:2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from torch_core.base.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class DeepSeekRoPE:
    """Rotates the pairs (0, 1), (2, 3), ... of a head; a function of x[heads, tokens, dim] and positions[tokens].

    The output has the first elements of all pairs before the second elements. Scores do not change, because queries and
    keys have the same order. Without `interleaved`, as in the indexer of DeepSeek-V3.2, the input has that order too.

    Attributes:
        dim: elements of a head; even.
        theta: base of the frequencies.
        factor: ratio of the context length to `original_max_position_embeddings`; 1 for plain frequencies.
        original_max_position_embeddings: context length of the first training, in tokens.
        beta_fast, beta_slow: numbers of rotations within that context. Frequencies with more than beta_fast are kept;
            those with fewer than beta_slow are divided by factor.
        mscale, mscale_all_dim: weights of the attention correction for the rotated part and for the whole score; 0 for
            no correction.
        interleaved: whether a pair is two adjacent elements of the input.

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
            raise InvalidInput("dim", f"is {self.dim}", "elements are rotated in pairs: it must be even")
        if self.factor < 1:
            raise InvalidInput("factor", f"is {self.factor}", "it must be at least 1")

    @property
    def score_factor(self) -> float:
        """Factor on the scale of the scores: the correction of the whole score, squared."""
        return yarn_weight(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

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
            problem = f"has heads of {x.shape[-1]} elements and the rope is for {self.dim}"
            raise InvalidInput("x", problem, f"build it with dim={x.shape[-1]}")
        weight = yarn_weight(self.factor, self.mscale or 1.0)
        if self.mscale and self.mscale_all_dim:
            weight /= yarn_weight(self.factor, self.mscale_all_dim)
        angles = positions.astype(jnp.float32)[:, None] * self.frequencies()[None]
        cosine, sine = (jax.lax.broadcast_to_rank(turn(angles) * weight, x.ndim) for turn in (jnp.cos, jnp.sin))
        wide = x.astype(jnp.float32)
        first, second = (wide[..., 0::2], wide[..., 1::2]) if self.interleaved else jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
        return rotated.astype(x.dtype)


def yarn_kept(
    dim: int, theta: float, original_max_position_embeddings: int, betas: tuple[float, float], *, truncate: bool = True
) -> np.ndarray:
    """Returns the share of each pair's frequency that is kept, float64[dim / 2]; the rest is divided by the factor.

    The share is 1 for pairs below the one that rotates `betas[0]` times within the first context, 0 above the one that
    rotates `betas[1]` times, and linear in between. With `truncate`, both bounds are rounded to whole pairs.
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
    """Returns the attention correction of a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
