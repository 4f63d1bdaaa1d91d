"""DeepSeek's sparse attention (V3.2) on JAX arrays: scores of an indexer, choice, attention to chosen latents."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jattn.ops.arguments import documented
from jattn.ops.attention import Request, output, output_and_lse
from jattn.ops.latent import latent_request
from jattn.ops.quantise import scaled
from jattn.ops.run import run
from jattn.ops.xla import JaxOp, register
from torch_core.attention.options import LatentOptions
from torch_core.base.checks import check_int
from torch_core.latent.call import LatentCall
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall, check_chosen_values, choice_of, chosen_latents
from torch_core.launch.public import operation


@documented(IndexerCall)
def indexer_topk(
    query: jax.Array,
    weights: jax.Array,
    key_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    topk: int,
    scale: float,
    max_query_len: int,
    k_scale: float | jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the positions of the keys that an indexer scores highest, for each query (DeepSeek-V3.2).

    A score is `sum over heads of weight * relu(scale * query @ key)`, of the keys up to the query's own.

    Args:
        topk: number of keys; static.

    Returns:
        int32[num_tokens, topk], the highest first; -1 after the last one if there are fewer.

    Example:
        >>> import jax.numpy as jnp
        >>> keys = jnp.array([[0.0, 0.0], [3.0, 1.0]])[..., None]  # 2 blocks of 2 tokens, keys of one element
        >>> table, lens, starts = jnp.array([[1]]), jnp.array([2]), jnp.array([0, 1])
        >>> query, weights = jnp.ones((1, 1, 1)), jnp.ones((1, 1))
        >>> indexer_topk(query, weights, keys, table, lens, starts, topk=3, scale=1.0, max_query_len=1).tolist()
        [[0, 1, -1]]
    """
    check_int("topk", topk, 1)
    call = IndexerCall(
        query=query,
        weights=weights,
        key_cache=key_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        k_scale=k_scale,
        scale=scale,
        max_query_len=max_query_len,
    )
    logits = run(call, implementation)["logits"]
    scores, found = jax.lax.top_k(logits, min(topk, logits.shape[1]))
    found = jnp.where(scores == -jnp.inf, -1, found)
    return jnp.pad(found, ((0, 0), (0, topk - found.shape[1])), constant_values=-1)


@documented(LatentCall)
def _sparse(
    query: jax.Array,
    latent_cache: jax.Array,
    topk_indices: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    kv_lora_rank: int,
    max_query_len: int,
    scale: float,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    **options: Unpack[LatentOptions[jax.Array]],
) -> Request[LatentCall[jax.Array]]:
    """Attends to chosen latents: query `t` sees the keys at the positions `topk_indices[t]` and no others.

    In prefill and in decode every query gathers its own latents.

    Args:
        topk_indices: int32[num_tokens, topk]; positions in the query's own sequence, each once, in any order; negative
            ones are skipped. `indexer_topk` computes them; no other mask is applied, and causal is ignored.

    Returns:
        As `mla_attention`.

    Raises:
        InvalidInput: as `mla_attention`; indices of another shape or dtype.
        Unsupported: as `mla_attention`; a window.

    Example:
        >>> import jax.numpy as jnp
        >>> cache = jnp.arange(8.0).reshape(2, 2, 2)  # 2 blocks of 2 tokens: latents 4 and 6 are the sequence's
        >>> table, lens, starts = jnp.array([[1]]), jnp.array([2]), jnp.array([0, 1])
        >>> options = {"kv_lora_rank": 1, "max_query_len": 1, "scale": 1.0}
        >>> chosen = jnp.array([[1, -1]])
        >>> sparse_mla_attention(jnp.ones((1, 1, 2)), cache, chosen, table, lens, starts, **options).tolist()
        [[[6.0]]]
    """
    call, attend = latent_request(
        query,
        latent_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        kv_lora_rank=kv_lora_rank,
        max_query_len=max_query_len,
        scale=scale,
        out_dtype=out_dtype,
        implementation=implementation,
        **options,
    )
    call.check()
    lengths = {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
    # Traced arrays have no values.
    if not any(isinstance(array, Tracer) for array in (*lengths.values(), topk_indices)):
        check_chosen_values(call.with_arrays(jax.device_get(lengths)), jax.device_get(topk_indices))
    chosen = run(choice_of(call, topk_indices), implementation)
    return chosen_latents(call, chosen), attend


sparse_mla_attention = operation(_sparse, output, "sparse_mla_attention", returns="jax.Array")
sparse_mla_attention_with_lse = operation(
    _sparse, output_and_lse, "sparse_mla_attention_with_lse", returns="tuple[jax.Array, jax.Array]"
)


def _indexer_logits(call: IndexerCall[jax.Array]) -> dict[str, jax.Array]:
    """Scores every key that a query sees, in float32, query by query; -inf elsewhere."""
    num_seqs, tokens = call.seq_lens.shape[0], jnp.arange(call.num_tokens, dtype=jnp.int32)
    if num_seqs == 0:
        return {"logits": jnp.full((call.num_tokens, call.table_tokens), -jnp.inf, jnp.float32)}
    places = jnp.arange(call.table_tokens, dtype=jnp.int32)
    exists = places[None] < call.seq_lens[:, None]
    # The table's tail may hold anything: block 0 replaces entries that no sequence reaches.
    keys = call.key_cache[jnp.where(exists[:, :: call.block_size], call.block_tables, 0)]
    keys = keys.astype(jnp.float32).reshape(num_seqs, call.table_tokens, -1)
    keys = scaled(jnp.where(exists[..., None], keys, 0), call.k_scale)
    real = tokens < call.query_start_loc[-1]
    sequence = jnp.where(real, jnp.searchsorted(call.query_start_loc, tokens, side="right") - 1, 0)
    seen = call.seq_lens[sequence] - call.query_start_loc[sequence + 1] + tokens + 1

    def of_token(query: jax.Array, weights: jax.Array, seq: jax.Array) -> jax.Array:
        return weights @ jax.nn.relu(call.scale * (query.astype(jnp.float32) @ keys[seq].T))

    logits = jax.lax.map(lambda x: of_token(*x), (call.query, call.weights, sequence))
    visible = real[:, None] & (places[None] < seen[:, None])
    return {"logits": jnp.where(visible, logits, -jnp.inf)}


def _chosen_slots(call: ChoiceCall[jax.Array]) -> dict[str, jax.Array]:
    """Looks up the slots of each query's keys."""
    starts = jnp.arange(call.topk_indices.shape[0] + 1, dtype=jnp.int32)
    seqs = (starts[:-1, None] >= call.query_start_loc[None, 1:]).sum(1)
    named = (call.topk_indices >= 0) & (seqs < call.block_tables.shape[0])[:, None]
    positions = jnp.where(named, call.topk_indices, 0)
    blocks = call.block_tables[seqs[:, None], positions // call.block_size]
    slots = jnp.where(named, blocks * call.block_size + positions % call.block_size, 0)
    # Entries that are no key go after the keys, whose order stays.
    order = jnp.argsort(~named, axis=1, stable=True)
    counts = named.sum(1, dtype=jnp.int32)
    return {"slots": jnp.take_along_axis(slots, order, axis=1), "counts": counts, "starts": starts}


register(JaxOp(call=IndexerCall, jnp=_indexer_logits))
register(JaxOp(call=ChoiceCall, jnp=_chosen_slots))
