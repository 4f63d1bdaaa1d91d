"""Shapes of models for benchmarks, models of them with random weights, and the bytes that a decode step moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jattn.llm.load.config import parse_config
from jattn.llm.models import (
    Decoder,
    ModelConfig,
    PagedSpec,
    TensorParallel,
    decoder_of,
    parameter_shards,
    tensor_parallel_of,
)

_LARGE = ModelConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=16384,
    dtype="bfloat16",
)
_TINY = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=128,
    dtype="float32",
)
#: Llama 3.1's shapes of 8B and 70B, and one for trying this out on a CPU.
SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "70b": _LARGE,
        "8b": replace(_LARGE, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
        "tiny": _TINY,
    }
)
_NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 131072,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}
#: What config.json has of models whose layers keep a state: of Nemotron-H 8B, Qwen 3.5 9B and Falcon-H1 7B.
_FILES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "nemotron-h-8b": _NEMOTRON,
        "qwen3.5-9b": {
            "architectures": ["Qwen3_5ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 248320,
            "max_position_embeddings": 16384,
            "dtype": "bfloat16",
        },
        "falcon-h1-7b": {
            "architectures": ["FalconH1ForCausalLM"],
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 44,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "vocab_size": 130048,
            "max_position_embeddings": 16384,
            "torch_dtype": "bfloat16",
        },
        "tiny-hybrid": _NEMOTRON
        | {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"attention_head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2}
        | {
            "vocab_size": 64,
            "hybrid_override_pattern": "M-*",
            "max_position_embeddings": 128,
            "torch_dtype": "float32",
        },
    }
)
# As in models that are loaded.
_FLOAT32 = ("A_log", "D", "dt_bias")


def shape_config(name: str) -> ModelConfig:
    """Returns the config of a shape."""
    return SHAPES[name] if name in SHAPES else parse_config(_FILES[name])


def random_decoder(config: ModelConfig, mesh: Mesh | None = None) -> Decoder:
    """Returns a decoder with random weights, each made where it stays: on one device, or cut over a mesh axis "tp"."""
    parallel = None if mesh is None else tensor_parallel_of(mesh)
    shards = parameter_shards(config, parallel or TensorParallel(size=1))
    keys = jax.random.split(jax.random.key(0), len(shards))
    values = {
        path: normal(
            each.cut_shape,
            "float32" if path[-1] in _FLOAT32 else config.dtype,
            None if mesh is None else NamedSharding(mesh, each.spec),
        )(key)
        for key, (path, each) in zip(keys, shards.items(), strict=True)
    }
    return decoder_of(config, values, None, parallel)


@functools.lru_cache
def normal(shape: tuple[int, ...], dtype: str, sharding: NamedSharding | None) -> Callable[[jax.Array], jax.Array]:
    """Returns a function of a key that returns small random numbers."""
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype) * 0.02, out_shardings=sharding)


def step_bytes(model: Decoder, spec: PagedSpec, num_seqs: int, num_blocks: int, *, block_size: int) -> int:
    """Returns the bytes that a decode step must move: weights, keys and values, and states twice.

    Tables of which a token reads one row are left out. Every layer counts as one without a window.

    Args:
        model: the model.
        spec: its caches.
        num_seqs: number of sequences.
        num_blocks: blocks of each.
        block_size: tokens of a block.
    """
    tables = (model.position_embedding,) if model.lm_head is None else (model.embed_tokens, model.position_embedding)
    weights = _nbytes(model) - sum(map(_nbytes, filter(None, tables)))
    cache = num_blocks * sum(each.bytes_per_block for each in spec.cache_specs(block_size))
    states = sum(each.bytes_per_slot for each in spec.states)
    return weights + num_seqs * (cache + 2 * states)


def _nbytes(module: nnx.Module) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(module)))
