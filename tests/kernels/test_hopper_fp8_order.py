"""The order of keys that transposed values and packed weights of the fp8 Hopper prefill kernel share; in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.attention_cases import paged_case
from tests.support.fp8_cases import assert_matches_fp8_weights, with_e4m3_weights
from torch_core.attention.kernels.hopper_fp8 import transpose as hopper_fp8_transpose
from torch_core.base.specs import AttentionSpec

_LAYOUTS = {64: ("_NARROW_RAW", "_NARROW_TURNED"), 128: ("_WIDE_RAW", "_WIDE_TURNED")}


def _layouts(width: int) -> list[Any]:
    return [getattr(hopper_fp8_transpose, name).value for name in _LAYOUTS[width]]


def _addresses(rows: int, width: int) -> np.ndarray:
    """Returns where the copy engine and the matrix units have byte [row, column] of a swizzled tile."""
    address = np.arange(rows * width).reshape(rows, width)
    return address ^ ((address >> 7 & (width // 16 - 1)) << 4)


def _numbers(bases: list[list[int]]) -> np.ndarray:
    """Returns what the numbers 0, 1, 2, ... become under a linear map of their bits."""
    numbers = np.zeros(1, int)
    for (base,) in bases:
        numbers = np.concatenate([numbers, numbers ^ base])
    return numbers


def _words(layout: Any) -> np.ndarray:
    """Returns the word in shared memory of each element of the one axis."""
    return np.argsort(_numbers(layout.offset_bases))


def _weight_order() -> np.ndarray:
    """Returns the key at each place of a left operand: the words of `fp8_softmax_step` on key numbers."""
    bits = np.arange(128).reshape(4, 2, 2, 4, 2).transpose(0, 4, 3, 1, 2).reshape(32, 2, 2)
    low, high = bits[..., 0], bits[..., 1]
    return np.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]], axis=-1).reshape(128)


def _column_order(width: int) -> np.ndarray:
    """Returns the head's element in each column of the product, whose columns `in_columns` puts in order."""
    return np.arange(width).reshape(width // 64, 2, 2, 2, 4, 2).transpose(0, 2, 4, 1, 3, 5).reshape(width)


@pytest.mark.parametrize("width", [64, 128])
def test_transposed_values_have_keys_in_the_order_of_the_weights_and_columns_in_that_of_the_sums(width, seed):
    raw, turned = _layouts(width)
    values = np.random.default_rng(seed).integers(0, 256, (128, width), dtype=np.uint8)
    memory = np.zeros(128 * width, np.uint8)
    memory[_addresses(128, width)] = values
    words = memory.view("<u4")[_words(raw)].copy()
    # Four words of four keys to four words of four columns, as `_transposed` has it.
    quads = words.view(np.uint8).reshape(8 * width, 2, 2, 4)
    by_column = quads.transpose(0, 3, 1, 2)
    written = np.ascontiguousarray(by_column).reshape(-1).view("<u4")
    memory = np.zeros(32 * width, "<u4")
    memory[_words(turned)] = written
    tile = memory.view(np.uint8)[_addresses(width, 128)]
    assert (tile == values[_weight_order()].T[_column_order(width)]).all()


@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_thread_has_eights_of_neighbours_of_a_products_columns(width):
    # Of a row, a thread has the columns 8 * i + 2 * t + (0, 1) of the product; see `fp8_softmax_step`.
    for of_thread in _column_order(width).reshape(-1, 4, 2).transpose(1, 0, 2).reshape(4, -1):
        eights = np.sort(of_thread).reshape(-1, 8)
        assert (eights == eights[:, :1] // 8 * 8 + np.arange(8)).all()


@pytest.mark.parametrize(
    ("words", "width", "piece", "pair"),
    [
        *(
            (words, width, piece, 1)
            for words in ("_WORDS_OF_TWO", "_WORDS_OF_FOUR")
            for width, piece in ((64, 0), (128, 0), (128, 1))
        ),
        ("_WIDE_WORDS", 128, 0, 2),
    ],
)
def test_threads_share_out_a_piece_and_do_not_meet_in_a_bank(words, width, piece, pair):
    raw, turned = _layouts(width)
    layout = getattr(hopper_fp8_transpose, words).value
    size = layout.shape[0]
    assert sorted(_numbers(layout.reg_bases + layout.lane_bases + layout.warp_bases)) == list(range(size))
    lanes = _numbers(layout.lane_bases) + piece * size
    # A warp loads single words, half a warp pairs of them; a quarter of a warp stores four words of each lane.
    loads = (_words(raw)[lanes] // pair % (32 // pair)).reshape(pair, 32 // pair)
    stores = (_words(turned)[lanes] // 4 % 8).reshape(4, 8)
    assert all(len(set(group)) == len(group) for group in (*loads, *stores))


@pytest.mark.parametrize("window", [None, 20])
def test_rounding_weights_to_e4m3_costs_little_and_is_within_its_own_bound(window, seed):
    spec = AttentionSpec(scale=64**-0.5, window_left=window)
    case = paged_case(
        seed, seq_lens=[150, 0, 40], query_lens=[130, 0, 50], head_size=64, dtype="float8_e4m3fn", spec=spec,
        padding_tokens=2, sinks=np.linspace(-2, 2, 6, dtype=np.float32), q_scale=0.5, k_scale=2.0, v_scale=0.5,
    )  # fmt: skip
    exact, _ = case.expected()
    output = with_e4m3_weights(case)
    assert (output - exact).abs().max() <= 0.05 * exact.abs().max()
    assert_matches_fp8_weights(case, output)
