"""While requests are generated, garbage collections leave out what exists already; afterwards nothing is left out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from jattn.llm.engine import LLM, EngineConfig, SamplingParams
from jattn.llm.engine.clients.collector import without_old_objects
from tests.engine.conftest import tiny_decoder


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_left_out() -> Iterator[None]:
    # Other packages may have frozen objects at their import.
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_old_objects_are_left_out_inside_and_found_afterwards() -> None:
    old = weakref.ref(Cycle())
    with without_old_objects():
        new = weakref.ref(Cycle())
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()

    assert old() is None


def test_what_the_caller_left_out_stays_left_out() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with without_old_objects():
        pass

    assert gc.get_freeze_count() == pytest.approx(count, rel=0.01)


def test_an_error_inside_ends_it() -> None:
    with pytest.raises(RuntimeError), without_old_objects():
        raise RuntimeError

    assert gc.get_freeze_count() == 0


def test_generate_leaves_old_objects_out_and_no_more_at_its_end(monkeypatch) -> None:
    llm = LLM(tiny_decoder(), config=EngineConfig(block_size=4, max_num_seqs=2, max_num_batched_tokens=16))
    counts: list[int] = []
    step = llm.engine.wait
    monkeypatch.setattr(llm.engine, "wait", lambda outbox: (counts.append(gc.get_freeze_count()), step(outbox))[1])

    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))

    assert counts
    assert min(counts) > 0
    assert gc.get_freeze_count() == 0
