"""Small models in the styles of projects that train with JAX, each with its own call, cache and config."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB_SIZE = 97


class Remat(enum.Enum):
    NONE = enum.auto()
    DECODER = enum.auto()


@dataclasses.dataclass(slots=True)
class Config:
    """It can change, and so has no hash, as all of tunix's."""

    num_layers: int = 1
    embed_dim: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    remat: Remat = Remat.NONE
    windows: tuple[int | None, ...] = ()
    soft_cap: float | None = None


class PretrainedConfig:
    """A config of transformers: equal by its values, and without a hash."""

    def __init__(self, **sizes: Any) -> None:
        self.__dict__.update(sizes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PretrainedConfig) and self.__dict__ == other.__dict__


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates [B, T, heads, size] by positions [B, T]."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 10_000.0 ** -(jnp.arange(half) / half)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attended(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, soft_cap: float | None = None) -> jax.Array:
    """Attends densely, [B, T, heads, size] with a mask bool[B, T, S]."""
    k, v = (jnp.repeat(each, q.shape[2] // k.shape[2], axis=2) for each in (k, v))
    scores = jnp.einsum("BTND,BSND->BNTS", q, k) * q.shape[-1] ** -0.5
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("BNTS,BSND->BTND", weights, v)


def causal(length: int) -> jax.Array:
    """Returns the mask bool[1, length, length]."""
    return jnp.tril(jnp.ones((1, length, length), bool))


class Einsum(nnx.Module):
    def __init__(self, equation: str, shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.equation = equation
        self.w = nnx.Param(0.4 * rngs.params.normal(shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.equation, x, self.w[...])


class Attention(nnx.Module):
    """tunix's and gemma's: the cache in, the cache out."""

    def __init__(self, config: Config, layer: int, rngs: nnx.Rngs) -> None:
        self.config, self.window = config, (config.windows or (None,) * config.num_layers)[layer]
        d, n, k, h = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = Einsum("BTD,DNH->BTNH", (d, n, h), rngs)
        self.k_proj, self.v_proj = (Einsum("BTD,DNH->BTNH", (d, k, h), rngs) for _ in range(2))
        self.o_proj = Einsum("BTNH,NHD->BTD", (n, h, d), rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any, mask: jax.Array) -> Any:
        q, k = (rotated(proj(x), positions) for proj in (self.q_proj, self.k_proj))
        if self.window is not None:
            mask = mask & ~jnp.tril(mask, -self.window)
        return cache, self.o_proj(attended(q, k, self.v_proj(x), mask, self.config.soft_cap))


class Layer(nnx.Module):
    def __init__(self, config: Config, layer: int, rngs: nnx.Rngs) -> None:
        self.config = config
        self.norm = nnx.RMSNorm(config.embed_dim, rngs=rngs)
        self.attn = Attention(config, layer, rngs)

    def block(self, x: jax.Array, positions: jax.Array, cache: Any, mask: jax.Array) -> Any:
        cache, out = self.attn(self.norm(x), positions, cache, mask)
        return cache, x + out

    def __call__(self, *args: Any) -> Any:
        return nnx.remat(Layer.block)(self, *args) if self.config.remat is Remat.DECODER else self.block(*args)


class Transformer(nnx.Module):
    """tunix's models and flax's example of gemma: `(tokens, positions, cache, mask) -> (logits, cache)`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedder = nnx.Embed(VOCAB_SIZE, config.embed_dim, rngs=rngs)
        self.layers = nnx.List(Layer(config, layer, rngs) for layer in range(config.num_layers))

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: Any, mask: Any) -> tuple[jax.Array, Any]:
        x, new = self.embedder(tokens), None if cache is None else {}
        for index, layer in enumerate(self.layers):
            name = f"layer_{index}"
            found, x = layer(x, positions, None if cache is None else cache[name], mask)
            if new is not None:
                new[name] = found
        return self.embedder.attend(x), new

    def dense(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits [1, T, vocab] of tokens [1, T], as a trainer computes them."""
        length = tokens.shape[1]
        return self(tokens, jnp.arange(length)[None], None, causal(length))[0]


class CausalLM(nnx.Module):
    """SkyRL-tx's: a config of transformers, keywords, hidden states first and the logits of a method of its own."""

    def __init__(self, config: PretrainedConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        sizes = Config(num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads)
        self.attn = Attention(sizes, 0, rngs)
        self.embed_tokens = nnx.Embed(VOCAB_SIZE, config.hidden_size, rngs=rngs)
        self.adapters = nnx.Param(rngs.params.normal((3, config.hidden_size)))

    def __call__(
        self,
        input_ids: jax.Array,
        *,
        attention_mask: Any,
        positions: jax.Array,
        adapter_indices: jax.Array,
    ) -> dict[str, jax.Array]:
        x = self.embed_tokens(input_ids) + self.adapters[...][adapter_indices]
        return {"last_hidden_state": x + self.attn(x, positions, None, attention_mask)[1]}

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        return self.embed_tokens.attend(hidden)

    def dense(self, tokens: jax.Array, adapter: int) -> jax.Array:
        length = tokens.shape[1]
        found = self(
            tokens,
            attention_mask=causal(length),
            positions=jnp.arange(length)[None],
            adapter_indices=jnp.full((1, length), adapter),
        )
        return self.compute_logits(found["last_hidden_state"])


class OwnCache(nnx.Module):
    """bonsai's: it counts its tokens, and layers write into it in place."""

    def __init__(self, length: int, config: Config) -> None:
        shape = (1, length, config.num_kv_heads, config.head_dim)
        self.k_cache, self.v_cache = nnx.Cache(jnp.zeros(shape)), nnx.Cache(jnp.zeros(shape))
        self.cur_ind = nnx.Variable(jnp.zeros((), jnp.int32))


class InPlaceAttention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.core = Attention(config, 0, rngs)

    def __call__(self, x: jax.Array, cache: OwnCache, segment_ids: jax.Array) -> jax.Array:
        core, start = self.core, cache.cur_ind[...]
        positions = start + jnp.cumsum(segment_ids, axis=-1) - 1
        q, k = (rotated(proj(x), positions) for proj in (core.q_proj, core.k_proj))
        for kept, new in ((cache.k_cache, k), (cache.v_cache, core.v_proj(x))):
            kept[...] = jax.lax.dynamic_update_slice(kept[...], new, (0, start, 0, 0))
        seen = jnp.arange(cache.k_cache.shape[1]) <= positions[..., None]
        cache.cur_ind[...] = start + x.shape[1]
        return core.o_proj(attended(q, cache.k_cache[...], cache.v_cache[...], seen))


class InPlaceModel(nnx.Module):
    """bonsai's: `(tokens, segment_ids, cache) -> logits`, whose layers change the cache in place."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedder = nnx.Embed(VOCAB_SIZE, config.embed_dim, rngs=rngs)
        self.attn = InPlaceAttention(config, rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array, cache: Any) -> jax.Array:
        x = self.embedder(tokens)
        return self.embedder.attend(x + self.attn(x, cache[0], segment_ids))

    def dense(self, tokens: jax.Array) -> jax.Array:
        return self(tokens, jnp.ones_like(tokens), [OwnCache(tokens.shape[1], self.config)])
