"""The engine samples from the weights that the optimizer has just changed, and compiles nothing for it."""

from __future__ import annotations

from examples import grpo


def test_rollout_and_training_agree_before_and_after_each_of_20_updates_without_compiling_again() -> None:
    gaps, compilations = grpo.main(steps=20)
    assert len(gaps) == 21
    assert max(gaps) <= 1e-5
    assert len(set(compilations)) == 1
