"""SparseMLP: a feed-forward layer of experts that never drops a token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.layers import INITIALIZER, MLP, is_plain, linear, unweighted_norm
from jattn.llm.models.tensor_parallel import TensorParallel
from jattn.ops import ExpertAdapters, fused_experts, in_tiles, route_experts
from jattn.ops.expert_products import ExpertKernels, ExpertProduct
from jattn.ops.routed import chosen_experts, routed_experts
from torch_core.base.errors import InvalidInput


class ExpertLinear(nnx.Module):
    """One linear map for each expert: `x @ kernel[expert] + bias[expert]`."""

    batch_invariant: bool = False

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, *, use_bias: bool, dtype: str, rngs: nnx.Rngs
    ) -> None:
        self.kernel = nnx.Param(INITIALIZER(rngs.params(), (num_experts, in_features, out_features), jnp.dtype(dtype)))
        self.bias = nnx.Param(jnp.zeros((num_experts, out_features), jnp.dtype(dtype))) if use_bias else None


class SparseMLP(nnx.Module):
    """Sends each token to its experts and returns the weighted sum of their outputs (Shazeer et al. 2017,
    arXiv:1701.06538).

    There is no capacity: rows that share an expert are multiplied together, and an expert without rows is not read. Of
    a model that is split, each device has some of the experts and routes over all.

    Attributes:
        adapters: low-rank adapters of the rows of a call; None for none.
    """

    batch_invariant: bool = False
    adapters: ExpertAdapters | None = None

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, parallel: TensorParallel | None = None) -> None:
        moe, width, dtype = config.moe, config.hidden_size, config.dtype
        if moe is None:
            raise InvalidInput("config.moe", value=None, wanted="a SparseMLP needs a MoEConfig")
        self.moe, self.hidden_act, self.parallel = moe, config.hidden_act, parallel
        self.num_local_experts = moe.num_experts // (1 if parallel is None else parallel.parts("experts"))
        options = {"use_bias": moe.expert_bias, "dtype": dtype, "rngs": rngs}
        router = {"use_bias": moe.router_bias, "preferred_element_type": jnp.float32}
        one: dict[str, Any] = {"param_dtype": jnp.dtype(dtype), "rngs": rngs}
        self.router = linear(width, moe.num_experts, **router, **one)
        self.epsilon = config.rms_norm_eps
        self.router_scale = nnx.Param(jnp.ones(width, jnp.dtype(dtype))) if moe.with_mlp else None
        self.per_expert_scale = nnx.Param(jnp.ones(moe.num_experts, jnp.dtype(dtype))) if moe.with_mlp else None
        # float32 in every model: in fewer bits it would choose other experts.
        self.e_score_correction_bias = (
            nnx.Param(jnp.zeros(moe.num_experts, jnp.float32)) if moe.score_correction_bias else None
        )
        self.is_gated = config.gated_mlp
        # One or the other, and their names in a checkpoint.
        if self.is_gated:
            self.gate_up_proj = ExpertLinear(self.num_local_experts, width, 2 * moe.intermediate_size, **options)
        else:
            self.up_proj = ExpertLinear(self.num_local_experts, width, moe.intermediate_size, **options)
        self.down_proj = ExpertLinear(self.num_local_experts, moe.intermediate_size, width, **options)
        shared = moe.shared_width // (1 if parallel is None else parallel.parts("mlp"))
        self.shared_expert = MLP(config, rngs=rngs, intermediate_size=shared) if shared else None
        has_gate = moe.shared_intermediate_size > 0 and moe.shared_expert_gate
        self.shared_expert_gate = linear(width, 1, use_bias=False, **one) if has_gate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., hidden]` to `[..., hidden]`."""
        return self.with_experts(x)[0]

    def with_experts(
        self, x: jax.Array, forced: jax.Array | None = None, stream: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the same and the experts, int32[..., num_experts_per_tok], the best expert first.

        `forced`, of the same shape, are experts instead of those that the router would choose; a token with a negative
        id has the router's. Their weights are the router's. `stream` is the router's input if it is not `x`.
        """
        rows = x.reshape(-1, x.shape[-1])
        routed = rows if stream is None else self._router_rows(stream.reshape(rows.shape))
        given = (rows, routed, *(() if forced is None else (forced.reshape(len(rows), -1),)))
        if self.batch_invariant:
            # All of it for one tile after the other.
            graph, weights = nnx.split(self)
            out, experts = in_tiles(lambda given, weights: nnx.merge(graph, weights)._of_rows(*given), given, weights)
        else:
            out, experts = self._of_rows(*given)
        return out.reshape(x.shape), experts.reshape(*x.shape[:-1], -1)

    def _router_rows(self, rows: jax.Array) -> jax.Array:
        """Returns the router's input: the rows after its norm, whose weight is multiplied by hidden_size ** -0.5."""
        if self.router_scale is None:
            return rows
        weight = jax.lax.broadcast_to_rank(self.router_scale[...], rows.ndim)
        return unweighted_norm(rows, self.epsilon) * weight * rows.shape[-1] ** -0.5

    def _of_rows(
        self, rows: jax.Array, routed: jax.Array, forced: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        weights, experts = self.route(routed, forced)
        if self.per_expert_scale is not None:
            weights = weights * self.per_expert_scale[...].astype(weights.dtype)[experts]
        own = self._own(weights, experts)
        out = (self._weighed_before if self.moe.apply_router_weight_on_input else self.routed)(rows, *own)
        if self.shared_expert is not None:
            shared, gate = self.shared_expert(rows), self.shared_expert_gate
            out = out + (shared if gate is None else jax.nn.sigmoid(gate(rows)) * shared)
        return out.astype(rows.dtype), experts

    def routed(
        self, rows: jax.Array, weights: jax.Array, experts: jax.Array, *, implementation: str | None = None
    ) -> jax.Array:
        """Returns the weighted sums `[rows, hidden]` of the outputs of each row's experts.

        `weights` and `experts` are as `route` returns them; ids that are none of this device's add nothing.
        """
        gate_up = _product(self.gate_up_proj if self.is_gated else self.up_proj)
        down, act = _product(self.down_proj), self.hidden_act
        adapters = None if self.adapters is None else self.adapters.of_rows(len(rows))
        if self.batch_invariant or not isinstance(gate_up, ExpertKernels) or not isinstance(down, ExpertKernels):
            # Kernels in fewer bits become numbers where jnp multiplies them.
            sizes = self.num_local_experts, self.batch_invariant, self.is_gated
            routed = functools.partial(routed_experts, gate_up, down, act, rows, weights, experts, *sizes)
            if adapters is None:
                return routed()[0]
            return adapters.around(routed, rows, weights, experts, self.num_local_experts)
        return fused_experts(
            rows,
            weights,
            experts,
            gate_up.kernel,
            down.kernel,
            gate_up_bias=gate_up.bias,
            down_bias=down.bias,
            activation=act,
            # Something is added to it.
            out_dtype=None if self.shared_expert is None else "float32",
            adapters=adapters,
            implementation=implementation,
        )

    def route(self, rows: jax.Array, forced: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns weights float32 and experts int32 of each row, [rows, num_experts_per_tok], the best expert first.

        `forced` is as in `with_experts`.
        """
        moe, router, correction = self.moe, self.router, self.e_score_correction_bias
        if moe.scoring_func == "sparsemixer":
            return sparse_mixer(router(rows), moe.num_experts_per_tok, moe.sparsemixer_eps, forced)
        names = ("scoring_func", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
        options: dict[str, Any] = {name: getattr(moe, name) for name in names}
        options["top_k"] = moe.num_experts_per_tok
        options["correction_bias"] = None if correction is None else correction[...]
        if self.batch_invariant or forced is not None or not is_plain(router):
            # A kernel in fewer bits becomes numbers where jnp multiplies it.
            return chosen_experts(router(rows), forced=forced, **options)
        bias = None if router.bias is None else router.bias[...]
        return route_experts(rows, router.kernel[...], bias=bias, **options)

    def _weighed_before(self, rows: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        """Returns the sums of the outputs of each row's experts, whose inputs are the row times their weights."""
        scaled = (rows[:, None] * weights[..., None]).astype(rows.dtype).reshape(-1, rows.shape[-1])
        out = self.routed(scaled, jnp.ones((len(scaled), 1), jnp.float32), experts.reshape(-1, 1))
        return out.reshape(len(rows), -1, rows.shape[-1]).sum(1)

    def _own(self, weights: jax.Array, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the routing by this device's ids: experts of others are below 0 or past the last."""
        count, parallel = self.num_local_experts, self.parallel
        if count == self.moe.num_experts or parallel is None:
            return weights, experts
        return weights, experts - parallel.first("experts", count)


def sparse_mixer(
    logits: jax.Array, top_k: int, eps: float, forced: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns weights float32 and experts int32, [rows, top_k], of logits [rows, experts] (arXiv:2409.12136).

    Each expert is the best of those left; its weight is its softmax among all that are nearly as good. `forced` is as
    in `SparseMLP.with_experts`.
    """
    scores, ids = logits.astype(jnp.float32), jnp.arange(logits.shape[-1])[None]
    left, weights, experts = scores, [], []
    for place in range(top_k):
        best = left.max(-1, keepdims=True)
        near = (best - scores) / jnp.maximum(jnp.abs(scores), best) <= 2 * eps
        chosen = left.argmax(-1)
        if forced is not None:
            chosen = jnp.where((forced >= 0).all(-1), forced[:, place], chosen)
        gates = jax.nn.softmax(jnp.where(near, left, -jnp.inf), axis=-1)
        weights.append(jnp.take_along_axis(gates, chosen[:, None], axis=-1)[:, 0])
        experts.append(chosen.astype(jnp.int32))
        left = jnp.where(ids == chosen[:, None], -jnp.inf, left)
    return jnp.stack(weights, -1), jnp.stack(experts, -1)


def _product(linear: Any) -> ExpertProduct:
    """Returns the linear maps of a module, which may have been exchanged for quantised ones."""
    if not isinstance(linear, ExpertLinear):
        return linear
    return ExpertKernels(linear.kernel[...], None if linear.bias is None else linear.bias[...])
