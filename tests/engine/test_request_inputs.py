"""Numbers that each request brings for the model: the adapter of its sequence, for example."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from jattn.llm.engine.clients.replicas import DataParallelEngine
from jattn.llm.load.calibrate import calibrate_kv_cache
from jattn.llm.models import PagedSpec
from jattn.llm.models.request_inputs import packed, unpacked
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import prompts_of
from torch_core.base.errors import InvalidInput

CONFIG = EngineConfig(
    block_size=4, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=24, num_scheduler_steps=1, fixed_shapes=True
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Adapted(nnx.Module):
    """A decoder whose input embeddings an adapter shifts: as if each request had token ids of its own."""

    paged_spec = PagedSpec(
        vocab_size=97, max_model_len=64, num_layers=2, num_kv_heads=2, head_dim=8, inputs={"adapter": jnp.int32}
    )

    def __init__(self) -> None:
        self.inner = tiny_decoder()

    def __call__(self, token_ids: Any, positions: Any, kv_caches: Any, metadata: Any) -> Any:
        shift = metadata.of_tokens(metadata.inputs["adapter"], token_ids.size)
        return self.inner((token_ids + shift) % 97, positions, kv_caches, metadata)

    def logits(self, hidden: Any) -> Any:
        return self.inner.logits(hidden)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Adapted(), CONFIG)


def tokens_of(engine: Any, requests: list[Any]) -> list[list[int]]:
    while engine.num_unfinished:
        engine.step()
    return [sample.output_token_ids for request in requests for sample in request.samples]


@functools.cache
def dense_logits() -> Any:
    model = tiny_decoder()
    return jax.jit(model.forward_dense)


def alone(prompt: list[int], adapter: int) -> list[int]:
    """Returns what the model says, by its dense pass over shifted tokens."""
    found = list(prompt)
    for _ in range(6):
        padded = jnp.asarray([[*found, *[0] * (32 - len(found))]])
        found.append(int(dense_logits()((padded + adapter) % 97)[0, len(found) - 1].argmax()))
    return found[len(prompt) :]


def test_each_request_of_a_batch_has_its_own_input(engine: Engine, seed: int) -> None:
    prompts = prompts_of(seed, 5, 9)
    requests = [engine.add(prompt, GREEDY, inputs={"adapter": 7 * index}) for index, prompt in enumerate(prompts)]

    assert tokens_of(engine, requests) == [alone(prompt, 7 * index) for index, prompt in enumerate(prompts)]


def test_prefixes_are_shared_among_equal_inputs_alone(engine: Engine, seed: int) -> None:
    (prompt,) = prompts_of(seed, 12)

    def cached(adapter: int) -> int:
        request = engine.add(prompt, GREEDY, inputs={"adapter": adapter})
        tokens_of(engine, [request])
        return request.num_cached_tokens

    assert [cached(1), cached(1), cached(2)] == [0, 8, 0]


def test_samples_of_a_prompt_and_preempted_requests_keep_their_input(seed: int) -> None:
    prompts = prompts_of(seed, 9, 8)
    many = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, n=2)
    # Room for two sequences: the others are preempted.
    engine = Engine(Adapted(), replace(CONFIG, num_blocks=9))
    requests = [engine.add(prompt, many, inputs={"adapter": 5 + index}) for index, prompt in enumerate(prompts)]

    expected = [alone(prompt, 5 + index) for index, prompt in enumerate(prompts) for _ in range(2)]
    assert tokens_of(engine, requests) == expected


def test_proposals_are_verified_with_the_input_of_their_request(seed: int) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 2}
    engine = Engine(Adapted(), replace(CONFIG, speculative_config=speculative))
    prompt = [3, 4, 5] * 4

    assert tokens_of(engine, [engine.add(prompt, GREEDY, inputs={"adapter": 2})]) == [alone(prompt, 2)]


def test_copies_of_an_engine_pass_inputs_on_and_route_by_them(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    prompts = prompts_of(seed, 6, 6)
    monkeypatch.setattr("jattn.llm.engine.clients.replicas.replica_meshes", lambda config: [None, None])
    engine = DataParallelEngine(Adapted(), CONFIG)
    requests = [engine.add(prompt, GREEDY, inputs={"adapter": index}) for index, prompt in enumerate(prompts)]

    assert tokens_of(engine, requests) == [alone(prompt, index) for index, prompt in enumerate(prompts)]


def test_generate_takes_inputs_for_all_prompts_or_for_each(seed: int) -> None:
    prompts = prompts_of(seed, 5, 5)
    llm = LLM(Adapted(), config=CONFIG)

    def said(inputs: Any) -> list[list[int]]:
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY, inputs=inputs)]

    assert said([{"adapter": 1}, {"adapter": 3}]) == [alone(prompts[0], 1), alone(prompts[1], 3)]
    assert said({"adapter": 1})[1] == alone(prompts[1], 1)
    with pytest.raises(InvalidInput, match=r"^inputs has 1 entries and there are 2 prompts; pass one or 2"):
        said([{"adapter": 1}])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "inputs lacks 'adapter'; this model needs it for each request (PagedSpec.inputs)."),
        ({"adapter": 1, "rank": 2}, "inputs has 'rank'; this model has adapter (PagedSpec.inputs)."),
        ({"adapter": 1.5}, "inputs['adapter'] is 1.5; it must be an int from -2147483648 to 2147483647."),
        ({"adapter": 1 << 31}, "inputs['adapter'] is 2147483648; it must be from -2147483648 to 2147483647."),
        (3, "inputs is 3; it must be a mapping from names to numbers."),
    ],
)
def test_inputs_that_the_model_does_not_ask_for_are_named(engine: Engine, inputs: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        engine.add([1, 2], GREEDY, inputs=inputs)

    assert str(error.value) == message


def test_inputs_for_a_model_without_any_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"^inputs has 'adapter'; this model has none"):
        packed({"adapter": 1}, ())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"adapter": "int64"}, "inputs['adapter'] is int64; it must be int32 or float32."),
        ({"a b": "int32"}, "inputs has the name 'a b'; names must be identifiers."),
        ({"adapter": range(0)}, "inputs['adapter'] is range(0, 0); it must have int32 numbers, without steps."),
    ],
)
def test_declarations_that_do_not_fit_are_named(inputs: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        PagedSpec(vocab_size=9, max_model_len=9, num_layers=1, num_kv_heads=1, head_dim=8, inputs=inputs)

    assert str(error.value) == message


def test_a_number_outside_the_declared_range_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^inputs\['adapter'\] is 8; it must be from 0 to 7\.$"):
        packed({"adapter": 8}, (("adapter", range(8)),))


def test_floats_keep_their_bits_on_the_way_to_the_device() -> None:
    spec = (("strength", "float32"), ("adapter", "int32"))
    rows = np.stack([packed({"adapter": -3, "strength": 0.1}, spec), packed({"adapter": 4, "strength": 2}, spec)])

    found = unpacked(jnp.asarray(rows), spec)

    assert found["strength"].tolist() == [np.float32(0.1), 2.0]
    assert found["adapter"].tolist() == [-3, 4]
    with pytest.raises(InvalidInput, match=r"^inputs\['strength'\] is nan; it must be a finite float32"):
        packed({"adapter": 1, "strength": float("nan")}, spec)


def test_the_scales_of_a_cache_are_measured_with_inputs(seed: int) -> None:
    llm, prompts = LLM(Adapted(), config=CONFIG), prompts_of(seed, 5, 9)
    shifted = [[(token + 3 * index) % 97 for token in prompt] for index, prompt in enumerate(prompts)]

    found = llm.calibrate_kv_cache(prompts, inputs=[{"adapter": 0}, {"adapter": 3}])

    expected = calibrate_kv_cache(tiny_decoder(), shifted)
    assert list(found.ranges.values()) == list(expected.ranges.values())
    with pytest.raises(InvalidInput, match=r"^inputs lacks 'adapter'"):
        llm.calibrate_kv_cache(prompts)
