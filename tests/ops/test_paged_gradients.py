"""Gradients through a paged cache: of queries, of new keys and values that are written, and of a cached prefix."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import AttentionMetadata, PagedAttention, SequenceRow, ops
from tests.ops.runner import QUICK_COMPILE, keywords
from tests.support.attention_cases import AttentionCase, paged_case
from torch_core.base.specs import AttentionSpec

jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """On a GPU JAX rounds float32 operands of its own products to TF32."""
    with jax.default_matmul_precision("highest"):
        yield


# Both sequences have their first block in common.
ROWS = [SequenceRow([3, 1, 4], 6, 3), SequenceRow([3, 2], 4, 2)]
HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
TRITON = pytest.param("triton", marks=pytest.mark.gpu)


def _layer() -> dict[str, jax.Array]:
    rng = np.random.default_rng(5)
    shapes = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    new = {name: jnp.asarray(rng.standard_normal((5, n, SIZE)), jnp.float32) for name, n in shapes.items()}
    cache = jnp.asarray(rng.standard_normal((5, 2, BLOCK, KV_HEADS, SIZE)), jnp.float32)
    return {**new, "kv_cache": cache, "sinks": jnp.asarray(rng.standard_normal(HEADS), jnp.float32)}


def _loss(out: jax.Array) -> jax.Array:
    return (out.astype(jnp.float32) * jnp.sin(jnp.arange(out.size)).reshape(out.shape)).sum()


def _paged_loss(implementation: str | None, given: dict[str, jax.Array]) -> jax.Array:
    core = PagedAttention(
        HEADS, SIZE, num_kv_heads=KV_HEADS, alibi_slopes=(0.1,) * HEADS, implementation=implementation
    )
    metadata = AttentionMetadata.build(ROWS, block_size=BLOCK, num_blocks=5)
    out, _ = core(given["query"], given["key"], given["value"], given["kv_cache"], metadata, sinks=given["sinks"])
    return _loss(out)


def _dense_loss(given: dict[str, jax.Array]) -> jax.Array:
    """The same by plain indexing: each sequence's prefix from its blocks, then its new tokens."""
    parts: dict[str, list[jax.Array]] = {"key": [], "value": []}
    first = 0
    for row in ROWS:
        last = first + row.num_new_tokens
        for index, name in enumerate(parts):
            prefix = given["kv_cache"][np.array(row.block_ids), index].reshape(-1, KV_HEADS, SIZE)
            parts[name] += [prefix[: row.num_computed_tokens], given[name][first:last]]
        first = last
    key, value = (jnp.concatenate(parts[name]) for name in ("key", "value"))
    starts = (jnp.array([0, 3, 5], jnp.int32), jnp.array([0, 9, 15], jnp.int32))
    return _loss(
        ops.attention(
            given["query"], key, value, *starts, max_query_len=3, max_key_len=9, sinks=given["sinks"],
            alibi_slopes=jnp.full(HEADS, 0.1), implementation="xla",
        )
    )  # fmt: skip


@pytest.mark.parametrize("implementation", [None, "torch", "xla", TRITON])
def test_a_layer_over_a_cached_prefix_has_the_gradients_of_dense_attention(implementation: str | None) -> None:
    found = jit(jax.grad(functools.partial(_paged_loss, implementation)))(_layer())
    expected = jit(jax.grad(_dense_loss))(_layer())
    # Slots of new tokens are overwritten: what they held has no gradient. Block 3 is shared: its gradients add up.
    for name, x in expected.items():
        assert np.allclose(found[name], x, rtol=1e-4, atol=1e-5), name
        assert np.abs(x).max() > 1e-2, name


SPECS = {
    "window": (AttentionSpec(scale=0.3, window_left=5), {}),
    "chunks and a soft cap": (AttentionSpec(scale=0.3, attention_chunk=8, logits_soft_cap=2.0), {}),
    "cross attention": (AttentionSpec(scale=0.3, causal=False), {}),
    "8-bit cache": (AttentionSpec(scale=0.3), {"cache_dtype": "int8", "k_scale": 0.02, "v_scale": 0.03}),
    "flags": (AttentionSpec(scale=0.3), {"seq_causal": np.array([True, False, True])}),
}


def _case(what: str) -> AttentionCase:
    spec, options = SPECS[what]
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "block_size": 4}
    return paged_case(7, seq_lens=[19, 6, 0], query_lens=[3, 6, 0], padding_tokens=2, spec=spec, **sizes, **options)


@pytest.mark.parametrize("what", SPECS)
@pytest.mark.parametrize("implementation", ["torch", TRITON])
def test_the_gradient_of_queries_and_cache_is_that_of_jnp(what: str, implementation: str) -> None:
    case = _case(what)
    arrays = {name: jnp.asarray(x) for name, x in case.operands.items()}
    fixed = {**keywords(case.spec), **case.limits, **case.options}
    wanted = ("query",) if what == "8-bit cache" else ("query", "kv_cache")

    def loss(by: str, floats: dict[str, jax.Array]) -> jax.Array:
        given: dict[str, Any] = {**arrays, **fixed, **floats}
        out, lse = ops.paged_attention_with_lse(**given, implementation=by)
        return _loss(out) + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    floats = {name: arrays[name] for name in wanted}
    found, expected = (jit(jax.grad(functools.partial(loss, by)))(floats) for by in (implementation, "xla"))
    for name in wanted:
        # NaN lies in the slots and rows that nobody may look at.
        assert np.isfinite(found[name]).all(), name
        assert np.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5), name


def test_mapped_gradients_are_those_of_the_examples() -> None:
    given = _layer()
    queries = jnp.stack([given["query"], 2 * given["query"]])
    slope = jax.grad(lambda query: _paged_loss("torch", {**given, "query": query}))
    assert np.allclose(jax.vmap(slope)(queries)[1], slope(queries[1]), rtol=1e-5, atol=1e-6)
