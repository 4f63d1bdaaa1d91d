"""SparseMLP: a feed-forward layer of experts in which no token is dropped, whatever the router says."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.models.config import ModelConfig
from jattn.models.layers import INITIALIZER, MLP, gated, linear
from jattn.models.tensor_parallel import TensorParallel
from torch_core.errors import InvalidInput

__all__ = ["ExpertLinear", "SparseMLP"]

_Routed = Callable[[jax.Array, jax.Array], jax.Array]


class ExpertLinear(nnx.Module):
    """One linear map for each expert: `x @ kernel[expert] + bias[expert]`."""

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, *, use_bias: bool, dtype: str, rngs: nnx.Rngs
    ) -> None:
        self.kernel = nnx.Param(INITIALIZER(rngs.params(), (num_experts, in_features, out_features), jnp.dtype(dtype)))
        self.bias = nnx.Param(jnp.zeros((num_experts, out_features), jnp.dtype(dtype))) if use_bias else None

    def grouped(self, x: jax.Array, experts: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Maps rows `[rows, in]` that are sorted by expert, `group_sizes` of them for each: one ragged product."""
        return self._biased(jax.lax.ragged_dot(x, self.kernel[...], group_sizes), experts)

    def gathered(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Maps rows `[rows, in]` one by one, each with its own expert: reads the experts that are hit, no others."""
        kernel = self.kernel[...]

        def one_row(arguments: tuple[jax.Array, jax.Array]) -> jax.Array:
            row, expert = arguments
            return row @ jax.lax.dynamic_index_in_dim(kernel, expert, keepdims=False)

        return self._biased(jax.lax.map(one_row, (x, experts)), experts)

    def _biased(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        return x if self.bias is None else x + self.bias[...][experts]


class SparseMLP(nnx.Module):
    """Sends each token to its experts and adds up what they return, weighted (Shazeer et al. 2017, arXiv:1701.06538).

    Rows are sorted by expert and multiplied in groups of their true sizes, so there is no capacity and no padding.
    Where rows are fewer than experts, as in decoding, each row takes its expert by itself. Which of the two runs
    follows from shapes alone.

    Args:
        config: the model's, with `moe`.
        rngs: source of the initial values.
        parallel: how the model is cut: each device has some of the experts and routes over all; None for not.

    Raises:
        InvalidInput: the config has no experts.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, parallel: TensorParallel | None = None) -> None:
        moe, width, dtype = config.moe, config.hidden_size, config.dtype
        if moe is None:
            raise InvalidInput("config.moe is None; a SparseMLP needs a MoEConfig.")
        self.moe, self.hidden_act, self.parallel = moe, config.hidden_act, parallel
        self.num_local_experts = moe.num_experts // (1 if parallel is None else parallel.parts("experts"))
        options = {"use_bias": moe.expert_bias, "dtype": dtype, "rngs": rngs}
        router = {"use_bias": moe.router_bias, "param_dtype": jnp.dtype(dtype), "rngs": rngs}
        self.router = linear(width, moe.num_experts, preferred_element_type=jnp.float32, **router)
        # float32 in every model: in fewer bits it would choose other experts.
        self.e_score_correction_bias = nnx.Param(jnp.zeros(moe.num_experts)) if moe.score_correction_bias else None
        self.gate_up_proj = ExpertLinear(self.num_local_experts, width, 2 * moe.intermediate_size, **options)
        self.down_proj = ExpertLinear(self.num_local_experts, moe.intermediate_size, width, **options)
        shared = moe.shared_width // (1 if parallel is None else parallel.parts("mlp"))
        self.shared_expert = MLP(config, rngs=rngs, intermediate_size=shared) if shared else None
        self.shared_expert_gate = (
            linear(width, 1, use_bias=False, param_dtype=jnp.dtype(dtype), rngs=rngs)
            if moe.shared_intermediate_size
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., hidden]` to `[..., hidden]`."""
        rows = x.reshape(-1, x.shape[-1])
        weights, experts = self.route(rows)
        routed = self.gathered if experts.size < self.moe.num_experts else self.grouped
        if self.num_local_experts < self.moe.num_experts:
            weights, experts, routed = self._own(weights, experts, routed)
        out = jnp.einsum("tk,tkh->th", weights, routed(rows, experts), preferred_element_type=jnp.float32)
        if self.shared_expert is not None:
            shared, gate = self.shared_expert(rows), self.shared_expert_gate
            out = out + (shared if gate is None else jax.nn.sigmoid(gate(rows)) * shared)
        return out.astype(x.dtype).reshape(x.shape)

    def route(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns weights float32 and experts int32 of each row, [rows, num_experts_per_tok], the best expert first."""
        moe, bias = self.moe, self.e_score_correction_bias
        score = jax.nn.softmax if moe.scoring_func == "softmax" else jax.nn.sigmoid
        scores = score(self.router(rows).astype(jnp.float32))
        choice = self._within_groups(scores if bias is None else scores + bias[...])
        experts = jax.lax.top_k(choice, moe.num_experts_per_tok)[1].astype(jnp.int32)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if moe.norm_topk_prob:
            # The sigmoids of a row may all be 0.
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return weights * moe.routed_scaling_factor, experts

    def _own(self, weights: jax.Array, experts: jax.Array, routed: _Routed) -> tuple[jax.Array, jax.Array, _Routed]:
        """Returns the part of the routing that is this device's: other experts stand behind the last, and give 0."""
        count, parallel = self.num_local_experts, self.parallel
        local = experts - (0 if parallel is None else parallel.first("experts", count))
        is_own = (local >= 0) & (local < count)

        def run(rows: jax.Array, experts: jax.Array) -> jax.Array:
            # What stands there for experts of other devices may be anything.
            return jnp.where(is_own[..., None], routed(rows, experts), 0)

        return jnp.where(is_own, weights, 0), jnp.where(is_own, local, count), run

    def _within_groups(self, choice: jax.Array) -> jax.Array:
        """Returns [rows, num_experts] with -inf in all groups but the best `topk_group` of each row."""
        moe = self.moe
        if moe.n_group == 1:
            return choice
        groups = choice.reshape(-1, moe.n_group, moe.num_experts // moe.n_group)
        best = jax.lax.top_k(groups, 2 if moe.score_correction_bias else 1)[0].sum(-1)
        kept = jax.lax.top_k(best, moe.topk_group)[1]
        is_kept = (kept[..., None] == jnp.arange(moe.n_group)).any(-2)
        return jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(choice.shape)

    def grouped(self, rows: jax.Array, experts: jax.Array) -> jax.Array:
        """Returns what each row's experts make of it, [rows, num_experts_per_tok, hidden], by grouped products."""
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        chosen = flat[order]
        # Rows of other devices' experts are in no group.
        sizes = jnp.bincount(flat, length=self.num_local_experts).astype(jnp.int32)
        inner = self.gate_up_proj.grouped(rows[order // experts.shape[-1]], chosen, sizes)
        out = self.down_proj.grouped(gated(self.hidden_act, inner), chosen, sizes)
        # Taken back by the inverse order and summed along an axis: added up by scattering, bits would vary on a GPU.
        return out[jnp.argsort(order)].reshape(*experts.shape, -1)

    def gathered(self, rows: jax.Array, experts: jax.Array) -> jax.Array:
        """Returns the same as `grouped`, row by row."""
        flat = experts.reshape(-1)
        inner = self.gate_up_proj.gathered(jnp.repeat(rows, experts.shape[-1], axis=0), flat)
        return self.down_proj.gathered(gated(self.hidden_act, inner), flat).reshape(*experts.shape, -1)
