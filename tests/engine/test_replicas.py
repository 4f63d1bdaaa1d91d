"""Copies of an engine behind one door: the tokens of one, prompts where their prefixes are, work dealt out evenly."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jattn.llm.engine import (
    DataParallelEngine,
    Engine,
    EngineConfig,
    KVCacheScales,
    Outbox,
    SamplingParams,
    calibrate_kv_cache,
    open_engine,
)
from jattn.llm.engine.device.device import Device
from jattn.llm.engine.device.programs import Programs
from jattn.llm.engine.device.weights import Weights
from tests.engine.conftest import tiny_decoder
from tests.engine.interrupts import InterruptAtReply
from tests.engine.test_engine import run
from tests.engine.test_interrupts import interrupted
from tests.engine.test_tensor_parallel import SIZES, large_decoder, prompts_of
from tests.support.devices import mesh, on_four_devices
from torch_core.base.errors import InvalidInput

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)


def two(**sizes: Any) -> DataParallelEngine:
    engine = open_engine(large_decoder(), EngineConfig(**SIZES, data_parallel_size=2, **sizes))
    assert isinstance(engine, DataParallelEngine)
    return engine


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}], ids=["dp tp", "tp dp"])
@on_four_devices
def test_a_mesh_with_an_axis_of_copies_has_an_engine_for_each(axes: dict[str, int]) -> None:
    over = mesh("auto", **axes)
    engine = open_engine(large_decoder(num_hidden_layers=1), EngineConfig(**SIZES, mesh=over))
    assert isinstance(engine, DataParallelEngine)
    places = [{device.id for device in each._core.device.pool._arrays[0].devices()} for each in engine.engines]
    ids = np.vectorize(lambda device: device.id)(over.devices)
    assert places == [set(row.tolist()) for row in (ids if over.axis_names[0] == "dp" else ids.T)]


@on_four_devices
@pytest.mark.nightly
def test_two_copies_of_two_devices_say_what_one_device_says() -> None:
    sizes: dict[str, Any] = SIZES | {"num_scheduler_steps": 1, "enable_cascade_attention": False}
    one, prompts = Engine(large_decoder(), EngineConfig(**sizes)), prompts_of(1, 12)
    engine = open_engine(large_decoder(), EngineConfig(**sizes, mesh=mesh("auto", dp=2, tp=2)))
    assert isinstance(engine, DataParallelEngine)

    # Drawn without seeds of their own: these come from the number of the request.
    requests = [engine.add(prompt, DRAWN) for prompt in prompts]
    halves = [len(each._core.requests) for each in engine.engines]
    places = [{device.id for device in each._core.device.pool._arrays[0].devices()} for each in engine.engines]
    while engine.num_unfinished:
        engine.step()

    assert [request.output_token_ids for request in requests] == run(one, prompts, DRAWN)
    assert min(halves) >= 4
    assert places == [{0, 1}, {2, 3}]
    assert engine.cache_stats().num_blocks == 2 * engine.pool_plan.num_blocks


@on_four_devices
def test_a_prompt_goes_where_its_prefix_is_and_elsewhere_when_that_is_busy() -> None:
    engine = two()
    shared = prompts_of(2, 1)[0][:8] + [7] * 12
    engine.add([1] * 20, GREEDY)
    engine.add(shared, GREEDY)
    while engine.num_unfinished:
        engine.step()

    request = engine.add([*shared, 5], GREEDY)
    assert engine.engines[1].request_of(request.request_id) is request
    engine.step()
    assert request.num_cached_tokens == 20
    # What waits there is more than the prefix saves.
    engine.add([*shared, 6], GREEDY)
    assert [len(each._core.requests) for each in engine.engines] == [1, 1]


@on_four_devices
def test_prompts_queued_together_are_dealt_out_and_numbered_as_one_after_the_other() -> None:
    prompts, placed, tokens = prompts_of(4, 12), [], []
    for together in (False, True):
        engine, outbox = two(), Outbox()
        requests = [engine.new_request(prompt, DRAWN, outbox=outbox) for prompt in prompts]
        for batch in [requests] if together else [[request] for request in requests]:
            engine.queue(batch)
        placed.append([engine.engines.index(engine._engine_of(request.request_id)) for request in requests])
        while engine.wait(outbox):
            pass
        tokens.append([request.output_token_ids for request in requests])
    assert placed[0] == placed[1]
    assert set(placed[0]) == {0, 1}
    assert tokens[0] == tokens[1]


@on_four_devices
def test_a_request_of_a_copy_is_cancelled_with_the_tokens_that_step_did_not_return() -> None:
    engine = two()
    request = engine.add([1, 2, 3], GREEDY)
    while not request.output_token_ids:
        for each in engine.engines:
            each.advance()
    end = engine.cancel(request.request_id)
    assert (end.finish_reason, list(end.token_ids)) == ("cancelled", request.output_token_ids)


@on_four_devices
@pytest.mark.parametrize("copies", [1, 2])
def test_of_prompts_queued_together_none_is_left_when_one_is_refused(copies: int) -> None:
    engine = open_engine(large_decoder(), EngineConfig(**SIZES, data_parallel_size=copies))
    names = ["first", "second", "first"]
    requests = [engine.new_request([1, 2, 3], GREEDY, request_id=name) for name in names]
    with pytest.raises(InvalidInput, match="'first' belongs to an unfinished request"):
        engine.queue(requests)
    again = engine.add([1, 2, 3], GREEDY, request_id="second")
    assert engine.num_unfinished == 1
    while again.finish_reason is None:
        engine.step()
    assert len(again.output_token_ids) == 4


@on_four_devices
def test_an_interrupted_caller_of_a_copy_queues_nothing_and_loses_no_token() -> None:
    engine = two()
    reply = InterruptAtReply(engine.engines[0])
    interrupted(reply, lambda: engine.add(prompts_of(4, 1)[0], GREEDY))
    assert engine.num_unfinished == 0

    request, seen = engine.add(prompts_of(4, 1)[0], GREEDY), []
    while engine.num_unfinished:
        interrupted(reply, engine.step)
        seen += [token for delta in engine.step() for token in delta.token_ids]
    assert seen == request.output_token_ids
    assert len(seen) == 4


@pytest.mark.nightly
@on_four_devices
def test_outboxes_cancelled_requests_and_the_end_are_those_of_an_engine() -> None:
    engine, outbox = two(), Outbox()
    first, second, third = (engine.add(prompt, GREEDY, outbox=outbox) for prompt in prompts_of(3, 3))
    with pytest.raises(InvalidInput, match=r"^request_id '#1' belongs to an unfinished request|begin with '#'"):
        engine.add([1], request_id="#1")
    assert engine.cancel(second.request_id).finish_reason == "cancelled"
    seen: dict[str, list[int]] = {}
    while deltas := engine.wait(outbox):
        for delta in deltas:
            seen.setdefault(delta.request_id, []).extend(delta.token_ids)

    assert [seen[each.request_id] for each in (first, third)] == [first.output_token_ids, third.output_token_ids]
    assert len(third.output_token_ids) == 4
    engine.sleep()
    assert engine.asleep
    engine.wake()
    engine.update_weights(tiny_decoder(implementation="xla"))
    engine.add([1, 2], GREEDY, outbox=outbox)
    engine.abandon(outbox)
    engine.settle()
    assert engine.num_unfinished == 0
    engine.close()
    assert engine.closed


@on_four_devices
def test_a_copy_that_fails_to_change_leaves_all_as_they_were() -> None:
    engine = two(kv_cache_dtype="fp8")
    ones = KVCacheScales(dict.fromkeys(calibrate_kv_cache(large_decoder()).ranges, (448.0, 448.0)))
    first, second = (each._core.device for each in engine.engines)
    weights = [device.runner.weights for device in (first, second)]
    before = [each.leaves for each in weights]
    # The first copy has done its part by then.
    with (
        mock.patch.object(Weights, "brought", side_effect=[before[0], InvalidInput("no room")] * 2),
    ):
        for change in (
            lambda: engine.update_weights(large_decoder()),
            lambda: engine.set_kv_cache_scales(ones),
        ):
            with pytest.raises(InvalidInput, match="no room"):
                change()
    with (
        mock.patch.object(Device, "lend", side_effect=[first.pool.close(), InvalidInput("no room")]),
        pytest.raises(InvalidInput, match="no room"),
    ):
        engine.sleep()
    assert [each.leaves for each in weights] == before
    assert not any(each.asleep for each in engine.engines)

    engine.sleep()
    with (
        mock.patch("jattn.llm.engine.core.check_room", side_effect=[None, InvalidInput("no room")]),
        pytest.raises(InvalidInput, match="no room"),
    ):
        engine.wake()
    assert all(each.asleep for each in engine.engines)
    engine.wake()
    assert not any(each.asleep for each in engine.engines)


@on_four_devices
def test_copies_compile_at_the_same_time_and_are_counted_together() -> None:
    # Programs of a size that no other test compiles.
    engine, told = two(num_scheduler_steps=1, num_blocks=99), []
    both, compile_one = threading.Barrier(2, timeout=100), Programs.compile

    def compile_with_the_other(programs: Programs, *rest: Any) -> None:
        # It breaks, which is an error, if one copy waits for the end of the other.
        both.wait()
        compile_one(programs, *rest)

    with mock.patch.object(Programs, "compile", compile_with_the_other):
        engine.warmup(
            lambda done, total, name: told.append((done, total)),
            wanted=lambda name: "queries up to 1," in name and name.endswith("plain") and "shared" not in name,
        )
    of_one = [len(each.programs) for each in engine.engines]
    assert told == [(done, sum(of_one)) for done in range(1, sum(of_one) + 1)]
    assert of_one[0] == of_one[1] > 1


@on_four_devices
def test_a_copy_that_cannot_compile_ends_the_warm_up_of_all() -> None:
    engine, has_ended, count = two(num_scheduler_steps=1), [], 10**6
    both, second = threading.Barrier(2, timeout=100), engine.engines[1]._core.device.runner.programs

    def compile_until_told(programs: Programs, buckets: Any, report: Any) -> None:
        both.wait()
        if programs is second:
            raise InvalidInput("no program")
        for done in range(count):
            report(done, count, "a program")
        has_ended.append(True)

    with mock.patch.object(Programs, "compile", compile_until_told), pytest.raises(InvalidInput, match="no program"):
        engine.warmup(lambda *_: None)
    assert not has_ended


@on_four_devices
def test_what_an_engine_refuses_several_copies_refuse_alike() -> None:
    engine = two()
    unhashable: Any = [1]
    prompts = None, [[1, 2]] * 64, np.zeros((64, 2), int), dict.fromkeys(range(64), 1)
    wrong: list[tuple[Any, dict[str, Any]]] = [(prompt, {}) for prompt in prompts]
    for prompt, options in [*wrong, ([1] * 64, {"salt": unhashable}), ([1], {"request_id": unhashable})]:
        messages = []
        for each in (engine, engine.engines[0]):
            with pytest.raises(InvalidInput) as refused:
                each.add(prompt, **options)
            messages.append(str(refused.value))
        assert messages[0] == messages[1]
    for action in (engine.cancel, engine.engines[0].cancel):
        with pytest.raises(InvalidInput, match=r"^no unfinished request has the id \[1\]\."):
            action(unhashable)
    assert engine.num_unfinished == 0


@on_four_devices
def test_an_engine_alone_is_no_several_copies() -> None:
    with pytest.raises(InvalidInput, match=r"^data_parallel_size is 2; an Engine is one copy\. "):
        Engine(tiny_decoder(implementation="xla"), EngineConfig(**SIZES, data_parallel_size=2))
