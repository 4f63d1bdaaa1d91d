"""A batch-invariant engine over several devices: the bits of the training pass of the same split."""

from __future__ import annotations

import pytest

from jattn import LLM, EngineConfig, SamplingParams
from tests.engine.test_bits import ENGINES, KINDS, SIZES
from tests.support.devices import on_four_devices
from tests.support.tiny_models import tiny_config, tiny_model

PROMPTS = [[5, 6, 7], list(range(1, 60)), list(range(1, 41))]


@pytest.mark.parametrize(
    ("kind", "dtype", "size"),
    [
        ("llama", "bfloat16", 2),
        pytest.param("windows", "bfloat16", 2, marks=pytest.mark.nightly),
        pytest.param("experts", "bfloat16", 2, marks=pytest.mark.nightly),
        pytest.param("latents", "float32", 4, marks=pytest.mark.nightly),
    ],
)
@on_four_devices
def test_bits_are_those_of_the_training_pass_of_the_same_split(kind: str, dtype: str, size: int) -> None:
    model = tiny_model(tiny_config(num_hidden_layers=1 + (kind == "windows"), dtype=dtype, **KINDS[kind]), 3, None)
    params = SamplingParams(temperature=0.8, max_tokens=20, logprobs=0, seed=5, ignore_eos=True)
    options = SIZES | ENGINES["preempted"] | {"tensor_parallel_size": size, "batch_invariant": True}
    with LLM(model, config=EngineConfig(**options)) as llm:
        found = llm.verify(llm.generate(PROMPTS, params), params)
    assert (found.num_values, found.num_differing) == (60, 0), str(found)
