"""Slots reserved ahead of the known tokens: several decoded tokens in one step, drafts, and what comes to nothing."""

from __future__ import annotations

import random

import pytest

from tests.cache.model import BrokenPromiseError, Model
from tests.cache.snapshot import snapshot
from torch_core.base.errors import CacheCorruption, InvalidInput
from torch_core.cache import CacheConfig, CacheGroup, CacheManager, stepping

PROMPT = [1, 2, 3, 4, 5]


def started(**options) -> CacheManager:
    """A cache of blocks of 4 in which 'a' has computed its prompt of 5 tokens and knows one more."""
    cache = CacheManager(CacheConfig(**{"num_blocks": 10, "block_size": 4, **options}))
    cache.add("a", PROMPT)
    cache.retire(cache.step([("a", 5)]).step_id)
    cache.append_tokens("a", [6])
    return cache


def blocks_of(cache: CacheManager, seq_id: str) -> list[list[int]]:
    table = cache._state.sequences[seq_id].table
    assert table is not None
    return table.blocks


def test_a_step_reserves_slots_for_tokens_that_nobody_knows_yet():
    cache = started()
    step = cache.step([("a", 8)])
    assert step.rows[0][1:4] == ((1, 2, 3, 4), 5, 8)
    cache.append_tokens("a", [7, 8, 9, 10, 11, 12, 13, 14])
    cache.retire(step.step_id)
    assert cache.step([("a", 1)]).rows[0][1:4] == ((1, 2, 3, 4), 13, 1)


def test_the_next_step_reserves_behind_one_whose_tokens_were_not_seen():
    cache = started()
    first, second = cache.step([("a", 4)]), cache.step([("a", 4)])
    assert second.rows[0].num_computed_tokens == 9
    cache.append_tokens("a", [7, 8, 9, 10])
    cache.retire(first.step_id)
    cache.append_tokens("a", [11, 12, 13, 14])
    cache.retire(second.step_id)
    cache.audit()


