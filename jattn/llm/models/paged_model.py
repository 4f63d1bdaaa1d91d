"""PagedModel: the methods that the engine calls on a model, and the facts that it needs about one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeAlias

import jax

from jattn.llm.models.request_inputs import declared
from jattn.metadata import AttentionMetadata
from torch_core.base.checks import INT32_MAX, check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Limits, check_fields
from torch_core.base.specs import KVCacheSpec, LatentCacheSpec, StateCacheSpec

Window: TypeAlias = Annotated[int | None, Limits(1, INT32_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSpec:
    """The facts that an engine needs about a model.

    Attributes:
        vocab_size: size of the vocabulary; token ids are below it.
        max_model_len: most tokens of one sequence.
        num_layers: number of layers with a cache.
        num_kv_heads: number of key and value heads of each layer.
        head_dim: elements of one head.
        layer_heads: number of key and value heads and elements of one head, for each layer, if layers differ; empty
            otherwise. A layer's array may be one of other sizes with blocks of as many bytes: the layer reshapes it.
        kv_lora_rank: number of elements of a latent, in layers of `jattn.MultiHeadLatentAttention`. Then num_kv_heads
            is 1, and head_dim is the size of the rotary key after a latent. None for keys and values.
        index_head_dim: number of elements of an indexer's key, in layers of `jattn.nn.SparseLatentAttention`. Each
            layer has a second cache for these keys; the second caches come after the first caches of all layers. None
            without.
        num_indexers: number of layers with an indexer, if not all have one.
        states: layouts of the layers with a recurrent state, such as `jattn.nn.ShortConv.state_spec()`. Their arrays
            come after all caches, those of a layer one after the other.
        dtype: dtype of the keys and values that the layers write, by name.
        sliding_window: number of tokens that every layer sees, including the query's own: blocks outside the window are
            freed. None if a layer sees all tokens.
        layer_windows: window of each layer, in tokens, if layers differ, None for a layer with full attention; empty
            otherwise. Layers with the same window then have their own blocks, and the model must ask its metadata for
            each layer's part.
        eos_token_ids: tokens that end a generation.
        max_encoder_len: most tokens of an encoder's input, in a model with an `encode`; 0 without one. A prompt is then
            the encoder's input, and a generation starts with decoder_start_token_id.
        decoder_start_token_id: first token of a generation; None without an encoder.
        forced_bos_token_id: token that always follows it; None for none.
        forced_eos_token_id: the last token of a generation of max_tokens, instead of the sampled one; None for none.
        inputs: numbers that each request brings (`Engine.add(inputs=...)`), as names and dtypes, int32 or float32, or
            a range of int32: {"adapter": range(8)}. A step's are in `metadata.inputs`. Kept as pairs.

    Raises:
        InvalidInput: a value is out of range.
        Unsupported: no cache has the dtype.

    Example:
        >>> PagedSpec(vocab_size=16, max_model_len=64, num_layers=2, num_kv_heads=2, head_dim=8).cache_spec(4).shape(10)
        (10, 2, 4, 2, 8)
    """

    vocab_size: Annotated[int, Limits(1, INT32_MAX)]
    max_model_len: Annotated[int, Limits(1, INT32_MAX)]
    num_layers: Annotated[int, Limits(1, INT32_MAX)]
    num_kv_heads: int
    head_dim: int
    layer_heads: tuple[tuple[int, int], ...] = ()
    kv_lora_rank: int | None = None
    index_head_dim: int | None = None
    num_indexers: Annotated[int | None, Limits(1, INT32_MAX)] = None
    states: tuple[StateCacheSpec, ...] = ()
    dtype: str = "float32"
    sliding_window: Window = None
    layer_windows: tuple[Window, ...] = ()
    eos_token_ids: Annotated[tuple[int, ...], Limits(wanted="a tuple of token ids")] = ()
    max_encoder_len: Annotated[int, Limits(0, INT32_MAX)] = 0
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    inputs: Any = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", declared(self.inputs))
        check_fields(self)
        for name in ("layer_windows", "layer_heads"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                wanted = f"it must be a tuple of one entry for each of the {self.num_layers} layers, or empty"
                raise InvalidInput(name, value=getattr(self, name), wanted=wanted)
        if self.layer_heads and self.kv_lora_rank is not None:
            raise InvalidInput("layer_heads", value=self.layer_heads, wanted="latents are alike in all layers")
        if self.layer_windows and self.sliding_window is not None:
            wanted = "the first is for all layers, the second where they differ: leave one out"
            raise InvalidInput("sliding_window", f"is {self.sliding_window} and layer_windows is given", wanted)
        for index, token in enumerate(self.eos_token_ids):
            check_int(f"eos_token_ids[{index}]", token, 0, self.vocab_size - 1)
        for name in ("forced_eos_token_id", *(["forced_bos_token_id"] if self.max_encoder_len else [])):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, self.vocab_size - 1)
        if self.max_encoder_len:
            check_int("decoder_start_token_id", self.decoder_start_token_id, 0, self.vocab_size - 1)
        elif self.decoder_start_token_id is not None:
            problem = f"is {self.decoder_start_token_id!r} and max_encoder_len 0"
            wanted = "a model without an encoder starts with its prompt: leave it None"
            raise InvalidInput("decoder_start_token_id", problem, wanted)
        if self.kv_lora_rank is not None and self.num_kv_heads != 1:
            wanted = "with kv_lora_rank it is 1: all heads share a latent"
            raise InvalidInput("num_kv_heads", value=self.num_kv_heads, wanted=wanted)
        if self.index_head_dim is not None and (self.kv_lora_rank is None or any(self.windows)):
            wanted = "an indexer needs kv_lora_rank, and layers that see all: leave windows out"
            raise InvalidInput("index_head_dim", value=self.index_head_dim, wanted=wanted)
        self.cache_specs(block_size=1)
        self.further_specs(block_size=1)

    @property
    def num_arrays(self) -> int:
        """Arrays of all caches, if no layers share one."""
        return self.num_layers + len(self.further_specs(block_size=1))

    @property
    def num_state_arrays(self) -> int:
        """Arrays of states."""
        return sum(len(spec.shapes) for spec in self.states)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with a cache."""
        return self.layer_windows or (self.sliding_window,) * self.num_layers

    def cache_spec(self, block_size: int) -> KVCacheSpec | LatentCacheSpec:
        """Returns the layout of a layer's cache in blocks of `block_size` tokens, of `num_kv_heads` and `head_dim`."""
        if self.kv_lora_rank is not None:
            return LatentCacheSpec(
                kv_lora_rank=self.kv_lora_rank, rope_dim=self.head_dim, block_size=block_size, dtype=self.dtype
            )
        return KVCacheSpec(
            num_kv_heads=self.num_kv_heads, head_size=self.head_dim, block_size=block_size, dtype=self.dtype
        )

    def cache_specs(self, block_size: int) -> list[KVCacheSpec | LatentCacheSpec]:
        """Returns the layout of each layer's own cache in blocks of `block_size` tokens; see `layer_heads`."""
        if not self.layer_heads:
            return [self.cache_spec(block_size)] * self.num_layers
        options: dict[str, Any] = {"block_size": block_size, "dtype": self.dtype}
        return [KVCacheSpec(num_kv_heads=heads, head_size=size, **options) for heads, size in self.layer_heads]

    def further_specs(self, block_size: int) -> list[LatentCacheSpec]:
        """Returns the layouts of the layers' further caches; see `index_head_dim`."""
        if self.index_head_dim is None:
            return []
        rest = self.index_head_dim - self.head_dim
        spec = LatentCacheSpec(kv_lora_rank=self.head_dim, rope_dim=rest, block_size=block_size, dtype=self.dtype)
        return [spec] * (self.num_indexers or self.num_layers)


