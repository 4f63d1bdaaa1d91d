"""A decoder over latents with an indexer's second cache: forks, preemption, swaps and guesses change no token."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from jattn.llm.models import Decoder
from jattn.llm.models.parts import LatentConfig
from tests.support.devices import on_four_devices
from tests.support.tiny_models import tiny_config, tiny_model
from torch_core.base.errors import InvalidInput

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


def latent_decoder(seed: int) -> Decoder:
    return tiny_model(tiny_config(num_key_value_heads=4, head_dim=4, latent=LATENT), seed)


def expansions_of(model: nnx.Module) -> dict[str, np.ndarray]:
    flat: Any = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat if "kv_b_proj" in path}


def assert_weights_are(engine: Engine, model: nnx.Module) -> None:
    """Those that its programs have, in two parts, and those that it shows."""
    jax.tree.map(np.testing.assert_array_equal, expansions_of(engine.current_model), expansions_of(model))
    weights = engine._core.device.runner.weights
    layer = weights.structure.merge(weights.leaves).layers[0].self_attn
    keys, values = (np.asarray(kernel) for kernel in layer.kv_b_proj.kernels())
    whole = expansions_of(model)["layers.0.self_attn.kv_b_proj.kernel"].reshape(len(keys), -1, 14)
    np.testing.assert_array_equal(keys, whole[..., :8])
    np.testing.assert_array_equal(values, whole[..., 8:])


def updated(devices: int) -> None:
    first, second = latent_decoder(1), latent_decoder(2)
    engine = Engine(first, EngineConfig(block_size=4, max_num_seqs=2, num_blocks=9, tensor_parallel_size=devices))
    assert_weights_are(engine, first)
    engine.update_weights(second)
    assert_weights_are(engine, second)
    name = "layers.0.self_attn.kv_b_proj.kernel"
    path, kernel = ("layers", 0, *name.split(".")[2:]), expansions_of(first)[name]
    engine.update_weights(nnx.from_flat_state([(path, kernel)]), partial=True)
    expected: Any = latent_decoder(2)
    expected.layers[0].self_attn.kv_b_proj.kernel[...] = kernel
    assert_weights_are(engine, expected)
    with pytest.raises(InvalidInput, match=rf"^{name} is float32\[16, 55\]; the model's is float32\[16, 56\]\.$"):
        engine.update_weights(nnx.from_flat_state([(path, kernel[:, :55])]), partial=True)
    with pytest.raises(InvalidInput, match=rf"^{name} has NaN or infinite numbers, and so have 0 other parameters;"):
        engine.update_weights(nnx.from_flat_state([(path, kernel * np.nan)]), partial=True)
    part = (*path[:-1], "k_b_proj", "kernel")
    with pytest.raises(InvalidInput, match=rf"^state has {name} and .*k_b_proj.kernel, which is a part of it"):
        engine.update_weights(nnx.from_flat_state([(path, kernel), (part, kernel)]), partial=True)
    flat: Any = nnx.to_flat_state(nnx.state(second))
    rest = nnx.from_flat_state([each for each in flat if "kv_b_proj" not in each[0]])
    wanted = rf"^state lacks {name}; {second.config.num_hidden_layers} of \d+ parameters do\.$"
    with pytest.raises(InvalidInput, match=wanted):
        engine.update_weights(rest)
    assert_weights_are(engine, expected)
    engine.close()


def test_one_expansion_of_a_trainer_is_brought_to_its_two_parts() -> None:
    updated(1)


@on_four_devices
def test_one_expansion_of_a_trainer_is_brought_to_the_two_parts_of_each_device() -> None:
    updated(4)
