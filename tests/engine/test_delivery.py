"""An outbox loses nothing, whatever interrupts its taking."""

from __future__ import annotations

import itertools

import numpy as np

from jattn.llm.engine.options.params import SamplingParams
from jattn.llm.engine.request.outputs import Outbox, TokenDelta
from jattn.llm.engine.request.request import Request, RequestMetrics
from tests.engine.interrupts import InterruptAt


def test_an_interrupt_at_any_line_of_take_loses_no_news() -> None:
    lines = 0
    for line in itertools.count(1):
        outbox = Outbox()
        for name in ("a", "b"):
            request = Request(name, (1,), SamplingParams(), np.zeros(0, np.int32), frozenset(), RequestMetrics(0.0))
            outbox.note(request)
            request.output_token_ids.append(7)
        news = outbox.news()
        interrupt = InterruptAt(line, KeyboardInterrupt())

        try:
            with interrupt:
                taken = outbox.take(news)
        except KeyboardInterrupt:
            taken = outbox.take(outbox.news())

        assert taken == [TokenDelta("a", (7,), None), TokenDelta("b", (7,), None)], interrupt.place
        if interrupt.place is None:
            break
        lines = line
    assert lines >= 5
