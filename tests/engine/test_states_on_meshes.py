"""Layers with a state over several devices: the tokens of one device, and sums as the only collectives of a layer."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from jattn.llm.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig, open_engine
from jattn.llm.models import Decoder, TensorParallel
from jattn.llm.models.mixers import DeltaNetConfig, KimiDeltaConfig, LightningConfig, MambaConfig, ShortConvConfig
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import run
from tests.engine.test_tensor_parallel import COLLECTIVE, large_decoder, prompts_of
from tests.support.devices import on_four_devices
from torch_core.base.errors import InvalidInput

SIZES: dict[str, Any] = {
    "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "fixed_shapes": True,
}  # fmt: skip
SAMPLED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=3)
KINDS = ("conv", "linear_attention", "kimi_delta_attention", "lightning_attention", "attention_mamba")
MIXERS: dict[str, Any] = {
    "short_conv": ShortConvConfig(use_bias=True),
    "delta_net": DeltaNetConfig(num_heads=8, num_kv_heads=4, key_dim=6, value_dim=5),
    "kimi_delta": KimiDeltaConfig(num_heads=4, head_dim=6),
    "lightning": LightningConfig(num_heads=4, head_dim=6),
    "mamba": MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2, use_bias=True, out_bias=True),
}


def decoder(**changes: Any) -> Decoder:
    return large_decoder(num_hidden_layers=len(KINDS), layer_types=KINDS, **{**MIXERS, **changes})


@on_four_devices
def test_tokens_of_every_mixer_are_those_of_one_device_and_only_sums_and_choices_cross_devices() -> None:
    model, prompts = decoder(), prompts_of(1, 6)
    engine = Engine(model, EngineConfig(**SIZES, tensor_parallel_size=4))
    assert run(engine, prompts, SAMPLED) == run(Engine(model, EngineConfig(**SIZES)), prompts, SAMPLED)
    states = engine._core.device.pool.shardings[-1]
    assert states is not None
    assert states.shard_shape((9, 8, 5, 6)) == (9, 2, 5, 6)
    for program in engine._core.device.runner.programs.compiled.values():
        found = COLLECTIVE.findall(program.as_text())
        kinds = Counter(kind for _, kind in found)
        # The embedding, two of each layer, those of lightning's norm and of Mamba's over copied groups, the best logit.
        assert kinds["all-reduce"] == 2 + 2 * len(KINDS) + 2
        assert set(kinds) == {"all-reduce", "all-gather"}
        assert all(re.match(r"\(?s32\[4,2,\d+\]", shape) for shape, kind in found if kind == "all-gather")


@pytest.mark.nightly
@on_four_devices
def test_guesses_forks_and_swaps_on_several_devices_and_copies_change_no_token() -> None:
    model, prompts = decoder(), prompts_of(3, 6)
    expected = run(Engine(model, EngineConfig(**SIZES)), prompts, SAMPLED)
    speculative = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1)
    choices: list[dict[str, Any]] = [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "speculative_config": speculative},
        {"tensor_parallel_size": 2, "num_blocks": 18, "num_host_blocks": 16},
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
    ]
    for options in choices:
        engine: Any = open_engine(model, EngineConfig(**SIZES, **options))
        assert run(engine, prompts, SAMPLED) == expected, options


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta_net": DeltaNetConfig(num_heads=6, num_kv_heads=3, key_dim=6, value_dim=4)}, "delta_net.num_kv_heads"),
        ({"kimi_delta": KimiDeltaConfig(num_heads=2, head_dim=6)}, "kimi_delta.num_heads"),
        ({"lightning": LightningConfig(num_heads=2, head_dim=6)}, "lightning.num_heads"),
        ({"mamba": MambaConfig(num_heads=12, head_dim=4, state_size=6, num_groups=3)}, "mamba.num_groups"),
    ],
)
def test_heads_that_devices_do_not_divide_are_refused(changes: dict[str, Any], words: str) -> None:
    config = replace(tiny_decoder(num_hidden_layers=1).config, layer_types=("attention",), **{**MIXERS, **changes})
    with pytest.raises(InvalidInput, match=words):
        TensorParallel(size=4).check(config)
