"""`Served`: a module with any call as a `PagedModel`, and the cache that its attention layers are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack, cast, overload

import jax
from flax import nnx

from jattn import ops
from jattn.llm.models.paged_model import PagedSpec
from jattn.metadata import AttentionMetadata
from jattn.nn import PagedAttention
from torch_core.base.errors import InvalidInput


class Served(nnx.Module):
    """Any `nnx.Module` as a `PagedModel`: its layers run as they are, and attend by the cache that they are given.

    Args:
        model: the module. Its arrays are those of the engine: training it in place, `Engine(follow=True)` and
            `update_weights(state, prefix="model")` work as with other models.
        spec: sizes and limits.
        forward: `forward(model, token_ids, positions, cache)` runs the model. It is given a copy of the module with the
            same arrays, in which it may replace parts (the attention of each layer, for example) and switch to
            evaluation; int32[1, tokens] twice, the tokens of all sequences and their positions; and a `PagedCache`
            with one entry for each layer. It returns logits [1, tokens, vocab_size], or hidden states if `logits` is
            given.
        num_heads: number of query heads of each layer.
        logits: `logits(model, hidden)`, from hidden states [1, rows, ...] of chosen tokens. Without it, the model
            computes the logits of every token of a prompt, of which the engine reads the last one's.
        implementation: "triton", "torch", "xla", or None for the fastest that serves the calls.

    Attributes:
        model: the module.
        layers: the attention of each layer with a cache.

    Raises:
        InvalidInput: no nnx.Module, PagedSpec or function, a number of heads that does not fit, or a spec with latents,
            recurrent states or an encoder.

    Example:
        >>> import jax.numpy as jnp
        >>> class Bag(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.embed = nnx.Embed(16, 8, rngs=rngs)
        ...     def __call__(self, token_ids, cache):
        ...         x = self.embed(token_ids)
        ...         heads = x.reshape(*x.shape[:-1], 2, 4)
        ...         return self.embed.attend(cache.attend(heads, heads, heads).reshape(x.shape))
        >>> spec = PagedSpec(vocab_size=16, max_model_len=64, num_layers=1, num_kv_heads=2, head_dim=4)
        >>> served = Served(
        ...     Bag(nnx.Rngs(0)), spec, lambda model, tokens, positions, cache: model(tokens, cache[0]), num_heads=2
        ... )
        >>> served.paged_spec.num_layers
        1
    """

    batch_invariant: bool = False

    def __init__(
        self,
        model: nnx.Module,
        spec: PagedSpec,
        forward: Callable[[Any, jax.Array, jax.Array, PagedCache], jax.Array],
        *,
        num_heads: int,
        logits: Callable[[Any, jax.Array], jax.Array] | None = None,
        implementation: str | None = None,
    ) -> None:
        for name, value, kind in (("model", model, nnx.Module), ("spec", spec, PagedSpec)):
            if not isinstance(value, kind):
                raise InvalidInput(name, f"is a {type(value).__name__}", f"it must be {kind.__name__}")
        for name in ("kv_lora_rank", "layer_heads", "states", "max_encoder_len"):
            if getattr(spec, name):
                wanted = "Served has layers with keys and values alone; write a PagedModel, with layers of jattn.nn"
                raise InvalidInput(f"spec.{name}", value=getattr(spec, name), wanted=wanted)
        for name, value in (("forward", forward), ("logits", logits)):
            if not callable(value) and not (name == "logits" and value is None):
                raise InvalidInput(name, f"is a {type(value).__name__}", "it must be a function")
        self.model, self.paged_spec = model, spec
        self.layers = nnx.List(
            PagedAttention(
                num_heads,
                spec.head_dim,
                num_kv_heads=spec.num_kv_heads,
                sliding_window=window,
                implementation=cast(Any, implementation),
            )
            for window in spec.windows
        )
        self._forward, self._logits = forward, logits

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, kv_caches: tuple[jax.Array, ...], metadata: AttentionMetadata
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs `forward`; see `PagedModel`."""
        cache = PagedCache(self.layers, kv_caches, metadata)
        found: Any = self._forward(_copied(self.model), token_ids[None], positions[None], cache)
        if getattr(found, "shape", ())[:2] != (1, token_ids.size):
            problem = f"is {_shape_of(found)}"
            raise InvalidInput("the result of forward", problem, f"it must be an array [1, {token_ids.size}, ...]")
        return found[0], cache.arrays()

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits of chosen tokens; see `PagedModel`."""
        return hidden if self._logits is None else self._logits(_copied(self.model), hidden[None])[0]


class PagedCache(Sequence["LayerCache"]):
    """The cache of a step: a sequence with the `LayerCache` of each layer.

    Attributes:
        metadata: metadata of the step.
    """

    def __init__(
        self, layers: Sequence[PagedAttention], kv_caches: tuple[jax.Array, ...], metadata: AttentionMetadata
    ) -> None:
        self.metadata = metadata
        # Layers of several groups share arrays.
        self._arrays = [CacheArray(array) for array in kv_caches]
        self._layers = []
        for layer, core in enumerate(layers):
            of_layer, index = metadata.of_layer(layer)
            self._layers.append(LayerCache(layer, core, self._arrays[index], of_layer))

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> LayerCache: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerCache]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._layers[index]

    def arrays(self) -> tuple[jax.Array, ...]:
        """Returns the arrays with the keys and values that were written.

        Raises:
            InvalidInput: a layer wrote nothing.
        """
        unwritten = [layer.layer for layer in self._layers if not layer.is_written]
        if unwritten:
            raise InvalidInput(
                f"forward did not call attend of cache[{unwritten[0]}] ({len(unwritten)} of {len(self)} layers), or "
                "called it inside jax.checkpoint or jax.jit, which lose the written keys and values: use nnx.remat "
                "and nnx.jit."
            )
        return tuple(array.get_value() for array in self._arrays)


class CacheArray(nnx.Variable):
    """A cache array of a step."""


class LayerCache(nnx.Module):
    """The cache of one layer in one step. It changes where it is: nothing has to be returned.

    Attributes:
        layer: index of the layer.
        metadata: the batch of the step.
    """

    def __init__(self, layer: int, core: PagedAttention, array: CacheArray, metadata: AttentionMetadata) -> None:
        self.layer, self._core, self._array = layer, core, array
        self.metadata = nnx.data(metadata)
        self.is_written = False

    def attend(
        self,
        query: jax.Array,
        key: jax.Array | None,
        value: jax.Array | None,
        *,
        scale: float | None = None,
        logits_soft_cap: float | None = None,
        **options: Unpack[ops.PagedOptions],
    ) -> jax.Array:
        """Writes the keys and values of the step's tokens, and attends to all earlier ones of each sequence.

        Masks are the engine's: causal, each sequence by itself, and the layer's window.

        Args:
            query: float[..., num_heads, head_dim], with the rotary embedding applied. The leading axes are those of the
                tokens, [tokens] or [1, tokens].
            key, value: float[..., num_kv_heads, head_dim]; None if the layer writes nothing and reads another's cache.
            scale: factor on the scores; head_dim ** -0.5 by default.
            logits_soft_cap: cap on the scores; None for no cap.
            **options: further keywords of `jattn.paged_attention`, such as sinks.

        Returns:
            The output, with the shape of query.

        Raises:
            InvalidInput: other shapes.
        """
        packed: Any = [None if array is None else array.reshape(-1, *array.shape[-2:]) for array in (query, key, value)]
        further: Any = {"scale": scale, "logits_soft_cap": logits_soft_cap, **options}
        output, array = self._core(*packed, kv_cache=self._array.get_value(), metadata=self.metadata, **further)
        self._array.set_value(array)
        self.is_written = True
        return output.reshape(query.shape)


def _copied(model: nnx.Module) -> Any:
    return nnx.merge(*nnx.split(model))


def _shape_of(found: Any) -> str:
    shape = getattr(found, "shape", None)
    return f"a {type(found).__name__}" if shape is None else f"of shape {shape}"
