"""A decoder over latents with an indexer's second cache: forks, preemption, swaps and guesses change no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.models import Decoder
from jattn.llm.models.parts import LatentConfig
from tests.support.tiny_models import tiny_config, tiny_model

LATENT = LatentConfig(
    kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, index_n_heads=8,
    index_head_dim=8, index_topk=12, index_shared_layers=(1,),
)  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, n=2)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_model(tiny_config(num_key_value_heads=4, head_dim=4, latent=LATENT), 1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    long = rng.integers(1, 257, 33).tolist()
    return [rng.integers(1, 257, 9).tolist(), long, [*long[:21], *rng.integers(1, 257, 6).tolist()]]


def engine_of(decoder: Decoder, **changes: Any) -> LLM:
    sizes = {"block_size": 4, "max_num_seqs": 8, "max_model_len": 64, "num_blocks": 160}
    return LLM(decoder, config=EngineConfig(**{**sizes, **changes}))


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(each.token_ids) for output in llm.generate(prompts, PARAMS) for each in output.outputs]


@pytest.fixture(scope="module")
def expected(decoder: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """Of each prompt alone, twice: both samples are the greedy one."""
    with engine_of(decoder, enable_prefix_caching=False) as llm:
        return [tokens for prompt in prompts for tokens in tokens_of(llm, [prompt])]


@pytest.mark.parametrize(
    ("changes", "happened"),
    [
        ({}, ("forks", "copies")),
        ({"num_blocks": 28}, ("preemptions",)),
        ({"num_blocks": 28, "num_host_blocks": 64}, ("swapped_out", "swapped_in")),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, ()),
    ],
    ids=["forked", "preempted", "swapped", "guessed"],
)
def test_tokens_over_latents_are_those_of_a_prompt_alone(changes, happened, decoder, prompts, expected) -> None:
    with engine_of(decoder, **changes) as llm:
        tokens, stats = tokens_of(llm, prompts), llm.engine.cache_stats()

    assert tokens == expected
    assert all(getattr(stats, name) > 0 for name in happened), stats
