"""LatentAttention and SparseAttention: a layer over latents with a model's options, called as `Attention` is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.attention import Angles, KeysValues
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.layers import INITIALIZER, dot_general
from jattn.llm.models.positions import attention_factor, inverse_frequencies, rotary_angles, temperature_factors
from jattn.llm.models.tensor_parallel import TensorParallel
from jattn.metadata import AttentionMetadata
from jattn.nn import DeepSeekRoPE, LatentIndexer, MultiHeadLatentAttention, SparseLatentAttention
from jattn.nn.expansion import LatentExpansion
from jattn.nn.paged import KVScales
from torch_core.base.errors import InvalidInput


class _Layer:
    """How a decoder makes and calls its layers; over the layers of `jattn.nn`."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        rngs: nnx.Rngs,
        implementation: str | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        self.temperature = config.temperature
        options = self._options(config, layer, rngs=rngs, implementation=implementation)
        super().__init__(config.num_attention_heads, config.hidden_size, **options)  # type: ignore[call-arg]

    def _projected(self, inputs: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, *rest = super()._projected(inputs, positions)  # type: ignore[misc]
        if self.temperature is not None:
            places = jnp.arange(inputs.shape[-2]) if positions is None else positions
            factors = jnp.broadcast_to(temperature_factors(places, self.temperature)[..., 0, 0], inputs.shape[:-1])
            query = (query * factors.reshape(-1, 1, 1)).astype(query.dtype)
        return query, *rest

    @classmethod
    def _options(cls, config: ModelConfig, layer: int, **shared: Any) -> dict[str, Any]:
        """Returns the layer's arguments from a config; its parts take their own."""
        latent = config.latent
        if latent is None:
            raise InvalidInput("config.latent", value=None, wanted="a LatentAttention needs a LatentConfig")
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
        return {
            **{name: getattr(latent, name) for name in sizes},
            "rope": _rope(config, latent.rope_interleave) if config.position_embedding == "rope" else None,
            "use_bias": config.attention_bias,
            "head_gate": latent.head_gate,
            # The norms of latents always have epsilon 1e-6, as in transformers, not rms_norm_eps.
            "param_dtype": jnp.dtype(config.dtype),
            "kernel_init": INITIALIZER,
            "dot_general": dot_general,
            **shared,
        }

    def forward_paged(
        self, x: jax.Array, angles: Angles | None, kv_cache: Any, metadata: AttentionMetadata
    ) -> tuple[jax.Array, Any]:
        """Attends packed tokens `[tokens, hidden]` to their cached prefixes; returns the output and the new cache."""
        return self(x, cache=kv_cache, metadata=metadata)  # type: ignore[operator]

    def set_kv_scales(self, k_scale: float, v_scale: float) -> None:
        """The counterpart of `Attention`; keys and values are one latent, with one scale."""
        self.kv_scales = KVScales(k_scale, k_scale)

    def forward_dense(
        self, x: jax.Array, angles: Angles | None, lengths: jax.Array | None = None, shared: KeysValues | None = None
    ) -> jax.Array:
        """Attends within each row of `[batch, tokens, hidden]`; padding comes after a row's tokens."""
        return self(x)  # type: ignore[operator]


def with_split_expansions(model: nnx.Module) -> nnx.Module:
    """Returns a model whose layers over latents have their `kv_b_proj` in two parts; one without any as it is."""
    if not any(_is_whole(module) for _, module in nnx.iter_modules(model)):
        return model
    model = nnx.merge(*nnx.split(model))
    layers: list[Any] = [module for _, module in nnx.iter_modules(model) if _is_whole(module)]
    for layer in layers:
        layer.kv_b_proj = LatentExpansion(layer.kv_b_proj, layer.qk_nope_head_dim, layer.v_head_dim)
    return model


def with_whole_expansions(model: nnx.Module) -> nnx.Module:
    """Changes the layers of a model back, in place, and returns it."""
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, MultiHeadLatentAttention) and isinstance(module.kv_b_proj, LatentExpansion):
            module.kv_b_proj = module.kv_b_proj.whole()
    return model


