"""tunix's language models as models of the engine: `served`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models import LayerCache, PagedCache, PagedSpec, Served
from torch_core.base.errors import Unsupported


def served(model: nnx.Module, *, max_model_len: int) -> Served:
    """Returns a model of tunix for `Engine` and `LLM`; nothing is copied.

    Args:
        model: a Gemma 3, Llama 3, Qwen 2 or Qwen 3 of `tunix.models`, with qwix's LoRA or without.
        max_model_len: most tokens of one sequence.

    Raises:
        Unsupported: another architecture.
    """
    source: Any = model
    layers = getattr(source, "layers", ())
    if not layers or _home(model).split(".")[-2:-1] not in (["gemma3"], ["llama3"], ["qwen2"], ["qwen3"]):
        raise Unsupported(
            f"model is a {type(model).__name__}; Gemma 3, Llama 3, Qwen 2 and Qwen 3 of tunix.models are served. Give "
            "a jattn.llm.models.Served of another model."
        )
    embedding = source.embedder.input_embedding
    num_heads, head_dim, _ = _output(layers[0].attn).shape
    windows = tuple(map(_window, layers))
    spec = PagedSpec(
        vocab_size=embedding.shape[0],
        max_model_len=max_model_len,
        num_layers=len(layers),
        num_kv_heads=source.config.num_kv_heads,
        head_dim=head_dim,
        dtype=jnp.dtype(getattr(source.config, "dtype", embedding.dtype)).name,
        layer_windows=windows if any(windows) else (),
    )
    return Served(model, spec, _hidden, logits=_logits, num_heads=num_heads)


def _hidden(model: Any, token_ids: jax.Array, positions: jax.Array, cache: PagedCache) -> jax.Array:
    layers = [_Layer(layer, each) for layer, each in zip(model.layers, cache, strict=True)]
    model.layers, norm = nnx.List(layers), _Recorded(model.final_norm)
    model.final_norm = norm
    # The model computes the logits of all tokens too; nothing reads them, so XLA removes them.
    model(token_ids, positions, None, None)
    return norm.output


def _logits(model: Any, hidden: jax.Array) -> jax.Array:
    # A call of the whole model: qwix applies LoRA in calls of the model that it changed.
    model.layers, model.final_norm, model.embedder.encode = nnx.List([]), _same, _same
    found, _ = model(hidden, jnp.zeros(hidden.shape[:2], jnp.int32), None, None)
    return found


class _Layer(nnx.Module):
    """A layer of tunix over the engine's cache, without its gradient checkpoint, which loses writes."""

    def __init__(self, layer: Any, cache: LayerCache) -> None:
        layer.attn = _Attention(layer.attn, cache)
        self.layer = layer

    def __call__(self, *args: Any, **options: Any) -> tuple[None, jax.Array]:
        return self.layer.block(*args, **options)


class _Attention(nnx.Module):
    """An attention layer of tunix over the engine's cache."""

    def __init__(self, layer: Any, cache: LayerCache) -> None:
        self.layer, self.cache = layer, cache

    def __call__(self, x: jax.Array, position: Any, *_: Any, **rest: Any) -> tuple[None, jax.Array]:
        layer = self.layer
        # The functions of its family.
        family: Any = sys.modules[_home(layer)]
        if hasattr(layer, "attn_vec_einsum"):
            query, key, value = (
                layer.qkv_einsum(x) if layer.use_qkv_einsum else (layer.q_einsum(x), *layer.kv_einsum(x))
            )
            query, key, scale = layer._query_norm(query), layer._key_norm(key), layer.query_pre_attn_scalar
            options = {"base_frequency": layer.rope_base_frequency, "scale_factor": layer.rope_scale_factor}
        else:
            query, key, value, scale, options = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x), layer.scale, {}
        if hasattr(layer, "q_norm"):
            query, key = layer.q_norm(query), layer.k_norm(key)
        if hasattr(layer, "q_bias"):
            query, key, value = (
                each + bias[...].astype(each.dtype).reshape(each.shape[2:])
                for each, bias in ((query, layer.q_bias), (key, layer.k_bias), (value, layer.v_bias))
            )
            query, key = (family.apply_rotary_embedding(each, rest["sin"], rest["cos"]) for each in (query, key))
        else:
            options["head_dim"] = layer.head_dim
            query, key = (family.apply_rope(each, position, **options) for each in (query, key))
        return None, _output(layer)(self.cache.attend(query, key, value, scale=scale))


class _Recorded(nnx.Module):
    """The last norm of a model, which keeps its output."""

    def __init__(self, norm: Any) -> None:
        self.norm: Any = norm
        self.output: Any = None

    def __call__(self, x: jax.Array) -> jax.Array:
        self.output = self.norm(x)
        return self.output


def _home(module: nnx.Module) -> str:
    # qwix makes a class of its own of the class of a model.
    homes = [base.__module__ for base in type(module).__mro__]
    return next((home for home in homes if home.startswith("tunix.")), "")


def _same(x: jax.Array) -> jax.Array:
    return x


def _output(attention: Any) -> Any:
    return attention.attn_vec_einsum if hasattr(attention, "attn_vec_einsum") else attention.o_proj


def _window(layer: Any) -> int | None:
    kind = getattr(layer.attn, "attn_type", None)
    return layer.attn.sliding_window_size if kind is not None and kind.name == "LOCAL_SLIDING" else None
