"""Every family in a small pool: chunks, shared prefixes, forks, preemption and swaps, against transformers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.load import known_families, load_model
from jattn.llm.testing.torch_side import FirstOfEqual
from tests.load.test_families import LAST, assert_best
from tests.support.family_models import LARGER, VARIANTS, write_checkpoint

LENGTHS, BLOCK, STEP = (17, 9, 10, 11), 4, 12
#: Of families whose layers keep states every variant, of the others the one in which most options are on.
CASES = [case for case in VARIANTS if case in LAST or known_families()[case[0]].has_states]


def check_every_way_through_the_engine(folder: Path, seed: int, max_tokens: int, *, forks: bool = True) -> None:
    """Texts alone, after a prefix, in three samples, computed again and swapped: transformers' best tokens."""
    model, config, _ = load_model(folder, implementation="xla", with_tokenizer=False)
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, config.vocab_size, length).tolist() for length in LENGTHS]
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    # Several samples of a prompt want a temperature; this one leaves the best token.
    three = dataclasses.replace(greedy, temperature=1e-7, n=3)
    blocks = -(-(max(LENGTHS) + max_tokens) // BLOCK)
    # With a window in all layers a sequence holds those of the window and of a step's tokens alone.
    held = blocks if config.sliding_window is None else -(-(config.sliding_window + STEP) // BLOCK)
    windows = Counter(map(config.window_of, range(config.num_hidden_layers)))
    groups = config.num_hidden_layers // min(windows.values())
    sizes = EngineConfig(
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=STEP,
        max_model_len=BLOCK * blocks,
        # Two of the sequences fit, and half of one in the memory of the host: some are swapped, some computed again.
        num_blocks=max(2, groups) * held,
        num_host_blocks=held // 2,
        fixed_shapes=True,
    )

    def said(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        return [list(each.token_ids) for output in llm.generate(prompts, params) for each in output.outputs]

    with LLM(model, config=sizes) as llm:
        texts = [said(llm, [prompt], greedy)[0] for prompt in prompts]
        # The prefix ends in tokens that were decoded.
        longer, rest = [*prompts[-1], *texts[-1][:-2]], dataclasses.replace(greedy, max_tokens=2)
        assert said(llm, [longer], rest) == [texts[-1][-2:]]
        assert llm.engine.cache_stats().hit_tokens > 0
        if forks:
            # Programs that draw are compiled for it.
            assert said(llm, prompts[:1], three) == [texts[0]] * 3
        assert said(llm, prompts, greedy) == texts
        stats = llm.engine.cache_stats()
        assert stats.swapped_in > 0
        # Behind a window blocks are given back: it may be that no sequence is computed again.
        assert stats.preemptions > 0 or set(windows) != {None}
        assert (stats.forks > 0) == forks
    assert_best(folder, prompts, texts)


def test_texts_of_states_and_latents_survive_preemption_and_swaps(tmp_path, seed) -> None:
    folder = write_checkpoint(tmp_path, "KimiLinearForCausalLM", 1, seed)
    check_every_way_through_the_engine(folder, seed, 8, forks=False)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [{}, LARGER], ids=["small", "larger"])
@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_texts_of_every_family_survive_forks_preemption_and_swaps(architecture, variant, sizes, tmp_path, seed) -> None:
    folder = write_checkpoint(tmp_path, architecture, variant, seed, **sizes)
    with FirstOfEqual():
        check_every_way_through_the_engine(folder, seed, 64)
