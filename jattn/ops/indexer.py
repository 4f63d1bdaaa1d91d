"""Scores of DeepSeek's indexer, and slots of what was chosen by them, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from torch_core.latent.sparse_call import ChoiceCall, IndexerCall

__all__ = ["chosen_slots", "indexer_logits"]


def indexer_logits(call: IndexerCall[jax.Array]) -> dict[str, jax.Array]:
    """Scores every key that a query sees, in float32, query by query; -inf elsewhere."""
    num_seqs, tokens = call.seq_lens.shape[0], jnp.arange(call.num_tokens)
    if num_seqs == 0:
        return {"logits": jnp.full((call.num_tokens, call.table_tokens), -jnp.inf)}
    places = jnp.arange(call.table_tokens)
    exists = places < call.seq_lens[:, None]
    # The table's tail may hold anything: block 0 stands in for what no sequence reaches.
    keys = call.key_cache[jnp.where(exists[:, :: call.block_size], call.block_tables, 0)]
    keys = keys.astype(jnp.float32).reshape(num_seqs, call.table_tokens, -1)
    keys = jnp.where(exists[..., None], keys, 0) * (1.0 if call.k_scale is None else call.k_scale)
    real = tokens < call.query_start_loc[-1]
    sequence = jnp.where(real, jnp.searchsorted(call.query_start_loc, tokens, side="right") - 1, 0)
    seen = call.seq_lens[sequence] - call.query_start_loc[sequence + 1] + tokens + 1

    def of_token(query: jax.Array, weights: jax.Array, seq: jax.Array) -> jax.Array:
        return weights @ jax.nn.relu(call.scale * (query.astype(jnp.float32) @ keys[seq].T))

    logits = jax.lax.map(lambda x: of_token(*x), (call.query, call.weights, sequence))
    visible = real[:, None] & (places < seen[:, None])
    return {"logits": jnp.where(visible, logits, -jnp.inf)}


def chosen_slots(call: ChoiceCall[jax.Array]) -> dict[str, jax.Array]:
    """Looks up the slots of each query's keys."""
    starts = jnp.arange(call.topk_indices.shape[0] + 1, dtype=jnp.int32)
    seqs = (starts[:-1, None] >= call.query_start_loc[1:]).sum(1)
    named = (call.topk_indices >= 0) & (seqs < call.block_tables.shape[0])[:, None]
    positions = jnp.where(named, call.topk_indices, 0)
    blocks = call.block_tables[seqs[:, None], positions // call.block_size]
    slots = jnp.where(named, blocks * call.block_size + positions % call.block_size, 0)
    # What is no key goes behind the keys, whose order stays.
    order = jnp.argsort(~named, axis=1, stable=True)
    counts = named.sum(1, dtype=jnp.int32)
    return {"slots": jnp.take_along_axis(slots, order, axis=1), "counts": counts, "starts": starts}
