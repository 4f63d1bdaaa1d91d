"""A layer of experts next to the bytes that it must read and to dense products of the same size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.bench.measure import jax_us
from jattn.bench.runner import Benchmark
from jattn.llm.models import ModelConfig, MoEConfig
from jattn.llm.models.experts import SparseMLP
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput

#: Hidden size, width of an expert, experts, experts of a token.
SHAPES = {
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "tiny": (64, 32, 16, 2),
}


@dataclass(frozen=True, slots=True)
class MoERow:
    """One number of tokens through one layer, in microseconds.

    Attributes:
        experts_hit: distinct experts of these tokens, the mean over the layers.
        router_us: the router alone, a part of `layer_us`.
        xla_us: the layer in plain jnp; None if it was not measured.
        read_us: reading those experts at copy speed.
        dense_us: two dense products over as many rows, with the activation between.
    """

    tokens: int
    experts_hit: float
    layer_us: float
    router_us: float
    xla_us: float | None
    read_us: float
    layer_over_read: float
    dense_us: float
    layer_over_dense: float


def measure_rows(
    shape: str = "qwen3-30b-a3b",
    tokens: Sequence[int] = (1, 16, 4096),
    *,
    layers: int = 16,
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    rounds: int = 9,
    xla: bool = False,
) -> Iterator[MoERow]:
    """Measures each number of tokens when the caller asks for its row.

    Args:
        shape: shape of the layer: mixtral-8x7b, qwen3-30b-a3b, gpt-oss-20b or tiny.
        tokens: number of tokens of a step, a row for each.
        layers: chained layers, so that no cache holds all weights and one program start serves all.
        dtype: dtype of all arrays.
        rounds: timed rounds of a row.
        xla: also measure the layer in plain jnp, which takes long.
    """
    if shape not in SHAPES:
        raise InvalidInput("shape", value=shape, wanted=f"use one of {', '.join(SHAPES)}")
    for name, value in (("layers", layers), ("rounds", rounds), *(("tokens", each) for each in tokens)):
        check_int(name, value, 1)
    return _rows(shape, tokens, layers, dtype, rounds, xla)


def _rows(shape: str, tokens: Sequence[int], layers: int, dtype: str, rounds: int, xla: bool) -> Iterator[MoERow]:
    hidden, inner, num_experts, top_k = SHAPES[shape]
    config = ModelConfig(
        vocab_size=8,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        dtype=dtype,
        moe=MoEConfig(num_experts=num_experts, num_experts_per_tok=top_k, intermediate_size=inner),
    )
    modules = nnx.List([SparseMLP(config, rngs=nnx.Rngs(index)) for index in range(layers)])
    graph, state = nnx.split(modules)
    # A dictionary of modules takes the host longer to pass than their layers take the device.
    leaves, tree = jax.tree.flatten(state)
    expert_bytes = 3 * hidden * inner * jnp.dtype(dtype).itemsize
    seconds_per_byte = _seconds_per_byte()
    for count in tokens:
        x = jax.random.normal(jax.random.key(count), (count, hidden), dtype)

        def timed(run: Callable[[SparseMLP, jax.Array], jax.Array], x: jax.Array = x) -> float:
            def program(leaves: list[jax.Array], x: jax.Array, _: jax.Array) -> jax.Array:
                # Added to its input, as in a model: without this, outputs of random layers become similar, and so do
                # their experts.
                for module in nnx.merge(graph, jax.tree.unflatten(tree, leaves)):
                    x = x + run(module, x)
                return x

            # Each result takes the place of the one before, as a donated cache does.
            jitted = jax.jit(program, donate_argnums=2, keep_unused=True)
            return jax_us(jitted, (leaves, x), calls=layers, rounds=rounds, donated=jnp.empty_like(x))

        hit, inner_x = [], x
        for module in modules:
            hit.append(jnp.unique(module.route(inner_x)[1]).size)
            inner_x = inner_x + module(inner_x)
        layer_us, router_us = timed(lambda module, x: module(x)), timed(_routed)
        xla_us = timed(_in_jnp) if xla else None
        mean_hit, dense_us = sum(hit) / layers, timed(_dense)
        read_us = mean_hit * expert_bytes * seconds_per_byte * 1e6
        ratios = layer_us / read_us, dense_us, layer_us / dense_us
        yield MoERow(count, mean_hit, layer_us, router_us, xla_us, read_us, *ratios)


# Many times a cache; a CPU's memory is slow to hand out.
_COPIED = {"gpu": 1 << 30, "cpu": 1 << 27}


def _seconds_per_byte() -> float:
    copied = _COPIED.get(jax.default_backend(), _COPIED["gpu"])
    # Words: XLA's elementwise loops are slower over bytes than the memory is.
    words = jnp.zeros(copied // 4, jnp.float32)
    return jax_us(jax.jit(lambda x: x + 1), (words,), calls=1) / 1e6 / (2 * copied)


def _routed(module: SparseMLP, x: jax.Array) -> jax.Array:
    weights, experts = module.route(x)
    return (weights + experts).sum(-1, keepdims=True).astype(x.dtype)


def _in_jnp(module: SparseMLP, x: jax.Array) -> jax.Array:
    return module.routed(x, *module.route(x), implementation="xla").astype(x.dtype)


def _dense(module: SparseMLP, x: jax.Array) -> jax.Array:
    """Runs as many rows as go to all experts together through the first expert alone."""
    top_k = module.moe.num_experts_per_tok
    gate, up = jnp.split(jnp.repeat(x, top_k, axis=0) @ module.gate_up_proj.kernel[0], 2, axis=-1)
    return ((jax.nn.silu(gate) * up) @ module.down_proj.kernel[0]).reshape(-1, top_k, x.shape[-1]).sum(1)


BENCHMARK = Benchmark("moe", __doc__, measure_rows)
