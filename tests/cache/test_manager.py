"""The verbs of the cache manager, one behaviour at a time."""

from __future__ import annotations

import math

import pytest

from tests.cache.snapshot import snapshot
from torch_core.base.errors import OutOfBlocks
from torch_core.cache import BlockCopy, CacheConfig, CacheGroup, CacheManager
from torch_core.cache.config import GroupLayout


def make(num_blocks: int = 10, block_size: int = 4, **options) -> CacheManager:
    return CacheManager(CacheConfig(num_blocks=num_blocks, block_size=block_size, **options))


def prefill(cache: CacheManager, seq_id: str, tokens: list[int], **options) -> int:
    """Adds a sequence and computes all of its tokens; returns its cached tokens."""
    hit = cache.add(seq_id, tokens, **options)
    cache.retire(cache.step([(seq_id, len(tokens) - hit)]).step_id)
    return hit


def test_a_row_says_where_the_new_tokens_go():
    cache = make()
    cache.add("a", [1, 2, 3, 4, 5])
    step = cache.step([("a", 5)])
    assert step.rows[0] == ("a", (1, 2), 0, 5, ((1, 2),), 0)


def test_the_rows_of_a_step_are_there_as_columns_too():
    cache = make()
    for name in ("a", "b"):
        cache.add(name, [1, 2, 3, 4, 5])
    step = cache.step([("a", 5), ("b", 3)])
    assert [*zip(*step.rows.columns.values(), strict=True)] == [*step.rows]
    assert tuple(step.rows.columns) == step.rows[0]._fields


def test_a_plan_changes_nothing():
    cache = make()
    cache.add("a", [1, 2, 3])
    before = snapshot(cache)
    plan = cache.plan([("a", 3)])
    assert snapshot(cache) == before
    assert (plan.num_tokens, plan.blocks_needed) == (3, 1)


def test_a_table_that_did_not_change_comes_back_as_the_same_object():
    cache = make()
    prefill(cache, "a", [1])
    cache.append_tokens("a", [2, 3])
    first, second = cache.step([("a", 1)]), cache.step([("a", 1)])
    assert first.rows[0].block_ids is second.rows[0].block_ids


def test_a_step_is_committed_before_the_last_one_retired_and_before_its_tokens_are_known():
    cache = make()
    cache.add("a", [1, 2, 3, 4])
    first = cache.step([("a", 4)])
    second = cache.step([("a", 1)])
    assert second.rows[0][1:4] == ((1, 2), 4, 1)
    cache.append_tokens("a", [5])
    cache.retire(first.step_id)
    cache.append_tokens("a", [6])
    cache.retire(second.step_id)
    cache.audit()


