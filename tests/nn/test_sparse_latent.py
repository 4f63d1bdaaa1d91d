"""SparseLatentAttention against transformers' DeepSeek-V3.2 attention, and its caches against its dense form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

from jattn.metadata import AttentionMetadata
from jattn.nn import DeepSeekRoPE, LatentIndexer, SparseLatentAttention
from tests.ops.runner import QUICK_COMPILE
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import LatentCacheSpec
from torch_core.metadata import SequenceRow

SIZES: dict[str, Any] = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 10,
}  # fmt: skip
TOPK, LENGTH = 4, 11
#: So many that no two keys score 0 in all of them, which would leave the choice open.
HEADS = 32


def module() -> SparseLatentAttention:
    rngs = nnx.Rngs(0)
    indexer = LatentIndexer(
        12,
        10,
        num_heads=HEADS,
        head_dim=8,
        topk=TOPK,
        rope_dim=4,
        rope=DeepSeekRoPE(dim=4, interleaved=False),
        rngs=rngs,
    )
    return SparseLatentAttention(3, 12, indexer=indexer, **SIZES, rope=DeepSeekRoPE(dim=4), rngs=rngs)


def of_transformers(ours: SparseLatentAttention, x: np.ndarray) -> np.ndarray:
    config = DeepseekV32Config(
        hidden_size=12, num_attention_heads=3, num_key_value_heads=3, **SIZES, max_position_embeddings=256,
        index_topk=TOPK, index_head_dim=8, index_n_heads=HEADS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = DeepseekV32Attention(config, 0).eval()
    state = {}
    for path, value in nnx.to_flat_state(nnx.state(ours, nnx.Param)):
        *layers, kind = map(str, path)
        array = np.array(value[...])
        name = "bias" if kind == "bias" else "weight"
        state[".".join((*layers, name))] = torch.from_numpy(array.T.copy() if kind == "kernel" else array)
    theirs.load_state_dict(state)
    length = x.shape[1]
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None].expand(len(x), 1, -1, -1)
    positions = DeepseekV32RotaryEmbedding(config)(torch.from_numpy(x), torch.arange(length)[None])
    with torch.no_grad():
        return theirs(torch.from_numpy(x), position_embeddings=positions, attention_mask=mask)[0].numpy()


def inputs(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, LENGTH, 12)).astype(np.float32)


def jitted(ours: SparseLatentAttention) -> Any:
    graph, params = nnx.split(ours)
    run = jax.jit(lambda p, x, **given: nnx.merge(graph, p)(x, **given), compiler_options=QUICK_COMPILE)
    return lambda x, **given: run(params, x, **given)


def test_it_computes_what_transformers_does(seed):
    ours, x = module(), inputs(seed)
    np.testing.assert_allclose(jitted(ours)(x), of_transformers(ours, x), rtol=1e-4, atol=1e-5)


def test_prompts_in_chunks_and_decodes_equal_the_dense_form(seed):
    ours, x = module(), inputs(seed)
    assert ours.indexer is not None
    run = jitted(ours)
    expected, found = np.array(run(x)), np.zeros(x.shape, np.float32)
    specs = (
        LatentCacheSpec(kv_lora_rank=16, rope_dim=4, block_size=4, dtype="float32"),
        ours.indexer.cache_spec(4, "float32"),
    )
    caches = tuple(jnp.full(spec.shape(7), jnp.nan) for spec in specs)
    for start, end in ((0, 6), (6, 10), (10, 11)):
        rows = [SequenceRow(ids, start, end - start) for ids in ([1, 2, 3], [4, 5, 6])]
        metadata = AttentionMetadata.build(rows, block_size=4, num_blocks=7, num_tokens=2 * (end - start) + 1)
        packed = np.pad(x[:, start:end].reshape(-1, 12), ((0, 1), (0, 0)))
        out, caches = run(packed, cache=caches, metadata=metadata)
        found[:, start:end] = np.array(out)[:-1].reshape(2, -1, 12)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_reaches_all_but_the_indexer(seed):
    ours, x = module(), jnp.asarray(inputs(seed)[:1, :6])
    graph, params = nnx.split(ours)
    gradients = jax.jit(jax.grad(lambda p: (nnx.merge(graph, p)(x) ** 2).sum()), compiler_options=QUICK_COMPILE)(params)
    for path, value in nnx.to_flat_state(gradients):
        assert bool(np.abs(value[...]).max() > 0) is (path[0] != "indexer"), path


def test_what_an_indexer_needs_is_asked_for():
    sizes: dict[str, Any] = {**SIZES, "q_lora_rank": None}
    with pytest.raises(InvalidInput, match="q_lora_rank is None; the indexer's queries come from"):
        SparseLatentAttention(3, 12, indexer=module().indexer, **sizes, rngs=nnx.Rngs(0))
    with pytest.raises(InvalidInput, match="rope_dim is 8; it must be"):
        LatentIndexer(12, 10, num_heads=3, head_dim=8, topk=4, rope_dim=8, rngs=nnx.Rngs(0))


def test_a_layer_without_an_indexer_is_given_the_choice_of_an_earlier_one(seed):
    own = module()
    given = nnx.clone(own)
    given.indexer = None
    x = jax.random.normal(jax.random.key(seed), (2, LENGTH, 12))

    out, _, chosen = own.with_choice(x)
    np.testing.assert_array_equal(given(x, chosen=chosen), out)
    for layer, choice in ((given, None), (own, chosen)):
        with pytest.raises(InvalidInput, match=r"^chosen is .*; an indexer or an earlier layer chooses the tokens"):
            layer(x, chosen=choice)
