"""DecoderLayer: attention and feed-forward part, and the addition of their outputs to the residual stream."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.attention import Angles, Attention, CrossAttention, KeysValues
from jattn.llm.models.batch_adapters import AdaptedBranch
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.experts import SparseMLP
from jattn.llm.models.fp8_rows import QuantizingNorm, UnscaledProduct
from jattn.llm.models.joined import shared_sizes
from jattn.llm.models.late_norm import LateNorm, LateRows, product, takes_late_rows
from jattn.llm.models.latent import LatentAttention, SparseAttention
from jattn.llm.models.layers import MLP, RMSNorm, norm, scaled
from jattn.llm.models.mixers import STATE_CONFIGS
from jattn.llm.models.per_layer import PerLayerInput
from jattn.llm.models.recurrent import recurrent_mixer
from jattn.llm.models.tensor_parallel import TensorParallel
from jattn.metadata import AttentionMetadata
from jattn.ops import QuantizedRows, launches_kernels, quantizes_rows, rowwise
from torch_core.base.specs import StateCacheSpec

#: An encoder's output for each row, float[batch, encoder_tokens, hidden], and its lengths, int32[batch]; None for full
#: rows.
Encoded: TypeAlias = tuple[jax.Array, jax.Array | None]
_Branch: TypeAlias = Callable[[jax.Array], jax.Array]


#: The places of norms that come after a branch.
_AFTER = ("after", "both", "residual")


class DecoderLayer(nnx.Module):
    """Attention, or what mixes tokens in its place, and feed-forward, one after the other or side by side, added to the
    residual stream.

    Of a model that is split, each device computes its share of both, and two sums over the devices make them whole.
    """

    batch_invariant: bool = False

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        rngs: nnx.Rngs,
        implementation: str | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        config = config.of_layer(layer)
        self.config, self.parallel = config, parallel
        self.norm_placement = config.norm_placement_of(layer)
        before, after = self.norm_placement not in ("after", "residual"), self.norm_placement in _AFTER
        self.input_layernorm = norm(config) if before and (layer or config.first_layer_norm) else None
        mixers, options = config.mixers(layer), {"rngs": rngs, "implementation": implementation}
        latent = LatentAttention if config.index_head_dim is None else SparseAttention
        attention: Any = Attention if config.latent is None else latent
        self.self_attn = attention(config, layer, parallel=parallel, **options) if "self_attn" in mixers else None
        for name in STATE_CONFIGS:
            mixer = recurrent_mixer(name, config, parallel=parallel, **options) if name in mixers else None
            setattr(self, name, mixer)
        self.attention_output_norm = norm(config) if after else None
        has_encoder = config.encoder is not None
        self.cross_attn = CrossAttention(config, rngs=rngs, implementation=implementation) if has_encoder else None
        self.cross_attention_norm = norm(config) if has_encoder else None
        has_both = not config.single_branch
        self.post_attention_layernorm = (
            norm(config) if has_both and before and config.parallel_block != "shared_norm" else None
        )
        self.is_sparse, self.has_feed_forward = config.is_sparse(layer), has_both or not mixers
        if self.is_sparse:
            self.moe = SparseMLP(config, rngs=rngs, parallel=parallel)
        self.has_both_parts = self.is_sparse and config.moe is not None and config.moe.with_mlp
        if self.has_both_parts:
            self.moe_input_norm, self.moe_norm, self.mlp_norm = (norm(config) for _ in range(3))
        has_norm = self.is_sparse and config.moe is not None and config.moe.output_norm
        self.moe_output_norm = norm(config) if has_norm else None
        if self.has_both_parts or (self.has_feed_forward and not self.is_sparse):
            self.mlp = MLP(config, rngs=rngs)
        self.mlp_output_norm = norm(config) if after and has_both else None
        self.per_layer_input = None if config.per_layer_input is None else PerLayerInput(config, rngs=rngs)
        self.layer_scalar = nnx.Param(jnp.ones(1, jnp.dtype(config.dtype))) if config.layer_scalar else None

    def __call__(
        self,
        x: jax.Array,
        normed: Any,
        angles: Angles | None,
        caches: tuple[jax.Array, ...],
        metadata: AttentionMetadata,
        following: Any,
        layer_input: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, tuple[jax.Array, ...], jax.Array | None]:
        """Returns the residual stream `x` [tokens, hidden] after this layer, its norm by `following`, and the caches.

        The last result are the experts of each token, int32[tokens, top_k]; None of a dense layer. `normed` is `x`
        after `input_norm`. The caches are attention's, then the states. `following` is the next layer's `input_norm`,
        or the last norm. `layer_input` is one of `PerLayerInputs`, in a model that has them.
        """
        first, mixed_rows = len(caches) - self.num_states, self._mixers_input(normed)
        mixed: list[jax.Array] = []
        updated: list[jax.Array] = []
        for (mixer, factors), own in zip(self._mixers, (caches[:first], caches[first:]), strict=True):
            if mixer is not None:
                # One array is given and returned as it is, several as a tuple.
                given: Any = own if len(own) > 1 else next(iter(own))
                first_factor, last_factor = factors
                out, new = mixer.forward_paged(scaled(mixed_rows, first_factor), angles, given, metadata)
                mixed.append(scaled(out, last_factor))
                updated += new if len(own) > 1 else [new]
        if metadata.result_rows is not None:
            x = x[metadata.result_rows]
        cross = None
        if self.cross_attn is not None:
            cross = functools.partial(self.cross_attn.forward_paged, kv_cache=updated[0], metadata=metadata)
        before_end = None if self.has_end else following
        x, normed, experts = self._added(x, normed, _sum(mixed), None, cross, before_end, metadata.peers)
        if self.has_end:
            x = self._ended(x, layer_input, None)
            normed = through(following, x)
        return x, normed, tuple(updated), experts

    def input_norm(self, *, quantizes: bool = False, is_row: bool = False) -> Any:
        """Returns the norm before the mixers, or None.

        With `quantizes` its results are `QuantizedRows`, and with `is_row` those of a single row are `LateRows`, where
        kernels launch and all that reads them takes such rows.
        """
        if quantizes and self._takes_quantized_rows:
            return QuantizingNorm(self.input_layernorm)
        return LateNorm(self.input_layernorm) if is_row and self._takes_late_rows else self.input_layernorm

    @property
    def _takes_quantized_rows(self) -> bool:
        config, attention = self.config, self.self_attn
        if type(attention) is not Attention or not attention.takes_quantized_rows or self.batch_invariant:
            return False
        if self.parallel is not None or self.recurrent is not None or self.cross_attn is not None:
            return False
        if config.single_branch or config.parallel_block is not None or self.norm_placement == "stream":
            return False
        if not isinstance(self.input_layernorm, RMSNorm) or self.input_layernorm.weight.dtype != jnp.bfloat16:
            return False
        implementation = attention.paged_attention.implementation
        return config.attention_multipliers == (1, 1) and quantizes_rows(
            config.hidden_size, config.query_size, implementation=implementation
        )

    @property
    def _takes_late_rows(self) -> bool:
        config, attention = self.config, self.self_attn
        if self.parallel is not None or self.cross_attn is not None or self.batch_invariant or config.single_branch:
            return False
        # A product of float16 may overflow before the division.
        if config.parallel_block is not None or self.norm_placement != "before" or config.dtype == "float16":
            return False
        first = self.input_layernorm
        if not isinstance(first, RMSNorm) or first.norm_type != "rms_norm" or first.weight.dtype != config.dtype:
            return False
        if not launches_kernels(first.row_implementation):
            return False
        if shared_sizes(config) is not None:
            return takes_late_rows(self.recurrent.in_proj)
        if type(attention) is not Attention or self.recurrent is not None or config.attention_multipliers[0] != 1:
            return False
        return takes_late_rows(attention.qkv_proj) and attention.gate_proj is None and config.value_head is None

    @property
    def picks_rows(self) -> bool:
        """Whether it can return the results of some tokens, of which alone it then multiplies what attention gives.

        Nothing but attention looks at other tokens, and nothing after attention reads the stream's norm before it.
        """
        others = (self.parallel, self.recurrent, self.cross_attn, self.per_layer_input, self.config.parallel_block)
        if any(each is not None for each in others) or type(self.self_attn) is not Attention or self.batch_invariant:
            return False
        return not self.config.single_branch and self.norm_placement != "stream"

    @property
    def adds_branches_alone(self) -> bool:
        """Nothing is done to the results of attention and of a dense feed-forward part before the stream has them."""
        config = self.config
        is_split = self.parallel is not None or self.has_both_parts or self.recurrent is not None
        factors = (config.residual_multiplier, config.stream_multiplier, *config.attention_multipliers)
        is_scaled = any(factor != 1 for factor in (*factors, config.mlp_multipliers[1]))
        return not (is_split or is_scaled or self.norm_placement in _AFTER or self.cross_attn is not None)

    @property
    def has_end(self) -> bool:
        """Whether the residual stream changes after the feed-forward part."""
        return self.per_layer_input is not None or self.layer_scalar is not None

    def _ended(self, x: jax.Array, layer_input: jax.Array | None, dropout: _Branch | None) -> jax.Array:
        """Returns the residual stream with the layer's further input, and multiplied by the layer's number."""
        if self.per_layer_input is not None and layer_input is not None:
            x = x + through(dropout, self.per_layer_input(x, layer_input))
        return x if self.layer_scalar is None else x * jax.lax.broadcast_to_rank(self.layer_scalar[...], x.ndim)

    @property
    def has_two_mixers(self) -> bool:
        """Attention and a mixer with a state read the same tokens, and neither reads the other's results."""
        return self.self_attn is not None and self.recurrent is not None

    @property
    def recurrent(self) -> Any:
        """The mixer with a state between tokens, or None."""
        return next((mixer for name in STATE_CONFIGS if (mixer := getattr(self, name)) is not None), None)

    def _mixers_input(self, normed: Any) -> Any:
        """Returns what the mixers are called with: the product that they share, or the rows after the norm."""
        return normed if shared_sizes(self.config) is None else product(self.recurrent.in_proj, normed)

    @property
    def _mixers(self) -> tuple[tuple[Any, tuple[float, float]], tuple[Any, tuple[float, float]]]:
        """Attention and the mixer with a state, each with the factors of its input and output; or None."""
        sizes = self.config.mamba
        of_state = (1.0, 1.0) if sizes is None else (sizes.in_multiplier, sizes.out_multiplier)
        if shared_sizes(self.config) is not None:
            # The factor of its inputs is one of its part of the product.
            of_state = 1.0, of_state[1]
        return (self.self_attn, self.config.attention_multipliers), (self.recurrent, of_state)

    @property
    def state_spec(self) -> StateCacheSpec | None:
        """Layout of its states, or None."""
        return None if self.recurrent is None else self.recurrent.state_spec(jnp.dtype(self.config.dtype).name)

    @property
    def num_states(self) -> int:
        """Number of its arrays of states."""
        return 0 if self.state_spec is None else len(self.state_spec.shapes)

    def forward_dense(
        self,
        x: jax.Array,
        angles: Angles | None,
        dropout: nnx.Dropout,
        lengths: jax.Array | None = None,
        encoded: Encoded | None = None,
        shared: KeysValues | None = None,
        routed_experts: jax.Array | None = None,
        layer_input: jax.Array | None = None,
    ) -> jax.Array:
        """Maps `[batch, tokens, hidden]` to the same shape; no cache. Experts are as in `SparseMLP.with_experts`."""
        normed = through(self.input_layernorm, x)
        mixed_rows = self._mixers_input(normed)
        mixed = _sum(
            [
                scaled(mixer.forward_dense(scaled(mixed_rows, first), angles, lengths, shared), last)
                for mixer, (first, last) in self._mixers
                if mixer is not None
            ]
        )
        cross = None
        if self.cross_attn is not None and encoded is not None:
            cross = functools.partial(self.cross_attn.forward_dense, encoded=encoded[0], lengths=encoded[1])
        x = self._added(x, normed, mixed, dropout, cross, routed_experts=routed_experts)[0]
        return self._ended(x, layer_input, dropout)

    def _added(
        self,
        x: jax.Array,
        normed: Any,
        mixed: Any,
        dropout: _Branch | None,
        cross: _Branch | None,
        following: Any = None,
        peers: jax.Array | None = None,
        routed_experts: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, jax.Array | None]:
        """Adds the outputs of the mixers and of the following parts to the residual stream; see `__call__`."""
        if self.norm_placement == "residual":
            mixed = through(dropout, self._summed(mixed, "heads", peers))
            x = through(self.attention_output_norm, self._sum(x, mixed))
            if cross is not None:
                x = through(self.cross_attention_norm, self._sum(x, through(dropout, cross(x))))
            branch, axis, experts = self._feed_forward(x, routed_experts)
            x = through(self.mlp_output_norm, self._sum(x, through(dropout, self._summed(branch, axis, peers))))
            return x, through(following, x), experts
        if self.config.single_branch:
            branch, axis, experts = (
                self._feed_forward(normed, routed_experts) if mixed is None else (mixed, "heads", None)
            )
            return *self._add_branch(x, branch, axis, self.attention_output_norm, following, dropout, peers), experts
        x = normed if self.norm_placement == "stream" else x
        kind = self.config.parallel_block
        before = self.post_attention_layernorm if kind is None and cross is None else None
        if isinstance(normed, QuantizedRows) and not self.is_sparse and self.mlp.takes_quantized_rows:
            before = QuantizingNorm(before)
        elif isinstance(normed, LateRows) and not self.is_sparse and self.mlp.takes_late_rows:
            before = LateNorm(before)
        seen: Any
        after, seen = self._add_branch(x, mixed, "heads", self.attention_output_norm, before, dropout, peers)
        if cross is not None:
            branch = through(dropout, cross(through(self.cross_attention_norm, after)))
            after = self._sum(after, branch, self.config.residual_multiplier)
            seen = through(self.post_attention_layernorm, after)
        elif kind is not None:
            seen = normed if kind == "shared_norm" else through(self.post_attention_layernorm, x)
            # In parallel with attention, this sum does not depend on attention's sum, and two at once would use the
            # same memory.
            peers = None
        after = seen if self.norm_placement == "stream" else after
        branch, axis, experts = self._feed_forward(seen, routed_experts, after, peers)
        return *self._add_branch(after, branch, axis, self.mlp_output_norm, following, dropout, peers), experts

    def _add_branch(
        self,
        x: jax.Array,
        branch: Any,
        axis: str,
        own_norm: Any,
        following: Any,
        dropout: _Branch | None,
        peers: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        """Adds a branch to the residual stream; returns the stream and its value after `following`."""
        scale = self.config.residual_multiplier
        factors = scale, self.config.stream_multiplier
        is_plain = own_norm is None and dropout is None and factors == (1, 1) and not self.batch_invariant
        if isinstance(branch, UnscaledProduct):
            if is_plain and isinstance(following, QuantizingNorm):
                return following.of_added(branch, x)
            branch = branch.scaled()
        if isinstance(branch, AdaptedBranch):
            if is_plain:
                x = branch.added(x)
                return x, through(following, x)
            branch = branch.whole()
        if self.parallel is not None and is_plain:
            found = self.parallel.summed_and_normed(branch, x, following, axis, peers)
            if found is not None:
                return found
        x = self._sum(x, through(dropout, through(own_norm, self._summed(branch, axis, peers))), scale)
        return x, through(following, x)

    def _sum(self, x: jax.Array, branch: jax.Array, scale: float = 1.0) -> jax.Array:
        if self.batch_invariant:
            return rowwise(
                lambda x, branch: x + scaled(branch, scale), scaled(x, self.config.stream_multiplier), branch
            )
        return scaled(x, self.config.stream_multiplier) + scaled(branch, scale)

    def _feed_forward(
        self, x: Any, forced: jax.Array | None, stream: jax.Array | None = None, peers: jax.Array | None = None
    ) -> tuple[Any, str, jax.Array | None]:
        """Returns this device's share, the axis along which it is one, and each token's experts.

        `x` is the residual stream after the norm; `stream` is without, where experts have one of their own.
        """
        if not self.is_sparse:
            return self.mlp(x), "mlp", None
        if self.has_both_parts and stream is not None:
            out, experts = self.moe.with_experts(self.moe_input_norm(stream), forced, stream)
            parts = self.mlp(x), out
            if self.parallel is not None:
                # One sum over devices for both. What is split no more has the axis "embed".
                parts = jnp.split(self._summed(jnp.concatenate(parts, axis=-1), "experts", peers), 2, axis=-1)
            return self.mlp_norm(parts[0]) + self.moe_norm(parts[1]), "embed", experts
        out, experts = self.moe.with_experts(x, forced)
        if self.moe_output_norm is not None:
            return self.moe_output_norm(self._summed(out, "experts", peers)), "embed", experts
        return out, "experts", experts

    def _summed(self, x: jax.Array, axis: str, peers: jax.Array | None) -> jax.Array:
        return x if self.parallel is None else self.parallel.summed(x, axis, peers, in_order=self.batch_invariant)


def _sum(parts: list[jax.Array]) -> Any:
    """Returns the sum of arrays; None of none."""
    return functools.reduce(operator.add, parts) if parts else None


def through(module: Any, x: jax.Array) -> jax.Array:
    """Returns module(x), or x if module is None."""
    return x if module is None else module(x)
