"""Sequences dealt out over devices that share key/value heads: the tokens of one device, and room for more of them."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import run
from tests.engine.test_tensor_parallel import COLLECTIVE, prompts_of
from tests.models.test_sharding import LATENT
from tests.support.devices import on_four_devices
from tests.support.tiny_models import write_tiny_model
from torch_core.base.errors import InvalidInput, Unsupported

# One shape for all steps: little to compile.
SIZES: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "num_scheduler_steps": 1,
    "fixed_shapes": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

TWO_HEADS = {"num_key_value_heads": 2, "num_hidden_layers": 1}
MODELS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one head on four": (4, {"num_key_value_heads": 1}, {}),
    "two heads on two each": (2, TWO_HEADS, {}),
    "windows": (2, {"num_key_value_heads": 1, "layer_windows": (9, None)}, {}),
    "ALiBi": (4, {"num_key_value_heads": 1, "position_embedding": "alibi"}, {}),
    "guesses": (4, {"num_key_value_heads": 1}, {"speculative_config": {"num_speculative_tokens": 3}}),
}


def engine_of(model: Any, context_size: int, **changes: Any) -> Engine:
    sizes = SIZES | changes
    return Engine(model, EngineConfig(**sizes, tensor_parallel_size=4, decode_context_parallel_size=context_size))


def assert_tokens_of_one_device(name: str) -> None:
    context_size, changes, options = MODELS[name]
    graph, state = nnx.split(tiny_decoder(**changes))
    # So large that the layers, and not the embedding alone, decide what comes next.
    state = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.2, state)
    model = nnx.merge(graph, state)
    # Longer than a step takes, so in chunks; and every second one begins like the one before.
    prompts = [prompt * 2 for prompt in prompts_of(5, 6)]
    prompts += [[*prompt, 1, 2, 3] for prompt in prompts[::2]]

    assert run(engine_of(model, context_size, **options), prompts, GREEDY) == run(
        Engine(model, EngineConfig(**SIZES)), prompts, GREEDY
    )


@on_four_devices
def test_tokens_are_those_of_one_device() -> None:
    assert_tokens_of_one_device("two heads on two each")


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
@on_four_devices
def test_heads_masks_and_guesses_change_no_token(name: str) -> None:
    assert_tokens_of_one_device(name)


@on_four_devices
def test_a_folder_is_read_as_its_tokens_are_dealt_out() -> None:
    cut: dict[str, Any] = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), 1, num_hidden_layers=1)
        found = [
            LLM(folder, config=EngineConfig(**SIZES, **each)).generate(["a text"], GREEDY)[0].outputs[0].token_ids
            for each in ({}, cut)
        ]
    assert found[0] == found[1]


@on_four_devices
def test_the_pool_holds_as_many_times_the_tokens_as_devices_share_them() -> None:
    model = tiny_decoder(implementation="xla", num_key_value_heads=1)
    alone, shared = (engine_of(model, size, kv_cache_bytes=1 << 14, max_num_seqs=32) for size in (1, 4))

    assert shared.pool_plan.num_blocks == alone.pool_plan.num_blocks
    assert shared.pool_plan.num_tokens == 4 * alone.pool_plan.num_tokens
    assert "blocks of 16 tokens" in str(shared.pool_plan)


@on_four_devices
def test_a_layer_gathers_queries_and_exchanges_results_once_and_no_cache_moves() -> None:
    engine = engine_of(tiny_decoder(**TWO_HEADS), 2)
    run(engine, prompts_of(6, 2), GREEDY)

    programs = engine._core.device.runner.programs
    texts = {str(bucket): compiled.as_text() for bucket, compiled in programs.compiled.items()}
    for name, text in texts.items():
        found = COLLECTIVE.findall(text)
        kinds = Counter(kind for _, kind in found)
        # The embedding, a layer's two, and the largest logit; the sampler gathers its best tokens.
        assert (kinds["all-reduce"], kinds["all-to-all"]) == (4, 1), name
        queries = [shape for shape, kind in found if kind == "all-gather" and shape.startswith("f32")]
        assert len(queries) == 1, name


_CONTEXT = r"decode_context_parallel_size \(context_size\)"
REFUSED: dict[str, tuple[dict[str, Any], int, type[Exception], str]] = {
    "heads dealt out": (
        {"num_key_value_heads": 4},
        2,
        InvalidInput,
        rf"{_CONTEXT} is 2; 4 key/value heads on 4 devices have 1 copies each, and it must divide them",
    ),
    "more than copies": (
        {"num_key_value_heads": 2},
        4,
        InvalidInput,
        rf"{_CONTEXT} is 4; 2 key/value heads on 4 devices have 2 copies each, and it must divide them",
    ),
    "no divisor": (
        {},
        3,
        InvalidInput,
        r"decode_context_parallel_size is 3; it must divide tensor_parallel_size \(4\), whose",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@on_four_devices
def test_devices_that_have_no_copies_to_save_are_refused(case: str) -> None:
    changes, context_size, error, message = REFUSED[case]
    with pytest.raises(error, match=f"^{message}"):
        engine_of(tiny_decoder(implementation="xla", **changes), context_size)


@on_four_devices
def test_latents_are_refused() -> None:
    model = tiny_decoder(implementation="xla", num_key_value_heads=4, latent=LATENT, head_dim=4)
    with pytest.raises(Unsupported, match=rf"^{_CONTEXT} is 2 and the model attends to latents"):
        engine_of(model, 2)