class PagedModel(Protocol):
    """A language model that `Engine` and `LLM` serve: any `nnx.Module` with these three members; `EncoderModel` has one
    more.

    `paged_spec` may be an attribute of the class or of the instance. A linen module needs a subclass of
    `nnx.bridge.ToNNX` with `paged_spec` as a class attribute; its own `logits` method is found by name.
    """

    @property
    def paged_spec(self) -> PagedSpec:
        """Sizes and limits."""
        ...

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, kv_caches: tuple[jax.Array, ...], metadata: AttentionMetadata
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs the new tokens of a batch of sequences, packed into one axis, and writes their keys and values.

        Args:
            token_ids: int32[tokens]. Padding may be any token below vocab_size.
            positions: int32[tokens]; the position of each token in its own sequence, from 0.
            kv_caches: one `(num_blocks, 2, block_size, num_kv_heads, head_dim)` array per layer, or one of latents,
                `(num_blocks, block_size, kv_lora_rank + head_dim)`, and, with `index_head_dim`, after all of them one
                `(num_blocks, block_size, index_head_dim)` per layer; donated.
            metadata: metadata of the step, for `jattn.MultiHeadAttention(cache=...)` or `jattn.PagedAttention`. A model
                with `layer_windows` asks it for each layer: `metadata, index = metadata.of_layer(layer)`, where index
                is that of the layer's array; several layers may share one, so each passes on the updated array. The
                metadata may then be a `jattn.metadata.GroupedMetadata`. With `states`, `metadata.states` (of any layer)
                are keywords of the ops that keep them.

        Returns:
            Hidden states `[tokens, ...]` and the caches with the new keys and values.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns float32[rows, vocab_size] for chosen rows of the hidden states."""
        ...


class RoutedModel(PagedModel, Protocol):
    """A PagedModel that says which experts its tokens are routed to, for `enable_return_routed_experts`."""

    def with_routed_experts(
        self, token_ids: jax.Array, positions: jax.Array, kv_caches: tuple[jax.Array, ...], metadata: AttentionMetadata
    ) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
        """Returns the results of a call and int[tokens, layers, top_k], the experts of each token; -1 for none."""
        ...


class EncoderModel(PagedModel, Protocol):
    """A PagedModel that reads its prompts with an encoder first: its `paged_spec` has a `max_encoder_len`.

    Its `__call__` finds the blocks of each sequence's input in `metadata.cross`.
    """

    def encode(
        self, token_ids: jax.Array, positions: jax.Array, kv_caches: tuple[jax.Array, ...], metadata: AttentionMetadata
    ) -> tuple[jax.Array, ...]:
        """Runs the encoder over whole inputs, packed into one axis, and writes the keys and values of cross attention.

        Args:
            token_ids, positions, kv_caches, metadata: as in `PagedModel.__call__`; every sequence starts at 0.

        Returns:
            The caches, with keys and values of every layer's cross attention in the slots of `metadata`.
        """
        ...
