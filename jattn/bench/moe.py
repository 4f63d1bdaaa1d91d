"""`jattn bench moe`: a layer of experts next to the bytes that it must read and to dense products of the same size."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.bench.measure import jax_us
from jattn.llm.models import ModelConfig, MoEConfig
from jattn.llm.models.experts import SparseMLP
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput

__all__ = ["SHAPES", "MoERow", "main", "measure_rows"]

#: Hidden size, width of an expert, experts, experts of a token.
SHAPES = {
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "tiny": (64, 32, 16, 2),
}
_HEADER = ("tokens", "experts hit", "layer", "router", "xla", "read", "layer / read", "dense", "layer / dense")
_WIDTH = 15


@dataclass(frozen=True, slots=True)
class MoERow:
    """One number of tokens through one layer.

    Attributes:
        tokens: of the step.
        experts_hit: distinct experts that they went to, the mean over the layers.
        layer_us: microseconds of the layer as the model runs it.
        router_us: microseconds of the router alone, which the layer's hold.
        xla_us: microseconds of the layer in plain jnp; None where that was not asked for.
        read_us: what reading the experts that were hit takes at the speed of a copy.
        dense_us: microseconds of two dense products over as many rows, with the activation between.
    """

    tokens: int
    experts_hit: float
    layer_us: float
    router_us: float
    xla_us: float | None
    read_us: float
    dense_us: float


def main(argv: Sequence[str]) -> None:
    """Prints a table of microseconds by tokens of a step, each row when it is known."""
    parser = argparse.ArgumentParser(prog="jattn bench moe", description=__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 4096])
    parser.add_argument(
        "--layers",
        type=int,
        default=16,
        help="chained: no cache holds all weights, and a program starts once for all (16)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--xla", action="store_true", help="also the layer in plain jnp, which takes long to measure")
    options = parser.parse_args(argv)
    rows = measure_rows(
        options.shape, options.tokens, layers=options.layers, dtype=options.dtype, rounds=options.rounds,
        with_xla=options.xla,
    )  # fmt: skip
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.shape}, {options.dtype}, us of one layer")
    print("".join(name.rjust(_WIDTH) for name in _HEADER), flush=True)
    for row in rows:
        cells = (
            str(row.tokens),
            f"{row.experts_hit:.1f}",
            f"{row.layer_us:.1f}",
            f"{row.router_us:.1f}",
            "" if row.xla_us is None else f"{row.xla_us:.1f}",
            f"{row.read_us:.1f}",
            f"{row.layer_us / row.read_us:.2f}",
            f"{row.dense_us:.1f}",
            f"{row.layer_us / row.dense_us:.2f}",
        )
        print("".join(cell.rjust(_WIDTH) for cell in cells), flush=True)


def measure_rows(
    shape: str, tokens: Sequence[int], *, layers: int, dtype: str, rounds: int, with_xla: bool = False
) -> Iterator[MoERow]:
    """Measures each number of tokens when the caller asks for its row.

    Raises:
        InvalidInput: an unknown shape, or a number below 1.
    """
    if shape not in SHAPES:
        raise InvalidInput(f"shape is {shape!r}; use one of {', '.join(SHAPES)}.")
    for name, value in (("layers", layers), ("rounds", rounds), *(("tokens", each) for each in tokens)):
        check_int(name, value, 1)
    return _rows(shape, tokens, layers, dtype, rounds, with_xla)


def _rows(shape: str, tokens: Sequence[int], layers: int, dtype: str, rounds: int, with_xla: bool) -> Iterator[MoERow]:
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
                # Added to its input, as in a model: outputs of random layers alone become alike, and their experts too.
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
        yield MoERow(
            tokens=count,
            experts_hit=sum(hit) / layers,
            layer_us=timed(lambda module, x: module(x)),
            router_us=timed(_routed),
            xla_us=timed(_in_jnp) if with_xla else None,
            read_us=sum(hit) / layers * expert_bytes * seconds_per_byte * 1e6,
            dense_us=timed(_dense),
        )


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
    """As many rows as go to all experts together, through the first expert alone."""
    top_k = module.moe.num_experts_per_tok
    gate, up = jnp.split(jnp.repeat(x, top_k, axis=0) @ module.gate_up_proj.kernel[0], 2, axis=-1)
    return ((jax.nn.silu(gate) * up) @ module.down_proj.kernel[0]).reshape(-1, top_k, x.shape[-1]).sum(1)
