"""A pool that takes all memory which JAX may use, and the largest steps in what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

_PROGRAM = """
import jax
import numpy as np
from flax import nnx

from jattn.llm.engine import EngineConfig, SamplingParams
from jattn.llm.models import Decoder, ModelConfig
from tests.engine.cores import CoreEngine

sizes = dict(vocab_size=32000, hidden_size=1024, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=16,
             num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=0,
             eos_token_ids=(0,), dtype="bfloat16")
model = Decoder(ModelConfig(**sizes), rngs=nnx.Rngs(0))
engine = CoreEngine(model, EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192))
pool = engine._core.device.pool
stats = jax.local_devices()[0].memory_stats()
# Of smaller pools the largest step is not measured.
assert stats["bytes_in_use"] > stats["bytes_limit"] / 2
print("share of the memory:", stats["bytes_in_use"] / stats["bytes_limit"])

random = np.random.default_rng(0)
every = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, presence_penalty=0.5, logprobs=20, prompt_logprobs=5,
                       max_tokens=12, ignore_eos=True)
plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
requests = [engine.add(random.integers(1, 32000, random.integers(500, 3000)).tolist(), every if index % 2 else plain)
            for index in range(150)]
while engine.num_unfinished:
    engine.step()
assert [len(request.output_token_ids) for request in requests] == [12] * 150
assert pool.generation == 1, "a step lost the pool"
"""


def test_the_largest_steps_fit_beside_a_pool_of_the_free_memory() -> None:
    # A twenty-fifth of a device, so that a small model's cache fills it.
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.04"}
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=400, env={**os.environ, **memory})
