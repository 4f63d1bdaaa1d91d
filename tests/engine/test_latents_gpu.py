"""DeepSeek's decoders in the engine on CUDA, through latent kernels; V3.2's with its indexer's choices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jattn.llm.engine import Engine, EngineConfig
from jattn.llm.load import parse_config
from jattn.llm.models import Decoder
from tests.engine.test_engine import prompts_of, run

pytestmark = pytest.mark.gpu

_RAW: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 3,
    "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "v_head_dim": 16,
    "hidden_act": "silu", "attention_bias": False, "rope_theta": 10000.0,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
_INDEXER: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 16,
    "index_head_dim": 128, "index_topk": 24,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, _INDEXER], ids=["v3", "v3.2"])
def test_paged_generation_equals_running_the_whole_sequence_again(changes, seed) -> None:
    decoder = Decoder(parse_config(_RAW | changes), rngs=nnx.Rngs(seed), implementation="triton")
    prompts = prompts_of(seed, 40, 40)
    # XLA's float32 products on a GPU are rounded to 10 bits otherwise, and a near tie may go either way.
    with jax.default_matmul_precision("highest"):
        engine = Engine(decoder, EngineConfig(block_size=16, max_num_seqs=2, max_num_batched_tokens=32))
        said = run(engine, prompts)
        whole = jnp.asarray([prompt + tokens for prompt, tokens in zip(prompts, said, strict=True)])
        best = jnp.argmax(jax.jit(decoder.forward_dense)(whole), axis=-1)
    assert said == best[:, len(prompts[0]) - 1 : -1].tolist()
