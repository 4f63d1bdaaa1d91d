"""MultiHeadLatentAttention against transformers' DeepSeek attention, and its absorbed form against its plain one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from jattn import KVPool, LatentCacheSpec, MultiHeadLatentAttention
from jattn.metadata import AttentionMetadata
from jattn.nn import DeepSeekRoPE, LoRA
from tests.ops.runner import QUICK_COMPILE
from torch_core.base.errors import InvalidInput
from torch_core.metadata import SequenceRow

SIZES: dict[str, Any] = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
SPEC = LatentCacheSpec(kv_lora_rank=16, rope_dim=4, block_size=4, dtype="float32")
STEP = AttentionMetadata.build([SequenceRow([1], 0, 1)], block_size=4, num_blocks=3)
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def module(rope: dict[str, Any] = PLAIN, **changes: Any) -> MultiHeadLatentAttention:
    options = {name: value for name, value in rope.items() if name not in ("rope_type", "rope_theta")}
    deepseek = DeepSeekRoPE(dim=4, theta=10000.0, **options)
    return MultiHeadLatentAttention(3, 12, **SIZES, rope=deepseek, **changes, rngs=nnx.Rngs(0))


def of_transformers(ours: MultiHeadLatentAttention, rope: dict[str, Any], **changes: Any) -> Any:
    """Their layer with our parameters, as a function of a batch."""
    config = DeepseekV3Config(
        hidden_size=12, num_attention_heads=3, num_key_value_heads=3, **SIZES, max_position_embeddings=256,
        rope_parameters=dict(rope), **changes,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(config, 0).eval()
    state = {}
    for path, value in nnx.to_flat_state(nnx.state(ours, nnx.Param)):
        layer, kind = map(str, path)
        array = np.array(value[...])
        name = "bias" if kind == "bias" else "weight"
        state[f"{layer}.{name}"] = torch.from_numpy(array.T.copy() if kind == "kernel" else array)
    theirs.load_state_dict(state)
    angles = DeepseekV3RotaryEmbedding(config)

    def attend(x: np.ndarray) -> np.ndarray:
        length = x.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        positions = angles(torch.from_numpy(x), torch.arange(length)[None])
        with torch.no_grad():
            return theirs(torch.from_numpy(x), position_embeddings=positions, attention_mask=mask)[0].numpy()

    return attend


def jitted(ours: MultiHeadLatentAttention, **static: Any) -> Any:
    graph, params = nnx.split(ours)
    call = jax.jit(lambda p, x, **arrays: nnx.merge(graph, p)(x, **arrays, **static), compiler_options=QUICK_COMPILE)
    return lambda x, **arrays: call(params, x, **arrays)


@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("changes", [{"q_lora_rank": None}, {"q_lora_rank": 10, "use_bias": True}])
def test_a_padded_batch_gives_what_transformers_gives(rope, changes, seed):
    ours = module(rope, **changes)
    their_changes = {"q_lora_rank": changes["q_lora_rank"], "attention_bias": changes.get("use_bias", False)}
    x = np.random.default_rng(seed).standard_normal((2, 9, 12)).astype(np.float32)

    np.testing.assert_allclose(jitted(ours)(x), of_transformers(ours, rope, **their_changes)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["torch", "xla"])
def test_generation_over_latents_equals_the_padded_batch(implementation, seed):
    """A prompt in the plain form, then two chunks: absorbed, over a cache that holds NaN elsewhere."""
    ours = module(YARN, q_lora_rank=10, implementation=implementation)
    x = np.random.default_rng(seed).standard_normal((2, 9, 12)).astype(np.float32)
    expected, blocks = np.array(jitted(ours)(x)), ([3, 1, 5], [2, 6, 4])
    cache, found = jnp.full(SPEC.shape(7), jnp.nan), np.zeros_like(expected)

    step = jitted(ours, from_start=False)
    for start, end in ((0, 5), (5, 7), (7, 9)):
        rows = [SequenceRow(ids, start, end - start) for ids in blocks]
        metadata = AttentionMetadata.build(rows, block_size=4, num_blocks=7, num_tokens=2 * (end - start) + 1)
        packed = np.pad(x[:, start:end].reshape(-1, 12), ((0, 1), (0, 0)))
        run = step if start else jitted(ours, from_start=True)
        out, cache = run(packed, cache=cache, metadata=metadata)
        found[:, start:end] = np.array(out)[:-1].reshape(2, -1, 12)

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def lora(base):
    adapted = LoRA(base, rank=2, rngs=nnx.Rngs(0))
    adapted.lora_b[...] = jax.random.normal(jax.random.key(0), adapted.lora_b.shape)
    return adapted


def lora_of_flax(base):
    rngs, options = nnx.Rngs(0), {"lora_rank": 2, "b_initializer": nnx.initializers.normal(1.0)}
    return nnx.LoRALinear(base.in_features, base.out_features, use_bias=False, **options, rngs=rngs)


@pytest.mark.parametrize("own", [lora, lora_of_flax])
def test_the_absorbed_form_has_an_expansion_of_ones_own(own, seed):
    ours, x = module(), np.random.default_rng(seed).standard_normal((1, 4, 12)).astype(np.float32)
    ours.kv_b_proj = own(ours.kv_b_proj)
    metadata = AttentionMetadata.build([SequenceRow([1], 0, 4)], block_size=4, num_blocks=2)

    found, _ = jitted(ours, from_start=False)(x[0], cache=jnp.zeros(SPEC.shape(2)), metadata=metadata)

    np.testing.assert_allclose(found, jitted(ours)(x)[0], rtol=1e-4, atol=1e-5)


def test_the_plain_form_has_a_gradient_in_every_parameter(seed):
    ours, x = module(q_lora_rank=10), jax.random.normal(jax.random.key(seed % 1000), (1, 4, 12))

    graph, params = nnx.split(ours)
    gradients = jax.jit(jax.grad(lambda p: (nnx.merge(graph, p)(x) ** 2).sum()), compiler_options=QUICK_COMPILE)(params)

    assert all(np.abs(value).max() > 0 for value in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": np.zeros(12)}, r"inputs has shape \(12,\); it must be \[batch..., length, 12\]"),
        ({"inputs": np.zeros((2, 3, 10))}, r"inputs has shape \(2, 3, 10\); it must be \[batch..., length, 12\]"),
        (
            {"inputs": np.zeros((1, 12)), "cache": jnp.zeros((3, 8, 20)), "metadata": STEP},
            "metadata is for blocks of 4 tokens and cache of 8; build it with the cache's block_size",
        ),
        (
            {"inputs": np.zeros((1, 12)), "cache": jnp.zeros((3, 2, 4, 1, 10)), "metadata": STEP},
            r"latent_cache has shape \[3, 2, 4, 1, 10\]; it must have 3 axes",
        ),
        ({"inputs": np.zeros((2, 12)), "cache": jnp.zeros(SPEC.shape(3))}, "one of cache and metadata is None"),
        ({"inputs": None}, r"inputs is a NoneType; it must be an array"),
    ],
)
def test_a_bad_call_is_refused(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        jitted(module())(arguments.pop("inputs"), **arguments)


def test_bad_sizes_are_refused():
    with pytest.raises(InvalidInput, match="kv_lora_rank is 0; it must be from 1 to 65536"):
        MultiHeadLatentAttention(3, 12, **{**SIZES, "kv_lora_rank": 0}, rngs=nnx.Rngs(0))
    with pytest.raises(InvalidInput, match="rope is for 8 elements and qk_rope_head_dim is 4; they are the same"):
        MultiHeadLatentAttention(3, 12, **SIZES, rope=DeepSeekRoPE(dim=8), rngs=nnx.Rngs(0))
    with pytest.raises(InvalidInput, match="dim is 3; elements are rotated in pairs"):
        DeepSeekRoPE(dim=3)
    with pytest.raises(InvalidInput, match=r"factor is 0\.5; it must be at least 1"):
        DeepSeekRoPE(dim=4, factor=0.5)


@pytest.mark.parametrize("implementation", ["torch", "xla"])
def test_a_pool_of_latents_is_updated_in_place(implementation):
    graph, params = nnx.split(module(implementation=implementation))
    pool = KVPool(SPEC, num_layers=1, num_blocks=4)
    before = pool.addresses()

    def step(caches: Any, params: Any, x: jax.Array, metadata: AttentionMetadata) -> Any:
        y, cache = nnx.merge(graph, params)(x, cache=caches[0], metadata=metadata)
        return y, [cache]

    metadata = AttentionMetadata.build([SequenceRow([2, 3], 0, 6)], block_size=4, num_blocks=4)
    jitted_step = jax.jit(step, donate_argnums=0, compiler_options=QUICK_COMPILE)
    pool.run(jitted_step, params, jnp.ones((6, 12)), metadata)

    assert pool.addresses() == before
    written = np.abs(pool.read_blocks([2, 3])[0]).sum(-1) > 0
    assert written.tolist() == [[True] * 4, [True, True, False, False]]


@pytest.mark.parametrize("shape", [(0, 3, 12), (2, 0, 12)], ids=str)
def test_a_batch_without_rows_or_tokens_has_an_output_without_any(shape: tuple[int, ...]) -> None:
    assert jitted(module())(jnp.zeros(shape)).shape == shape
