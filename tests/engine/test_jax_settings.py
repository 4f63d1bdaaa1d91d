"""Settings of JAX that a user may have on: the same tokens, or a sentence that says which one is in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from tests.engine.conftest import tiny_decoder
from tests.engine.cores import CoreEngine
from tests.engine.test_engine import GREEDY, prompts_of, run
from torch_core.base.errors import Unsupported

CONFIG = EngineConfig(
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    num_blocks=12,
    num_host_blocks=12,
    scrub_on_free=True,
    fixed_shapes=True,
)
# Every part of the sampler runs.
FULL = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, logprobs=2, prompt_logprobs=1, max_tokens=6)
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from tests.engine.test_jax_settings import CONFIG, FULL
from tests.engine.test_engine import prompts_of, run
from tests.engine.conftest import tiny_decoder
from tests.engine.cores import CoreEngine
from jattn.llm.engine import Engine
print(run(Engine(tiny_decoder(), CONFIG), prompts_of(3, 17, 2, 9), FULL))
"""


@pytest.mark.nightly
def test_the_tokens_are_the_same_in_a_process_with_64_bits_and_without_rank_promotion(decoder) -> None:
    settings = {"JAX_ENABLE_X64": "1", "JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | settings | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert finished.stdout.strip() == str(run(Engine(decoder, CONFIG), prompts_of(3, 17, 2, 9), FULL)), finished.stderr


def test_the_engines_own_transfers_pass_the_users_guard(decoder, seed) -> None:
    prompts = prompts_of(seed, 17, 2, 9)
    expected = run(Engine(decoder, CONFIG), prompts, FULL)

    with jax.transfer_guard("disallow"):
        engine = Engine(decoder, CONFIG)
        assert run(engine, prompts, FULL) == expected

    assert engine.cache_stats().swapped_out > 0


@pytest.mark.parametrize(
    ("setting", "name"),
    [(jax.disable_jit, "jax_disable_jit"), (jax.debug_nans, "jax_debug_nans"), (jax.debug_infs, "jax_debug_infs")],
)
def test_a_setting_that_forbids_donation_is_named_and_the_engine_goes_on_without_it(setting, name, seed) -> None:
    engine = CoreEngine(tiny_decoder(), CONFIG)
    prompts = prompts_of(seed, 5)
    request = engine.add(prompts[0], GREEDY)

    with setting(True), pytest.raises(Unsupported, match=f"^{name} is on: JAX donates no buffer"):
        engine.step()
    while engine.num_unfinished:
        engine.step()

    assert [request.output_token_ids] == run(Engine(tiny_decoder(), CONFIG), prompts)


@pytest.mark.parametrize("setting", [jax.disable_jit, jax.debug_nans])
def test_a_setting_of_the_callers_thread_does_not_reach_the_engine(setting, decoder, seed) -> None:
    prompts = prompts_of(seed, 5)
    expected = run(Engine(decoder, CONFIG), prompts)

    with setting(True):
        assert run(Engine(decoder, CONFIG), prompts) == expected


def test_the_default_device_of_the_caller_is_the_engines(decoder) -> None:
    with jax.default_device(jax.devices()[-1]):
        engine = Engine(decoder, CONFIG)

    assert engine._core.device.pool._arrays[0].devices() == {jax.devices()[-1]}
