"""One layer's self-attention and cross attention, over a paged cache or over dense sequences."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.joined import shared_sizes
from jattn.llm.models.late_norm import product
from jattn.llm.models.layers import linear, multiplies_rows, norm, scaled, unweighted_norm
from jattn.llm.models.parts import ValueHeadConfig
from jattn.llm.models.positions import apply_rotary
from jattn.llm.models.tensor_parallel import TensorParallel
from jattn.metadata import AttentionMetadata
from jattn.nn import PagedAttention, attention_fn
from jattn.nn.paged import KVScales
from jattn.ops import QuantizedRows, row_quantize, rowwise
from jattn.parallel import attend_spread
from torch_core.base.errors import InvalidInput

#: The attention inputs computed from positions: cosine and sine for layers with full attention, and for layers with a
#: window, then the factors of queries, if there are some; or the bias of `relative_bias`.
Angles = tuple[Any, ...] | jax.Array

#: Keys and values of dense sequences that later layers read, by the index of their layer; and the last choice of an
#: indexer, by None.
KeysValues = dict[int | None, tuple[jax.Array, ...]]


class Attention(nnx.Module):
    """Self-attention of one layer; query, key and value share one matrix product."""

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
        self.config = config
        self.parallel = parallel
        self.window = config.window_of(layer)
        self.rotates = config.position_embedding == "rope" and layer not in config.nope_layers
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        # Not set for layers that share nothing: equal layers are traced once.
        self.layer = layer if layer in config.kv_sharing_targets else None
        self.kv_sharing_target = config.kv_sharing_target(layer)
        self.num_kv_heads = kv_heads if self.kv_sharing_target is None else 0
        options = {"param_dtype": jnp.dtype(config.dtype), "rngs": rngs}
        values = config.value_head
        without_values = config.attention_k_eq_v or values is not None
        self.num_projected = heads + self.num_kv_heads * (2 - without_values)
        fused = (self.num_projected + heads * config.attn_output_gate) * size
        # The layer's other mixer computes it where they share a product; attention is called with the results.
        is_shared = shared_sizes(config) is not None
        use_bias = config.attention_bias
        self.qkv_proj: Any = None if is_shared else linear(config.hidden_size, fused, use_bias=use_bias, **options)
        self.gate_proj = linear(config.hidden_size, heads, use_bias=False, **options) if config.attn_head_gate else None
        inner, use_bias = heads * (size if values is None else values.head_dim), config.attention_output_bias
        self.o_proj: Any = linear(inner, config.hidden_size, use_bias=use_bias, **options)
        if values is not None:
            inner = self.num_kv_heads * values.head_dim
            self.v_proj = linear(config.hidden_size, inner, use_bias=config.attention_bias, **options)
        temperature = config.temperature
        self.has_temperature = temperature is not None and not (temperature.without_rope and self.rotates)
        if config.qk_norm not in (None, "unweighted"):
            shared = {"use_bias": config.qk_norm_bias, "parallel": parallel if config.qk_norm == "all" else None}
            self.q_norm, self.k_norm = (
                norm(config, {"head": size, "per_head": (count, size), "all": count * size}[config.qk_norm], **shared)
                if count
                else None
                for count in (heads, self.num_kv_heads)
            )
        self.sinks = nnx.Param(jnp.zeros(heads, jnp.dtype(config.dtype))) if config.attention_sinks else None
        self.paged_attention = PagedAttention(
            heads,
            size,
            num_kv_heads=kv_heads,
            causal=not config.is_encoder,
            scale=config.attention_scale,
            sliding_window=self.window,
            attention_chunk=config.attention_chunk_size if self.rotates else None,
            logits_soft_cap=config.attn_logit_softcapping,
            implementation=implementation,
        )

    @property
    def scales_by_element(self) -> bool:
        """Whether queries, values or results are multiplied by more than the weights of norms."""
        config = self.config
        gated = config.attn_output_gate or config.attn_head_gate
        gated = gated or (config.value_head is not None and config.value_head.scale != 1)
        return self.has_temperature or gated or config.value_norm or config.qk_norm == "unweighted"

    @property
    def takes_quantized_rows(self) -> bool:
        """Its products are of e4m3 numbers."""
        is_whole = self.gate_proj is None and self.config.value_head is None
        return is_whole and multiplies_rows(self.qkv_proj, bias=True) and multiplies_rows(self.o_proj)

    @property
    def sees_distances(self) -> bool:
        """Whether a bias by distance goes in with each call."""
        return self.config.position_embedding in ("alibi", "relative")

    def forward_paged(
        self, x: Any, angles: Angles | None, kv_cache: jax.Array, metadata: AttentionMetadata
    ) -> tuple[Any, jax.Array]:
        """Attends packed tokens `[tokens, hidden]` to their cached prefixes; returns the output and the new cache.

        The output of `QuantizedRows` is an `UnscaledProduct`.
        """
        core, parallel, biases = self.paged_attention, self.parallel, self._biases(angles)
        given = kv_cache.shape
        if given[-2:] != (core.num_kv_heads, core.head_dim):
            # The array is that of layers with other heads, whose blocks have as many bytes.
            own = kv_cache.reshape(*given[:2], -1, core.num_kv_heads, core.head_dim)
            output, own = self.forward_paged(x, angles, own, metadata)
            return output, own.reshape(given)
        if parallel is not None and parallel.context_size > 1:
            options: dict[str, Any] = {**core.options, **biases, **core.scales_of(kv_cache)}
            options["group_size"] = parallel.context_size
            query, key, value, gate = self._project(x, angles)
            output, kv_cache = attend_spread(query, key, value, kv_cache, metadata, parallel.axis, **options)
            return self._output(output, gate, as_rows=isinstance(x, QuantizedRows)), kv_cache
        # A norm comes before the rotation.
        config = self.config
        changes = config.qk_norm is not None or config.clip_qkv is not None or self.has_temperature
        changes = changes or config.value_norm or config.attention_k_eq_v or config.value_head is not None
        rotates = self.rotates and self.num_kv_heads and not changes and not self.batch_invariant
        if rotates and isinstance(angles, tuple) and core.rotates_in_one_launch:
            cos_sin = jnp.concatenate([part[:, 0] for part in angles[self.window is not None]], axis=-1)
            (qkv, gate, scales), key, value = self._unscaled_heads(x), None, None
            query, kv_cache = core.rotate_and_write(qkv, cos_sin, kv_cache, metadata, **scales, **biases)
            biases["out_dtype"] = qkv.dtype
        else:
            query, key, value, gate = self._project(x, angles)
        output, kv_cache = core(query, key, value, kv_cache, metadata, **biases)
        if (rows := metadata.result_rows) is not None:
            output, gate = output[rows], None if gate is None else gate[rows]
        return self._output(output, gate, as_rows=isinstance(x, QuantizedRows)), kv_cache

    def forward_dense(
        self, x: jax.Array, angles: Angles | None, lengths: jax.Array | None = None, shared: KeysValues | None = None
    ) -> jax.Array:
        """Attends within each row of `[batch, tokens, hidden]`, up to its length; no cache.

        Layers that share keys and values exchange them through `shared`.
        """
        query, key, value, gate = self._project(x, angles)
        shared = {} if shared is None else shared
        if key is None or value is None:
            key, value = shared[self.kv_sharing_target]
        elif self.layer is not None:
            shared[self.layer] = key, value
        options = {**self.paged_attention.options, "implementation": None, **self._biases(angles)}
        output = attention_fn(query, key, value, is_causal=not self.config.is_encoder, lengths=lengths, **options)
        return self._output(output, gate)

    def set_kv_scales(self, k_scale: float, v_scale: float) -> None:
        """Sets the dequantisation scales of an 8-bit cache from a checkpoint; other caches do not use them."""
        self.paged_attention.kv_scales = KVScales(k_scale, v_scale)

    def _biases(self, angles: Angles | None) -> dict[str, Any]:
        config = self.config
        biases: dict[str, Any] = {} if self.sinks is None else {"sinks": self.sinks[...]}
        if config.position_embedding == "alibi":
            heads, parallel = config.num_attention_heads, self.parallel
            parts = 1 if parallel is None else parallel.parts("heads")
            slopes = jnp.asarray(alibi_slopes(heads * parts) * config.alibi_scale)
            if parallel is not None:
                slopes = jax.lax.dynamic_slice_in_dim(slopes, parallel.first("heads", heads), heads)
            biases["alibi_slopes"] = slopes
        if config.position_embedding == "relative":
            biases["relative_bias"] = angles
        return biases

    def _heads(self, x: Any) -> tuple[jax.Array, jax.Array | None]:
        """Returns the heads of query, key and value, one after the other, and those of the gate, if there is one.

        Behind values there may be more of a shared product. A gate of whole heads is `[..., heads, 1]`.
        """
        values = x if self.qkv_proj is None else product(self.qkv_proj, x)
        heads = values.reshape(*x.shape[:-1], -1, self.config.head_dim)
        if self.gate_proj is not None:
            return heads, self.gate_proj(x)[..., None]
        if not self.config.attn_output_gate:
            return heads, None
        return heads[..., : self.num_projected, :], heads[..., self.num_projected :, :]

    def _unscaled_heads(self, x: Any) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
        """Returns the same, and the factors of tokens and elements that they still have to be multiplied by."""
        if not isinstance(x, QuantizedRows) or self.qkv_proj.bias is not None or self.config.attn_output_gate:
            return *self._heads(x), {}
        values, row_scale, column_scale = self.qkv_proj.product(x)
        heads = values.reshape(len(values), -1, self.config.head_dim)
        return heads, None, {"row_scale": row_scale, "column_scale": column_scale}

    def _output(self, output: jax.Array, gate: jax.Array | None, *, as_rows: bool = False) -> Any:
        """Returns the layer's output of the heads' results."""
        if gate is not None and self.config.attn_gate_act == "softplus":
            output = output * jax.nn.softplus(gate.astype(jnp.float32)).astype(output.dtype)
        elif gate is not None:
            output = output * jax.nn.sigmoid(gate)
        if self.config.value_head is not None:
            output = output[..., : self.config.value_head.head_dim]
        output = output.reshape(*output.shape[:-2], -1)
        return self.o_proj.product(row_quantize(output)[0]) if as_rows else self.o_proj(output)

    def _project(self, x: Any, angles: Angles | None) -> tuple[jax.Array, Any, Any, jax.Array | None]:
        """Returns query, key, value and gate; None for keys and values that are another layer's, and for no gate."""
        config, num_heads, num_kv_heads = self.config, self.config.num_attention_heads, self.num_kv_heads
        heads, gate = self._heads(x)
        rotated, value = jnp.split(heads[..., : self.num_projected, :], (num_heads + num_kv_heads,), axis=-2)
        if config.value_head is not None:
            value = self._values(x, config.value_head)
        if config.attention_k_eq_v:
            value = rotated[..., num_heads:, :]
        if config.value_norm and num_kv_heads:
            value = unweighted_norm(value, config.rms_norm_eps)
        if not config.qk_norm_after_rotation:
            rotated = self._normed(rotated)
        if config.clip_qkv is not None:
            rotated, value = (jnp.clip(each, -config.clip_qkv, config.clip_qkv) for each in (rotated, value))
        if self.rotates and angles is not None:
            turn = functools.partial(rowwise, apply_rotary, trailing=2) if self.batch_invariant else apply_rotary
            rotated = turn(rotated, *angles[self.window is not None])
        if config.qk_norm_after_rotation:
            rotated = self._normed(rotated)
        query = rotated[..., :num_heads, :]
        if self.has_temperature and isinstance(angles, tuple):
            query = (query * angles[2]).astype(query.dtype)
        if not num_kv_heads:
            return query, None, None, gate
        return query, rotated[..., num_heads:, :], value, gate

    def _values(self, x: jax.Array, sizes: ValueHeadConfig) -> jax.Array:
        """Returns the heads of values, with zeros up to the size of a key's."""
        value = scaled(self.v_proj(x).reshape(*x.shape[:-1], -1, sizes.head_dim), sizes.scale)
        return jnp.pad(value, ((0, 0),) * (value.ndim - 1) + ((0, self.config.head_dim - sizes.head_dim),))

    def _normed(self, heads: jax.Array) -> jax.Array:
        """Returns the heads of queries and keys after their norms, if they have some."""
        kind, count = self.config.qk_norm, self.config.num_attention_heads
        if kind == "unweighted" and self.rotates:
            return unweighted_norm(heads, self.config.rms_norm_eps)
        if kind in (None, "unweighted"):
            return heads
        front = heads.shape[:-2]
        parts = ((self.q_norm, heads[..., :count, :]), (self.k_norm, heads[..., count:, :]))
        joined = ((norm, part.reshape(*front, 1, -1) if kind == "all" else part) for norm, part in parts)
        normed = [norm(part).reshape(*front, -1) for norm, part in joined if norm is not None]
        return jnp.concatenate(normed, axis=-1).reshape(heads.shape)


