"""The example trains, samples with the engine, and learns from its samples."""

from __future__ import annotations

import math

import pytest

from examples import flax_policy_gradient


@pytest.mark.nightly
def test_the_example_learns_to_count_and_then_from_its_own_samples(capsys) -> None:
    losses, rise = flax_policy_gradient.main()
    assert losses[0] > 0.9 * math.log(flax_policy_gradient.CONFIG.vocab_size) > 2 * losses[-1]
    assert rise > 0
    assert "after [0, 1] comes" in capsys.readouterr().out
