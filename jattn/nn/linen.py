"""MultiHeadAttention for linen: flax's `MultiHeadDotProductAttention` with a paged cache in the collection `cache`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jattn import ops
from jattn.nn import options
from jattn.nn.checks import POSITIONS_WITHOUT_ROPE, check_cache_dtype, checked_features, refuse_with_cache
from jattn.nn.dense import attention_fn, rotated
from jattn.nn.module_cache import CacheFixes, ModuleCache, check_module_cache, decode_module_cache, new_module_cache
from jattn.nn.paged import PagedAttention
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.limits import check_fields

_FIXES = CacheFixes(
    deleted="go on with the variables that the step returned, or call init.",
    batch="call init with the inputs' batch.",
    full="call init of a module with a larger max_length.",
)


class MultiHeadAttention(linen.MultiHeadDotProductAttention):
    """`linen.MultiHeadDotProductAttention` with paged decoding of any number of tokens in a call.

    Fields, call and parameters are flax's, and those of `jattn.nn.MultiHeadAttention`. With `decode`, the size of the
    cache is `max_length`, for any input of `init`, and `apply` needs `mutable=["cache"]`; otherwise flax refuses the
    write.

    Attributes:
        num_kv_heads: number of key and value heads; num_heads by default.
        head_dim, rope, scale, sliding_window, attention_chunk, logits_soft_cap, alibi_slopes, use_alibi_sqrt,
            implementation: as in `jattn.nn.MultiHeadAttention`.
        max_length: capacity of the cache, in tokens of a sequence; required for `decode`.
        block_size: tokens of a cache block.
        kv_cache_dtype: dtype of the cache; that of the keys by default.
        deterministic_gradients: compute gradients with the same bits in every run; wide heads are faster without.

    Raises:
        InvalidInput: a field of the wrong type or out of range. The message names the field.

    Example:
        >>> layer = MultiHeadAttention(num_heads=2, decode=True, max_length=16)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 1, 8)))
        >>> y, updated = layer.apply(variables, jnp.ones((1, 5, 8)), mutable=["cache"])
        >>> y.shape, updated["cache"]["cache_index"].tolist()
        ((1, 5, 8), [5])
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope: options.Rope = None
    scale: options.Scale = None
    sliding_window: options.SlidingWindow = None
    attention_chunk: options.AttentionChunk = None
    logits_soft_cap: options.LogitsSoftCap = None
    alibi_slopes: options.AlibiSlopes = None
    use_alibi_sqrt: bool = False
    implementation: options.Implementation = None
    max_length: int | None = None
    block_size: int = 16
    kv_cache_dtype: Any = None
    deterministic_gradients: bool = True

    def __post_init__(self) -> None:
        check_fields(self, of_numpy=True)
        super().__post_init__()

    @linen.compact
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        key_segment_ids: jax.Array | None = None,
        max_segments: int | None = None,
    ) -> jax.Array:
        """Attends; arguments and errors are those of `jattn.nn.MultiHeadAttention`, and `dropout_rng` is linen's."""
        if self.qk_attn_weights_einsum_cls is not None or self.attn_weights_value_einsum_cls is not None:
            raise Unsupported("an einsum of your own was given; jattn computes both products itself: leave it None.")
        ops.refuse_leaked(
            inputs_q=inputs_q, inputs_k=inputs_k, inputs_v=inputs_v, mask=mask, input_positions=input_positions,
            lengths=lengths, segment_ids=segment_ids, key_segment_ids=key_segment_ids, variables=self.variables,
        )  # fmt: skip
        if input_positions is not None and self.rope is None:
            raise InvalidInput(POSITIONS_WITHOUT_ROPE)
        if inputs_k is None and inputs_v is not None:
            raise InvalidInput("inputs_v", "is given without inputs_k", "pass inputs_k alone where both are the same")
        new_keys = inputs_q.shape[-2] if inputs_k is None else inputs_k.shape[-2]
        if self.decode and not self.is_initializing() and new_keys != inputs_q.shape[-2]:
            raise InvalidInput(
                f"inputs_k has {new_keys} tokens and inputs_q {inputs_q.shape[-2]}; with a cache they are the same "
                "tokens. For an encoder's use jattn.nn.MultiHeadAttention, whose attention_type says so."
            )
        features = checked_features(
            self.num_heads,
            self.qkv_features,
            self.head_dim,
            num_kv_heads=self.num_kv_heads,
            attention_fn=self.attention_fn,
            own_fn=linen.dot_product_attention,
        )
        features = features or inputs_q.shape[-1]
        if features % self.num_heads:
            raise InvalidInput(f"qkv_features is {features}; it must be a multiple of num_heads, {self.num_heads}.")
        names = options.LayerOptions.__annotations__
        given: dict[str, Any] = {name: getattr(self, name) for name in names if hasattr(self, name)}
        core = PagedAttention(self.num_heads, features // self.num_heads, num_kv_heads=self.num_kv_heads, **given)
        inputs_k = inputs_q if inputs_k is None else inputs_k
        query = self._projected("query", core.num_heads, core, inputs_q)
        key = self._projected("key", core.num_kv_heads, core, inputs_k)
        value = self._projected("value", core.num_kv_heads, core, inputs_k if inputs_v is None else inputs_v)
        dropout_rng = self._dropout_rng(deterministic, dropout_rng)
        held = self._cache(query.shape[:-3], core, key.dtype) if self.decode else None
        if held is None or self.is_initializing():
            x = attention_fn(
                query,
                key,
                value,
                mask=mask,
                broadcast_dropout=self.broadcast_dropout,
                dropout_rng=dropout_rng,
                dropout_rate=self.dropout_rate,
                deterministic=dropout_rng is None,
                dtype=self.dtype,
                precision=self.precision,
                module=self if sow_weights else None,
                is_causal=is_causal,
                input_positions=input_positions,
                rope=self.rope,
                lengths=lengths,
                segment_ids=segment_ids,
                key_segment_ids=key_segment_ids,
                max_segments=max_segments,
                deterministic_gradients=self.deterministic_gradients,
                **core.options,
            )
        else:
            dropped = dropout_rng is not None
            segmented = any(given is not None for given in (segment_ids, key_segment_ids, max_segments))
            given = {"a mask": mask is not None, "segment_ids": segmented}
            refuse_with_cache({**given, "dropout": dropped, "sow_weights": sow_weights})
            cache = ModuleCache(*(variable.value for variable in held))
            check_module_cache(cache, query.shape[:-3], core, _FIXES)
            if self.rope is not None:
                if input_positions is None:
                    input_positions = cache.seq_lens[..., None] + jnp.arange(query.shape[-3], dtype=jnp.int32)
                query, key = (rotated(self.rope, x, input_positions) for x in (query, key))
            room: dict[str, Any] = {"max_length": self.max_length, "fixes": _FIXES}
            x, cache = decode_module_cache(core, query, (key, value), cache, lengths=lengths, **room)
            for variable, array in zip(held, cache, strict=True):
                variable.value = array
        return self._dense(
            name="out",
            features=self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
        )(x)

    def _dense(self, **keywords: Any) -> linen.DenseGeneral:
        names = ("dtype", "param_dtype", "use_bias", "precision")
        return linen.DenseGeneral(**{name: getattr(self, name) for name in names}, **keywords)

    def _projected(self, name: str, num_heads: int, core: PagedAttention, inputs: jax.Array) -> jax.Array:
        heads = self._dense(
            name=name,
            features=(num_heads, core.head_dim),
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )(inputs)
        if not self.normalize_qk or name == "value":
            return heads
        norm = linen.LayerNorm(name=f"{name}_ln", use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
        return norm(heads)

    def _dropout_rng(self, deterministic: bool | None, rng: jax.Array | None) -> jax.Array | None:
        if not self.dropout_rate or linen.merge_param("deterministic", self.deterministic, deterministic):
            return None
        return self.make_rng("dropout") if rng is None else rng

    def _cache(self, batch_dims: tuple[int, ...], core: PagedAttention, dtype: Any) -> list[Any]:
        if self.max_length is None:
            raise InvalidInput("decode without max_length; the cache's size comes from there, not from the input.")
        check_cache_dtype(self.kv_cache_dtype, None, None)
        make = functools.partial(
            new_module_cache, batch_dims, self.max_length, core, self.kv_cache_dtype or dtype, self.block_size
        )
        names = ("cached_key", "cached_value", "cache_index")
        return [self.variable("cache", name, lambda i=i: make()[i]) for i, name in enumerate(names)]