class CrossAttention(nnx.Module):
    """Attends to all of an encoder's output; its keys and values share one matrix product and are computed once."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, implementation: str | None = None) -> None:
        self.config = config
        options = {"param_dtype": jnp.dtype(config.dtype), "rngs": rngs}
        width, use_bias = config.hidden_size, config.attention_bias
        self.q_proj = linear(width, config.query_size, use_bias=use_bias, **options)
        self.kv_proj = linear(width, 2 * config.key_value_size, use_bias=use_bias, **options)
        self.o_proj = linear(config.query_size, width, use_bias=config.attention_output_bias, **options)
        self.paged_attention = PagedAttention(
            config.num_attention_heads,
            config.head_dim,
            num_kv_heads=config.num_key_value_heads,
            causal=False,
            scale=config.attention_scale,
            implementation=implementation,
        )

    def write(self, encoded: jax.Array, kv_cache: jax.Array, slot_mapping: jax.Array) -> jax.Array:
        """Writes the keys and values of packed encoder states `[tokens, hidden]`; returns the new cache."""
        key, value = self._keys_and_values(encoded)
        return self.paged_attention.write(key, value, kv_cache, slot_mapping)

    def forward_paged(self, x: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        """Attends packed tokens `[tokens, hidden]` to what `write` stored in the blocks of `metadata.cross`."""
        cross = metadata.cross
        if cross is None:
            raise InvalidInput("metadata.cross is None; a model with an encoder needs the blocks of each row's input.")
        tables = replace(metadata, block_tables=cross.block_tables, seq_lens=cross.seq_lens, cross=None)
        output, _ = self.paged_attention(self._queries(x), None, None, kv_cache, tables)
        return self.o_proj(output.reshape(*x.shape[:-1], -1))

    def forward_dense(self, x: jax.Array, encoded: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Attends `[batch, tokens, hidden]` to each row's `[batch, encoder_tokens, hidden]`, up to its length."""
        key, value = self._keys_and_values(encoded)
        options = {**self.paged_attention.options, "implementation": None}
        if lengths is not None:
            options |= {"lengths": jnp.full(len(x), x.shape[1], jnp.int32), "key_lengths": lengths}
        return self.o_proj(attention_fn(self._queries(x), key, value, **options).reshape(*x.shape[:-1], -1))

    def _queries(self, x: jax.Array) -> jax.Array:
        return self.q_proj(x).reshape(*x.shape[:-1], self.config.num_attention_heads, self.config.head_dim)

    def _keys_and_values(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = (*encoded.shape[:-1], 2 * self.config.num_key_value_heads, self.config.head_dim)
        key, value = jnp.split(self.kv_proj(encoded).reshape(shape), 2, axis=-2)
        return key, value


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns float32[num_heads], the slopes of ALiBi (Press et al. 2021, arXiv:2108.12409).

    A power of two of heads has a geometric sequence; others add every second slope of twice as many heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (index + 1) / power) for index in range(power)]
    slopes += [2.0 ** (-4 * (index + 1) / power) for index in range(0, 2 * (num_heads - power), 2)]
    return np.asarray(slopes, np.float32)
