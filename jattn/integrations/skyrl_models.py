"""SkyRL-tx's language models as models of the engine: `served`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from skyrl.tx.layers.rotary_embedding import apply_rope  # pyright: ignore[reportMissingImports]

from jattn.llm.models import LayerCache, PagedCache, PagedSpec, Served
from torch_core.base.errors import Unsupported

_DIGIT = 128


def served(model: nnx.Module, *, max_model_len: int) -> Served:
    """Returns a model of SkyRL-tx for `Engine` and `LLM`; nothing is copied.

    A model with LoRA adapters takes the index of each request's: `inputs={"adapter": 1}`; 0 is the base model's.

    Args:
        model: a `Qwen3ForCausalLM` or `Llama3ForCausalLM`.
        max_model_len: most tokens of one sequence.

    Raises:
        Unsupported: another architecture.
    """
    source: Any = model
    if type(model).__module__.split(".")[-1] not in ("qwen3", "llama3"):
        wanted = "Qwen 3 and Llama 3 of skyrl.tx.models are served. Give a jattn.llm.models.Served of another model"
        raise Unsupported("model", f"is a {type(model).__name__}", wanted)
    config, first = source.config, source.model.layers[0].self_attn
    spec = PagedSpec(
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        num_layers=config.num_hidden_layers,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        dtype=jnp.dtype(first.o_proj.kernel[...].dtype).name,
        inputs={"adapter": range(config.max_lora_adapters)} if config.max_lora_adapters else {},
    )
    return Served(model, spec, _hidden, logits=_logits, num_heads=first.num_heads)


def _hidden(model: Any, token_ids: jax.Array, positions: jax.Array, cache: PagedCache) -> jax.Array:
    model.model.layers = _Layers(model.model.layers, cache)
    # A row for each token: an adapter is a row's.
    tokens, positions = token_ids.reshape(-1, 1), positions.reshape(-1, 1)
    adapters = cache.metadata.inputs.get("adapter")
    if adapters is not None:
        adapters = cache.metadata.of_tokens(adapters, tokens.size)
    inputs = {"attention_mask": jnp.ones_like(tokens), "positions": positions, "adapter_indices": adapters}
    hidden = model(tokens, **inputs).last_hidden_state.swapaxes(0, 1)
    if adapters is None:
        return hidden
    # The head has adapters, too. bfloat16 is exact up to 256.
    digits = jnp.stack(jnp.divmod(adapters, _DIGIT), -1)[None].astype(hidden.dtype)
    return jnp.concatenate([hidden, digits], -1)


def _logits(model: Any, hidden: jax.Array) -> jax.Array:
    hidden, adapters = hidden.swapaxes(0, 1), None
    if model.config.max_lora_adapters:
        high, low = jnp.moveaxis(hidden[:, 0, -2:].astype(jnp.int32), -1, 0)
        hidden, adapters = hidden[..., :-2], high * _DIGIT + low
    return model.compute_logits(hidden, adapters).astype(jnp.float32).swapaxes(0, 1)


class _Layers(nnx.Module):
    """The stacked layers of a model, one by one over the engine's cache."""

    def __init__(self, stacked: Any, cache: PagedCache) -> None:
        graph, states = stacked.preextract_decode()
        self.layers = nnx.List([nnx.merge(graph, state) for state in states])
        for layer, each in zip(self.layers, cache, strict=True):
            layer.self_attn = _Attention(layer.self_attn, each)

    def __call__(self, hidden: jax.Array, *, adapter_indices: Any, **inputs: Any) -> tuple[Any, list, None]:
        own = {name: inputs[name] for name in ("attention_mask", "positions")}
        for layer in self.layers:
            hidden, _ = layer(hidden, adapter_indices=adapter_indices, **own)
        return hidden, [], None


class _Attention(nnx.Module):
    """An attention layer of SkyRL-tx over the engine's cache."""

    def __init__(self, layer: Any, cache: LayerCache) -> None:
        self.layer, self.cache = layer, cache

    def __call__(self, x: jax.Array, *, positions: Any, adapter_indices: Any, **_: Any) -> tuple[jax.Array, None]:
        layer, adapters = self.layer, {"adapter_indices": adapter_indices}
        if hasattr(layer, "qkv_proj"):
            projected = layer.qkv_proj(x, **adapters)
        else:
            projected = (each(x, **adapters) for each in (layer.q_proj, layer.k_proj, layer.v_proj))
        query, key, value = (each.reshape(*x.shape[:2], -1, layer.head_dim) for each in projected)
        if hasattr(layer, "q_norm"):
            query, key = layer.q_norm(query), layer.k_norm(key)
        base = layer.config.rope_parameters["rope_theta"]
        query, key = (apply_rope(each, positions, layer.head_dim, base) for each in (query, key))
        attended = self.cache.attend(query, key, value, scale=layer.head_dim**-0.5)
        return layer.o_proj(attended.reshape(*x.shape[:2], -1), **adapters), None
