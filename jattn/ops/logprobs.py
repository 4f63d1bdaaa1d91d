"""Log-probabilities of tokens under logits, for trainers."""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp

from jattn.ops.rowwise import row_logsumexp
from torch_core.base.errors import InvalidInput


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, *, temperature: float | jax.Array | None = None, batch_invariant: bool = False
) -> jax.Array:
    """Returns float32[...], the log-probability of each token under its logits; differentiable.

    Args:
        logits: float32[..., vocab].
        tokens: int32[...].
        temperature: divides the logits, a number or [...]; None for 1. An engine reports log-probabilities at its
            requests' temperatures with `logprobs_mode="processed_logprobs"`.
        batch_invariant: the bits are those that a batch-invariant engine reports for the same logits; see
            `jattn.llm.models.set_batch_invariant`.

    Raises:
        InvalidInput: tokens of another shape or dtype, or a temperature that is a number and not above 0.

    Example:
        >>> import jax.numpy as jnp
        >>> [round(x, 3) for x in token_logprobs(jnp.zeros((1, 4)), jnp.array([2])).tolist()]
        [-1.386]
    """
    logits, tokens = jnp.asarray(logits), jnp.asarray(tokens)
    if logits.ndim == 0 or tokens.shape != logits.shape[:-1]:
        raise InvalidInput("tokens", f"has shape {tokens.shape}", f"logits {logits.shape} are [..., vocab] for [...]")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InvalidInput("tokens", f"is {tokens.dtype}", "token ids are integers, such as int32")
    if isinstance(temperature, numbers.Real) and not temperature > 0:
        raise InvalidInput("temperature", value=temperature, wanted="it must be above 0, or None for 1")
    values = logits.astype(jnp.float32)
    if temperature is not None:
        # XLA would multiply by the inverse of a constant, and the sampler's is none.
        divisor = jax.lax.optimization_barrier(jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), tokens.shape))
        values = values / divisor[..., None]
    chosen = jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]
    if not batch_invariant:
        return chosen - jax.nn.logsumexp(values, axis=-1)
    return chosen - row_logsumexp(values.reshape(-1, values.shape[-1])).reshape(tokens.shape)
