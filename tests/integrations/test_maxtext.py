"""The branch of MaxText's AttentionOp computes what its dot product computes, and refuses what it does not serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import Unsupported
from jattn.integrations import maxtext

SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
CASES: dict[str, dict[str, Any]] = {
    "segments": {"attention_type": "global"},
    "window": {"attention_type": "local_sliding", "sliding_window_size": 2},
    "soft cap": {"attention_type": "global", "attn_logits_soft_cap": 2.0},
    "full": {"attention_type": "full"},
}


def an_op(**given: Any) -> Any:
    blank = {"sliding_window_size": None, "chunk_attn_window_size": None, "attn_logits_soft_cap": None}
    return SimpleNamespace(**{**blank, "config": SimpleNamespace(moba=False, max_segments_per_seq=2), **given})


def operands(seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((2, 8, 4, 8), (2, 8, 2, 8), (2, 8, 2, 8), (4,))
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def dot_product(op: Any, *arrays: jax.Array) -> np.ndarray:
    """MaxText's definition, in float64."""
    query, key, value, sinks = (np.asarray(each, np.float64) for each in arrays)
    scores = np.einsum("bqhd,bkhd->bhqk", query, key.repeat(2, 2))
    if op.attn_logits_soft_cap:
        scores = np.tanh(scores / op.attn_logits_soft_cap) * op.attn_logits_soft_cap
    row, column = np.ogrid[:8, :8]
    mask = np.asarray(SEGMENTS)[:, :, None] == np.asarray(SEGMENTS)[:, None, :]
    if op.attention_type != "full":
        mask = mask & (column <= row) & (column > row - (op.sliding_window_size or 8))
    weights = np.where(mask[:, None], np.exp(scores), 0)
    weights = weights / (weights.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None])
    return np.where(
        np.asarray(SEGMENTS)[..., None, None] > 0, np.einsum("bhqk,bkhd->bqhd", weights, value.repeat(2, 2)), 0
    )


@pytest.mark.parametrize("case", CASES)
def test_the_branch_gives_the_dot_product_of_packed_segments_with_sinks(case: str, seed: int) -> None:
    op, (query, key, value, sinks) = an_op(**CASES[case]), operands(seed)

    found = maxtext.attention(op, query, key, value, SEGMENTS, sinks=sinks)

    np.testing.assert_allclose(found, dot_product(op, query, key, value, sinks), atol=1e-5)


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"model_mode": "prefill"}, "model_mode is 'prefill'"),
        ({"indexer_mask": jnp.ones((2, 8, 8))}, "indexer_mask"),
        ({"record_max_logits": True}, "record_max_logits"),
    ],
)
def test_what_the_branch_does_not_serve_is_refused_by_name(given: dict[str, Any], argument: str, seed: int) -> None:
    query, key, value, _ = operands(seed)
    with pytest.raises(Unsupported, match=argument):
        maxtext.attention(an_op(attention_type="global"), query, key, value, SEGMENTS, **given)


def test_another_attention_type_is_refused(seed: int) -> None:
    query, key, value, _ = operands(seed)
    with pytest.raises(Unsupported, match="block_diffusion"):
        maxtext.attention(an_op(attention_type="block_diffusion"), query, key, value)


@pytest.mark.parametrize("case", CASES)
def test_the_branch_gives_what_the_installed_maxtext_gives(case: str, seed: int) -> None:
    attention_op = pytest.importorskip("maxtext.layers.attention_op")
    kinds: Any = attention_op.AttentionType
    options = {**CASES[case], "attention_type": kinds(CASES[case]["attention_type"])}
    config = SimpleNamespace(
        moba=False,
        max_segments_per_seq=2,
        matmul_precision="highest",
        context_parallel_load_balance=False,
        context_sharding="context",
        context_parallel_strategy="all_gather",
        ici_context_autoregressive_parallelism=0,
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sizes = {"max_target_length": 8, "num_query_heads": 4, "num_kv_heads": 2}
    op = attention_op.AttentionOp(config=config, mesh=mesh, attention_kernel="dot_product", **sizes, **options)
    real = (SEGMENTS > 0)[..., None, None]

    def with_gradients(attend: Any) -> Any:
        return jax.value_and_grad(lambda *arrays: jnp.where(real, attend(*arrays), 0).var(), argnums=(0, 1, 2, 3))

    def theirs(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array) -> jax.Array:
        return op(query, key, value, SEGMENTS, None, "train", sinks=sinks)

    def ours(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array) -> jax.Array:
        return maxtext.attention(op, query, key, value, SEGMENTS, sinks=sinks)

    found, wanted = with_gradients(ours)(*operands(seed)), with_gradients(theirs)(*operands(seed))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), found, wanted)
