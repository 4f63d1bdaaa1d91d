"""Calls that must be refused: the text says what is wrong and what to do, and the state stays deeply equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cache.snapshot import snapshot
from torch_core.base.errors import CacheCorruption, InvalidInput, OutOfBlocks, RequestTooLong
from torch_core.cache import CacheConfig, CacheGroup, CacheManager


@pytest.fixture
def cache() -> CacheManager:
    """Runs 'run', has 'old' preempted and 'host' swapped out, step 2 in flight, 2 of 7 blocks free."""
    cache = CacheManager(
        CacheConfig(num_blocks=8, block_size=4, num_host_blocks=2, max_blocks_per_seq=6, enable_prefix_caching=False)
    )
    for name, length in (("old", 4), ("host", 5), ("run", 17)):
        cache.add(name, list(range(length)))
    cache.retire(cache.step([("old", 4), ("host", 5)]).step_id)
    cache.preempt("old")
    cache.retire(cache.swap_out("host").step_id)
    cache.step([("run", 17)])
    return cache


def stale_plan(cache: CacheManager) -> None:
    plan = cache.plan([("run", 1)])
    cache.commit(plan)
    before = snapshot(cache)
    try:
        cache.commit(plan)
    finally:
        assert snapshot(cache) == before


def foreign_plan(cache: CacheManager) -> None:
    other = CacheManager(cache.config)
    other.add("run", [1])
    cache.commit(other.plan([("run", 1)]))


REFUSED: list[tuple[str, Callable[[CacheManager], object], type[Exception], str]] = [
    (
        "add a known id",
        lambda c: c.add("run", [1]),
        InvalidInput,
        "seq_id is 'run'; it exists already: finish it first",
    ),
    ("add an empty id", lambda c: c.add("", [1]), InvalidInput, "seq_id has 0 characters; it must be a string of 1 to"),
    ("add a huge id", lambda c: c.add("x" * 2000, [1]), InvalidInput, "seq_id has 2000 characters"),
    ("add an id of bytes", lambda c: c.add(b"a", [1]), InvalidInput, "seq_id is a bytes; it must be a string"),  # type: ignore[arg-type]
    ("add nothing", lambda c: c.add("a", []), InvalidInput, "token_ids of 'a' is empty"),
    ("add a negative token", lambda c: c.add("a", [1, -2]), InvalidInput, r"token_ids\[1\] is negative; each must be"),
    ("add a huge token", lambda c: c.add("a", [1, 2**31]), InvalidInput, r"token_ids\[1\] does not fit into 32 bits"),
    ("add a float token", lambda c: c.add("a", [1.0]), InvalidInput, r"token_ids\[0\] is a float; each must be"),  # type: ignore[list-item]
    ("add a text", lambda c: c.add("a", "abc"), InvalidInput, "token_ids is a str; it must be a sequence of ints"),  # type: ignore[arg-type]
    ("add bytes", lambda c: c.add("a", b"abcd"), InvalidInput, "token_ids is a bytes; it must be a sequence of ints"),
    ("add texts", lambda c: c.add("a", ["b"]), InvalidInput, r"token_ids\[0\] is a str; each must be an int from 0"),  # type: ignore[list-item]
    ("add a spent iterator", lambda c: c.add("a", iter(["b"])), InvalidInput, "is a list_iterator with a token of the"),  # type: ignore[arg-type]
    ("add an int", lambda c: c.add("a", 3), InvalidInput, "token_ids is a int; it must be a sequence of ints"),  # type: ignore[arg-type]
    ("add a bad salt", lambda c: c.add("a", [1], salt=b""), InvalidInput, "salt has 0 bytes"),
    ("add too much", lambda c: c.add("a", [1] * 40), RequestTooLong, "'a' needs 10 blocks .* table has 6 columns"),
    ("append a negative", lambda c: c.append_tokens("run", [-1]), InvalidInput, r"token_ids\[0\] is negative"),
    ("append a huge one", lambda c: c.append_tokens("run", (2**31,)), InvalidInput, "does not fit into 32 bits"),
    ("append partly bad", lambda c: c.append_tokens("run", [1, -1]), InvalidInput, r"token_ids\[1\] is negative"),
    ("append to each", lambda c: c.append_each([("run", [1]), ("x", [1])]), InvalidInput, "seq_id is 'x'; it is"),
    ("append no pairs", lambda c: c.append_each([("run", [1]), ("run",)]), InvalidInput, "new must be a sequence of"),  # type: ignore[list-item]
    ("append to unknown", lambda c: c.append_tokens("x", [1]), InvalidInput, "seq_id is 'x'; it is unknown"),
    (
        "plan unknown",
        lambda c: c.plan([("x", 1)]),
        InvalidInput,
        "seq_id is 'x'; it is unknown: it was never added, or it",
    ),
    ("plan twice", lambda c: c.plan([("run", 1), ("run", 1)]), InvalidInput, "work names sequence 'run' twice"),
    ("plan zero", lambda c: c.plan([("run", 0)]), InvalidInput, "num_new_tokens of sequence 'run' is 0; it must be"),
    ("plan negative", lambda c: c.plan([("run", -1)]), InvalidInput, "num_new_tokens of sequence 'run' is -1"),
    ("plan a bool", lambda c: c.plan([("run", True)]), InvalidInput, "num_new_tokens of sequence 'run' is True"),
    ("plan a float", lambda c: c.plan([("run", 1.0)]), InvalidInput, r"num_new_tokens of sequence 'run' is 1\.0"),  # type: ignore[list-item]
    ("plan preempted", lambda c: c.plan([("old", 1)]), InvalidInput, "seq_id is 'old'; it is preempted: call resume"),
    (
        "plan swapped",
        lambda c: c.plan([("host", 1)]),
        InvalidInput,
        "seq_id is 'host'; it is swapped out: call swap_in",
    ),
    ("plan no pairs", lambda c: c.plan(["run"]), InvalidInput, "work must be a sequence of pairs"),  # type: ignore[list-item]
    ("plan an int", lambda c: c.plan(3), InvalidInput, "work must be a sequence of pairs"),  # type: ignore[arg-type]
    ("plan ragged", lambda c: c.plan([("run", 1), ("x",)]), InvalidInput, "work must be a sequence of pairs"),  # type: ignore[list-item]
    ("plan unhashable", lambda c: c.plan([(["run"], 1)]), InvalidInput, "work must be a sequence of pairs"),  # type: ignore[list-item]
    (
        "overflow a table",
        lambda c: c.plan([("run", 9)]),
        RequestTooLong,
        r"num_new_tokens of sequence 'run' leads to 26 tokens \(7 blocks\); its block",
    ),
    ("commit a stale plan", stale_plan, InvalidInput, r"plan was made on state \d+ of the cache, which is now at"),
    ("commit another's plan", foreign_plan, InvalidInput, "plan was not made by this cache manager"),
    ("commit no plan", lambda c: c.commit(None), InvalidInput, "plan was not made by this cache manager"),  # type: ignore[arg-type]
    (
        "retire unknown",
        lambda c: c.retire(9),
        InvalidInput,
        "step_id is 9; steps in flight are 2. Retire each step once",
    ),
    ("retire twice", lambda c: c.retire(0), InvalidInput, "step_id is 0; steps in flight are 2"),
    ("retire a name", lambda c: c.retire("2"), InvalidInput, "step_id is '2'"),  # type: ignore[arg-type]
    ("finish unknown", lambda c: c.finish("x"), InvalidInput, "seq_id is 'x'; it is unknown"),
    ("cancel unknown", lambda c: c.cancel("x"), InvalidInput, "seq_id is 'x'; it is unknown"),
    ("finish an int", lambda c: c.finish(1), InvalidInput, "seq_id is 1; it is unknown"),  # type: ignore[arg-type]
    (
        "preempt preempted",
        lambda c: c.preempt("old"),
        InvalidInput,
        "seq_id is 'old'; it is preempted, has no blocks on the device and cannot be preempted",
    ),
    ("preempt swapped", lambda c: c.preempt("host"), InvalidInput, "'host'; it is swapped out, has no blocks"),
    ("resume running", lambda c: c.resume("run"), InvalidInput, "'run'; it is not preempted: only preempt"),
    (
        "resume swapped",
        lambda c: c.resume("host"),
        InvalidInput,
        "'host'; it is swapped out, not preempted: call swap_in",
    ),
    ("fork unknown", lambda c: c.fork("x", "y"), InvalidInput, "seq_id is 'x'; it is unknown"),
    ("fork preempted", lambda c: c.fork("old", "y"), InvalidInput, "'old'; it is preempted, .* cannot be forked"),
    ("fork to known", lambda c: c.fork("run", "old"), InvalidInput, "seq_id is 'old'; it exists already"),
    (
        "swap out preempted",
        lambda c: c.swap_out("old"),
        InvalidInput,
        "'old'; it is preempted, .* cannot be swapped out",
    ),
    ("swap in running", lambda c: c.swap_in("run"), InvalidInput, "'run'; it is not swapped out: only swap_out"),
    ("swap out too much", lambda c: c.swap_out("run"), OutOfBlocks, "needs 5 host blocks; 0 of 2 are free"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_refused_call_says_why_and_changes_nothing(cache, call, error, message):
    before = snapshot(cache)
    with pytest.raises(error, match=message) as caught:
        call(cache)
    assert type(caught.value) is error
    if call is not stale_plan:
        assert snapshot(cache) == before
    cache.audit()


def test_out_of_blocks_carries_the_numbers_and_names_what_would_help(cache):
    cache.add("a", [1] * 12)
    cache.finish("run")
    before = snapshot(cache)
    with pytest.raises(OutOfBlocks) as caught:
        cache.plan([("a", 12)])
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (3, 2, 0)
    assert str(caught.value) == (
        "the step needs 3 blocks for 1 sequences; 2 are free and 0 evictable. More return when step 2 and those before "
        "it retire. Wait, or preempt a sequence."
    )
    assert snapshot(cache) == before


def test_swapping_in_without_room_is_refused():
    cache = CacheManager(CacheConfig(num_blocks=3, block_size=4, num_host_blocks=2))
    cache.add("a", [1] * 5)
    cache.step([("a", 5)])
    cache.swap_out("a")
    before = snapshot(cache)
    with pytest.raises(OutOfBlocks, match=r"'a' needs 2 blocks; 0 are free and 0 evictable\. More return when step 1"):
        cache.swap_in("a")
    assert snapshot(cache) == before


def test_the_numbers_of_a_request_that_never_fits_are_named():
    cache = CacheManager(CacheConfig(num_blocks=64, block_size=16))
    message = r"'r12' needs 70 blocks \(1,009 prompt \+ 111 new tokens\); the pool can ever give 63\."
    with pytest.raises(RequestTooLong, match=message):
        cache.check_admission("r12", 1009, 111)
    cache.check_admission("r12", 1000, 8)


def test_a_window_admits_what_its_steps_can_hold():
    config: dict[str, Any] = {"num_blocks": 8, "block_size": 4, "sliding_window": 8}
    with pytest.raises(RequestTooLong, match="needs 25 blocks"):
        CacheManager(CacheConfig(**config)).check_admission("a", 99, 1)
    cache = CacheManager(CacheConfig(**config, max_step_tokens=8))
    cache.check_admission("a", 99, 1)
    cache.add("a", list(range(99)))
    for start in range(0, 99, 8):
        cache.retire(cache.step([("a", min(8, 99 - start))]).step_id)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        (0, 1, "num_prompt_tokens of 'a' is 0; it must be an int of at least 1"),
        (1, -1, "max_new_tokens of 'a' is -1; it must be an int of at least 0"),
        (1.5, 1, r"num_prompt_tokens of 'a' is 1\.5"),
    ],
)
def test_admission_numbers_are_checked(cache, prompt, new, message):
    with pytest.raises(InvalidInput, match=message):
        cache.check_admission("a", prompt, new)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 1}, "num_blocks is 1; it must be from 2 to"),
        ({"num_blocks": 4.0}, r"num_blocks is 4\.0; it must be an int from 2 to"),
        ({"block_size": 0}, "block_size is 0; it must be from 1 to"),
        ({"block_size": True}, "block_size is True; it must be an int"),
        ({"watermark_blocks": 7}, "watermark_blocks is 7; it must be from 0 to 6"),
        ({"watermark_blocks": -1}, "watermark_blocks is -1"),
        ({"num_host_blocks": -1}, "num_host_blocks is -1"),
        ({"max_blocks_per_seq": 0}, "max_blocks_per_seq is 0"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0"),
        ({"verify_tokens": 1}, "verify_tokens is 1; it must be True or False"),
        ({"model_fingerprint": "abc"}, "model_fingerprint is a str; it must be bytes"),
        ({"cache_dtype": None}, "cache_dtype is None; it must be the name of a dtype"),
        ({"sliding_window": 0}, "sliding_window of cache group 'all' is 0"),
        ({"sliding_window": 4, "attention_chunk": 4}, "sliding_window of cache group 'all' is 4 and attention_chunk 4"),
        ({"groups": ["full"]}, "groups must be a tuple of CacheGroup"),
        ({"groups": (CacheGroup(name="a"),), "sliding_window": 4}, "put the window into a group"),
        ({"groups": (CacheGroup(name="a"), CacheGroup(name="a"))}, "groups has two groups of one name"),
    ],
)
def test_bad_sizes_are_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        CacheConfig(**{"num_blocks": 8, "block_size": 4, **options})


def test_bad_groups_and_configs_are_refused():
    with pytest.raises(InvalidInput, match="name is ''; the name of a cache group must"):
        CacheGroup(name="")
    with pytest.raises(InvalidInput, match="block_size of cache group 'a' is 0"):
        CacheGroup(name="a", block_size=0)
    with pytest.raises(InvalidInput, match="config is a int; it must be a CacheConfig"):
        CacheManager(3)  # type: ignore[arg-type]


def test_messages_never_show_tokens(cache):
    with pytest.raises(InvalidInput) as caught:
        cache.add("a", [123456789, 987654321, -1])
    assert "123456789" not in str(caught.value)
    assert "987654321" not in str(caught.value)


def test_the_pool_takes_all_or_nothing(cache):
    before = snapshot(cache)
    with pytest.raises(OutOfBlocks, match=r"3 blocks are needed; 2 are free and 0 evictable\."):
        cache._state.pool.take(3)
    assert snapshot(cache) == before


def test_a_release_that_nobody_holds_is_corruption(cache):
    with pytest.raises(CacheCorruption, match="block 2 was released more often than it was taken"):
        cache._state.pool.release([2, 2, 2])
