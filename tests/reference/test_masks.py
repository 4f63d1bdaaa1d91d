"""Which keys are visible and what is added to scores, on cases small enough to write down."""

from __future__ import annotations

import math

import pytest
import torch

from torch_core.attention.reference.masks import score_bias, visible_keys
from torch_core.base.specs import AttentionSpec


def rows(text: str) -> torch.Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in text.split()])


@pytest.mark.parametrize(
    ("query_len", "key_len", "options", "expected"),
    [
        (3, 3, {}, "x.. xx. xxx"),
        (2, 4, {}, "xxx. xxxx"),
        (3, 2, {}, ".. x. xx"),
        (2, 3, {"causal": False}, "xxx xxx"),
        (3, 5, {"window_left": 1}, ".xx.. ..xx. ...xx"),
        (2, 3, {"window_left": 0}, ".x. ..x"),
        (3, 3, {"causal": False, "window_right": 1}, "xx. xxx xxx"),
        (3, 3, {"causal": False, "window_left": 0, "window_right": 1}, "xx. .xx ..x"),
        (3, 3, {"window_right": 1}, "x.. xx. xxx"),
        (5, 5, {"attention_chunk": 2}, "x.... xx... ..x.. ..xx. ....x"),
        (2, 5, {"attention_chunk": 2, "causal": False}, "..xx. ....x"),
        (3, 5, {"attention_chunk": 3, "window_left": 1}, ".xx.. ...x. ...xx"),
        (3, 1, {"causal": False, "window_left": 0, "window_right": 1}, ". x x"),
        (0, 2, {}, ""),
    ],
)
def test_visible_keys_follow_the_inequalities_of_the_spec(query_len, key_len, options, expected):
    visible = visible_keys(query_len, key_len, spec=AttentionSpec(scale=1.0, **options))
    assert torch.equal(visible, rows(expected).reshape(query_len, key_len).bool())


def test_the_flag_of_a_sequence_overrides_the_causal_mask_of_the_spec():
    spec = AttentionSpec(scale=1.0)
    assert visible_keys(2, 2, spec=spec, causal=False).all()
    assert torch.equal(visible_keys(2, 2, spec=AttentionSpec(scale=1.0, causal=False), causal=True), rows("x. xx"))


def test_a_span_of_an_image_is_bidirectional_up_to_both_its_ends():
    ranges = torch.tensor([[1, 2]])
    visible = visible_keys(4, 4, spec=AttentionSpec(scale=1.0), mm_prefix_range=ranges)
    assert torch.equal(visible, rows("x... xxx. xxx. xxxx"))


def test_a_span_shows_keys_that_a_window_hides():
    visible = visible_keys(3, 3, spec=AttentionSpec(scale=1.0, window_left=0), mm_prefix_range=torch.tensor([[0, 2]]))
    assert visible.all()


def test_a_span_reaches_into_the_cached_past_but_not_beyond_the_sequence():
    ranges = torch.tensor([[0, 9]])
    visible = visible_keys(1, 3, spec=AttentionSpec(scale=1.0, window_left=0), mm_prefix_range=ranges)
    assert torch.equal(visible, rows("xxx"))


@pytest.mark.parametrize("span", [[0, 0], [2, 2], [3, 1]])
def test_a_span_without_a_second_position_is_padding(span):
    spec = AttentionSpec(scale=1.0)
    visible = visible_keys(4, 4, spec=spec, mm_prefix_range=torch.tensor([span]))
    assert torch.equal(visible, visible_keys(4, 4, spec=spec))


def bias_of(query_len: int, key_len: int, **options) -> torch.Tensor:
    spec = AttentionSpec(scale=1.0, use_alibi_sqrt=options.pop("use_alibi_sqrt", False))
    arguments = {"alibi_slopes": None, "qq_bias": None, **options}
    bias = score_bias(query_len, key_len, spec=spec, dtype=torch.float64, **arguments)
    assert bias is not None
    return bias


def test_alibi_adds_the_slope_times_the_distance():
    bias = bias_of(2, 3, alibi_slopes=torch.tensor([0.5, 2.0]))
    assert bias.tolist() == [[[-0.5, 0.0, 0.5], [-1.0, -0.5, 0.0]], [[-2.0, 0.0, 2.0], [-4.0, -2.0, 0.0]]]


def test_alibi_sqrt_subtracts_the_root_of_the_distance_and_leaves_later_keys_alone():
    bias = bias_of(2, 3, alibi_slopes=torch.tensor([2.0]), use_alibi_sqrt=True)
    assert bias[0, 0].tolist() == [-2.0, 0.0, 0.0]
    assert bias[0, 1].tolist() == pytest.approx([-2 * math.sqrt(2), -2.0, 0.0])


def test_a_relative_bias_is_read_by_distance_and_its_ends_go_on():
    bias = bias_of(2, 4, relative_bias=torch.tensor([[10.0, 20.0, 30.0]]))
    assert bias.tolist() == [[[10.0, 10.0, 20.0, 30.0], [10.0, 10.0, 10.0, 20.0]]]


def test_the_bias_between_new_tokens_starts_at_the_first_new_token():
    bias = bias_of(2, 4, qq_bias=torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 9.0], [9.0, 9.0, 9.0]]))
    assert bias.tolist() == [[[0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 3.0, 4.0]]]


def test_both_biases_add_up():
    bias = bias_of(1, 2, alibi_slopes=torch.tensor([1.0]), qq_bias=torch.tensor([[5.0]]))
    assert bias.tolist() == [[[-1.0, 5.0]]]


def test_no_bias_is_none():
    spec = AttentionSpec(scale=1.0)
    assert score_bias(2, 2, spec=spec, alibi_slopes=None, qq_bias=None, dtype=torch.float64) is None
