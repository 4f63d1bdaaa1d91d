"""The torch loop over backend, builder, allocator and graphs gives what the JAX engine gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.torch_decode import Generator
from jattn import LLM, SamplingParams, load_model
from tests.support.tiny_models import write_tiny_model

PROMPTS = [[5, 6, 7], [9], list(range(20, 60)), [*range(20, 52), 3]]


def test_the_torch_loop_gives_the_jax_engines_tokens(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, 0)
    generator = Generator(folder, max_num_seqs=4, max_seq_len=128, num_blocks=64)

    tokens = generator.generate(PROMPTS, 12)

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    theirs = LLM(load_model(folder)[0]).generate(PROMPTS, params)
    assert tokens == [list(output.outputs[0].token_ids) for output in theirs]
    assert len({token for row in tokens for token in row}) > 5


def test_a_second_batch_reuses_the_cached_prefix_and_gives_the_same_tokens(tmp_path: Path) -> None:
    generator = Generator(write_tiny_model(tmp_path, 0), max_num_seqs=4, max_seq_len=128, num_blocks=64)

    first = generator.generate(PROMPTS, 8)
    second = generator.generate(PROMPTS, 8)

    assert second == first
    assert generator.manager.stats().hit_tokens > 0
    assert generator.manager.stats().used == 0
    assert generator.graphs.keys == (4, 2, 1)


@pytest.mark.gpu
def test_the_torch_loop_gives_the_same_tokens_with_graphs_on_the_gpu(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, 0, head_dim=32)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_seq_len": 128, "num_blocks": 64}
    on_gpu = Generator(folder, device="cuda", **sizes).generate(PROMPTS, 12)

    assert on_gpu == Generator(folder, **sizes).generate(PROMPTS, 12)
