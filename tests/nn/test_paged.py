"""The attention core as a Flax module: the ops' values, no state of its own, valid in every mode of nnx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jattn.metadata import AttentionMetadata
from jattn.nn import PagedAttention
from jattn.pool import KVPool
from tests.support import reference
from tests.support.attention_cases import assert_as_exact, to_torch
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import AttentionSpec, KVCacheSpec

IMPLEMENTATIONS = ("torch", "xla")
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 8, 4, 8
SPEC = KVCacheSpec(num_kv_heads=KV_HEADS, head_size=HEAD_DIM, block_size=BLOCK_SIZE, dtype="float32")
# A prompt of five tokens, a decode row at length seven, and one padded token.
TABLES, SEQ_LENS, STARTS, SLOTS = [[1, 2], [3, 4]], [5, 7], [0, 5, 6], [4, 5, 6, 7, 8, 18, -1]

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def core(implementation: str | None = None, **options: Any) -> PagedAttention:
    return PagedAttention(HEADS, HEAD_DIM, num_kv_heads=KV_HEADS, implementation=implementation, **options)


def batch() -> AttentionMetadata:
    arrays = [jnp.array(values, jnp.int32) for values in (TABLES, SEQ_LENS, STARTS, SLOTS)]
    tables, seq_lens, starts, slots = arrays
    return AttentionMetadata(
        block_tables=tables, seq_lens=seq_lens, query_start_loc=starts, slot_mapping=slots, max_query_len=5
    )


def inputs(seed: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Query, key and value of the new tokens, and a cache that holds the decode row's past."""
    rng = np.random.default_rng(seed)
    shapes = [(len(SLOTS), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value, cache = (jnp.array(rng.normal(size=s), jnp.float32) for s in (*shapes, SPEC.shape(NUM_BLOCKS)))
    return query, key, value, cache


def call(module: Any, arguments: Sequence[jax.Array]) -> Any:
    return module(*arguments, batch())


def donated(module: PagedAttention) -> Any:
    return jax.jit(lambda *arguments: module(*arguments), donate_argnums=3)


@each_implementation
@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.1, "sliding_window": 3, "logits_soft_cap": 2.0}], ids=["plain", "all options"]
)
def test_output_and_cache_are_those_of_the_reference(implementation: str, options: dict[str, Any], seed: int) -> None:
    query, key, value, cache = inputs(seed)
    tensors = {name: to_torch(np.asarray(x)) for name, x in (("q", query), ("k", key), ("v", value), ("c", cache))}
    metadata = batch()
    tables, lens, starts, slots = (
        to_torch(np.asarray(x))
        for x in (metadata.block_tables, metadata.seq_lens, metadata.query_start_loc, metadata.slot_mapping)
    )
    reference.write_kv_cache(tensors["k"], tensors["v"], tensors["c"], slots)
    window = options.get("sliding_window")
    spec = AttentionSpec(
        scale=options.get("scale", HEAD_DIM**-0.5),
        window_left=None if window is None else window - 1,
        logits_soft_cap=options.get("logits_soft_cap"),
    )
    exact, same = (
        reference.paged_attention(tensors["q"], tensors["c"], tables, lens, starts, spec=spec, compute_dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    output, new_cache = donated(core(implementation, **options))(query, key, value, cache, metadata)
    assert_as_exact(to_torch(np.asarray(output)), exact, same, torch.float32)
    assert np.array_equal(np.asarray(new_cache), tensors["c"].numpy())


def test_padded_tokens_give_zeros_and_write_nothing(seed: int) -> None:
    query, key, value, cache = inputs(seed)
    before = np.array(cache)
    output, after = donated(core())(query, key.at[-1].set(jnp.nan), value, cache, batch())
    assert not output[-1].any()
    untouched = np.ones(before.shape, bool)
    for slot in SLOTS[:-1]:
        untouched[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = False
    assert np.array_equal(np.asarray(after)[untouched], before[untouched])


def test_the_cache_is_written_in_place(seed: int) -> None:
    query, key, value, cache = inputs(seed)
    address = cache.unsafe_buffer_pointer()
    _, after = donated(core())(query, key, value, cache, batch())
    assert after.unsafe_buffer_pointer() == address


def test_the_module_has_no_state_and_survives_split_and_merge(seed: int) -> None:
    module = core()
    graph, state = nnx.split(module)
    assert jax.tree.leaves(state) == []
    again = nnx.merge(graph, state)
    arguments = inputs(seed)
    assert (call(again, arguments)[0] == call(module, arguments)[0]).all()


class Block(nnx.Module):
    """A decoder layer in miniature: projections around the core."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.project = nnx.Linear(HEAD_DIM, HEAD_DIM, rngs=rngs)
        self.core = core()

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, cache: jax.Array, metadata: Any) -> Any:
        output, cache = self.core(self.project(query), key, value, cache, metadata)
        return self.project(output), cache


@pytest.mark.parametrize("graph", [True, False], ids=["graph mode", "tree mode"])
def test_a_model_with_the_core_runs_under_nnx_jit_in_graph_and_tree_mode(graph: bool, seed: int) -> None:
    block = Block(nnx.Rngs(0))
    arguments = inputs(seed)
    expected, expected_cache = call(block, arguments)

    @nnx.jit(graph=graph)
    def step(module: Any, arguments: Any, metadata: AttentionMetadata) -> Any:
        return module(*arguments, metadata)

    output, cache = step(block, arguments, batch())
    assert np.allclose(output, expected, rtol=1e-5, atol=1e-6)
    assert np.allclose(cache, expected_cache, rtol=1e-5, atol=1e-6)


def test_a_model_with_the_core_runs_from_flat_leaves_over_a_donated_pool(seed: int) -> None:
    graph, state = nnx.split(Block(nnx.Rngs(0)))
    query, key, value, _ = inputs(seed)
    pool = KVPool(SPEC, num_layers=2, num_blocks=NUM_BLOCKS)

    def step(caches: Any, state: Any, metadata: AttentionMetadata) -> Any:
        module, hidden, updated = nnx.merge(graph, state), query, []
        for cache in caches:
            hidden, cache = module(hidden, key, value, cache, metadata)
            updated.append(cache)
        return hidden, updated

    jitted = jax.jit(step, donate_argnums=0)
    addresses = pool.addresses()
    first = pool.run(jitted, state, batch())
    assert (pool.run(jitted, state, batch()) == first).all()
    assert pool.addresses() == addresses


def test_the_metadata_is_a_pytree_whose_query_bound_is_static() -> None:
    leaves, tree = jax.tree.flatten(batch())
    assert [leaf.shape for leaf in leaves] == [(2, 2), (2,), (3,), (7,)]
    assert jax.tree.unflatten(tree, leaves).max_query_len == 5


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(4, 3), (0, 1), (4, 0), (2, 4)],
)
def test_head_counts_that_do_not_fit_are_refused(heads: int, kv_heads: int) -> None:
    with pytest.raises(InvalidInput) as error:
        PagedAttention(heads, HEAD_DIM, num_kv_heads=kv_heads)
    assert str(error.value) == (
        f"num_heads is {heads} and num_kv_heads {kv_heads}; both must be positive and the first a multiple of the "
        "second."
    )


def test_a_head_dim_that_is_no_size_is_refused() -> None:
    with pytest.raises(InvalidInput) as error:
        PagedAttention(4, 0)
    assert str(error.value) == "head_dim is 0; it must be at least 1."


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (7, 4, 16), "query has shape (7, 4, 16); this module needs (num_tokens, 4, 8)."),
        (0, (7, 32), "query has shape (7, 32); this module needs (num_tokens, 4, 8)."),
        (1, (7, 4, 8), "key has shape (7, 4, 8); this module needs (num_tokens, 2, 8)."),
        (2, (7, 4, 8), "value has shape (7, 4, 8); this module needs (num_tokens, 2, 8)."),
        (0, (6, 4, 8), "query has 6 tokens and key 7; one key and value for each query token."),
    ],
)
def test_arrays_that_do_not_fit_the_module_are_refused(index: int, shape: tuple[int, ...], message: str) -> None:
    arguments = list(inputs(0))
    arguments[index] = jnp.ones(shape)
    with pytest.raises(InvalidInput) as error:
        call(core(), arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, [[[0.0] * 8] * 4] * 7, "query is a list; it must be an array (jnp.asarray)."),
        (0, None, "query is a NoneType; it must be an array (jnp.asarray)."),
        (3, None, "kv_cache is a NoneType; it must be an array (jnp.asarray)."),
        (4, {}, "metadata is a dict; use AttentionMetadata.build."),
    ],
)
def test_what_is_no_array_and_no_metadata_is_refused_by_name(index: int, value: Any, message: str) -> None:
    arguments: list[Any] = [*inputs(0), batch()]
    arguments[index] = value
    with pytest.raises(InvalidInput) as error:
        core()(*arguments)
    assert str(error.value) == message