def _is_whole(module: object) -> bool:
    if not isinstance(module, LatentAttention | SparseAttention) or module.batch_invariant:
        return False
    # Over several processes all would have to join the parts again together.
    return type(module.kv_b_proj) is nnx.Linear and jnp.asarray(module.kv_b_proj.kernel[...]).is_fully_addressable


class LatentAttention(_Layer, MultiHeadLatentAttention):
    """Multi-head latent attention of one layer; a device's heads do not depend on other devices."""


class SparseAttention(_Layer, SparseLatentAttention):
    """Latent attention of one layer to the tokens that an indexer chooses.

    Its caches are latents, keys if it has an indexer, and the choice if some layer has none.
    """

    def forward_paged(
        self, x: jax.Array, angles: Angles | None, kv_cache: Any, metadata: AttentionMetadata
    ) -> tuple[jax.Array, Any]:
        """See `LatentAttention`."""
        if self.indexer is None:
            latents, chosen = kv_cache
            out, latents, _ = self.with_choice(x, latents, metadata, chosen=chosen)
            return out, (latents, chosen)
        out, caches, chosen = self.with_choice(x, kv_cache[:2], metadata)
        return out, (*caches, chosen)[: len(kv_cache)]

    def forward_dense(
        self, x: jax.Array, angles: Angles | None, lengths: jax.Array | None = None, shared: KeysValues | None = None
    ) -> jax.Array:
        """See `LatentAttention`; layers exchange the choice through `shared`."""
        shared = {} if shared is None else shared
        out, _, chosen = self.with_choice(x, chosen=None if self.indexer is not None else shared[None][0])
        shared[None] = (chosen,)
        return out

    @classmethod
    def _options(cls, config: ModelConfig, layer: int, **shared: Any) -> dict[str, Any]:
        options, latent = super()._options(config, layer, **shared), config.latent
        if layer not in config.index_layers:
            return {"indexer": None, **options}
        if latent is None or not (
            latent.q_lora_rank and latent.index_n_heads and latent.index_head_dim and latent.index_topk
        ):
            raise InvalidInput("config.latent", "has no index_n_heads", "a SparseAttention needs an indexer")
        indexer = LatentIndexer(
            config.hidden_size,
            latent.q_lora_rank,
            num_heads=latent.index_n_heads,
            head_dim=latent.index_head_dim,
            topk=latent.index_topk,
            rope=_rope(config, latent.index_rope_interleave),
            rope_dim=latent.qk_rope_head_dim,
            param_dtype=jnp.dtype(config.dtype),
            kernel_init=INITIALIZER,
            **shared,
        )
        return {"indexer": indexer, **options}


def _rope(config: ModelConfig, interleaved: bool) -> Any:
    scaling = config.rope_scaling
    options: dict[str, Any] = {"dim": config.rotary_dim, "theta": config.rope_theta, "interleaved": interleaved}
    if scaling is None:
        return DeepSeekRoPE(**options)
    if scaling.rope_type != "yarn":
        return _OtherRoPE(config, interleaved)
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    return DeepSeekRoPE(
        **options,
        **{name: getattr(scaling, name) for name in names},
        # transformers weighs cosine and sine by both or by none.
        mscale=(scaling.mscale_all_dim and scaling.mscale) or 0.0,
        mscale_all_dim=scaling.mscale_all_dim or 0.0,
    )


class _OtherRoPE:
    """Rotates x[heads, tokens, dim] by positions[tokens], with frequencies that are scaled otherwise."""

    def __init__(self, config: ModelConfig, interleaved: bool) -> None:
        self.dim, self.interleaved = config.rotary_dim, interleaved
        self._frequencies, self._factor = inverse_frequencies(config), attention_factor(config.rope_scaling)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        cosine, sine = (part[:, 0] for part in rotary_angles(positions, self._frequencies, self._factor))
        wide = x.astype(jnp.float32)
        first, second = (wide[..., 0::2], wide[..., 1::2]) if self.interleaved else jnp.split(wide, 2, axis=-1)
        turned = [first * cosine[None] - second * sine[None], second * cosine[None] + first * sine[None]]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)
