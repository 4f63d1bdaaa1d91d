"""Fifteen faults that allocators have had, planted one at a time: the audit or the model must catch each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.cache.model import BrokenPromiseError, Model
from tests.cache.snapshot import snapshot
from torch_core.base.errors import CacheCorruption, InvalidInput, OutOfBlocks, RequestTooLong
from torch_core.cache import CacheConfig, keys, lifecycle, manager, stepping
from torch_core.cache.config import GroupLayout
from torch_core.cache.pool import BlockPool
from torch_core.cache.prefix import PrefixIndex
from torch_core.cache.state import CacheState
from torch_core.cache.table import SequenceTable

Plant = Callable[[pytest.MonkeyPatch], None]

PROMPT = [1, 2, 3, 4, 5]


def make(num_blocks: int = 12, **options: Any) -> Model:
    return Model(CacheConfig(num_blocks=num_blocks, block_size=2, **options))


def prefill(model: Model, name: str, tokens: list[int], salt: bytes | None = None) -> None:
    model.add(name, tokens, salt)
    model.step([(name, tokens[model.sequences[name].computed :])])
    model.retire(next(reversed(model.flights)))
    model.check()


# Faults


def _skip_holds_in(owner: Any, name: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def faulty(*args: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(BlockPool, "hold", lambda self, blocks: None)
                return original(*args)

        patch.setattr(owner, name, faulty)

    return plant


def _free_twice(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.release

    def faulty(self: BlockPool, blocks: Any) -> None:
        before = len(self.free)
        original(self, blocks)
        if len(self.free) > before:
            self.free.append(self.free[-1])

    patch.setattr(BlockPool, "release", faulty)


def _forget_null_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheConfig, "capacity", property(lambda self: self.num_blocks))


def _publish_at_commit(patch: pytest.MonkeyPatch) -> None:
    original = stepping.commit_plan

    def faulty(state: CacheState, plan: Any) -> Any:
        step = original(state, plan)
        for table, end in zip(plan.tables, plan.ends, strict=True):
            retired, table.retired = table.retired, end
            table.advance(state.groups, state.publishing)
            table.retired = retired
        return step

    patch.setattr(manager, "commit_plan", faulty)


def _return_at_finish(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: CacheState, sequence: Any) -> None:
        table, sequence.table = sequence.table, None
        if table is not None:
            self.release_table(table)

    patch.setattr(CacheState, "detach_table", faulty)


def _evict_parent_first(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: BlockPool) -> int:
        block, _ = self.cached.popitem(last=True)
        self.index.forget(block)
        return block

    patch.setattr(BlockPool, "_evict", faulty)


def _keep_key_on_evict(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "forget", lambda self, block: None)


def _drop_one_block_too_many(patch: pytest.MonkeyPatch) -> None:
    original = GroupLayout.first_needed_token
    patch.setattr(GroupLayout, "first_needed_token", lambda self, position: original(self, position + self.block_size))


def _drop_by_tokens_in_flight(patch: pytest.MonkeyPatch) -> None:
    original = SequenceTable.advance

    def faulty(self: SequenceTable, groups: Any, index: Any) -> list[int]:
        retired, self.retired = self.retired, self.scheduled
        gone = original(self, groups, None)
        self.retired = retired
        return gone

    patch.setattr(SequenceTable, "advance", faulty)


def _share_partial_tail(patch: pytest.MonkeyPatch) -> None:
    original = SequenceTable.growth

    def faulty(self: SequenceTable, *args: Any) -> Any:
        return tuple((fresh, 0) for fresh, _ in original(self, *args))

    patch.setattr(SequenceTable, "growth", faulty)


def _no_rollback(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: BlockPool, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            if not self.free:
                raise OutOfBlocks("no block is left.", needed=count, free=0)
            taken.append(self.free.pop())
            self.refs[taken[-1]] = 1
        return taken

    patch.setattr(BlockPool, "take", faulty)
    patch.setattr(stepping, "_check_room", lambda *args: None)


def _leave_out_salt(patch: pytest.MonkeyPatch) -> None:
    original = keys.encode_root
    patch.setattr(lifecycle, "encode_root", lambda *, salt, **fields: original(salt=None, **fields))


class _ShortDigest:
    """SHA-256 cut down until two prompts of the scenario collide."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def copy(self) -> _ShortDigest:
        return _ShortDigest(self.data)

    def update(self, data: bytes) -> None:
        self.data += data

    def digest(self) -> bytes:
        return hashlib.sha256(self.data).digest()[:8] if b"prefix" in self.data else bytes(8)


def _truncate_hash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keys, "sha256", _ShortDigest)


