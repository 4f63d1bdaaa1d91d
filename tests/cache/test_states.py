"""Slots of layers with a state: snapshots, copies on write, forks, rejected tokens, swaps, planted faults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cache.driver import run_trace
from tests.cache.model import BrokenPromiseError
from torch_core.base.errors import CacheCorruption, InvalidInput, OutOfBlocks, Unsupported
from torch_core.base.specs import StateCacheSpec
from torch_core.cache import CacheConfig, CacheManager, StateConfig
from torch_core.cache.slots import StateSlots

PROMPT = [1, 2, 3, 4, 5, 6, 7]
TRACES, MOVES = 25, 120


def make(num_slots: int = 8, *, snapshot_blocks: int = 8, num_host_slots: int = 0, **options: Any) -> CacheManager:
    states = StateConfig(num_slots=num_slots, snapshot_blocks=snapshot_blocks, num_host_slots=num_host_slots)
    return CacheManager(CacheConfig(num_blocks=32, block_size=2, states=states, **options))


def compute(cache: CacheManager, seq_id: str, count: int) -> list[Any]:
    """Computes tokens in steps that end where snapshots are due, and returns the steps."""
    steps = []
    while count:
        steps.append(cache.step([(seq_id, cache.until_snapshot(seq_id, count))]))
        count -= steps[-1].rows[0].num_new_tokens
        cache.retire(steps[-1].step_id)
    return steps


def test_a_prefix_is_shared_up_to_the_last_boundary_of_the_prompt_from_a_copy_of_its_snapshot():
    cache = make()
    cache.add("a", PROMPT)
    assert [step.rows[0].num_new_tokens for step in compute(cache, "a", 7)] == [6, 1]
    assert cache.add("b", [*PROMPT, 8]) == 6
    (step,) = compute(cache, "b", 2)
    ((source, target),) = step.state_copies
    assert step.rows[0].state_slot == target != source
    cache.audit()


def test_blocks_without_a_snapshot_at_their_end_are_no_prefix():
    cache = make()
    cache.add("a", PROMPT)
    cache.retire(cache.step([("a", 7)]).step_id)
    assert cache.add("b", PROMPT) == 0


def test_a_snapshot_at_every_second_block_is_found_by_a_shorter_prefix():
    cache = make(snapshot_blocks=2)
    cache.add("a", [*PROMPT, 8, 9])
    cache.retire(cache.step([("a", cache.until_snapshot("a", 6))]).step_id)
    assert [step.rows[0].num_new_tokens for step in compute(cache, "a", 5)] == [4, 1]
    assert cache.add("b", [*PROMPT[:5], 9]) == 4
    assert cache.stats().snapshots == 2


def test_where_a_prompt_leaves_another_a_step_ends_and_the_next_prompt_finds_a_snapshot():
    cache = make()
    cache.add("a", [*PROMPT, 8, 9])
    assert [step.rows[0].num_new_tokens for step in compute(cache, "a", 9)] == [8, 1]
    other = [*PROMPT[:5], 11, 12, 13, 14]
    assert cache.add("b", other) == 0
    assert [step.rows[0].num_new_tokens for step in compute(cache, "b", 9)] == [4, 4, 1]
    assert cache.add("c", [*PROMPT[:4], 21, 22]) == 4


def test_a_step_writes_the_slot_of_the_last_one_in_place():
    cache = make()
    cache.add("a", [1])
    slots = []
    for token in range(5):
        step = cache.step([("a", 1)])
        slots.append((step.rows[0].state_slot, step.state_copies))
        cache.retire(step.step_id)
        cache.append_tokens("a", [token])
    assert slots == [(1, ())] * 5


def test_of_two_forks_the_first_to_write_gets_a_copy():
    cache = make()
    cache.add("a", PROMPT)
    compute(cache, "a", 7)
    cache.append_tokens("a", [8])
    old = cache.fork("a", "b") and cache._state.sequences["a"].table.slot  # type: ignore[union-attr]
    first, second = cache.step([("a", 1)]), cache.step([("b", 1)])
    assert [tuple(copy) for copy in first.state_copies] == [(old, first.rows[0].state_slot)]
    assert (second.rows[0].state_slot, second.state_copies) == (old, ())


def test_a_sequence_continues_in_its_slot_after_the_kept_tokens_of_a_step():
    cache = make()
    cache.add("a", PROMPT)
    before = compute(cache, "a", 7)[-1].rows[0].state_slot
    cache.append_tokens("a", [8])
    step = cache.step([("a", 4)])
    assert (step.rows[0].state_slot, step.state_copies) == (before, ())
    cache.retire(step.step_id, {"a": 2})
    cache.append_tokens("a", [9, 10])
    step = cache.step([("a", 3)])
    assert (step.rows[0].num_computed_tokens, step.rows[0].state_slot) == (9, before)
    cache.audit()


def test_a_state_waits_on_the_host_with_the_blocks_of_its_sequence():
    cache = make(num_host_slots=1, num_host_blocks=8)
    cache.add("a", PROMPT)
    slot = compute(cache, "a", 7)[-1].rows[0].state_slot
    (out,) = cache.swap_out("a").state_swaps
    (back,) = cache.swap_in("a").state_swaps
    assert (out.device_slot, out.host_slot, out.to_host) == (slot, 0, True)
    assert (back.host_slot, back.to_host) == (0, False)
    cache.audit()


def test_snapshots_give_way_to_running_sequences_and_a_lack_of_slots_is_refused():
    cache = make(num_slots=4)
    cache.add("a", PROMPT)
    compute(cache, "a", 7)
    cache.finish("a")
    assert cache.stats().slots_cached == 1
    for name in "bcd":
        cache.add(name, [9])
        compute(cache, name, 1)
    cache.add("e", [9])
    with pytest.raises(OutOfBlocks, match="needs 1 state slots; 0 are free"):
        cache.step([("e", 1)])
    assert cache.stats().evicted_snapshots == 1
    cache.audit()


def test_freed_slots_are_scrubbed_and_snapshots_keep_their_content():
    cache = make(scrub_on_free=True)
    cache.add("a", PROMPT)
    last = compute(cache, "a", 7)[-1].rows[0].state_slot
    cache.finish("a")
    assert cache.scrub().slots_to_scrub == (last,)


def test_without_prefix_caching_no_state_is_kept():
    cache = make(enable_prefix_caching=False)
    cache.add("a", PROMPT)
    assert cache.until_snapshot("a", 7) == 7
    compute(cache, "a", 6)
    step = cache.step([("a", 1)])
    assert step.state_copies == ()
    cache.retire(step.step_id)
    cache.finish("a")
    assert cache.stats().slots_free == 7


def test_random_traces_with_states_keep_every_promise(seed):
    models = [run_trace(seed + trace, MOVES, states=True) for trace in range(TRACES)]
    assert sum(model.cuts for model in models) > 0
    for name in ("hit_tokens", "snapshots", "state_copies", "evicted_snapshots"):
        assert sum(getattr(model.cache.stats(), name) for model in models) > 0, name


@pytest.mark.nightly
def test_200_000_moves_with_states_keep_every_promise(seed):
    models = [run_trace(seed + trace, 500, states=True) for trace in range(400)]
    assert sum(model.cuts for model in models) > 100


def _writes_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        StateSlots, "plan", _without(StateSlots.plan, lambda is_snapshot, table: table.slot and not is_snapshot)
    )


def _without(original: Any, is_dropped: Any) -> Any:
    def faulty(self: StateSlots, tables: Any) -> Any:
        moves = original(self, tables)
        return {at: move for at, move in moves.items() if not is_dropped(move, tables[at])}

    return faulty


def _keeps_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSlots, "release", lambda self, table: 0)


@pytest.mark.parametrize("plant", [_writes_shared, _keeps_slots])
def test_planted_faults_are_caught(plant, seed, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((BrokenPromiseError, CacheCorruption)):
        [run_trace(seed + trace, 100, states=True) for trace in range(60)]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"shapes": (), "dtypes": ()}, InvalidInput, "shapes has 0 entries"),
        ({"shapes": ((3, 4),), "dtypes": ("int8",)}, Unsupported, "dtypes.0."),
        ({"shapes": ((3, 0),), "dtypes": ("float32",)}, InvalidInput, "shapes.0..1."),
        ({"shapes": ((3, 4), ()), "dtypes": ("float32", "float32")}, InvalidInput, "shapes.1. is empty"),
    ],
)
def test_a_layout_of_states_that_cannot_be_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        StateCacheSpec(**options)


def test_sizes_of_slots_that_cannot_be_are_refused():
    with pytest.raises(InvalidInput, match="num_slots"):
        StateConfig(num_slots=3)
    with pytest.raises(InvalidInput, match="StateConfig"):
        CacheConfig(num_blocks=8, block_size=2, states=8)  # type: ignore[arg-type]
