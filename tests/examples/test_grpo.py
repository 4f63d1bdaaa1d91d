"""The engine samples from the weights that the optimizer has just changed, and compiles nothing for it."""

from __future__ import annotations

import pytest

from examples import grpo


@pytest.mark.nightly
def test_rollout_and_training_have_the_same_bits_before_and_after_each_of_10_updates_without_compiling_again() -> None:
    gaps, compilations = grpo.main(steps=10)
    # Importance ratios are exactly 1 before each update.
    assert gaps == [0.0] * 11
    assert len(set(compilations)) == 1
