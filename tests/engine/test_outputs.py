"""An outbox gives each delta out once, in order."""

from __future__ import annotations

from jattn.llm.engine.request.outputs import Outbox, TokenDelta

DELTAS = [TokenDelta("a", (7,), None), TokenDelta("b", (8, 9), None), TokenDelta("a", (5,), "length")]


def filled() -> Outbox:
    outbox = Outbox()
    for delta in DELTAS:
        outbox.deltas.append(delta)
    return outbox


def test_deltas_are_taken_once_and_in_order() -> None:
    outbox = filled()

    assert (outbox.take(), outbox.take(), bool(outbox)) == (DELTAS, [], False)


def test_the_deltas_of_one_request_are_taken_alone() -> None:
    outbox = filled()

    assert outbox.take("a") == [DELTAS[0], DELTAS[2]]
    assert outbox.take() == [DELTAS[1]]
