"""Log-probabilities of tokens under logits, for trainers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn.ops.rowwise import row_logsumexp


def token_logprobs(
    logits: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float | jax.Array | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Returns float32[...], the log-probability of each token under its logits; differentiable.

    Args:
        logits: float32[..., vocab].
        tokens: int32[...].
        temperature: divides the logits, a number or [...]; None for 1. An engine reports log-probabilities at its
            requests' temperatures with `logprobs_mode="processed_logprobs"`.
        batch_invariant: the bits are those that a batch-invariant engine reports for the same logits; see
            `jattn.llm.models.set_batch_invariant`.

    Example:
        >>> import jax.numpy as jnp
        >>> [round(x, 3) for x in token_logprobs(jnp.zeros((1, 4)), jnp.array([2])).tolist()]
        [-1.386]
    """
    values = logits.astype(jnp.float32)
    if temperature is not None:
        # XLA would multiply by the inverse of a constant, and the sampler's is none.
        divisor = jax.lax.optimization_barrier(jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), tokens.shape))
        values = values / divisor[..., None]
    chosen = jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]
    if not batch_invariant:
        return chosen - jax.nn.logsumexp(values, axis=-1)
    return chosen - row_logsumexp(values.reshape(-1, values.shape[-1])).reshape(tokens.shape)