def test_a_prefix_is_shared_in_whole_blocks():
    cache = make()
    prefill(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.add("b", [1, 2, 3, 4, 5, 6, 7, 0, 0]) == 4
    assert cache.step([("b", 5)]).rows[0].block_ids[0] == 1


def test_a_prompt_that_is_cached_whole_leaves_one_block_to_compute():
    cache = make()
    prefill(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.add("b", [1, 2, 3, 4, 5, 6, 7, 8]) == 4


def test_generated_tokens_are_shared_once_they_are_known():
    cache = make()
    prefill(cache, "a", [1, 2, 3])
    cache.append_tokens("a", [4])
    cache.retire(cache.step([("a", 1)]).step_id)
    assert cache.add("b", [1, 2, 3, 4, 5]) == 4


def test_a_block_whose_last_token_came_after_its_step_is_shared_when_its_sequence_has_ended():
    cache = make()
    prefill(cache, "a", [1, 2, 3])
    cache.retire(cache.step([("a", 1)]).step_id)
    cache.append_tokens("a", [4])
    cache.finish("a")
    assert cache.add("b", [1, 2, 3, 4, 5]) == 4


def test_tokens_of_several_sequences_are_appended_at_once():
    cache = make()
    for seq_id in ("a", "b"):
        prefill(cache, seq_id, [ord(seq_id), 2, 3])
    cache.append_each([("a", [4, 5]), ("b", (6,))])
    cache.retire(cache.step([("a", 2), ("b", 1)]).step_id)
    assert cache.add("like a", [ord("a"), 2, 3, 4, 5]) == 4
    assert cache.add("like b", [ord("b"), 2, 3, 6, 5]) == 4


def test_a_block_is_not_shared_before_the_step_that_fills_it_retired():
    cache = make()
    cache.add("a", [1, 2, 3, 4, 5])
    step = cache.step([("a", 5)])
    assert cache.add("b", [1, 2, 3, 4, 5]) == 0
    cache.retire(step.step_id)
    assert cache.add("c", [1, 2, 3, 4, 5]) == 4


def test_steps_that_retire_out_of_order_take_effect_in_order():
    cache = make()
    cache.add("a", [1, 2, 3, 4, 5])
    steps = [cache.step([("a", count)]).step_id for count in (2, 2, 1)]
    cache.retire(steps[2])
    cache.retire(steps[1])
    assert (cache.add("b", [1, 2, 3, 4, 5]), cache.stats().steps_in_flight) == (0, 3)
    cache.retire(steps[0])
    assert (cache.add("c", [1, 2, 3, 4, 5]), cache.stats().steps_in_flight) == (4, 0)


def test_blocks_of_a_finished_sequence_wait_for_its_step():
    cache = make(num_blocks=3)
    cache.add("a", [1, 2, 3, 4, 5])
    step = cache.step([("a", 5)])
    cache.finish("a")
    cache.add("b", [7])
    assert cache.stats().deferred == 2
    with pytest.raises(OutOfBlocks):
        cache.plan([("b", 1)])
    cache.retire(step.step_id)
    assert cache.stats().deferred == 0
    assert cache.step([("b", 1)]).rows[0].block_ids == (2,)


def test_blocks_of_a_sequence_that_is_in_no_step_are_free_at_once():
    cache = make()
    prefill(cache, "a", [1, 2, 3])
    cache.cancel("a")
    assert (cache.stats().used, cache.stats().deferred, cache.stats().cancelled) == (0, 0, 1)


def test_the_block_released_longest_ago_is_evicted_first_and_children_before_parents():
    cache = make(num_blocks=6)
    prefill(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    prefill(cache, "b", [9, 9, 9, 9])
    cache.finish("a")
    cache.finish("b")
    cache.add("c", list(range(20, 32)))
    assert cache.step([("c", 12)]).rows[0].block_ids == (4, 5, 2)
    assert cache.stats().evictions == 1
    assert cache.add("d", [1, 2, 3, 4, 5, 6, 7, 8, 0]) == 4


def test_a_forked_tail_is_copied_by_the_first_writer_only():
    cache = make()
    prefill(cache, "a", [1, 2, 3, 4, 5])
    cache.append_tokens("a", [6])
    assert cache.fork("a", "b") == 5
    step = cache.step([("b", 1), ("a", 1)])
    assert step.copies == (BlockCopy(2, 3),)
    assert [row.block_ids for row in step.rows] == [(1, 3), (1, 2)]


def test_a_fork_does_not_get_what_the_parent_has_in_flight_unknown():
    cache = make()
    cache.add("a", [1, 2, 3])
    first = cache.step([("a", 3)])
    second = cache.step([("a", 1)])
    assert cache.fork("a", "b") == 3
    cache.append_tokens("a", [4])
    cache.append_tokens("b", [5])
    cache.retire(first.step_id)
    cache.retire(second.step_id)
    cache.finish("a")
    # The shared tail is full and published as the parent's now, so the child must copy it although it is alone.
    step = cache.step([("b", 1)])
    assert step.copies == (BlockCopy(1, 2),)
    cache.audit()


def test_a_window_gives_blocks_back_to_the_null_block():
    cache = make(sliding_window=4)
    prefill(cache, "a", list(range(12)))
    assert cache.step([("a", 1)]).rows[0].block_ids == (0, 0, 3, 4)


def test_a_window_counts_only_tokens_whose_step_has_retired():
    cache = make(sliding_window=4)
    cache.add("a", list(range(12)))
    cache.step([("a", 12)])
    assert cache.step([("a", 1)]).rows[0].block_ids == (1, 2, 3, 4)


def test_a_chunk_is_given_back_when_the_next_one_begins():
    cache = make(attention_chunk=8)
    cache.add("a", list(range(17)))
    tables = []
    for count in (7, 1, 1):
        step = cache.step([("a", count)])
        tables.append(step.rows[0].block_ids)
        cache.retire(step.step_id)
    assert tables == [(1, 2), (1, 2), (0, 0, 3)]


def test_a_window_needs_only_the_end_of_a_prefix():
    cache = make(sliding_window=4)
    prefill(cache, "a", list(range(12)))
    assert cache.add("b", [*range(12), 99]) == 12
    assert cache.step([("b", 1)]).rows[0].block_ids[:3] == (0, 0, 3)


def test_groups_share_one_budget_and_have_tables_of_their_own():
    groups = (
        CacheGroup(name="full"),
        CacheGroup(name="window", sliding_window=4),
        CacheGroup(name="latent", block_size=8),
    )
    cache = make(num_blocks=20, groups=groups)
    prefill(cache, "a", list(range(16)))
    row = cache.step([("a", 1)]).rows[0]
    assert [len(ids) for ids in row.group_block_ids] == [5, 5, 3]
    assert row.group_block_ids[1][:3] == (0, 0, 0)
    assert cache.stats().used == 5 + 2 + 3
    assert cache.add("b", [*range(16), 99]) == 16


def test_a_preempted_sequence_starts_again_from_what_is_cached():
    cache = make()
    prefill(cache, "a", [1, 2, 3, 4, 5])
    cache.append_tokens("a", [6])
    cache.preempt("a")
    assert (cache.stats().used, cache.stats().preemptions) == (0, 1)
    assert cache.resume("a") == 4
    assert cache.step([("a", 2)]).rows[0].num_computed_tokens == 4


def test_swapped_blocks_come_back_in_other_places():
    cache = make(num_blocks=4, num_host_blocks=2)
    prefill(cache, "a", [1, 2, 3, 4, 5])
    out = cache.swap_out("a")
    assert [tuple(swap) for swap in out.swaps] == [(1, 0, True, 0), (2, 1, True, 0)]
    assert (cache.stats().deferred, cache.stats().host_free) == (2, 0)
    cache.retire(out.step_id)
    assert cache.stats().used == 0
    back = cache.swap_in("a")
    assert [tuple(swap) for swap in back.swaps] == [(2, 0, False, 0), (3, 1, False, 0)]
    assert cache.step([("a", 1)]).rows[0][1:4] == ((2, 3), 5, 1)
    cache.retire(back.step_id)
    assert cache.stats().host_free == 2
    cache.audit()


def test_a_token_sampled_anew_after_a_swap_is_no_key_of_the_blocks_that_were_swapped():
    cache = make(num_host_blocks=2)
    prefill(cache, "a", [1, 2, 3])
    # The device writes a fourth token that nobody learns: its sequence is computed again, and samples another one.
    flight = cache.step([("a", 1)])
    out, back = cache.swap_out("a"), cache.swap_in("a")
    cache.preempt("a")
    cache.append_tokens("a", [4])
    for step in (flight, out, back):
        cache.retire(step.step_id)
    assert cache.resume("a") == 0
    assert cache.add("b", [1, 2, 3, 4, 5]) == 0


def test_reset_keeps_the_sequences_and_forgets_the_blocks():
    cache = make()
    prefill(cache, "a", [1, 2, 3, 4, 5])
    cache.step([("a", 1)])
    cache.reset()
    stats = cache.stats()
    assert (stats.used, stats.cached, stats.steps_in_flight, stats.num_sequences) == (0, 0, 0, 1)
    assert cache.resume("a") == 0
    cache.audit()


def test_the_watermark_keeps_blocks_for_those_that_run():
    cache = make(num_blocks=5, watermark_blocks=2)
    prefill(cache, "a", [1, 2, 3])
    cache.add("b", list(range(10, 18)))
    with pytest.raises(OutOfBlocks, match="2 are kept for running sequences"):
        cache.plan([("b", 8)])
    assert cache.plan([("a", 8)]).blocks_needed == 2
    cache.finish("a")
    assert cache.plan([("b", 8)]).blocks_needed == 2


def test_statistics_add_up():
    cache = make()
    prefill(cache, "a", [1, 2, 3, 4, 5])
    prefill(cache, "b", [1, 2, 3, 4, 6])
    cache.finish("b")
    stats = cache.stats()
    assert (stats.null, stats.free, stats.cached, stats.used, stats.deferred) == (1, 7, 0, 2, 0)
    assert (stats.queried_tokens, stats.hit_tokens, stats.hit_rate) == (10, 4, 0.4)


def test_a_request_that_gives_its_prefix_back_before_it_ran_is_no_preemption():
    cache = make()
    prefill(cache, "a", [1, 2, 3, 4, 5])
    cache.add("b", [1, 2, 3, 4, 6])
    cache.preempt("b")
    assert cache.stats().preemptions == 0
    assert cache.resume("b") == 4


def test_a_group_knows_when_it_can_forget():
    full = GroupLayout(CacheGroup(name="full"), default_block_size=4)
    window = GroupLayout(CacheGroup(name="window", sliding_window=3), default_block_size=4)
    chunk = GroupLayout(CacheGroup(name="chunk", attention_chunk=8), default_block_size=4)
    for layout in (full, window, chunk):
        for num_tokens in range(1, 20):
            frees = layout.position_that_frees(num_tokens)
            assert all((layout.first_needed_token(p) >= num_tokens) == (p >= frees) for p in range(40))
    assert full.position_that_frees(1) == math.inf
