"""Gemma 4's heads in the engine on CUDA, through the kernels: 512 elements without a window, 256 with one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jattn.llm.engine import Engine, EngineConfig
from jattn.llm.models import FullAttentionConfig, PerLayerInputConfig
from tests.engine.test_engine import prompts_of, run
from tests.support.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("kv_heads", "full"),
    [
        (4, FullAttentionConfig(head_dim=512, num_key_value_heads=1, attention_k_eq_v=True)),
        (1, FullAttentionConfig(head_dim=512, num_key_value_heads=1)),
    ],
    ids=["narrower than the others", "wider than the others"],
)
def test_paged_generation_equals_running_the_whole_sequence_again(kv_heads, full, seed) -> None:
    config = tiny_config(
        num_hidden_layers=5, layer_windows=(24, None, 24, 24, None), kv_sharing_targets=(None, None, None, 2, 1),
        num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=256, full_attention=full, qk_norm="head",
        value_norm=True, layer_scalar=True, rope_local_theta=1e4, attention_scale=1.0,
        per_layer_input=PerLayerInputConfig(hidden_size=16, vocab_size=257, num_layers=5),
    )  # fmt: skip
    decoder, prompts = tiny_model(config, seed, "triton"), prompts_of(seed, 90, 90)
    # XLA's float32 products on a GPU are rounded to 10 bits otherwise, and a near tie may go either way.
    with jax.default_matmul_precision("highest"):
        engine = Engine(decoder, EngineConfig(block_size=16, max_num_seqs=2, max_num_batched_tokens=64))
        said, again = run(engine, prompts), run(engine, prompts)
        whole = jnp.asarray([prompt + tokens for prompt, tokens in zip(prompts, said, strict=True)])
        best = jnp.argmax(jax.jit(decoder.forward_dense)(whole), axis=-1)
    assert said == again == best[:, len(prompts[0]) - 1 : -1].tolist()
    assert engine.cache_stats().hit_tokens > 0
