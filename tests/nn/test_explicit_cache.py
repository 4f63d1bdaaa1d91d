"""Caches that go in and come out: ragged batches, shared prefixes, layers that share, cross attention, many layers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import SequenceRow
from jattn.metadata import AttentionMetadata
from jattn.nn import MultiHeadAttention, PagedAttention, scan_layers
from torch_core.base.errors import InvalidInput, Unsupported

FEATURES, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 16, 4, 2, 4, 4, 8


def build(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(
        HEADS, FEATURES, num_kv_heads=KV_HEADS, decode=False, rngs=nnx.Rngs(options.pop("seed", 0)), **options
    )


def inputs(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*shape, FEATURES)), jnp.float32)


def empty(num_blocks: int = NUM_BLOCKS) -> jax.Array:
    return jnp.zeros((num_blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM))


def batch(tables: Any, seq_lens: Any, starts: Any, slots: Any, longest: int) -> AttentionMetadata:
    names = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping")
    arrays = (jnp.array(values, jnp.int32) for values in (tables, seq_lens, starts, slots))
    return AttentionMetadata(**dict(zip(names, arrays, strict=True)), max_query_len=longest)


def prompt(length: int) -> AttentionMetadata:
    """One sequence in blocks 1 and 2, from its start."""
    return batch([[1, 2]], [length], [0, length], range(BLOCK_SIZE, BLOCK_SIZE + length), length)


def close(one: Any, other: Any) -> bool:
    return np.allclose(one, other, rtol=1e-5, atol=1e-5)


def turned(x: jax.Array, positions: jax.Array) -> jax.Array:
    return x * jnp.cos(0.3 * positions)[:, None]


def test_a_prefix_that_two_sequences_share_a_chunk_and_a_decode_row_make_one_batch(seed: int) -> None:
    module, x = build(rope=turned), inputs(seed, 2, 7)
    x = x.at[1, :4].set(x[0, :4])
    expected = module(x, is_causal=True)
    # Both begin with block 1; the first sequence comes whole but for its last token, the second has its prefix.
    _, cache = module(x[0, :6], cache=empty(), metadata=batch([[1, 2]], [6], [0, 6], range(4, 10), 6))
    tokens = jnp.concatenate([x[0, 6:], x[1, 4:], jnp.full((1, FEATURES), jnp.nan)])
    metadata = batch([[1, 2], [1, 3]], [7, 7], [0, 1, 4], [10, 12, 13, 14, -1], 3)
    step = jax.jit(lambda module, x, cache, metadata: module(x, cache=cache, metadata=metadata), donate_argnums=2)
    address = cache.unsafe_buffer_pointer()
    found, cache = step(module, tokens, cache, metadata)
    assert close(found[0], expected[0, 6])
    assert close(found[1:4], expected[1, 4:])
    assert cache.unsafe_buffer_pointer() == address


def test_cross_attention_reads_the_encoders_blocks_and_writes_them_once(seed: int) -> None:
    module = build(attention_type="encoder_decoder")
    x, encoder = inputs(seed, 1, 3), inputs(seed + 1, 1, 6)
    expected = module(x, encoder)[0]
    both = batch([[1, 2]], [6], [0, 2], range(4, 10), 2)
    first, cache = module(x[0, :2], encoder[0], cache=empty(), metadata=both)
    later, _ = module(x[0, 2:], cache=cache, metadata=batch([[1, 2]], [6], [0, 1], [], 1))
    assert close(jnp.concatenate([first, later]), expected)


def test_a_layer_that_shares_keys_and_values_has_none_of_its_own_and_writes_none(seed: int) -> None:
    target, layer, x = build(), build(kv_sharing=True, seed=1), inputs(seed, 1, 6)
    assert set(nnx.to_pure_dict(nnx.state(layer, nnx.Param))) == {"query", "out"}
    expected = layer(x, is_causal=True, shared_kv=target.keys_and_values(x))
    _, cache = target(x[0], cache=empty(), metadata=prompt(6))
    found, after = layer(x[0], cache=cache, metadata=prompt(6))
    assert close(found, expected[0])
    assert after is cache


def test_a_cache_of_another_module_is_refused_with_both_sizes(seed: int) -> None:
    with pytest.raises(InvalidInput, match=r"^kv_cache has shape \[8, 2, 4, 2, 8\]; it must be "):
        build()(inputs(seed, 3), cache=jnp.zeros((NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, 8)), metadata=prompt(3))


def test_a_cache_that_leaked_out_of_a_trace_is_refused_by_name(seed: int) -> None:
    leaked: list[jax.Array] = []
    jax.jit(lambda cache: leaked.append(cache))(empty())
    with pytest.raises(InvalidInput, match=r"^cache is a tracer of a function that JAX traced and left"):
        build()(inputs(seed, 3), cache=leaked[0], metadata=prompt(3))


def test_a_window_of_so_many_tokens_reaches_as_far_to_either_side_in_an_encoder(seed: int) -> None:
    x = inputs(seed, 1, 9)
    one_number, pair = (build(attention_type="encoder_only", sliding_window=window) for window in (3, (2, 2)))
    np.testing.assert_array_equal(one_number(x), pair(x))
    assert not np.array_equal(one_number(x), build(attention_type="encoder_only", sliding_window=(2, None))(x))


def test_an_encoders_module_sees_both_ways_and_takes_no_cache(seed: int) -> None:
    module, x = build(attention_type="encoder_only", sliding_window=(1, 1)), inputs(seed, 1, 6)
    changed = module(x.at[:, 5].add(1.0))
    assert np.flatnonzero(np.asarray(changed != module(x)).any(-1)).tolist() == [4, 5]
    with pytest.raises(Unsupported, match="a layer of type 'encoder_only' takes no cache"):
        module(x[0], cache=empty(), metadata=prompt(6))


@functools.cache
def layers() -> MultiHeadAttention:
    make = nnx.vmap(lambda rngs: MultiHeadAttention(HEADS, FEATURES, num_kv_heads=KV_HEADS, decode=False, rngs=rngs))
    return nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))


def residual(layer: MultiHeadAttention, x: jax.Array, cache: jax.Array, metadata: AttentionMetadata) -> Any:
    y, cache = layer(x, cache=cache, metadata=metadata)
    return x + y, cache


def test_scanned_layers_in_one_pool_give_what_a_loop_over_caches_gives(seed: int) -> None:
    stacked, x = layers(), inputs(seed, 7)
    metadata = batch([[1, 2], [3, 0]], [5, 2], [0, 5, 7], [4, 5, 6, 7, 8, 12, -1], 5)
    graph, state = nnx.split(stacked)
    expected, caches = x, []
    for index in range(3):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, index=index: leaf[index], state))
        expected, cache = residual(layer, expected, empty(), metadata)
        caches.append(cache)

    def run(cache: jax.Array, state: Any, x: jax.Array) -> Any:
        return scan_layers(residual, nnx.merge(graph, state), x, cache, metadata)

    pool = empty(3 * NUM_BLOCKS)
    compiled = jax.jit(run, donate_argnums=0).lower(pool, state, x).compile()
    found, pool = compiled(pool, state, x)
    assert close(found, expected)
    assert close(pool, jnp.concatenate(caches))
    # T11: the loop writes the donated pool where it lies.
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes


def test_a_pool_that_the_layers_cannot_divide_is_refused(seed: int) -> None:
    with pytest.raises(InvalidInput, match=r"kv_cache has 8 blocks of 4 tokens for 3 layers; it must be a multiple of"):
        scan_layers(residual, layers(), inputs(seed, 7), empty(8), prompt(7))


def test_a_vmap_over_modules_serves_training_and_jnps_paged_attention(seed: int) -> None:
    stacked, x = layers(), inputs(seed, 3, 1, 6)

    def paged(module: MultiHeadAttention, x: jax.Array) -> jax.Array:
        return module(x[0], cache=empty(), metadata=prompt(6))[0]

    @nnx.jit
    def both(stacked: Any, x: jax.Array) -> Any:
        return nnx.vmap(lambda m, x: m(x, is_causal=True))(stacked, x), nnx.vmap(paged)(stacked, x)

    expected, found = both(stacked, x)
    assert close(found, expected[:, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"lengths": jnp.array([6])}, "lengths are given beside metadata, which has them; leave them out."),
        ({"metadata": None}, "one of cache and metadata is None; an explicit cache needs both."),
        (
            {"metadata": AttentionMetadata.build([SequenceRow([1], 0, 6)], block_size=8, num_blocks=8)},
            "metadata is for blocks of 8 tokens and kv_cache of 4; build it with the cache's block_size.",
        ),
        ({"cache": jnp.zeros((8, 2, 4, 3, 4))}, "num_kv_heads = 2, that of key"),
        ({"cache": jnp.zeros((8, 2, 4, 2, 8))}, "head_size = 4, that of key"),
    ],
)
def test_a_cache_of_another_module_and_half_a_step_are_refused(call: dict[str, Any], message: str, seed: int) -> None:
    with pytest.raises(InvalidInput, match=message):
        build()(inputs(seed, 6), **{"cache": empty(), "metadata": prompt(6), **call})


def test_a_cache_that_was_donated_is_refused(seed: int) -> None:
    cache = empty()
    cache.delete()
    with pytest.raises(InvalidInput, match="cache was donated to a step and is deleted; use the one that the step"):
        build()(inputs(seed, 6), cache=cache, metadata=prompt(6))


def test_half_of_keys_and_values_is_refused_by_the_core(seed: int) -> None:
    core, x = PagedAttention(HEADS, HEAD_DIM, num_kv_heads=KV_HEADS), jnp.ones((6, KV_HEADS, HEAD_DIM))
    with pytest.raises(InvalidInput, match="one of key and value is None; give both"):
        core(jnp.ones((6, HEADS, HEAD_DIM)), x, None, empty(), prompt(6))
