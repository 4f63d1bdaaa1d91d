"""Traps that Flax users have met, and that no other test of the module holds.

T1, T2, T5: `test_module_cache`. T4: `test_attention_fn`. T6, T11: `test_explicit_cache`. T7 to T9: `test_meshes`. T15:
`tests/engine/test_engine.py`. T16: `tests/engine/test_detokenize.py`. T17: `tests/engine/test_sampler.py`. T19:
`test_module_gpu`. T20: `test_linen`. T3 is a figure: `jattn bench module --host`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.nn import MultiHeadAttention, attention_fn

ROOT = Path(__file__).resolve().parents[2]


def holding() -> MultiHeadAttention:
    module = MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    module.init_cache((1, 8, 8), block_size=4)
    return module


# T10: what nobody wrote must be finite, because 0 times NaN is NaN.
def test_a_new_cache_is_zeros() -> None:
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(nnx.state(holding(), nnx.Cache)))


# T12: Triton's autotuner runs a kernel several times on the same memory, and a cache write is not to be repeated.
def test_nothing_is_tuned_while_it_runs() -> None:
    sources = [*(ROOT / "torch_core").rglob("*.py"), *(ROOT / "jattn").rglob("*.py")]
    assert [path.name for path in sources if re.search(r"@triton\.(autotune|heuristics)", path.read_text())] == []


# T13
@pytest.mark.parametrize("head_dim", [12, 576])
def test_heads_that_cudnn_does_not_take_are_served(head_dim: int, seed: int) -> None:
    query = jnp.asarray(np.random.default_rng(seed).normal(size=(1, 3, 1, head_dim)), jnp.float32)
    expected = nnx.dot_product_attention(query, query, query)
    assert np.allclose(attention_fn(query, query, query), expected, atol=1e-5)


# T14
def test_new_weights_are_arguments_and_compile_nothing(seed: int) -> None:
    graph, cache, weights = nnx.split(holding(), nnx.Cache, ...)
    x, traces = jnp.ones((1, 1, 8)), []

    @jax.jit
    def step(cache: Any, weights: Any, x: jax.Array) -> Any:
        traces.append(x)
        module = nnx.merge(graph, cache, weights)
        y = module(x)
        return nnx.state(module, nnx.Cache), y

    _, y = step(cache, weights, x)
    _, other = step(cache, jax.tree.map(lambda leaf: 2 * leaf, weights), x)
    assert len(traces) == 1
    assert not np.allclose(y, other)
    assert jax.make_jaxpr(step)(cache, weights, x).consts == []


# T18
@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)], ids=["new", "legacy"])
def test_dropout_takes_both_kinds_of_key(key: jax.Array) -> None:
    query = jnp.ones((1, 8, 1, 4))
    dropped = attention_fn(query, query, query, dropout_rate=0.5, dropout_rng=key)
    assert len(np.unique(np.asarray(dropped).round(3))) > 1


@pytest.mark.parametrize("implementation", ["xla", "torch"])
def test_dropout_takes_a_seed_through_rngs(implementation: str, seed: int) -> None:
    options: dict[str, Any] = {"dropout_rate": 0.5, "implementation": implementation, "rngs": nnx.Rngs(0)}
    module, x = MultiHeadAttention(2, 8, decode=False, **options), jnp.ones((1, 8, 8))
    one, same, other = (module(x, deterministic=False, rngs=nnx.Rngs(dropout=n)) for n in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()
