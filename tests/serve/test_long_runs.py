"""The long runs, at their smallest: what a ledger keeps; and nightly, at some length."""

from __future__ import annotations

import json

import pytest

from jattn.llm.engine import LLM, EngineConfig
from jattn.llm.serve import AsyncLLM
from tests.serve.soak import CONFIG, kinds_of, read, soak, summary
from tests.serve.streams import run
from tests.support.tiny_models import write_tiny_model

WRONG = ("wrong", "leaked_blocks", "unfinished", "compilations")


@pytest.mark.nightly
def test_a_soak_that_was_killed_goes_on_behind_the_last_whole_line(tmp_path) -> None:
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, num_scheduler_steps=1, fixed_shapes=True
    )
    ledger = tmp_path / "ledger"
    with AsyncLLM(LLM(write_tiny_model(tmp_path / "tiny", 0), config=config)) as llm:
        kinds = kinds_of(llm.llm, 2)
        soak(llm, kinds, ledger, rounds=1, size=9, seconds=60)
        first = ledger.read_text()
        ledger.write_text(first + '{"requests": 9, "dro')
        soak(llm, kinds, ledger, rounds=2, size=9, seconds=60)
        soak(llm, kinds, ledger, rounds=3, size=9, seconds=-1)

    rounds = read(ledger)
    assert ledger.read_text().startswith(first)
    assert [each["requests"] for each in rounds] == [9, 9]
    sums = summary(rounds)
    assert (sums["requests"], sums["processes"]) == (18, 2)
    assert not any(sums[name] for name in WRONG), json.dumps(sums)


@pytest.mark.nightly
def test_ten_thousand_requests_lose_nothing_and_leave_nothing(tmp_path) -> None:
    with AsyncLLM(LLM(config=CONFIG)) as llm:
        llm.llm.engine.warmup(lambda *_: None)
        soak(llm, kinds_of(llm.llm), tmp_path / "ledger", rounds=20, size=500, seconds=1e9)

    sums = summary(read(tmp_path / "ledger"))
    assert not any(sums[name] for name in WRONG), json.dumps(sums)


@pytest.mark.nightly
def test_two_hundred_streams_for_a_minute_get_their_own_answers_and_leave_nothing() -> None:
    report = run(200, 60)

    assert not report.errors
    assert (report.unfinished, report.kv_cache_usage, report.programs) == (0, 0, 0)
