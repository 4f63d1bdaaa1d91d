"""Decoder: a decoder-only language model over a paged cache, and the same weights over dense sequences."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jattn.llm.models.attention import Angles, KeysValues
from jattn.llm.models.batch_adapters import BatchAdapters, LayerAdapters, attached
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.decoder_layer import DecoderLayer, Encoded, through
from jattn.llm.models.layers import INITIALIZER, MLP, RMSNorm, linear, norm, scaled
from jattn.llm.models.paged_model import PagedSpec
from jattn.llm.models.per_layer import PerLayerInputs
from jattn.llm.models.positions import (
    attention_factor,
    inverse_frequencies,
    relative_bias,
    rotary_angles,
    temperature_factors,
)
from jattn.llm.models.tensor_parallel import TensorParallel
from jattn.metadata import AttentionMetadata, GroupedMetadata
from jattn.ops import row_product, rowwise
from jattn.ops.activations import activated
from jattn.ops.lookup import look_up
from torch_core.base.errors import InvalidInput, Unsupported


class Decoder(nnx.Module):
    """A decoder-only language model: `hidden, caches = model(token_ids, positions, caches, metadata)`.

    The caches are explicit arguments and results, one array per layer, so that a jitted step can donate them; the
    module itself never changes. It works in nnx's graph and tree mode.

    Args:
        config: shapes and options.
        rngs: source of the initial values.
        implementation: implementation of the paged ops: None (the best for the device), "triton", "torch" or "xla".
        embeds_tokens: False for an encoder whose tokens are embedded by the decoder that reads it.
        parallel: one device's part of a model that is split over a mesh axis, to be called inside `jax.shard_map`; see
            `jattn.llm.models.shard_model`. None for a whole model.

    Raises:
        InvalidInput: the model cannot be split this way; the message has the size that does not divide.

    Attributes:
        batch_invariant: see `set_batch_invariant`.
    """

    batch_invariant: bool = False

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        implementation: str | None = None,
        embeds_tokens: bool = True,
        parallel: TensorParallel | None = None,
    ) -> None:
        self.config, self.parallel, self.implementation = config, parallel, implementation
        vocab_size, local = config.vocab_size, config
        if parallel is not None:
            parallel.check(config)
            vocab_size, local = parallel.vocab(vocab_size), parallel.local(config)
        sizes, options = (vocab_size, config.hidden_size), {"param_dtype": jnp.dtype(config.dtype), "rngs": rngs}

        def table(rows: int, width: int = config.hidden_size) -> Any:
            return nnx.Embed(rows, width, embedding_init=INITIALIZER, **options) if rows else None

        kind = config.position_embedding
        self.embed_tokens = table(vocab_size * embeds_tokens)
        positions = config.position_offset + config.max_position_embeddings
        self.position_embedding = table(positions * (kind == "learned"))
        buckets = config.relative_attention_num_buckets * (kind == "relative")
        self.relative_attention_bias = table(buckets, config.num_attention_heads)
        self.token_type_embedding = table(config.token_types)
        self.embedding_norm = norm(config) if config.embedding_norm else None
        self.per_layer_inputs = PerLayerInputs(config, rngs=rngs, parallel=parallel) if config.per_layer_input else None
        shared: dict[str, Any] = {"rngs": rngs, "implementation": implementation, "parallel": parallel}
        self.layers = nnx.List([DecoderLayer(local, index, **shared) for index in range(config.num_hidden_layers)])
        self.norm = norm(config) if config.final_norm else None
        head: dict[str, Any] = {"use_bias": config.lm_head_bias, "preferred_element_type": jnp.float32, **options}
        has_head = not (config.tie_word_embeddings or config.is_encoder)
        self.lm_head = linear(*reversed(sizes), **head) if has_head else None
        width, num_labels = config.hidden_size, config.num_labels
        self.pooler = linear(width, width, use_bias=config.pooler_bias, **options) if num_labels else None
        self.pooler_norm = norm(config) if num_labels and config.pooler_norm else None
        self.classifier = linear(width, num_labels, use_bias=True, **options) if num_labels else None
        shape, dtype = (1, config.vocab_size), jnp.dtype(config.dtype)
        self.final_logits_bias = nnx.Param(jnp.zeros(shape, dtype)) if config.logits_bias else None
        for module in (each for _, each in nnx.iter_modules(self) if isinstance(each, RMSNorm | MLP)):
            module.row_implementation = implementation

    @property
    def paged_spec(self) -> PagedSpec:
        """The facts that the engine needs about it."""
        config, parallel = self.config, self.parallel
        if config.is_encoder:
            raise InvalidInput("model is an encoder, which generates nothing; its embed gives vectors.")
        own = map(config.of_layer, config.cache_layers)
        kv_heads, _ = self._heads_of(config)
        states = tuple(spec for layer in self.layers if (spec := layer.state_spec) is not None)
        if parallel is not None:
            states = tuple(spec.of_devices(parallel.parts("heads")) for spec in states)
        return PagedSpec(
            vocab_size=config.vocab_size,
            max_model_len=config.max_position_embeddings,
            num_layers=len(config.cache_layers),
            num_kv_heads=kv_heads if config.latent is None else 1,
            head_dim=config.head_dim,
            kv_lora_rank=None if config.latent is None else config.latent.kv_lora_rank,
            index_head_dim=config.index_head_dim,
            num_indexers=len(config.index_layers) or None,
            layer_heads=() if config.full_attention is None else tuple(self._heads_of(each) for each in own),
            states=states,
            dtype=jnp.dtype(config.dtype).name,
            sliding_window=config.sliding_window,
            layer_windows=config.layer_windows and tuple(map(config.window_of, config.cache_layers)),
            eos_token_ids=config.eos_token_ids,
            forced_eos_token_id=config.forced_eos_token_id,
        )

    def _heads_of(self, config: ModelConfig) -> tuple[int, int]:
        """Returns the key/value heads in the cache of a layer with these sizes, and the elements of a head."""
        parallel = self.parallel
        # Heads that several devices have are as many heads of the cache.
        heads = config.num_key_value_heads if parallel is None else parallel.kv_heads(config) * parallel.parts("heads")
        return heads, config.head_dim

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: tuple[jax.Array, ...],
        metadata: AttentionMetadata | GroupedMetadata,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs the new tokens of a batch of sequences and writes their keys and values; see `PagedModel.__call__`.

        The caches are those of `ModelConfig.cache_layers`; fewer where the metadata has several groups, whose layers
        share caches; then the states of each layer that has some. The hidden states are normalised, to be given to
        `logits` (pick the rows first).
        """
        *_, (hidden, new_caches) = self.paged_hidden_states(token_ids, positions, kv_caches, metadata)
        return hidden, new_caches

    def with_routed_experts(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: tuple[jax.Array, ...],
        metadata: AttentionMetadata | GroupedMetadata,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
        """Returns the results of a call and the experts of each token, int32[tokens, num_hidden_layers, top_k].

        -1 in layers without experts. `forward_dense(routed_experts=...)` takes them.
        """
        if self.config.moe is None:
            raise Unsupported("this model has no experts.")
        _, *states, (hidden, new_caches, _) = self._paged_states(token_ids, positions, kv_caches, metadata)
        none = jnp.full((token_ids.size, self.config.moe.num_experts_per_tok), -1, jnp.int32)
        experts = [none if each is None else each for _, _, each in states]
        return hidden, new_caches, jnp.stack(experts, axis=1)

    def paged_hidden_states(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: tuple[jax.Array, ...],
        metadata: AttentionMetadata | GroupedMetadata,
    ) -> Iterator[tuple[jax.Array, tuple[jax.Array, ...]]]:
        """Yields the same as `hidden_states`, for the arguments of a call, each with the caches at that point."""
        for x, caches, _ in self._paged_states(token_ids, positions, kv_caches, metadata):
            yield x, caches

    def _paged_states(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: tuple[jax.Array, ...],
        metadata: AttentionMetadata | GroupedMetadata,
    ) -> Iterator[tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None]]:
        """Yields the same, each with the experts of the layer."""
        if self.config.is_encoder:
            raise Unsupported("this model is an encoder, which has no cache and generates nothing; use embed.")
        peers, adapters = metadata.of_layer(0)[0].peers, metadata.of_layer(0)[0].adapters
        x, angles = self.embedded(token_ids, positions, peers, adapters=adapters)
        layer_inputs, count, latent = self._layer_inputs(token_ids, x), len(kv_caches), self.config.latent
        shares = latent is not None and len(latent.index_shared_layers) > 0
        # The last choice of an indexer goes from layer to layer as a cache does.
        caches = [*kv_caches, *[jnp.zeros(0, jnp.int32)] * shares]
        yield x, kv_caches, None
        # Adapters read rows as they are.
        kinds = {"quantizes": adapters is None, "is_row": adapters is None and len(x) == 1}
        normed = through(self.layers[0].input_norm(**kinds), x)
        first_state = count - sum(layer.num_states for layer in self.layers)
        indexers = self.config.index_layers
        for index, modules in enumerate(self.layers_and_norms(**kinds)):
            (own, array), places = metadata.of_layer(0), []
            if self.config.attends(index):
                own, array = metadata.of_layer(self.config.cache_of(index))
                places.append(array)
                if index in indexers:
                    places.append(len(self.config.cache_layers) + indexers.index(index))
                places += [count] * shares
            places += range(first_state, first_state := first_state + modules[0].num_states)
            if index + 1 < len(self.layers):
                own = own.of_all_rows()
            operands = x, normed, angles, tuple(caches[place] for place in places), own
            own_adapters = None if adapters is None else adapters.of_layer(index, own.result_rows)
            x, normed, updated, experts = _called(modules, own_adapters, layer_inputs[index], *operands)
            for place, cache in zip(places, updated, strict=True):
                caches[place] = cache
            yield x, tuple(caches[:count]), experts
        yield normed, tuple(caches[:count]), None

    def layers_and_norms(self, **kinds: bool) -> Iterator[tuple[DecoderLayer, Any]]:
        """Yields each layer and the norm after it, the next one's `input_norm(**kinds)` or the last; None for none."""
        norms: list[Any] = [*(layer.input_norm(**kinds) for layer in self.layers), self.norm]
        yield from zip(self.layers, norms[1:], strict=True)

    def logits(self, hidden: jax.Array, adapters: BatchAdapters | None = None) -> jax.Array:
        """Returns float32[..., vocab_size], the unnormalised log-probabilities of the next token, for chosen rows.

        Of a model that is split these are the device's part of the vocabulary, -inf if that is padding. `adapters` are
        low-rank adapters of these rows; None for none.
        """
        if self.config.is_encoder:
            raise Unsupported("this model is an encoder and has no output projection; use embed.")
        if self.lm_head is not None:
            logits = self.lm_head(hidden)
        else:
            # Not Embed.attend, which rounds the logits to the dtype of the model.
            product = tied_logits_by_row if self.batch_invariant else tied_logits
            logits = product(hidden, self.embed_tokens.embedding[...])
        if adapters is not None:
            logits = adapters.with_head(logits, hidden)
        bias = () if self.final_logits_bias is None else (self.final_logits_bias[0],)
        finish = functools.partial(rowwise, self._finished) if self.batch_invariant else self._finished
        logits = finish(logits, *bias)
        parallel, count = self.parallel, logits.shape[-1]
        if parallel is None or count * parallel.parts("vocab") == self.config.vocab_size:
            return logits
        tokens = parallel.first("vocab", count) + jnp.arange(count)
        return jnp.where(tokens < self.config.vocab_size, logits, -jnp.inf)

    def _finished(self, logits: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        logits, cap = scaled(logits, self.config.logits_scale), self.config.final_logit_softcapping
        if bias is not None:
            logits = logits + jax.lax.broadcast_to_rank(bias, logits.ndim)
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def forward_dense(
        self,
        token_ids: jax.Array,
        *,
        dropout_rate: float = 0.0,
        dropout_key: jax.Array | None = None,
        routed_experts: jax.Array | np.ndarray | None = None,
        adapters: BatchAdapters | None = None,
    ) -> jax.Array:
        """Returns float32[batch, tokens, vocab_size] for whole sequences, without a cache: training and comparison.

        Args:
            token_ids: int32[batch, tokens]; every row starts at position 0.
            dropout_rate: share of dropped elements of the embedding and of each residual branch; 0 for off.
            dropout_key: a `jax.random.key`; needed when the rate is not 0.
            routed_experts: int[batch, tokens, num_hidden_layers, top_k], experts of each token instead of those that
                the routers would choose, as a rollout recorded them (`CompletionOutput.routed_experts`). Their weights
                are computed from the routers' logits, with gradients. A negative id leaves the choice to the router.
            adapters: low-rank adapters of the rows, such as `jattn.llm.models.Adapters.batch` gives; None for none.

        Raises:
            InvalidInput: dropout_rate outside [0, 1), or not 0 without a key; experts of another shape or dtype, or ids
                that no expert has.
        """
        experts = checked_experts(routed_experts, token_ids.shape, self.config)
        dropout = checked_dropout(dropout_rate, dropout_key)
        *_, hidden = self.hidden_states(token_ids, dropout, routed_experts=experts, adapters=adapters)
        return self.logits(hidden, adapters)

    def embed(
        self, token_ids: jax.Array, lengths: jax.Array, *, pooling: str = "mean", normalize: bool = True
    ) -> jax.Array:
        """Returns float32[batch, hidden], an embedding of each row's text.

        Args:
            token_ids: int32[batch, tokens]; positions past a row's length may hold any token.
            lengths: int32[batch], real tokens of each row, at least 1.
            pooling: the "mean" of the last hidden states, that of the first token ("cls") or of the last ("last").
            normalize: divide each vector by its length.

        Raises:
            InvalidInput: another pooling.
        """
        if pooling not in ("mean", "cls", "last"):
            raise InvalidInput("pooling", value=pooling, wanted="use 'mean', 'cls' or 'last'")
        *_, hidden = self.hidden_states(token_ids, lengths=lengths)
        pooled = _pooled(hidden.astype(jnp.float32), lengths, pooling)
        return unit_length(pooled) if normalize else pooled

    def label_logits(self, token_ids: jax.Array, lengths: jax.Array, token_types: jax.Array | None = None) -> jax.Array:
        """Returns float32[batch, num_labels], the logits of a text's labels.

        Args:
            token_ids, lengths: as in `embed`.
            token_types: int32[batch, tokens], the kind of each token's text; None for the first of all.

        Raises:
            Unsupported: the model has no labels.
        """
        if self.pooler is None or self.classifier is None:
            raise Unsupported("this model has no labels; embed gives vectors.")
        *_, hidden = self.hidden_states(token_ids, lengths=lengths, token_types=token_types)
        config = self.config
        pooled = self.pooler(_pooled(hidden, lengths, config.label_pooling))
        pooled = jnp.tanh(pooled) if config.pooler_act == "tanh" else activated(config.pooler_act, pooled)
        return self.classifier(through(self.pooler_norm, pooled)).astype(jnp.float32)

    def hidden_states(
        self,
        token_ids: jax.Array,
        dropout: nnx.Dropout | None = None,
        lengths: jax.Array | None = None,
        encoded: Encoded | None = None,
        routed_experts: jax.Array | None = None,
        adapters: BatchAdapters | None = None,
        token_types: jax.Array | None = None,
    ) -> Iterator[jax.Array]:
        """Yields `[batch, tokens, hidden]` after the embedding, after each layer, and after the last norm.

        Args:
            token_ids: int32[batch, tokens], or their embeddings; every row starts at position 0.
            dropout: dropout of the embedding and of each residual branch; None for off.
            lengths: int32[batch], real tokens of each row; None for all.
            encoded: the encoder's output for cross attention, for a model with an encoder.
            routed_experts, adapters: as in `forward_dense`, or None.
            token_types: as in `label_logits`.
        """
        dropout = nnx.Dropout(0.0) if dropout is None else dropout
        positions = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
        x, angles = self.embedded(token_ids, positions, token_types=token_types, adapters=adapters)
        layer_inputs, x = self._layer_inputs(token_ids, x), dropout(x)
        yield x
        shared: KeysValues = {}
        for index, layer in enumerate(self.layers):
            experts = None if routed_experts is None else routed_experts[:, :, index]
            layer = attached(layer, None if adapters is None else adapters.of_layer(index))
            x = layer.forward_dense(x, angles, dropout, lengths, encoded, shared, experts, layer_inputs[index])
            yield x
        yield through(self.norm, x)

    def embedded(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        peers: jax.Array | None = None,
        token_types: jax.Array | None = None,
        adapters: BatchAdapters | None = None,
    ) -> tuple[jax.Array, Angles | None]:
        """Returns the first layer's input, and the attention inputs computed from positions, if any.

        `token_ids` is int32[..., tokens], or their embeddings, float[..., tokens, hidden], which have no adapters;
        positions are int32[tokens].
        """
        config = self.config
        is_embedded = jnp.issubdtype(token_ids.dtype, jnp.floating)
        x, added = token_ids if is_embedded else self._embed(token_ids, peers), []
        if adapters is not None and not is_embedded:
            x = adapters.with_embedding(x, token_ids)
        if self.position_embedding is not None:
            added.append(self.position_embedding(positions + config.position_offset))
        if self.token_type_embedding is not None:
            kinds = self.token_type_embedding
            added.append(kinds.embedding[0] if token_types is None else kinds(token_types))

        def join(x: jax.Array, *added: jax.Array) -> jax.Array:
            ranked = (jax.lax.broadcast_to_rank(each, x.ndim) for each in added)
            return functools.reduce(jnp.add, ranked, scaled(x, config.embedding_multiplier))

        x = through(self.embedding_norm, rowwise(join, x, *added) if self.batch_invariant else join(x, *added))
        if self.relative_attention_bias is not None:
            return x, relative_bias(self.relative_attention_bias.embedding[...], config)
        if config.position_embedding != "rope" or config.latent is not None:
            return x, None
        factor = attention_factor(config.rope_scaling)
        angles = local = self._angles(positions, frequencies=inverse_frequencies(config), factor=factor)
        if config.rope_local_theta is not None or config.full_attention is not None:
            local = self._angles(positions, frequencies=inverse_frequencies(config, local=True))
        factors = () if config.temperature is None else (temperature_factors(positions, config.temperature),)
        return x, (angles, local, *factors)

    def _layer_inputs(self, token_ids: jax.Array, x: jax.Array) -> Sequence[jax.Array | None]:
        """Returns the further input of each layer, of tokens and their embeddings; None for none."""
        given = self.per_layer_inputs
        return [None] * len(self.layers) if given is None else given(token_ids, x)

    def _angles(self, positions: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
        angles = functools.partial(rotary_angles, **options)
        return rowwise(angles, positions, trailing=0) if self.batch_invariant else angles(positions)

    def _embed(self, token_ids: jax.Array, peers: jax.Array | None) -> jax.Array:
        if self.parallel is None:
            return self._rows(token_ids)
        return self.parallel.looked_up(self._rows, token_ids, self.embed_tokens.num_embeddings, peers)

    def _rows(self, token_ids: jax.Array) -> jax.Array:
        if not self.batch_invariant:
            return self.embed_tokens(token_ids)
        return look_up(self.embed_tokens.embedding[...], token_ids)


def unit_length(vectors: jax.Array) -> jax.Array:
    """Returns `[..., size]` vectors divided by their lengths."""
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)


def _pooled(hidden: jax.Array, lengths: jax.Array, pooling: str) -> jax.Array:
    """Returns [batch, hidden] of [batch, tokens, hidden]; see `Decoder.embed`."""
    places = jnp.arange(hidden.shape[1])
    if pooling == "mean":
        chosen = (places < lengths[:, None]) / lengths[:, None]
    else:
        chosen = places == (0 if pooling == "cls" else lengths[:, None] - 1)
    chosen = jnp.broadcast_to(chosen, hidden.shape[:2])[..., None]
    # Not a product with 0: padding may hold anything, and 0 times NaN is NaN.
    return jnp.where(chosen > 0, hidden * chosen, 0).sum(1).astype(hidden.dtype)


def tied_logits(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    """Returns float32[..., vocab_size] by an embedding [vocab_size, hidden_size]."""
    return jnp.einsum("...e,ve->...v", hidden, embedding, preferred_element_type=jnp.float32)


def tied_logits_by_row(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    """Returns the same by `row_product`."""
    rows = row_product(hidden.reshape(-1, hidden.shape[-1]), embedding, transposed=True, out_dtype="float32")
    return rows.reshape(*hidden.shape[:-1], -1)


def checked_dropout(rate: float, key: jax.Array | None) -> nnx.Dropout:
    """Returns the dropout of a forward pass, and raises InvalidInput for a wrong rate or a missing key."""
    if not 0.0 <= rate < 1.0:
        raise InvalidInput("dropout_rate", f"is {rate}", "it must be at least 0 and less than 1")
    if rate and key is None:
        raise InvalidInput("dropout_rate", f"is {rate} but dropout_key is None", "pass a jax.random.key")
    return nnx.Dropout(rate, rngs=None if key is None else nnx.Rngs(dropout=key))


def checked_experts(experts: Any, shape: tuple[int, ...], config: ModelConfig) -> jax.Array | None:
    """Returns the experts of a forward pass over tokens of a shape as an array, or raises InvalidInput."""
    moe = config.moe
    if experts is None:
        return None
    if moe is None:
        raise InvalidInput("routed_experts", "is given and the model has no experts", "leave it out")
    wanted = (*shape, config.num_hidden_layers, moe.num_experts_per_tok)
    if not isinstance(experts, jax.Array | np.ndarray):
        raise InvalidInput("routed_experts", f"is a {type(experts).__name__}", "it must be an array")
    if experts.shape != wanted or not jnp.issubdtype(experts.dtype, jnp.signedinteger):
        problem = f"is {experts.dtype}{list(experts.shape)}"
        raise InvalidInput("routed_experts", problem, f"it must be signed ints of shape {list(wanted)}")
    if not isinstance(experts, Tracer) and (bad := np.argwhere(np.asarray(experts) >= moe.num_experts)).size:
        place = tuple(bad[0].tolist())
        problem = f"is {int(np.asarray(experts)[place])}"
        raise InvalidInput(f"routed_experts[{', '.join(map(str, place))}]", problem, f"ids are below {moe.num_experts}")
    return jnp.asarray(experts)


def _called(
    modules: tuple[DecoderLayer, Any], adapters: LayerAdapters | None, layer_input: jax.Array | None, *operands: Any
) -> Any:
    """Calls a layer with the norm that follows it; in a program, equal pairs are traced and lowered once.

    The last layer is for itself where the model's last norm is unlike that of a layer's input, or one is missing.
    """
    *_, metadata = operands
    # The host checks known values; a separate function would hide them, and the layer's notes too.
    if isinstance(metadata.seq_lens, Tracer):
        graph, weights, noted = nnx.split(modules, nnx.Param, ...)
        if not noted:
            return _traced_once(weights, adapters, layer_input, *operands, graph=graph)
    layer, following = modules
    return attached(layer, adapters)(*operands, following=following, layer_input=layer_input)


@functools.partial(jax.jit, static_argnames="graph")
def _traced_once(
    weights: Any, adapters: LayerAdapters | None, layer_input: jax.Array | None, *operands: Any, graph: Any
) -> Any:
    layer, following = cast(tuple[DecoderLayer, Any], nnx.merge(graph, weights))
    return attached(layer, adapters)(*operands, following=following, layer_input=layer_input)
