"""EncoderDecoder: a decoder whose layers also attend to an encoder's output for the prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from jattn.llm.models.batch_adapters import BatchAdapters
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.decoder import Decoder, checked_dropout, checked_experts
from jattn.llm.models.decoder_layer import through
from jattn.llm.models.paged_model import PagedSpec
from jattn.metadata import AttentionMetadata
from torch_core.base.errors import InvalidInput, Unsupported


class EncoderDecoder(Decoder):
    """A `Decoder` with an encoder before it, as T5 (arXiv:1910.10683) and BART (arXiv:1910.13461) are.

    A prompt is the encoder's input. `encode` runs once for each, and leaves the keys and values of every layer's cross
    attention in blocks of the decoder's own pool; `__call__` reads them through `metadata.cross`.

    Args:
        config: a config with an `encoder`.
        rngs: source of the initial values.
        implementation: implementation of the paged ops; see `Decoder`.

    Raises:
        InvalidInput: the config has no encoder.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, implementation: str | None = None) -> None:
        if config.encoder is None:
            raise InvalidInput("config.encoder", value=None, wanted="an EncoderDecoder needs the encoder's ModelConfig")
        super().__init__(config, rngs=rngs, implementation=implementation)
        self.encoder = Decoder(config.encoder, rngs=rngs, implementation=implementation, embeds_tokens=False)

    @property
    def paged_spec(self) -> PagedSpec:
        """The facts that the engine needs about it."""
        return replace(
            super().paged_spec,
            max_encoder_len=self.encoder.config.max_position_embeddings,
            decoder_start_token_id=self.config.decoder_start_token_id,
            forced_bos_token_id=self.config.forced_bos_token_id,
        )

    def encode(
        self, token_ids: jax.Array, positions: jax.Array, kv_caches: tuple[jax.Array, ...], metadata: AttentionMetadata
    ) -> tuple[jax.Array, ...]:
        """Runs the encoder over whole inputs, and writes keys and values of cross attention: `EncoderModel.encode`."""
        encoder, caches = self.encoder, list(kv_caches)
        x, angles = encoder.embedded(self.embed_tokens(token_ids), positions)
        encoded = through(encoder.layers[0].input_layernorm, x)
        for index, (layer, following) in enumerate(encoder.layers_and_norms()):
            # The encoder's own keys and values lie where the cross ones will: nothing else is in these slots yet.
            place = index % len(caches)
            x, encoded, (caches[place],), _ = layer(x, encoded, angles, (caches[place],), metadata, following)
        layers: Any = self.layers
        return tuple(
            layer.cross_attn.write(encoded, cache, metadata.slot_mapping)
            for layer, cache in zip(layers, caches, strict=True)
        )

    def forward_dense(
        self,
        token_ids: jax.Array,
        *,
        encoder_token_ids: jax.Array | None = None,
        encoder_lengths: jax.Array | None = None,
        dropout_rate: float = 0.0,
        dropout_key: jax.Array | None = None,
        routed_experts: jax.Array | np.ndarray | None = None,
        adapters: BatchAdapters | None = None,
    ) -> jax.Array:
        """Returns float32[batch, tokens, vocab_size] for whole sequences, without a cache; see `Decoder.forward_dense`.

        `encoder_token_ids` is int32[batch, encoder_tokens] and required. `encoder_lengths`, int32[batch], are the real
        encoder tokens of each row; None for all. It takes no adapters.
        """
        if adapters is not None:
            raise Unsupported("adapters", "are given", "adapters are for models without an encoder")
        if encoder_token_ids is None:
            raise InvalidInput("encoder_token_ids", value=None, wanted="a model with an encoder needs its input")
        experts = checked_experts(routed_experts, token_ids.shape, self.config)
        dropout = checked_dropout(dropout_rate, dropout_key)
        embedded = self.embed_tokens(encoder_token_ids)
        *_, encoded = self.encoder.hidden_states(embedded, dropout, encoder_lengths)
        *_, hidden = self.hidden_states(token_ids, dropout, encoded=(encoded, encoder_lengths), routed_experts=experts)
        return self.logits(hidden)


def build_model(config: ModelConfig, *, rngs: nnx.Rngs, implementation: str | None = None) -> Decoder:
    """Returns the model of a config: a `Decoder`, or an `EncoderDecoder` if it has an encoder."""
    kind = Decoder if config.encoder is None else EncoderDecoder
    return kind(config, rngs=rngs, implementation=implementation)
