"""The manager against the model of a device: random traces from hypothesis, long seeded traces, and the nightly run."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.cache.driver import Driver, draw_config, run_trace
from tests.cache.model import Model

#: Of traces; some of them hypothesis ends early.
HYPOTHESIS_EXAMPLES = 125
HYPOTHESIS_STEPS = 100
NUMBERS = strategies.integers(0, 2**40 - 1)
SEEDED_TRACES = 30
MOVES_OF_A_TRACE = 200


class CacheMachine(RuleBasedStateMachine):
    """Every verb is a rule; hypothesis picks the order and the numbers, and shrinks what fails."""

    moves = 0

    @initialize(number=NUMBERS)
    def build(self, number):
        self.driver = Driver(Model(draw_config(_draws(number))))

    @rule(number=NUMBERS)
    def add(self, number):
        self.driver.add(_draws(number))

    @rule(number=NUMBERS)
    def grow(self, number):
        self.driver.grow(_draws(number))

    @rule(number=NUMBERS)
    def batch(self, number):
        self.driver.batch(_draws(number))

    @rule(number=NUMBERS)
    def reveal(self, number):
        self.driver.reveal(_draws(number))

    @rule(number=NUMBERS)
    def sample(self, number):
        self.driver.sample(_draws(number))

    @rule(number=NUMBERS)
    def retire_out_of_order_by_up_to_three(self, number):
        self.driver.retire(_draws(number))

    @rule(number=NUMBERS)
    def finish_or_cancel(self, number):
        self.driver.leave(_draws(number))

    @rule(number=NUMBERS)
    def fork(self, number):
        self.driver.fork(_draws(number))

    @rule(number=NUMBERS)
    def preempt(self, number):
        self.driver.preempt(_draws(number))

    @rule(number=NUMBERS)
    def resume(self, number):
        self.driver.resume(_draws(number))

    @rule(number=NUMBERS)
    def swap(self, number):
        self.driver.swap(_draws(number))

    @rule(number=NUMBERS)
    def make_a_call_that_is_refused(self, number):
        self.driver.refused(_draws(number))

    @rule(number=NUMBERS)
    def reset_or_drain(self, number):
        self.driver.rare(_draws(number))

    @invariant()
    def everything_holds(self):
        if hasattr(self, "driver"):
            self.driver.model.check()
            CacheMachine.moves += 1

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.model.drain()


def _draws(number):
    """Splits one number into as many small ones as a move asks for: a draw of hypothesis costs more than the move."""

    def draw(most):
        nonlocal number
        number, digit = divmod(number, most + 1)
        return digit

    return draw


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_hypothesis_finds_no_trace_that_breaks_a_promise(times):
    CacheMachine.moves = 0
    kinds: Any = HealthCheck
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=times * HYPOTHESIS_EXAMPLES,
            stateful_step_count=HYPOTHESIS_STEPS,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(kinds),
        ),
    )
    assert CacheMachine.moves >= times * 10_000


def test_seeded_traces_keep_every_promise_and_reach_every_verb(seed):
    totals = dict.fromkeys(("hit_tokens", "evictions", "preemptions", "forks", "copies", "swapped_in"), 0)
    refused = scrubbed = cuts = 0
    for trace in range(SEEDED_TRACES):
        model = run_trace(seed + trace, MOVES_OF_A_TRACE)
        refused += model.refused
        scrubbed += model.scrubbed
        cuts += model.cuts
        stats = model.cache.stats()
        for name in totals:
            totals[name] += getattr(stats, name)
    assert refused > 100
    assert min(scrubbed, cuts) > 5
    assert min(totals.values()) > 5, totals


@pytest.mark.nightly
@pytest.mark.parametrize("shard", range(8))
def test_ten_million_moves(shard, seed):
    moves = int(os.environ.get("JATTN_NIGHTLY_MOVES", 10_000_000)) // 8
    print(f"shard {shard}: seeds from {seed}, {moves} moves")
    for trace in range(moves // 500):
        run_trace(seed + trace, 500)
