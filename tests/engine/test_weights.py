"""New weights between two steps, and a pool whose memory is lent to somebody else for a while."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from jattn.llm.engine.device.weights import Weights
from jattn.llm.models import Decoder
from jattn.pool import KVPool
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import GREEDY, prompts_of, run
from tests.support.devices import WHOLE, mesh, on_four_devices
from torch_core.base.errors import InvalidInput

CONFIG = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32)


def other_decoder() -> Decoder:
    """Weights so large that the layers, and not the embedding alone, decide what comes next."""
    graph, state = nnx.split(tiny_decoder())
    return nnx.merge(graph, jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), state))


@pytest.fixture(scope="module")
def other() -> Decoder:
    return other_decoder()


@pytest.fixture
def engine(decoder) -> Engine:
    return Engine(decoder, CONFIG)


def finish(engine: Engine) -> None:
    while engine.num_unfinished:
        engine.step()


@pytest.mark.parametrize(
    "form",
    [lambda model: model, nnx.state, lambda model: nnx.to_pure_dict(nnx.state(model))],
    ids=["model", "state", "dict"],
)
def test_new_weights_compile_nothing_and_say_what_a_new_engine_says(engine, other, form, seed) -> None:
    prompts = prompts_of(seed, 20, 3)
    old = run(engine, prompts)
    before = engine.num_compilations, engine.programs

    engine.update_weights(form(other))

    assert run(engine, prompts) == run(Engine(other, CONFIG), prompts) != old
    assert (engine.num_compilations, engine.programs) == before


def test_no_prefix_of_the_old_weights_is_found(engine, other, seed) -> None:
    (prompt,) = prompts_of(seed, 20)
    run(engine, [prompt])
    engine.update_weights(other)

    request = engine.add(prompt, GREEDY)
    finish(engine)

    assert request.num_cached_tokens == 0


def test_restarted_requests_keep_their_tokens_and_go_on_with_the_new_weights(engine, other, seed) -> None:
    (prompt,) = prompts_of(seed, 6)
    request = engine.add(prompt, GREEDY)
    while not request.output_token_ids:
        engine.step()
    said = list(request.output_token_ids)

    engine.update_weights(other)
    finish(engine)

    rest = SamplingParams(temperature=0.0, max_tokens=12 - len(said), ignore_eos=True)
    assert request.output_token_ids == said + run(Engine(other, CONFIG), [prompt + said], rest)[0]


def test_finished_requests_end_with_the_old_weights_and_their_tokens_are_still_delivered(engine, other, seed) -> None:
    (prompt,) = prompts_of(seed, 6)
    expected = run(engine, [prompt])[0]
    request = engine.add(prompt, GREEDY)

    engine.update_weights(other, unfinished="finish")

    assert (request.output_token_ids, request.finish_reason) == (expected, "length")
    assert [token for delta in engine.step() for token in delta.token_ids] == expected


def test_arrays_that_lie_on_the_device_are_taken_without_a_copy(engine, other) -> None:
    engine.update_weights(other)

    taken = {leaf.unsafe_buffer_pointer() for leaf in engine._core.device.runner.weights.leaves}
    assert taken == {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(other))}


@on_four_devices
def test_a_state_that_is_spread_over_a_mesh_is_brought_to_the_engines_device() -> None:
    prompts = prompts_of(3, 7)
    one, other = Engine(tiny_decoder(), CONFIG), other_decoder()
    run(one, prompts)
    before = one.num_compilations
    split = NamedSharding(mesh("auto"), PartitionSpec("tp"))
    whole = NamedSharding(mesh("auto"), WHOLE)

    one.update_weights(
        jax.tree.map(lambda leaf: jax.device_put(leaf, whole if leaf.shape[0] % 4 else split), nnx.state(other))
    )

    assert run(one, prompts) == run(Engine(other, CONFIG), prompts)
    assert one.num_compilations == before


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_name_and_the_old_ones_stay(engine, other, seed, value) -> None:
    prompts = prompts_of(seed, 5)
    before = run(engine, prompts)
    state = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(other)))
    state["norm"]["weight"][3] = value

    with pytest.raises(InvalidInput, match=r"^norm\.weight has NaN or infinite numbers"):
        engine.update_weights(state)

    assert run(engine, prompts) == before


@pytest.mark.parametrize("mode", ["report", "accept"])
def test_weights_that_are_not_finite_are_reported_or_accepted_by_choice(other, seed, mode, caplog) -> None:
    engine = Engine(tiny_decoder(), replace(CONFIG, non_finite_weights=mode))
    state = nnx.to_pure_dict(nnx.state(other))
    state["norm"]["weight"] = state["norm"]["weight"].at[3].set(np.nan)

    with caplog.at_level(logging.WARNING, logger="jattn"):
        engine.update_weights(state)

    assert ["norm.weight" in record.message for record in caplog.records] == [True] * (mode == "report")
    assert engine.weights_version == 1


def test_arrays_that_the_engine_has_already_are_not_read_again(engine, other, monkeypatch) -> None:
    engine.update_weights(other)
    read: list[Any] = []
    monkeypatch.setattr(
        "jattn.llm.engine.device.weights._all_finite", lambda arrays, before: read.extend(arrays) or before
    )

    engine.update_weights({**nnx.to_pure_dict(nnx.state(other)), "norm": {"weight": jnp.ones(32)}})

    assert [array.shape for array in read] == [(32,)]


def test_memory_of_the_callers_own_is_copied(engine, other, seed) -> None:
    prompts = prompts_of(seed, 5)
    state = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(other)))
    engine.update_weights(state)

    state["norm"]["weight"][:] = np.nan

    assert run(engine, prompts) == run(Engine(other, CONFIG), prompts)


@pytest.fixture
def told(engine, monkeypatch) -> list[Any]:
    """What an engine tells the other processes, as if there were some: announcements, and whether something failed."""
    found: list[Any] = []

    def gather(has_failed: np.ndarray) -> np.ndarray:
        found.extend(has_failed.tolist())
        return has_failed

    monkeypatch.setattr("jattn.llm.processes.multihost_utils.process_allgather", gather)
    channel = mock.Mock(send=lambda what, *_: found.append(what))
    engine._core._device = replace(engine._core.device, channel=channel)
    return found


def test_processes_agree_that_the_arrays_came_and_not_on_the_check_alone(engine, other, told) -> None:
    engine.sleep()

    planted = mock.patch.object(Weights, "brought", side_effect=MemoryError("planted"))
    with planted, pytest.raises(MemoryError, match="planted"):
        engine.update_weights(other)

    assert told[-2:] == [False, True]


def test_a_sleeping_engine_refuses_to_finish_requests_before_any_weight_moves(engine, other, seed) -> None:
    engine.add(prompts_of(seed, 5)[0], GREEDY)
    engine.sleep()

    with (
        mock.patch.object(Weights, "brought") as brought,
        pytest.raises(InvalidInput, match=r"^unfinished is 'finish' and the engine is asleep; wake\(\) and"),
    ):
        engine.update_weights(other, unfinished="finish")
    brought.assert_not_called()


def test_what_a_sleeping_engine_refuses_to_finish_no_process_replaces(engine, other, told, seed) -> None:
    engine.add(prompts_of(seed, 5)[0], GREEDY)
    engine.sleep()

    with pytest.raises(InvalidInput, match="unfinished is 'finish'"):
        engine.update_weights(other, unfinished="finish")

    assert told[-2:] == ["lend", True]


def test_a_sleeping_engine_without_requests_has_nothing_to_finish(engine, other, seed) -> None:
    prompts = prompts_of(seed, 7)
    engine.sleep()

    engine.update_weights(other, unfinished="finish")

    engine.wake()
    assert run(engine, prompts) == run(Engine(other, CONFIG), prompts)


def changed(path: str, leaf: Any) -> dict[Any, Any]:
    state = nnx.to_pure_dict(nnx.state(tiny_decoder()))
    place: Any = state
    name = path.split(".")
    for key in name[:-1]:
        place = place[int(key) if key.isdigit() else key]
    if leaf is None:
        del place[name[-1]]
    else:
        place[name[-1]] = leaf
    return state


def donated() -> jax.Array:
    array = jnp.ones(32)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (5, "state is 5; it must be an nnx.State, a mapping of arrays, or a module."),
        ({0: jnp.ones(3), "norm": jnp.ones(3)}, "state has keys of several types on one level ("),
        (lambda: changed("norm.weight", None), "state lacks norm.weight; 1 of 14 parameters do."),
        (lambda: changed("layers.1.extra", jnp.ones(3)), "state has layers.1.extra, which the model has not"),
        (lambda: changed("norm.weight", jnp.ones(31)), "norm.weight is float32[31]; the model's is float32[32]."),
        (lambda: changed("norm.weight", np.ones(32)), "norm.weight is float64[32]; the model's is float32[32]."),
        (lambda: changed("norm.weight", 5), "norm.weight is a int; the model's is float32[32]."),
        (lambda: changed("norm.weight", donated()), "norm.weight was donated or deleted"),
    ],
    ids=["number", "keys", "missing", "unknown", "shape", "dtype", "kind", "donated"],
)
def test_weights_that_do_not_fit_are_refused_by_their_path_and_nothing_changes(engine, state, message, seed) -> None:
    prompts = prompts_of(seed, 5)
    expected = run(engine, prompts)

    with pytest.raises(InvalidInput) as error:
        engine.update_weights(state() if callable(state) else state)

    assert str(error.value).startswith(message)
    assert run(engine, prompts) == expected


def test_an_unknown_choice_for_unfinished_requests_is_refused_before_any_weight_moves(engine, other) -> None:
    with (
        mock.patch.object(Weights, "brought") as brought,
        pytest.raises(InvalidInput, match="unfinished is 'drop'; it must be 'restart' or 'finish'"),
    ):
        engine.update_weights(other, unfinished="drop")
    brought.assert_not_called()


def test_a_sleeping_engine_holds_no_pool_and_loses_no_request(engine, decoder, seed) -> None:
    prompts = prompts_of(seed, 6, 9, 4)
    running = engine.add(prompts[0], GREEDY)
    while not running.output_token_ids:
        engine.step()
    waiting = engine.add(prompts[1], GREEDY)

    engine.sleep()
    assert engine.asleep
    assert not engine._core.device.pool._arrays
    late, gone = engine.add(prompts[2], GREEDY), engine.add(prompts[2], GREEDY)
    engine.cancel(gone.request_id)
    with pytest.raises(InvalidInput, match=r"the engine is asleep: its pool has no memory. wake\(\) takes it again"):
        engine.step()
    engine.wake()
    finish(engine)

    assert [each.output_token_ids for each in (running, waiting, late)] == run(Engine(decoder, CONFIG), prompts)
    assert not engine.asleep


def test_an_engine_that_is_put_to_sleep_twice_tells_the_others_once(engine, told) -> None:
    engine.sleep()
    engine.sleep()

    assert told.count("lend") == 1


def test_a_refused_sleep_leaves_the_engine_awake_and_tells_nobody(engine, told) -> None:
    refused = mock.patch.object(KVPool, "close", side_effect=InvalidInput("planted"))
    with refused, pytest.raises(InvalidInput, match="planted"):
        engine.sleep()

    assert not engine.asleep
    assert "lend" not in told


def test_an_engine_takes_new_weights_in_its_sleep_and_compiles_nothing(engine, other, seed) -> None:
    prompts = prompts_of(seed, 7)
    run(engine, prompts)
    before = engine.num_compilations

    engine.sleep()
    engine.update_weights(other)
    engine.wake()

    assert run(engine, prompts) == run(Engine(other, CONFIG), prompts)
    assert engine.num_compilations == before


def test_waking_an_engine_that_is_awake_changes_nothing(engine, seed) -> None:
    request = engine.add(prompts_of(seed, 5)[0], GREEDY)
    engine.step()
    generation = engine._core.device.pool.generation

    engine.wake()

    finish(engine)
    assert engine._core.device.pool.generation == generation
    assert request.finish_reason == "length"


def test_an_engine_without_room_sleeps_on(engine, monkeypatch) -> None:
    engine.sleep()

    def refuse(num_bytes: int) -> None:
        raise InvalidInput("planted")

    with monkeypatch.context() as patch:
        patch.setattr("jattn.llm.engine.core.check_room", refuse)
        with pytest.raises(InvalidInput, match="planted"):
            engine.wake()

    assert engine.asleep
    engine.wake()
    assert not engine.asleep
