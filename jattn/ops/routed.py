"""A layer of experts and its router in plain jnp: grouped products, or row by row if rows are fewer than experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jattn.ops.activations import activated, gated
from jattn.ops.expert_products import ExpertProduct

_Activate: TypeAlias = Callable[[jax.Array], jax.Array]


def chosen_experts(
    logits: jax.Array, *, correction_bias: jax.Array | None, top_k: int, scoring_func: str, norm_topk_prob: bool,
    routed_scaling_factor: float, n_group: int, topk_group: int, forced: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns weights and experts, `[rows, top_k]`, by logits `[rows, experts]` and the options of a RouteCall.

    Rows of `forced`, int32[rows, top_k], are the experts themselves, unless an id is negative.
    """
    score = jax.nn.softmax if scoring_func == "softmax" else jax.nn.sigmoid
    scores = score(logits.astype(jnp.float32))
    choice = scores if correction_bias is None else scores + correction_bias[None]
    if n_group > 1:
        groups = choice.reshape(-1, n_group, choice.shape[-1] // n_group)
        best = jax.lax.top_k(groups, 1 if correction_bias is None else 2)[0].sum(-1)
        kept = jax.lax.top_k(best, topk_group)[1]
        is_kept = (kept[..., None] == jnp.arange(n_group, dtype=jnp.int32)[None, None]).any(-2)
        choice = jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(choice.shape)
    experts = jax.lax.top_k(choice, top_k)[1].astype(jnp.int32)
    if forced is not None:
        experts = jnp.where((forced >= 0).all(-1, keepdims=True), forced.astype(jnp.int32), experts)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if norm_topk_prob:
        # The sigmoids of a row may all be 0.
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * routed_scaling_factor, experts


def routed_experts(
    gate_up: ExpertProduct, down: ExpertProduct, activation: str, rows: jax.Array, weights: jax.Array,
    experts: jax.Array, num_experts: int, in_rows: bool = False, is_gated: bool = True,
    added: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns the weighted sums of the outputs of each row's experts, `[rows, hidden]` in the dtype of the weights.

    The second result are the inputs of `down`, `[rows, top_k, in]`, undefined without an expert.

    Args:
        gate_up, down: the experts.
        activation: activation of the gate, or of up alone.
        rows: `[rows, hidden]`.
        weights: `[rows, top_k]`.
        experts: int32 `[rows, top_k]`; ids outside the experts add nothing.
        num_experts: number of experts.
        in_rows: multiply row by row; else only if rows are fewer than experts.
        is_gated: `gate_up` is gate and up, not up alone.
        added: `[rows, top_k, out]`, added to the results of `gate_up`; None for nothing.
    """
    act = functools.partial(gated if is_gated else activated, activation)
    is_expert = (experts >= 0) & (experts < num_experts)
    # After the last expert comes a group of rows without an expert.
    experts = jnp.where(is_expert, experts, num_experts)
    routed = by_rows if in_rows or experts.size < num_experts else by_groups
    found, inner = routed(gate_up, down, act, rows, experts, num_experts, added)
    # Values without an expert are undefined there.
    found, weights = jnp.where(is_expert[..., None], found, 0), jnp.where(is_expert, weights, 0)
    return jnp.einsum("tk,tkh->th", weights, found, preferred_element_type=weights.dtype), inner


def by_groups(
    gate_up: ExpertProduct, down: ExpertProduct, act: _Activate, rows: jax.Array, experts: jax.Array, num_experts: int,
    added: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns outputs and activated rows of each row's experts, `[rows, top_k, ...]`, by grouped products."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    chosen, tokens = flat[order], order // experts.shape[-1]
    sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    inner = gate_up.grouped(rows[tokens], chosen, sizes)
    inner = act(inner if added is None else inner + added.reshape(flat.size, -1)[order])
    out = down.grouped(inner, chosen, sizes)
    # Taken back by the inverse order and summed along an axis: added up by scattering, bits would vary on a GPU.
    places = jnp.argsort(order)
    return out[places].reshape(*experts.shape, -1), inner[places].reshape(*experts.shape, -1)


def by_rows(
    gate_up: ExpertProduct, down: ExpertProduct, act: _Activate, rows: jax.Array, experts: jax.Array, num_experts: int,
    added: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns the same as `by_groups`, row by row."""
    flat, tokens = experts.reshape(-1), jnp.arange(experts.size, dtype=jnp.int32) // experts.shape[-1]
    inner = gate_up.gathered(rows[tokens], flat)
    inner = act(inner if added is None else inner + added.reshape(flat.size, -1))
    return down.gathered(inner, flat).reshape(*experts.shape, -1), inner.reshape(*experts.shape, -1)
