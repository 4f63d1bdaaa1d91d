"""LatentAttention: one layer's attention over latents with a model's options, called as `Attention` is."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.metadata import AttentionMetadata
from jattn.models.attention import Angles, KeysValues
from jattn.models.config import ModelConfig
from jattn.models.layers import INITIALIZER
from jattn.models.tensor_parallel import TensorParallel
from jattn.nn import DeepSeekRoPE, MultiHeadLatentAttention
from torch_core.errors import InvalidInput

__all__ = ["LatentAttention"]


class LatentAttention(MultiHeadLatentAttention):
    """Multi-head latent attention of one layer.

    Args:
        config: the model's, with `latent`, or of what one device has of it.
        layer: index of the layer; all are alike.
        rngs: source of the initial values.
        implementation: of the ops; see `jattn.mla_attention`.
        parallel: how the model is cut; a device's heads need to know of no others.

    Raises:
        InvalidInput: the config has no latents.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        rngs: nnx.Rngs,
        implementation: str | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        if config.latent is None:
            raise InvalidInput("config.latent is None; a LatentAttention needs a LatentConfig.")
        # The norms of latents have epsilon 1e-6 whatever rms_norm_eps is, as in transformers.
        super().__init__(
            config.num_attention_heads,
            config.hidden_size,
            **dataclasses.asdict(config.latent),
            rope=_rope(config),
            use_bias=config.attention_bias,
            param_dtype=jnp.dtype(config.dtype),
            kernel_init=INITIALIZER,
            implementation=implementation,
            rngs=rngs,
        )

    def forward_paged(
        self, x: jax.Array, angles: Angles | None, kv_cache: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array, jax.Array]:
        """Attends packed tokens `[tokens, hidden]` to their cached prefixes; returns the output and the new cache."""
        return self(x, cache=kv_cache, metadata=metadata)

    def set_kv_scales(self, k_scale: float, v_scale: float) -> None:
        """Does what `Attention` does; keys and values are one latent, of one scale."""
        self.k_scale = k_scale

    def forward_dense(
        self, x: jax.Array, angles: Angles | None, lengths: jax.Array | None = None, shared: KeysValues | None = None
    ) -> jax.Array:
        """Attends within each row of `[batch, tokens, hidden]`; what lies past a row's length is behind its tokens."""
        return self(x)


def _rope(config: ModelConfig) -> DeepSeekRoPE:
    scaling, options = config.rope_scaling, {"dim": config.rotary_dim, "theta": config.rope_theta}
    if scaling is None:
        return DeepSeekRoPE(**options)
    return DeepSeekRoPE(
        **options,
        factor=scaling.factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        # transformers weighs cosine and sine by both or by none.
        mscale=(scaling.mscale_all_dim and scaling.mscale) or 0.0,
        mscale_all_dim=scaling.mscale_all_dim or 0.0,
    )
