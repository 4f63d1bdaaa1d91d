"""MultiHeadAttention: flax's module with the same parameters, for padded batches and paged caches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Self, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.module import first_from

from jattn import ops
from jattn.metadata import AttentionMetadata
from jattn.nn import checks, dense, options
from jattn.nn.module_cache import ModuleCache, PagedCache, check_module_cache, decode_module_cache, new_module_cache
from jattn.nn.norms import by_row
from jattn.nn.paged import PagedAttention
from jattn.nn.segments import positions_in_segments
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.limits import checked

#: Options that the shapes of parameters follow from.
_OF_PARAMETERS = ("num_heads", "in_features", "qkv_features", "out_features", "num_kv_heads", "in_kv_features")
_OF_PARAMETERS += ("head_dim", "use_bias", "normalize_qk")


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`nnx.MultiHeadAttention` with paged decoding: it trains like flax's module and generates over a paged cache.

    Constructor, call and parameters are flax's: the parameters of one module load into the other, and `from_nnx` takes
    them from it. The module has three forms of call:

    - `y = attn(x)` attends within a padded batch `[batch..., length, features]`. It is differentiable.
    - `y, cache = attn(x, cache=cache, metadata=metadata)` takes packed tokens `[tokens, features]` and a paged cache,
      and returns the updated cache. One batch can hold prompts, chunks of prompts and decode steps of any lengths.
    - `y = attn(x, decode=True)` after `init_cache` uses a cache that the module holds. A call can have any number of
      tokens, and each sequence has its own length.

    With a cache, self-attention is causal, as in flax's decoding; train with `is_causal=True`. The module works in
    nnx's graph and tree mode, with `nnx.split`, in `jax.lax.scan` over steps and in `scan_layers`. A function under
    `jax.jit` that writes a held cache must return the module; see `PagedCache`.

    Args:
        num_heads: number of query heads.
        in_features: width of the input.
        qkv_features: width of all query heads together; `in_features` by default.
        out_features: width of the output; `in_features` by default.
        num_kv_heads: number of key and value heads; `num_heads` by default.
        in_kv_features: width of the input of keys and values; `in_features` by default.
        head_dim: elements of a head; an alternative to `qkv_features`, which is then num_heads * head_dim.
        rope: rotary embedding of queries and keys, applied after their norms: newer flax's `nnx.RoPE`, or a function of
            x[heads, tokens, head_size] and positions[tokens].
        scale, sliding_window, attention_chunk, logits_soft_cap, alibi_slopes, use_alibi_sqrt, implementation: as in
            `PagedAttention`.
        sinks: add a learned sink logit to each head, the parameter `sinks`, initialised with zeros.
        attention_type: "decoder", "encoder_only" (no cache) or "encoder_decoder". The cache of "encoder_decoder" is
            written when `inputs_k` is given, with the encoder's keys, and read otherwise.
        kv_sharing: build no `key` and `value` parameters. The layer then takes `shared_kv=other.keys_and_values(x)`, or
            reads the cache of the other layer.
        kv_cache_dtype: dtype of a held cache; the dtype of the computation by default.
        k_scale, v_scale: dequantisation scales of an 8-bit cache: value = stored value * scale.
        deterministic_gradients: compute gradients with the same bits in every run; wide heads are faster without.
        attention_fn: accepted only if it is flax's default or `jattn.attention_fn`.
        rngs: source of the initial values and of dropout.
        dtype, param_dtype, precision, use_bias, normalize_qk, kernel_init, out_kernel_init, bias_init, out_bias_init,
            dropout_rate, broadcast_dropout, deterministic, keep_rngs, decode, qkv_promote_dtype, out_promote_dtype,
            ln_promote_dtype, qkv_dot_general, out_dot_general, qkv_dot_general_cls, out_dot_general_cls,
            kernel_metadata, out_kernel_metadata, bias_metadata, out_bias_metadata, query_ln_scale_metadata,
            key_ln_scale_metadata: as in `nnx.MultiHeadAttention`, with its defaults.

    Raises:
        InvalidInput: an option of the wrong type or out of range, or two options that exclude each other. The message
            names the option.
        Unsupported: another attention_fn.

    Example:
        >>> attn = MultiHeadAttention(num_heads=4, in_features=16, num_kv_heads=2, decode=True, rngs=nnx.Rngs(0))
        >>> attn.init_cache((2, 32, 16))  # two sequences of up to 32 tokens
        >>> prompt, token = jnp.ones((2, 5, 16)), jnp.ones((2, 1, 16))
        >>> attn(prompt, lengths=jnp.array([5, 3])).shape, attn(token).shape
        ((2, 5, 16), (2, 1, 16))
        >>> attn.cache_index[...].tolist()
        [6, 4]
    """

    batch_invariant: bool = False

    @checked
    def __init__(
        self,
        num_heads: int,
        in_features: options.Size,
        qkv_features: int | None = None,
        out_features: options.Size | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: options.Size | None = None,
        *,
        head_dim: int | None = None,
        rope: options.Rope = None,
        scale: options.Scale = None,
        sliding_window: options.SlidingWindow = None,
        attention_chunk: options.AttentionChunk = None,
        logits_soft_cap: options.LogitsSoftCap = None,
        alibi_slopes: options.AlibiSlopes = None,
        use_alibi_sqrt: bool = False,
        sinks: bool = False,
        attention_type: str = "decoder",
        kv_sharing: bool = False,
        kv_cache_dtype: Any = None,
        k_scale: options.CacheScale = None,
        v_scale: options.CacheScale = None,
        deterministic_gradients: bool = True,
        implementation: options.Implementation = None,
        attention_fn: Callable[..., jax.Array] | None = None,
        rngs: nnx.Rngs,
        **flax_options: Unpack[options.FlaxOptions],
    ) -> None:
        qkv_features = checks.checked_features(
            num_heads,
            qkv_features,
            head_dim,
            num_kv_heads=num_kv_heads,
            attention_fn=attention_fn,
            own_fn=nnx.dot_product_attention,
        )
        checks.check_attention_type(attention_type, rope)
        checks.check_cache_dtype(kv_cache_dtype, k_scale, v_scale)
        sizes = (num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features)
        super().__init__(*sizes, attention_fn=dense.attention_fn, rngs=rngs, **flax_options)
        self.core = PagedAttention(
            num_heads,
            self.head_dim,
            num_kv_heads=self.num_kv_heads,
            causal=attention_type == "decoder",
            scale=scale,
            sliding_window=sliding_window,
            attention_chunk=attention_chunk,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            use_alibi_sqrt=use_alibi_sqrt,
            implementation=implementation,
        )
        self.rope = rope
        self.sinks = nnx.Param(jnp.zeros(num_heads, self.param_dtype)) if sinks else nnx.data(None)
        self.attention_type = attention_type
        self.kv_sharing, self.kv_cache_dtype = kv_sharing, kv_cache_dtype
        self.k_scale, self.v_scale = k_scale, v_scale
        self.deterministic_gradients = deterministic_gradients
        if kv_sharing:
            self.key, self.value, self.key_ln = nnx.data(None), nnx.data(None), nnx.data(None)

    @classmethod
    def from_nnx(cls, module: nnx.MultiHeadAttention, **changes: Any) -> Self:
        """Returns a module with the options and the parameters of flax's module, and without a cache.

        Args:
            module: flax's module. Both modules then have the same `nnx.Param` objects.
            changes: options of the constructor, such as `sliding_window`; they replace those of the module.

        Raises:
            InvalidInput: it is another module, or a change does not fit its parameters.
            Unsupported: the module has an attention_fn other than flax's default and `jattn.attention_fn`.

        Example:
            >>> old = nnx.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0))
            >>> new = MultiHeadAttention.from_nnx(old, sliding_window=8)
            >>> new.query.kernel is old.query.kernel
            True
        """
        if not isinstance(module, nnx.MultiHeadAttention):
            wanted = "it must be an nnx.MultiHeadAttention"
            raise InvalidInput("module", f"is a {type(module).__name__}", wanted)
        for name in _OF_PARAMETERS:
            if name in changes and changes[name] != (own := getattr(module, name)):
                raise InvalidInput(name, value=changes[name], wanted=f"the module's parameters have {own}")
        names = inspect.signature(nnx.MultiHeadAttention.__init__).parameters
        given = {name: getattr(module, name) for name in names if name != "rngs" and hasattr(module, name)}
        given |= {"kernel_init": nnx.initializers.zeros, "keep_rngs": module.rngs is not None}
        new = cls(**{**given, **changes}, rngs=nnx.Rngs(0))
        for name in ("query", "key", "value", "out", "query_ln", "key_ln", "rngs"):
            setattr(new, name, getattr(module, name))
        return new

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: Any = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: jax.Array | None = None,
        lengths: jax.Array | None = None,
        key_lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        key_segment_ids: jax.Array | None = None,
        max_segments: int | None = None,
        shared_kv: tuple[jax.Array, jax.Array] | None = None,
        cache: Any = None,
        metadata: AttentionMetadata | None = None,
    ) -> Any:
        """Attends in one of the three forms that the class describes.

        Args:
            inputs_q, inputs_k, inputs_v, mask, deterministic, rngs, sow_weights, decode, is_causal, out_sharding,
                qkv_sharding: as in flax. With a cache, a mask, dropout and sown weights raise Unsupported.
            input_positions: int[batch..., length] or [tokens], for `rope`; by default those of segments, lengths and
                metadata. Keys have the positions of the queries if there are as many, and otherwise count from 0.
            lengths: int32[batch...], number of real tokens of each row of `inputs_q`. The rest is padding: its output
                is the output bias.
            key_lengths: the same for `inputs_k`; only without a cache, or in cross attention.
            segment_ids, key_segment_ids, max_segments: the documents of packed rows, with ids of 0 and below for
                padding, left padding too; as in `jattn.attention_fn`, only without a cache.
            shared_kv: `keys_and_values` of another layer, for `kv_sharing` without a cache.
            cache: this layer's cache array, or its key and value caches. It is consumed; use the returned one.
            metadata: the batch of the step, for `cache`. In cross attention, lengths, tables and slots are the
                encoder's, and query_start_loc is the decoder's.

        Returns:
            The output, [batch..., length, out_features] or [tokens, out_features]; with `cache`, a pair of this and the
            updated cache.

        Raises:
            InvalidInput: inputs that do not match each other, the module or its cache. The state does not change.
            Unsupported: an argument that a paged cache does not serve.
        """
        if cache is not None or metadata is not None:
            decode = False
        decode = first_from(decode, self.decode, error_msg="decode was given neither to the module nor to the call.")
        cached = decode or cache is not None
        ops.refuse_leaked(
            inputs_q=inputs_q, inputs_k=inputs_k, inputs_v=inputs_v, mask=mask, input_positions=input_positions,
            lengths=lengths, key_lengths=key_lengths, shared_kv=shared_kv, cache=cache, metadata=metadata,
            segment_ids=segment_ids, key_segment_ids=key_segment_ids,
        )  # fmt: skip
        checks.check_inputs(self, inputs_q, inputs_k, inputs_v, input_positions, shared_kv, cached=cached)
        checks.check_explicit(self, cache, metadata, (lengths, key_lengths))
        drops = self._drops(deterministic)
        if cached:
            segmented = any(given is not None for given in (segment_ids, key_segment_ids, max_segments))
            given = {"a mask": mask is not None, "segment_ids": segmented}
            checks.refuse_with_cache({**given, "dropout": drops, "sow_weights": sow_weights})
        held = self._held(inputs_q.shape[:-2]) if decode else None

        query = self.query(inputs_q, out_sharding=qkv_sharding)
        query = self._normalised(self.query_ln, query)
        if self.rope is not None:
            if input_positions is None:
                own = positions_in_segments(segment_ids)
                input_positions = _positions(query, held, metadata) if own is None else own
            query = dense.rotated(self.rope, query, input_positions, batch_invariant=self.core.batch_invariant)
        new = shared_kv
        if not self.kv_sharing and not (cached and inputs_k is None and self.attention_type == "encoder_decoder"):
            inputs_k = inputs_q if inputs_k is None else inputs_k
            alike = self.attention_type != "encoder_decoder" and inputs_k.shape[-2] == inputs_q.shape[-2]
            new = self.keys_and_values(
                inputs_k,
                inputs_v,
                input_positions=input_positions if alike else positions_in_segments(key_segment_ids),
                qkv_sharding=qkv_sharding,
            )
        scores: dict[str, Any] = {"sinks": None if self.sinks is None else self.sinks[...]}
        lens: dict[str, Any] = {"lengths": lengths, "key_lengths": key_lengths}
        of_cache = {**scores, "k_scale": self.k_scale, "v_scale": self.v_scale}
        if held is not None:
            x, held = decode_module_cache(self.core, query, new, held, **lens, **of_cache)
            for variable, array in zip(self._cache_variables(), held, strict=True):
                variable.put(array)
        elif cache is not None and metadata is not None:
            key, value = (None, None) if new is None else (_packed(array) for array in new)
            x, cache = self.core(_packed(query), key, value, cache, metadata, **of_cache)
            x = x.reshape(query.shape)
        elif new is not None:
            x = dense.attention_fn(
                query,
                *new,
                mask=mask,
                dropout_rng=self._dropout_rng(rngs) if drops else None,
                dropout_rate=self.dropout_rate,
                broadcast_dropout=self.broadcast_dropout,
                deterministic=not drops,
                dtype=self.dtype,
                precision=self.precision,
                module=self if sow_weights else None,
                is_causal=is_causal,
                deterministic_gradients=self.deterministic_gradients,
                segment_ids=segment_ids,
                key_segment_ids=key_segment_ids,
                max_segments=max_segments,
                **lens,
                **self.core.options,
                **scores,
            )
        else:
            raise InvalidInput("this layer has no keys and values of its own; pass shared_kv, or that layer's cache.")
        out = self.out(x, out_sharding=out_sharding)
        return out if cache is None else (out, cache)

    def keys_and_values(
        self,
        inputs_k: jax.Array,
        inputs_v: jax.Array | None = None,
        *,
        input_positions: jax.Array | None = None,
        qkv_sharding: Any = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the keys, with rope applied, and the values: [batch..., length, num_kv_heads, head_dim] each."""
        if self.key is None or self.value is None:
            raise InvalidInput("a layer with kv_sharing has no keys and values; ask the layer whose cache it reads.")
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_k if inputs_v is None else inputs_v, out_sharding=qkv_sharding)
        key = self._normalised(self.key_ln, key)
        if self.rope is not None:
            key = dense.rotated(self.rope, key, input_positions, batch_invariant=self.core.batch_invariant)
        return key, value

    def init_cache(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_shape: Sequence[int], dtype: Any = None, *, block_size: int = 16, out_sharding: Any = None
    ) -> None:
        """Creates an empty cache in the module; a second call replaces it.

        Args:
            input_shape: (batch..., max_length, features), as in flax; in cross attention, that of the encoder.
            dtype: dtype of the cache; by default `kv_cache_dtype`, or else the dtype of the computation (flax's default
                is always float32).
            block_size: tokens of a block; max_length is rounded up to whole blocks.
            out_sharding: sharding of a cache (num_blocks, block_size, num_kv_heads, head_dim) under a mesh.

        Raises:
            InvalidInput: a size below 1, or a dtype that a cache cannot have.
            Unsupported: the layer has no cache of its own.
        """
        if self.kv_sharing or self.attention_type == "encoder_only":
            raise Unsupported("a layer that shares keys and values, or an encoder's, holds no cache.")
        if isinstance(input_shape, int) or len(input_shape) < 2:
            raise InvalidInput("input_shape", value=input_shape, wanted="it must be (batch..., max_length, features)")
        if not all(isinstance(size, Integral) and size >= 0 for size in input_shape[:-2]):
            wanted = "sizes of a batch must be ints of at least 0"
            raise InvalidInput("input_shape", value=tuple(input_shape), wanted=wanted)
        dtype = dtype or self.kv_cache_dtype or self.dtype or self.param_dtype
        checks.check_cache_dtype(dtype, self.k_scale, self.v_scale)
        held = new_module_cache(input_shape[:-2], input_shape[-2], self.core, dtype, block_size)
        sharding = {} if out_sharding is None else {"out_sharding": out_sharding}
        self.cached_key, self.cached_value = PagedCache(held.key, **sharding), PagedCache(held.value, **sharding)
        self.cache_index = PagedCache(held.seq_lens)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets the options of a view; with decode, batch_size and max_length, also creates a cache. For `nnx.view`."""
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.decode = self.decode if decode is None else decode
        if decode and batch_size is not None and max_length is not None:
            batch_dims = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch_dims, max_length, self.in_features))

    def _cache_variables(self) -> tuple[PagedCache, PagedCache, PagedCache]:
        return self.cached_key, self.cached_value, self.cache_index  # type: ignore[return-value]

    def _held(self, batch_dims: tuple[int, ...]) -> ModuleCache:
        if self.kv_sharing or self.attention_type == "encoder_only":
            raise Unsupported("decode of a layer that holds no cache; pass the other layer's cache and metadata.")
        if self.cached_key is None:
            raise InvalidInput("decode without a cache; call init_cache((batch, max_length, features)) first.")
        held = ModuleCache(*(variable.peek() for variable in self._cache_variables()))
        check_module_cache(held, batch_dims, self.core)
        return held

    def _normalised(self, norm: Any, x: jax.Array) -> jax.Array:
        if self.batch_invariant and type(norm) is nnx.LayerNorm:
            return by_row(norm, x, None, "layer_norm")
        return x if norm is None else norm(x)

    def _drops(self, deterministic: bool | None) -> bool:
        message = "deterministic was given neither to the module nor to the call, and dropout_rate is not 0."
        return self.dropout_rate > 0 and not first_from(deterministic, self.deterministic, error_msg=message)

    def _dropout_rng(self, rngs: Any) -> jax.Array:
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise InvalidInput("dropout", "needs rngs, and the module was built with keep_rngs=False", "pass them")
        return rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs()


def _positions(query: jax.Array, held: ModuleCache | None, metadata: AttentionMetadata | None) -> jax.Array | None:
    """Returns the positions of queries after the cached tokens; None if they count from 0."""
    if held is not None:
        return held.seq_lens[..., None] + jnp.arange(query.shape[-3], dtype=jnp.int32)
    return None if metadata is None else metadata.positions(query[..., 0, 0].size).reshape(query.shape[:-2])


def _packed(array: jax.Array) -> jax.Array:
    return array.reshape(-1, *array.shape[-2:])
