"""While an engine is measured, garbage collections leave out what exists already; afterwards nothing is left out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from jattn.bench.collector import without_old_objects


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
    kept = Cycle()
    old = weakref.ref(kept)
    with without_old_objects():
        del kept
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
        assert gc.get_freeze_count() <= count

    assert gc.get_freeze_count() > 0.9 * count


def test_the_objects_that_python_itself_leaves_out_are_not_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python 3.12.1 begins with so many.
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    kept = Cycle()
    old = weakref.ref(kept)
    with without_old_objects():
        del kept
        gc.collect()
        assert old() is not None


def test_an_error_inside_ends_it() -> None:
    with pytest.raises(RuntimeError), without_old_objects():
        raise RuntimeError

    assert gc.get_freeze_count() == 0
