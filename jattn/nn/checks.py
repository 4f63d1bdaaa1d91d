"""Checks of the modules' arguments, at construction and before a call runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jattn.metadata import AttentionMetadata
from jattn.nn.dense import attention_fn as own_attention_fn
from jattn.nn.options import MAX_SIZE, CacheScale, check_arrays
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import KV_CACHE_DTYPES

POSITIONS_WITHOUT_ROPE = "input_positions is given and the module has no rope; build it with one, or leave them out."
# The names are vLLM's.
_ATTENTION_TYPES = ("decoder", "encoder_only", "encoder_decoder")


def checked_features(
    num_heads: int,
    qkv_features: int | None,
    head_dim: int | None,
    *,
    num_kv_heads: int | None,
    attention_fn: Any,
    own_fn: Any,
) -> int | None:
    """Checks the sizes of a module and returns qkv_features, from head_dim if that is given; None for the default."""
    if attention_fn not in (None, own_fn, own_attention_fn):
        raise Unsupported(
            "attention_fn is a function of your own; this module computes attention itself, so that training and "
            "paged decoding agree. Give your function to flax's module."
        )
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "qkv_features": qkv_features}
    for name, size in sizes.items():
        if size is not None and not 1 <= size <= MAX_SIZE:
            raise InvalidInput(name, f"is {size}", f"it must be from 1 to {MAX_SIZE}")
    if head_dim is None:
        return qkv_features
    if qkv_features not in (None, num_heads * head_dim):
        raise InvalidInput(f"qkv_features is {qkv_features} and head_dim {head_dim} with {num_heads} heads; give one.")
    return num_heads * head_dim


def check_attention_type(attention_type: str, rope: Any) -> None:
    """Checks attention_type, and that cross attention has no rope."""
    if attention_type not in _ATTENTION_TYPES:
        wanted = f"use one of {', '.join(map(repr, _ATTENTION_TYPES))}"
        raise InvalidInput("attention_type", value=attention_type, wanted=wanted)
    if attention_type == "encoder_decoder" and rope is not None:
        raise InvalidInput("rope is given with 'encoder_decoder'; queries and an encoder's keys share no positions.")


def check_cache_dtype(dtype: Any, k_scale: CacheScale, v_scale: CacheScale) -> None:
    """Checks the dtype of a cache; int8 needs scales."""
    if dtype is None:
        return
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    # Only jnp serves float64; it is for checks of a model.
    if name not in (*KV_CACHE_DTYPES, "float64"):
        raise InvalidInput(f"the cache's dtype is {name}; it must be one of {', '.join(KV_CACHE_DTYPES)}.")
    if name == "int8" and (k_scale is None or v_scale is None):
        raise InvalidInput("kv_cache_dtype is int8 and k_scale or v_scale is None; int8 without scales keeps nothing.")


def check_inputs(
    module: Any, inputs_q: Any, inputs_k: Any, inputs_v: Any, input_positions: Any, shared_kv: Any, *, cached: bool
) -> None:
    """Checks that the inputs of a call match the module and each other, and its weights the number of heads."""
    _check_heads(module)
    if input_positions is not None and module.rope is None:
        raise InvalidInput(POSITIONS_WITHOUT_ROPE)
    arrays = {"inputs_q": inputs_q, "inputs_k": inputs_k, "inputs_v": inputs_v}
    check_arrays(**{name: array for name, array in arrays.items() if array is not None or name == "inputs_q"})
    if inputs_q.ndim < 2 or inputs_q.shape[-1] != module.in_features:
        raise InvalidInput("inputs_q", f"has shape {inputs_q.shape}", f"it must be [..., length, {module.in_features}]")
    for name in ("inputs_k", "inputs_v"):
        array = arrays[name]
        if array is not None and (array.ndim < 2 or array.shape[-1] != module.in_kv_features):
            raise InvalidInput(name, f"has shape {array.shape}", f"it must be [..., length, {module.in_kv_features}]")
    if inputs_k is None and inputs_v is not None:
        raise InvalidInput("inputs_v", "is given without inputs_k", "pass inputs_k alone where both are the same")
    new_keys = inputs_q.shape[-2] if inputs_k is None else inputs_k.shape[-2]
    if cached and module.attention_type == "decoder" and new_keys != inputs_q.shape[-2]:
        raise InvalidInput(
            f"inputs_k has {new_keys} tokens and inputs_q {inputs_q.shape[-2]}; with a cache a decoder's are the same "
            "tokens. For an encoder's build the layer with attention_type='encoder_decoder'."
        )
    if module.kv_sharing and (inputs_k is not None or (shared_kv is not None and cached)):
        raise InvalidInput("a layer that shares keys and values takes shared_kv without a cache, and no inputs_k.")
    if shared_kv is not None and not module.kv_sharing:
        raise InvalidInput("shared_kv", "is given, and the layer was built without kv_sharing=True")


def check_explicit(module: Any, cache: Any, metadata: Any, lengths: Sequence[Any]) -> None:
    """Checks that cache and metadata are given together, and without lengths."""
    if (cache is None) != (metadata is None):
        raise InvalidInput("one of cache and metadata is None; an explicit cache needs both.")
    if cache is None:
        return
    check_metadata(metadata)
    if module.attention_type == "encoder_only":
        raise Unsupported("a layer of type 'encoder_only' takes no cache; attend to the whole input at once.")
    refuse_donated("cache", cache, "use the one that the step returned.")
    if any(given is not None for given in lengths):
        raise InvalidInput("lengths", "are given beside metadata, which has them", "leave them out")


def check_packed(inputs: Any, features: int, name: str, given: Any, metadata: Any) -> None:
    """Checks the inputs of a layer that takes packed tokens if caches or states, by their name, are given."""
    if (given is None) != (metadata is None):
        raise InvalidInput(f"one of {name} and metadata is None; the metadata of a step says how to read the {name}.")
    check_arrays(inputs=inputs)
    if given is not None:
        check_metadata(metadata)
        for leaf in jax.tree.leaves(given) or [given]:
            check_arrays(**{name: leaf})
    fits = inputs.ndim >= 2 if metadata is None else inputs.ndim == 2
    if not fits or inputs.shape[-1] != features:
        wanted = "[batch..., length, {}]" if metadata is None else "[tokens, {}]"
        raise InvalidInput("inputs", f"has shape {inputs.shape}", f"it must be {wanted.format(features)}")


def check_metadata(metadata: Any) -> None:
    """Raises InvalidInput for what is no metadata of a step."""
    if not isinstance(metadata, AttentionMetadata):
        raise InvalidInput("metadata", f"is a {type(metadata).__name__}", "use AttentionMetadata.build")


def refuse_with_cache(given: Mapping[str, bool]) -> None:
    """Raises Unsupported for arguments that a call with a paged cache does not serve."""
    what = next((name for name, is_given in given.items() if is_given), None)
    if what is not None:
        raise Unsupported(what, "with a cache", "use lengths for padding, deterministic=True and no sow_weights")


def refuse_donated(name: str, cache: Any, fix: str) -> None:
    """Raises InvalidInput if an array of a cache is deleted; JAX's own error would name neither cause nor fix."""
    # A cache that was read from a file may have numpy arrays.
    arrays = [array for array in jax.tree.leaves(cache) if isinstance(array, jax.Array)]
    if any(not isinstance(array, Tracer) and array.is_deleted() for array in arrays):
        raise InvalidInput(f"{name} was donated to a step and is deleted; {fix}")


def _check_heads(module: Any) -> None:
    kernels = {name: getattr(getattr(module, name), "kernel", None) for name in ("query", "key", "value")}
    shapes = {name: kernel.shape for name, kernel in kernels.items() if kernel is not None}
    heads = {name: shape[-2] for name, shape in shapes.items()}
    for name in ("key", "value"):
        # A device may have a part of the heads, in the same ratio.
        if {name, "query"} <= heads.keys() and heads[name] * module.num_heads != heads["query"] * module.num_kv_heads:
            wanted = f"num_kv_heads and head_dim need [..., {module.num_kv_heads}, {module.head_dim}]"
            raise InvalidInput(f"{name}.kernel", f"has shape {shapes[name]}", f"{wanted}; load such weights")
