"""Low-rank adapters in an engine: several in a step, slots of memory, versions, and adapters that are trained."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.llm.engine import Engine, EngineConfig, LoRARequest, SamplingParams
from jattn.llm.engine.adapter_slots import AdapterSlots
from jattn.llm.engine.clients.adapters import AdapterRegistry
from jattn.llm.engine.device.adapters import AdapterLayout
from jattn.llm.engine.request.lora import LoadedAdapter
from jattn.llm.models import Adapters, MoEConfig, adapter_targets
from tests.support.devices import on_four_devices
from tests.support.lora_models import (
    GATED,
    LATENT,
    STATES,
    merged_model,
    peft_folder,
    peft_tensors,
    tiny_adapters,
)
from tests.support.tiny_models import tiny_config, tiny_model
from torch_core.base.errors import InvalidInput

# Adapters are of all parts: attention, experts and their router, the embedding and the head, which is tied.
MOE = MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=8)
CONFIG = tiny_config(num_hidden_layers=1, moe=MOE, tie_word_embeddings=True)
ALL = tuple(target.module for target in adapter_targets(CONFIG))
NUM_ADAPTERS, NUM_SLOTS = 200, 16
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def trained(seed: int, **options: Any) -> Adapters:
    return tiny_adapters(CONFIG, seed, rank=2, target_modules=ALL, **options)


class Running(Engine):
    """An engine with adapters of one module, and that module."""

    def __init__(self) -> None:
        self.model, self.trained = tiny_model(CONFIG, 3), trained(5, num_adapters=NUM_ADAPTERS)
        super().__init__(
            self.model,
            EngineConfig(
                max_num_seqs=24,
                max_num_batched_tokens=128,
                max_model_len=64,
                num_blocks=128,
                fixed_shapes=True,
                num_scheduler_steps=1,
                enable_lora=True,
                max_loras=NUM_SLOTS,
                max_lora_rank=4,
                lora_target_modules=ALL,
            ),
        )

    @property
    def slots(self) -> AdapterSlots:
        slots = self._core.device.runner.adapter_slots
        assert slots is not None
        return slots

    def finish_all(self) -> None:
        while self.num_unfinished:
            self.step()

    def logits(self, tokens: list[list[int]], ids: list[int]) -> jax.Array:
        """The logits of whole sequences, each with its adapter, by the dense forward pass."""
        longest = max(map(len, tokens))
        padded = jnp.array([[*row, *[0] * (longest - len(row))] for row in tokens])
        return _logits(self.model, self.trained, padded, jnp.array(ids))


@nnx.jit
def _logits(model, adapters, tokens, ids):
    return model.forward_dense(tokens, adapters=adapters.batch(ids, tokens.shape[1]))


@nnx.jit
def _merged_logprobs(model, tokens):
    return jax.nn.log_softmax(model.forward_dense(tokens))


@pytest.fixture(scope="module")
def engine() -> Iterator[Running]:
    with Running() as engine:
        yield engine


@pytest.fixture
def named(engine: Running) -> Iterator[Running]:
    """The engine with two adapters by name."""
    for index in range(2):
        engine.add_lora(f"a{index}", engine.trained, index=index)
    yield engine
    engine.finish_all()
    for name in list(engine.list_loras()):
        engine.remove_lora(name)


def test_tokens_and_logprobs_of_a_mixed_batch_are_those_of_merged_models(named):
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    loras = ["a1", None, "a0"]
    params = SamplingParams(max_tokens=5, logprobs=0, **GREEDY)
    requests = [named.add(prompt, params, lora=lora) for prompt, lora in zip(prompts, loras, strict=True)]
    named.finish_all()
    models = [merged_model(named.model, named.trained, 1), named.model, merged_model(named.model, named.trained, 0)]
    for request, prompt, model in zip(requests, prompts, models, strict=True):
        tokens = request.output_token_ids
        padded = np.array([[*prompt, *tokens, *[0] * (4 - len(prompt))]])
        places = slice(len(prompt) - 1, len(prompt) - 1 + len(tokens))
        logprobs = np.asarray(_merged_logprobs(model, padded))[0, places]
        assert tokens == logprobs.argmax(-1).tolist()
        found = [each[token].logprob for each, token in zip(request.output().outputs[0].logprobs, tokens, strict=True)]
        np.testing.assert_allclose(found, logprobs.max(-1), atol=1e-5)


@pytest.mark.parametrize("method", ["remove_lora", "pin_lora"])
def test_a_number_of_two_adapters_names_neither(named, method):
    for index in range(2):
        named.add_lora(LoRARequest(f"n{index}", lora_int_id=7), named.trained, index=index)

    with pytest.raises(InvalidInput, match="lora is 7, the lora_int_id of 'n0' and 'n1'; give a name"):
        getattr(named, method)(7)

    named.remove_lora("n0")
    getattr(named, method)(7)


def test_log_probabilities_of_a_prompt_have_the_heads_adapter(named):
    prompt = [1, 2, 3, 4, 5]
    request = named.add(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0, **GREEDY), lora="a1")
    named.finish_all()
    merged = merged_model(named.model, named.trained, 1)
    wanted = np.asarray(_merged_logprobs(merged, np.array([[*prompt, *[0] * 4]])))[0, np.arange(4), prompt[1:]]
    reported = request.output().prompt_logprobs
    assert reported is not None
    found = [each[token].logprob for each, token in zip(reported[1:], prompt[1:], strict=True) if each is not None]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_only_requests_with_the_same_version_share_a_prefix(named):
    prompt, params = list(range(1, 35)), SamplingParams(max_tokens=1, **GREEDY)
    cached = []
    for lora in ("a0", "a1", None, "a0"):
        request = named.add(prompt, params, lora=lora)
        named.finish_all()
        cached.append(request.num_cached_tokens)
    named.add_lora("a0", named.trained, index=0)
    request = named.add(prompt, params, lora="a0")
    named.finish_all()
    assert [*cached, request.num_cached_tokens] == [0, 0, 0, 32, 0]


def test_another_adapter_compiles_nothing(named):
    params = SamplingParams(max_tokens=2, **GREEDY)
    named.add([1, 2], params, lora="a0")
    named.finish_all()
    before = named.num_compilations
    named.add_lora("later", named.trained, index=7)
    named.add([1, 2], params, lora="later")
    named.finish_all()
    assert named.num_compilations == before


def test_a_running_request_keeps_its_version_and_a_new_one_has_the_trained(named):
    prompt, params = [9, 8, 7], SamplingParams(max_tokens=6, **GREEDY)
    module = trained(11, num_adapters=1)
    before = Adapters(CONFIG, rank=2, target_modules=ALL, rngs=nnx.Rngs(0))
    nnx.update(before, nnx.state(module))
    named.add_lora("trained", module)
    first = named.add(prompt, params, lora="trained")
    while not first.output_token_ids:
        named.step()
    nnx.update(module, jax.tree.map(lambda x: -2.0 * x, nnx.state(module)))
    second = named.add(prompt, params, lora="trained")
    named.finish_all()
    for request, adapters in ((first, before), (second, module)):
        tokens = prompt + request.output_token_ids
        logits = _logits(named.model, adapters, jnp.array([tokens]), jnp.zeros(1, jnp.int32))
        assert request.output_token_ids == logits[0, 2:-1].argmax(-1).tolist()


def test_200_adapters_share_16_slots_with_random_requests_and_cancels(engine, seed):
    choose = random.Random(seed)
    for index in range(NUM_ADAPTERS):
        engine.add_lora(f"r{index}", engine.trained, index=index, follow=False)
    jobs, cancelled, loads = [], set(), engine.slots.num_loads
    for number in range(120):
        index = choose.randrange(-6, NUM_ADAPTERS)
        prompt = [choose.randrange(1, 257) for _ in range(choose.randrange(1, 6))]
        params = SamplingParams(max_tokens=choose.randrange(1, 4), **GREEDY)
        jobs.append((index, engine.add(prompt, params, lora=f"r{index}" if index >= 0 else None)))
        if choose.random() < 0.5:
            engine.step()
        if choose.random() < 0.1:
            request = jobs[choose.randrange(number + 1)][1]
            if request.finish_reason is None:
                engine.cancel(request.request_id)
                cancelled.add(request.request_id)
    engine.finish_all()
    texts = [[*request.prompt_token_ids, *request.output_token_ids] for _, request in jobs]
    logits = engine.logits(texts, [index for index, _ in jobs])
    wrong = [
        request.request_id
        for row, (_, request) in enumerate(jobs)
        for place, token in enumerate(request.output_token_ids, len(request.prompt_token_ids) - 1)
        if logits[row, place, token] < logits[row, place].max() - 1e-3
    ]
    short = [request for _, request in jobs if len(request.output_token_ids) < request.max_tokens]
    assert wrong == []
    assert {request.request_id for request in short} <= cancelled
    assert engine.cache_stats().used == 0
    assert engine.slots.num_loads - loads > 2 * NUM_SLOTS
    for index in range(NUM_ADAPTERS):
        engine.remove_lora(f"r{index}")


def test_a_folder_is_loaded_by_the_first_request_that_names_it(named, tmp_path):
    folder = peft_folder(tmp_path, peft_tensors(CONFIG, 1, r=3), r=3)
    params = SamplingParams(max_tokens=1, **GREEDY)
    requests = [named.add([1, 2], params, lora=LoRARequest("a folder", 1, str(folder))) for _ in range(2)]
    again = LoRARequest("a folder", 1, str(folder), load_inplace=True)
    requests += [named.add([1, 2], params, lora=again) for _ in range(2)]
    versions = [request.adapter.version for request in requests if request.adapter is not None]
    assert np.diff(versions).tolist() == [0, 1, 0]
    assert named.list_loras()["a folder"].lora_path == str(folder)
    with pytest.raises(jattn.InvalidInput, match="lora_name 'a folder' was loaded from"):
        named.add([1, 2], params, lora=LoRARequest("a folder", 1, "elsewhere"))


@pytest.mark.parametrize(
    ("lora", "text"),
    [
        ("unknown", "lora 'unknown' is not loaded; the engine has 'a0', 'a1'"),
        (LoRARequest("unknown"), "lora_path is empty; name the adapter's folder"),
        (LoRARequest("unknown", 1, "/no/folder"), "/no/folder"),
        (3, "lora 3 is not loaded"),
    ],
    ids=str,
)
def test_an_adapter_that_is_not_there_is_refused(lora, text, named):
    with pytest.raises(jattn.InvalidInput, match=text):
        named.add([1], lora=lora)
    assert named.num_unfinished == 0


@pytest.mark.parametrize("path", [None, 1])
def test_a_folder_that_is_no_path_is_refused_by_name(path):
    with pytest.raises(InvalidInput, match=f"lora_path is {path}"):
        LoRARequest("a", lora_path=path)


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays(named):
    with pytest.raises(jattn.InvalidInput, match="the rank of 'a0' is 5; the engine's max_lora_rank is 4"):
        named.add_lora("a0", Adapters(CONFIG, rank=5, rngs=nnx.Rngs(0)))
    with pytest.raises(jattn.InvalidInput, match="is not of the model"):
        named.add_lora("a0", Adapters(tiny_config(hidden_size=32), rank=2, rngs=nnx.Rngs(0)))
    with pytest.raises(jattn.InvalidInput, match="adapter has no arrays named lora_a"):
        named.add_lora("a0", {"x": jnp.ones(2)})
    named.add([1], SamplingParams(max_tokens=1, **GREEDY), lora="a0")


@pytest.mark.parametrize("alpha", [0, float("nan"), "1", True])
def test_an_alpha_that_scales_by_no_number_is_refused(alpha, named):
    with pytest.raises(InvalidInput, match=rf"^alpha is {alpha!r}; it must be a number other than 0"):
        named.add_lora("a0", named.trained, alpha=alpha)


@pytest.mark.parametrize("alpha", [3, np.int64(3), np.float32(3)])
def test_an_alpha_is_any_number(alpha, named):
    named.add_lora("numbered", named.trained, alpha=alpha)
    named.remove_lora("numbered")


@pytest.mark.parametrize("kind", ["refuse", "report", "accept"])
def test_an_adapter_from_memory_with_numbers_that_are_not_finite(kind, caplog):
    adapters = tiny_adapters(CONFIG, 0)
    config = EngineConfig(num_blocks=8, enable_lora=True, non_finite_weights=kind)
    with Engine(tiny_model(CONFIG, 0), config) as engine:
        engine.add_lora("a", adapters)
        weight = next(iter(adapters.layers[0].values()))["lora_b"]
        weight[...] = weight[...].at[0].set(jnp.nan)
        if kind == "refuse":
            with pytest.raises(InvalidInput, match=r"^adapter 'a' has NaN or infinite numbers"):
                engine.add([1], lora="a")
        else:
            engine.add([1], lora="a")
    assert ("adapter 'a' has NaN or infinite numbers" in caplog.text) == (kind == "report")


def test_without_enable_lora_an_adapter_is_refused():
    with Engine(tiny_model(CONFIG, 0), EngineConfig(num_blocks=8)) as engine:
        for call in (lambda: engine.add([1], lora="x"), lambda: engine.add_lora("x", {})):
            with pytest.raises(jattn.InvalidInput, match=r"lora is given; the engine needs EngineConfig\(enable_lora"):
                call()


@pytest.mark.nightly
@on_four_devices
@pytest.mark.parametrize("changes", [{"moe": MOE, "tie_word_embeddings": True}, GATED, LATENT, STATES], ids=str)
def test_devices_share_adapters_as_they_share_the_products(changes, seed):
    config = tiny_config(**{"num_hidden_layers": 1, **changes})
    names = tuple({target.module for target in adapter_targets(config)})
    model, adapters = tiny_model(config, seed), tiny_adapters(config, seed, num_adapters=1, target_modules=names)
    config = EngineConfig(
        tensor_parallel_size=4, num_blocks=16, max_num_seqs=2, enable_lora=True, max_lora_rank=8, num_scheduler_steps=1,
        lora_target_modules=names,
    )  # fmt: skip
    with Engine(model, config) as engine:
        engine.add_lora("a", adapters)
        request = engine.add([3, 1, 4], SamplingParams(max_tokens=3, **GREEDY), lora="a")
        while engine.num_unfinished:
            engine.step()
    tokens = [3, 1, 4, *request.output_token_ids]
    logits = _logits(model, adapters, jnp.array([tokens]), jnp.zeros(1, jnp.int32))
    assert request.output_token_ids == logits[0, 2:-1].argmax(-1).tolist()


def test_the_head_is_multiplied_for_adapters_that_change_it_alone():
    changes_head = jnp.array([True, False, True])
    layout, slots = AdapterLayout(0, (), ()), jnp.array([0, 1, -1, 2])
    arrays = (jnp.zeros(3), changes_head)
    assert layout.batch(arrays, slots, of_heads=True).slots.tolist() == [0, -1, -1, 2]
    assert layout.batch(arrays, slots).slots.tolist() == slots.tolist()


def test_adapters_and_batch_invariance_are_refused_together():
    with pytest.raises(jattn.Unsupported, match="batch_invariant is True and so is enable_lora"):
        EngineConfig(enable_lora=True, batch_invariant=True)


def loaded(name: str) -> LoadedAdapter:
    return LoadedAdapter(name, 1, 1, {})


def test_the_adapter_that_was_unused_for_longest_gives_way():
    loads = []
    slots = AdapterSlots(2, lambda slot, adapter: loads.append((slot, adapter.name)))
    first, second, third = map(loaded, "abc")
    for adapter in (first, second, first):
        slots.begin([])
        assert slots.take(adapter)
    slots.begin([first])
    assert slots.take(third)
    assert not slots.take(second)
    assert loads == [(0, "a"), (1, "b"), (1, "c")]


def test_a_slot_whose_upload_failed_is_free_and_no_more_the_one_of_its_last_adapter():
    def load(slot: int, adapter: LoadedAdapter) -> None:
        if adapter.name == "b":
            raise MemoryError

    slots, first = AdapterSlots(1, load), loaded("a")
    assert slots.take(first)
    slots.begin([])
    with pytest.raises(MemoryError):
        slots.take(loaded("b"))
    slots.begin([])
    assert slots.num_loads == 1
    # The failed upload may have written a part.
    assert slots.take(first)
    assert slots.num_loads == 2


def registry(**options: Any) -> AdapterRegistry:
    options = {"lora_target_modules": ALL, **options}
    return AdapterRegistry(tiny_model(CONFIG, 0), EngineConfig(enable_lora=True, max_loras=2, **options))


def test_a_pinned_adapter_keeps_its_slot_and_its_next_version_does():
    loads, adapters, known = [], trained(0, num_adapters=3), registry()
    slots = AdapterSlots(2, lambda slot, adapter: loads.append((slot, adapter.name)))
    for index, name in enumerate("abc"):
        known.add(LoRARequest(name, index + 1), adapters, index=index, follow=False)

    def run(name: str) -> None:
        slots.begin([])
        assert slots.take(known.of(name))

    known.pin(1)
    for name in "abcb":
        run(name)
    assert loads == [(0, "a"), (1, "b"), (1, "c"), (1, "b")]
    known.add(LoRARequest("a", 1), adapters, index=1, follow=False)
    for name in "acb":
        run(name)
    # The old version had the slot that was unused for longest.
    assert loads[4:] == [(0, "a"), (1, "c"), (1, "b")]


def test_requests_of_other_adapters_are_refused_while_all_slots_are_pinned():
    known, adapters = registry(), trained(0, num_adapters=1)
    for name in "abc":
        known.add(LoRARequest(name), adapters, follow=False)
    for name in "aba":
        known.pin(name)
    text = r"'c' gets no slot; all of max_loras \(2\) are pinned: 'a', 'b'. Remove one of them"
    for refused in (known.pin, known.of):
        with pytest.raises(jattn.InvalidInput, match=text):
            refused("c")
    known.remove("a")
    known.pin("c")
    with pytest.raises(jattn.InvalidInput, match="lora 'a' is not loaded"):
        known.pin("a")
    with pytest.raises(jattn.InvalidInput, match="lora 7 is not loaded"):
        known.pin(7)


def test_a_request_that_was_there_before_all_slots_were_pinned_gets_one():
    pinned = {1, 2}
    slots = AdapterSlots(2, lambda slot, adapter: None)
    held = [LoadedAdapter(name, version, 1, {}, pinned=pinned) for version, name in enumerate("abc", 1)]
    for adapter in held[:2]:
        slots.begin([])
        slots.take(adapter)
    slots.begin([held[0]])
    assert slots.take(held[2])
    assert slots.slot_of(held[0]) == 0


def test_parts_without_memory_have_no_adapters():
    known = registry(lora_target_modules=["o_proj", "moe.down_proj"])
    known.add(LoRARequest("fits"), trained_of(("o_proj",)))
    with pytest.raises(jattn.InvalidInput, match="lm_head has an adapter in 'more'; name it in lora_target_modules"):
        known.add(LoRARequest("more"), trained_of(("o_proj", "lm_head")))
    with pytest.raises(jattn.InvalidInput, match="lora_target_modules has 'gate'; this model has embed_tokens"):
        registry(lora_target_modules=("gate",))
    with pytest.raises(jattn.InvalidInput, match="router has an adapter in 'choice'; name it in lora_target_modules"):
        registry(lora_target_modules=None).add(LoRARequest("choice"), trained_of(("router",)))
    with pytest.raises(jattn.InvalidInput, match=r"lora_target_modules\[0\] is 3"):
        EngineConfig(lora_target_modules=(3,))  # type: ignore[arg-type]


def trained_of(names: tuple[str, ...]) -> Adapters:
    return Adapters(CONFIG, rank=2, target_modules=names, rngs=nnx.Rngs(0))