@pytest.mark.parametrize("kept", range(1, 9))
def test_a_sequence_goes_on_behind_the_tokens_that_it_keeps(kept):
    cache = started()
    step = cache.step([("a", 8)])
    cache.retire(step.step_id, {"a": kept})
    cache.audit()
    assert cache.stats().used == -(-(5 + kept) // 4)
    cache.append_tokens("a", list(range(kept)))
    row = cache.step([("a", 1)]).rows[0]
    assert (row.num_computed_tokens, row.num_new_tokens) == (5 + kept, 1)
    assert row.block_ids == (1, 2, 3, 4)[: -(-(6 + kept) // 4)]


def test_keeping_everything_changes_nothing():
    caches = [started(), started()]
    steps = [cache.step([("a", 8)]).step_id for cache in caches]
    caches[0].retire(steps[0])
    caches[1].retire(steps[1], {"a": 8})
    assert snapshot(caches[0]) == snapshot(caches[1])


def test_surplus_blocks_are_free_when_the_step_settles_and_not_before():
    cache = started()
    cache.add("b", [9])
    earlier = cache.step([("b", 1)])
    step = cache.step([("a", 8)])
    cache.retire(step.step_id, {"a": 1})
    assert (cache.stats().used, cache.stats().deferred) == (3, 2)
    cache.retire(earlier.step_id)
    assert (cache.stats().used, cache.stats().deferred) == (3, 0)


def test_a_slot_whose_token_was_rejected_is_never_published():
    cache = started()
    step = cache.step([("a", 3)])
    cache.retire(step.step_id, {"a": 2})
    # The slot of token 7 holds the rejected draft; the token that was drawn instead is known, but not computed.
    cache.append_tokens("a", [7, 8])
    cache.add("b", [*PROMPT, 6, 7, 8, 9])
    assert blocks_of(cache, "b") == [[1]]
    cache.retire(cache.step([("a", 1)]).step_id)
    cache.add("c", [*PROMPT, 6, 7, 8, 9])
    assert blocks_of(cache, "c") == [[1, 2]]


def test_a_sequence_that_stopped_early_publishes_only_what_is_known():
    cache = started()
    step = cache.step([("a", 8)])
    cache.append_tokens("a", [7])
    cache.finish("a")
    cache.retire(step.step_id)
    stats = cache.stats()
    assert (stats.used, stats.deferred, stats.cached) == (0, 0, 1)


def test_a_fork_of_the_kept_tokens_copies_the_tail_before_either_writes():
    cache = started()
    step = cache.step([("a", 4)])
    cache.fork("a", "b")
    cache.retire(step.step_id, {"a": 2})
    cache.audit()
    cache.append_tokens("a", [7, 8])
    both = cache.step([("a", 1), ("b", 1)])
    assert len(both.copies) == 1
    cache.audit()


def test_a_sequence_that_left_may_still_be_named():
    cache = started()
    step = cache.step([("a", 8)])
    cache.preempt("a")
    cache.retire(step.step_id, {"a": 2})
    cache.audit()
    assert cache.stats().used == 0


def test_every_group_gives_its_surplus_back():
    groups = (CacheGroup(name="full"), CacheGroup(name="window", sliding_window=3), CacheGroup(name="l", block_size=8))
    cache = started(num_blocks=20, groups=groups)
    before = cache.stats().used
    step = cache.step([("a", 8)])
    cache.retire(step.step_id, {"a": 1})
    cache.audit()
    assert [len(column) for column in blocks_of(cache, "a")] == [2, 2, 1]
    # One block slid out of the window meanwhile.
    assert cache.stats().used == before - 1


REFUSED = [
    ({"b": 1}, r"num_kept_tokens names sequence 'b', which has no row in step 2\."),
    (
        {"a": 0},
        "num_kept_tokens of sequence 'a' is 0; it must be an int from 1 to 4, the new tokens of its row",
    ),
    ({"a": 5}, "num_kept_tokens of sequence 'a' is 5; it must be an int from 1 to 4"),
    ({"a": True}, "num_kept_tokens of sequence 'a' is True; it must be an int from 1 to 4"),
    (["a"], "num_kept_tokens is a list; it must map seq_id to an int"),
]


@pytest.mark.parametrize(("kept", "message"), REFUSED)
def test_kept_tokens_that_make_no_sense_are_refused_and_nothing_changes(kept, message):
    cache = started()
    cache.add("b", [9])
    cache.retire(cache.step([("b", 1)]).step_id)
    step = cache.step([("a", 4)])
    before = snapshot(cache)
    with pytest.raises(InvalidInput, match=message):
        cache.retire(step.step_id, kept)
    assert snapshot(cache) == before


def test_a_cut_below_a_later_step_is_refused():
    cache = started()
    first = cache.step([("a", 4)])
    cache.step([("a", 4)])
    before = snapshot(cache)
    with pytest.raises(
        InvalidInput,
        match="num_kept_tokens of sequence 'a' is 2, less than the 4 tokens of step 1; step 2, which continues behind",
    ):
        cache.retire(first.step_id, {"a": 2})
    assert snapshot(cache) == before


def test_a_cut_below_the_known_tokens_is_refused():
    cache = started()
    step = cache.step([("a", 4)])
    cache.append_tokens("a", [7, 8])
    before = snapshot(cache)
    with pytest.raises(InvalidInput, match="'a' is 2, and leaves 7 of its 8 known tokens; append the ids"):
        cache.retire(step.step_id, {"a": 2})
    assert snapshot(cache) == before


def test_a_swap_has_no_rows_to_cut():
    cache = started(num_host_blocks=4)
    cache.retire(cache.swap_out("a").step_id)
    step = cache.swap_in("a")
    with pytest.raises(InvalidInput, match="names sequence 'a', which has no row in step 2"):
        cache.retire(step.step_id, {"a": 1})


def reject_drafts(model: Model, seed: int) -> None:
    """Runs three sequences that draft up to six tokens a step and keep a random part, for 40 steps."""
    source = random.Random(seed)
    for number in range(3):
        model.add(f"s{number}", PROMPT, None)
        model.step([(f"s{number}", PROMPT[model.sequences[f"s{number}"].computed :])])
        model.retire(next(reversed(model.flights)))
    for _ in range(40):
        work = []
        for name, sequence in model.sequences.items():
            if sequence.known == sequence.computed:
                model.sample(name, source.randrange(2))
            drafts = [source.randrange(2) for _ in range(source.randrange(6))]
            work.append((name, [sequence.tokens[sequence.computed], *drafts]))
        if not model.step(work):
            return
        step_id = next(reversed(model.flights))
        kept = {name: source.randint(*most) for name, most in model.cuttable(step_id).items() if source.random() < 0.7}
        model.retire(step_id, kept)
        model.check()
        for name, sequence in model.sequences.items():
            model.reveal(name, len(sequence.tokens) - sequence.known)


@pytest.mark.parametrize("window", [None, 3])
def test_rejected_drafts_never_reach_a_reader(window, seed):
    model = Model(CacheConfig(num_blocks=200, block_size=2, sliding_window=window, scrub_on_free=True))
    reject_drafts(model, seed)
    assert len(model.sequences["s0"].tokens) > 50
    model.drain()


def _keep_the_end(patch) -> None:
    def faulty(state, record, position, end):
        ends = list(record.ends)
        original(state, record, position, end)
        record.ends[:] = ends

    original = stepping._cut
    patch.setattr(stepping, "_cut", faulty)


def _lose_the_surplus(patch) -> None:
    def faulty(state, record, position, end):
        before = list(record.dropped)
        original(state, record, position, end)
        record.dropped[:] = before

    original = stepping._cut
    patch.setattr(stepping, "_cut", faulty)


def _free_the_surplus_at_once(patch) -> None:
    def faulty(state, record, position, end):
        before = len(record.dropped)
        original(state, record, position, end)
        state.pool.release(record.dropped[before:])

    original = stepping._cut
    patch.setattr(stepping, "_cut", faulty)


@pytest.mark.parametrize("plant", [_keep_the_end, _lose_the_surplus, _free_the_surplus_at_once])
def test_a_planted_fault_of_the_cut_is_caught(plant, monkeypatch, seed):
    plant(monkeypatch)
    with pytest.raises((BrokenPromiseError, CacheCorruption)):
        reject_drafts(Model(CacheConfig(num_blocks=200, block_size=2)), seed)