def _do_not_count_down(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.release

    def faulty(self: BlockPool, blocks: Any) -> None:
        original(self, [block for block in blocks if self.refs[block] == 1])

    patch.setattr(BlockPool, "release", faulty)


# Scenarios: each is fine without a fault.


def share_then_evict() -> None:
    model = make(num_blocks=6)
    prefill(model, "a", PROMPT)
    model.add("b", PROMPT, None)
    model.check()
    model.leave("a", cancel=False)
    prefill(model, "c", [7, 7, 7, 7])


def fork_and_leave() -> None:
    model = make()
    prefill(model, "a", PROMPT)
    model.fork("a", "b")
    model.check()
    model.leave("a", cancel=False)
    model.check()


def finish_twice_over() -> None:
    model = make()
    prefill(model, "a", [1])
    model.leave("a", cancel=False)
    model.check()


def run_the_largest_request_alone() -> None:
    model = make(num_blocks=6)
    try:
        model.cache.check_admission("a", 9, 3)
    except RequestTooLong:
        return
    model.add("a", list(range(9)), None)
    if not model.step([("a", list(range(12)))]):
        raise BrokenPromiseError("an admitted request cannot finish alone in an empty pool")


def share_in_flight() -> None:
    model = make()
    model.add("a", PROMPT, None)
    model.step([("a", PROMPT)])
    model.add("b", PROMPT, None)
    model.check()


def finish_in_flight() -> None:
    model = make(num_blocks=6)
    model.add("a", PROMPT, None)
    model.step([("a", PROMPT)])
    model.leave("a", cancel=True)
    model.add("b", [7, 7, 7, 7, 7, 7], None)
    model.step([("b", [7, 7, 7, 7, 7, 7])])


def evict_one_of_a_chain() -> None:
    model = make(num_blocks=6)
    prefill(model, "a", [1, 2, 3, 4, 5, 6])
    model.leave("a", cancel=False)
    prefill(model, "b", [7, 7, 7, 7, 7])
    model.add("c", [1, 2, 3, 4, 5, 6], None)


def decode_in_a_window() -> None:
    model = make(sliding_window=4)
    prefill(model, "a", list(range(9)))
    model.step([("a", [9])])
    model.check()


def decode_ahead_in_a_window() -> None:
    model = make(sliding_window=4)
    model.add("a", list(range(6)), None)
    model.step([("a", list(range(4)))])
    model.step([("a", [4, 5])])
    model.step([("a", [6])])
    model.retire(0)
    model.check()


def both_sides_of_a_fork_write() -> None:
    model = make()
    prefill(model, "a", PROMPT)
    model.fork("a", "b")
    model.sample("a", 6)
    model.sample("b", 7)
    model.step([("a", [6]), ("b", [7])])
    model.check()
    model.retire(next(reversed(model.flights)))


def refuse_five_blocks_when_two_are_free() -> None:
    model = make(num_blocks=6)
    prefill(model, "a", PROMPT)
    before = snapshot(model.cache)
    with pytest.raises(OutOfBlocks):
        model.cache.step([("a", 10)])
    model.check()
    if snapshot(model.cache) != before:
        raise BrokenPromiseError("a refused step changed the state")


def two_salts() -> None:
    model = make()
    prefill(model, "a", PROMPT, salt=b"one")
    model.add("b", PROMPT, b"two")


def two_prompts_with_colliding_keys() -> None:
    model = make()
    prefill(model, "a", PROMPT)
    model.add("b", [9, 9, 9], None)


FAULTS = {
    "01_skip_a_hold_on_hit": (_skip_holds_in(CacheState, "attach_table"), share_then_evict),
    "02_skip_a_hold_on_fork": (_skip_holds_in(lifecycle, "fork"), fork_and_leave),
    "03_free_a_block_twice": (_free_twice, finish_twice_over),
    "04_forget_the_null_block_in_the_capacity": (_forget_null_block, run_the_largest_request_alone),
    "05_publish_at_commit": (_publish_at_commit, share_in_flight),
    "06_return_blocks_at_finish": (_return_at_finish, finish_in_flight),
    "07_evict_the_parent_first": (_evict_parent_first, evict_one_of_a_chain),
    "08_keep_the_key_on_evict": (_keep_key_on_evict, evict_one_of_a_chain),
    "09_window_off_by_one_block": (_drop_one_block_too_many, decode_in_a_window),
    "10_window_off_by_tokens_in_flight": (_drop_by_tokens_in_flight, decode_ahead_in_a_window),
    "11_share_a_partial_tail": (_share_partial_tail, both_sides_of_a_fork_write),
    "12_no_rollback_on_the_third_of_five_blocks": (_no_rollback, refuse_five_blocks_when_two_are_free),
    "13_salt_left_out_of_the_root": (_leave_out_salt, two_salts),
    "14_hash_truncated_until_it_collides": (_truncate_hash, two_prompts_with_colliding_keys),
    "15_count_not_decremented": (_do_not_count_down, fork_and_leave),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_scenario_of_a_fault_is_fine_without_it(name):
    FAULTS[name][1]()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, monkeypatch):
    plant, scenario = FAULTS[name]
    plant(monkeypatch)
    with pytest.raises((BrokenPromiseError, CacheCorruption)):
        scenario()


def test_all_fifteen_faults_are_planted():
    assert [int(name[:2]) for name in FAULTS] == list(range(1, 16))


def test_verify_tokens_survives_the_collision_that_fault_14_forces(monkeypatch):
    _truncate_hash(monkeypatch)
    model = make(verify_tokens=True)
    prefill(model, "a", PROMPT)
    model.add("b", [9, 9, 9], None)
    assert model.sequences["b"].computed == 0
    model.step([("b", [9, 9, 9])])
    model.retire(next(reversed(model.flights)))
    model.add("c", [9, 9, 9], None)
    assert model.sequences["c"].computed == 2


def test_a_double_finish_is_refused():
    model = make()
    prefill(model, "a", PROMPT)
    model.cache.finish("a")
    with pytest.raises(InvalidInput, match="seq_id is 'a'; it is unknown: it was never added, or it has finished"):
        model.cache.finish("a")
