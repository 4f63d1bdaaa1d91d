"""LatentAttention and SparseAttention: a layer over latents with a model's options, called as `Attention` is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.attention import Angles, KeysValues
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.layers import INITIALIZER
from jattn.llm.models.tensor_parallel import TensorParallel
from jattn.metadata import AttentionMetadata
from jattn.nn import DeepSeekRoPE, LatentIndexer, MultiHeadLatentAttention, SparseLatentAttention
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
        options = self._options(config, rngs=rngs, implementation=implementation)
        super().__init__(config.num_attention_heads, config.hidden_size, **options)  # type: ignore[call-arg]

    @classmethod
    def _options(cls, config: ModelConfig, **shared: Any) -> dict[str, Any]:
        """Returns the layer's arguments from a config; its parts take their own."""
        latent = config.latent
        if latent is None:
            raise InvalidInput("config.latent", value=None, wanted="a LatentAttention needs a LatentConfig")
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
        return {
            **{name: getattr(latent, name) for name in sizes},
            "rope": _rope(config),
            "use_bias": config.attention_bias,
            # The norms of latents always have epsilon 1e-6, as in transformers, not rms_norm_eps.
            "param_dtype": jnp.dtype(config.dtype),
            "kernel_init": INITIALIZER,
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


class LatentAttention(_Layer, MultiHeadLatentAttention):
    """Multi-head latent attention of one layer; a device's heads do not depend on other devices."""


class SparseAttention(_Layer, SparseLatentAttention):
    """Latent attention of one layer to the tokens that an indexer chooses; its cache is a pair."""

    @classmethod
    def _options(cls, config: ModelConfig, **shared: Any) -> dict[str, Any]:
        options, latent = super()._options(config, **shared), config.latent
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
            rope=_rope(config, interleaved=False),
            rope_dim=latent.qk_rope_head_dim,
            param_dtype=jnp.dtype(config.dtype),
            kernel_init=INITIALIZER,
            **shared,
        )
        return {"indexer": indexer, **options}


def _rope(config: ModelConfig, **options: Any) -> DeepSeekRoPE:
    scaling, options = config.rope_scaling, {"dim": config.rotary_dim, "theta": config.rope_theta, **options}
    if scaling is None:
        return DeepSeekRoPE(**options)
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    return DeepSeekRoPE(
        **options,
        **{name: getattr(scaling, name) for name in names},
        # transformers weighs cosine and sine by both or by none.
        mscale=(scaling.mscale_all_dim and scaling.mscale) or 0.0,
        mscale_all_dim=scaling.mscale_all_dim or 0.0,
    )
