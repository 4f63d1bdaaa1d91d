"""Layers to cache groups: one window each, about equally many layers, every layer in a place of its own."""

from __future__ import annotations

import random

import pytest

from torch_core.base.errors import InvalidInput
from torch_core.cache import group_layers


@pytest.mark.parametrize(
    ("windows", "num_groups", "num_arrays"),
    [
        ([None] * 5, 1, 5),
        ([64] * 5, 1, 5),
        ([64, None] * 12, 2, 12),
        (([512] * 5 + [None]) * 4 + [512] * 2, 7, 4),
        ([64] * 12 + [None] * 13, 2, 13),
        ([64, 32, None], 3, 1),
        ([64] * 7 + [None] * 2, 5, 2),
    ],
    ids=["full", "window", "gpt-oss", "Gemma 3 1B", "nearly even", "three windows", "padded"],
)
def test_groups_have_the_layers_of_the_rarest_window(windows, num_groups, num_arrays) -> None:
    found = group_layers(windows)

    assert (len(found.groups), found.num_arrays) == (num_groups, num_arrays)


@pytest.mark.parametrize("case", range(30))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_window(case, seed) -> None:
    source = random.Random(seed)
    windows = [source.choice([None, None, 4, 8, 8, 8]) for _ in range(source.randint(1, 40))]

    found = group_layers(windows)

    places = list(zip(found.layer_groups, found.layer_arrays, strict=True))
    assert len(set(places)) == len(windows)
    assert [found.groups[group].sliding_window for group in found.layer_groups] == windows
    assert max(found.layer_arrays) + 1 == found.num_arrays
    assert set(found.layer_groups) == set(range(len(found.groups)))
    assert len({group.name for group in found.groups}) == len(found.groups)
    seen = [group.sliding_window for group in found.groups]
    assert seen == sorted(seen, key=lambda window: (window is not None, window or 0))


def test_where_windows_differ_narrower_layers_have_more_tokens_in_a_block() -> None:
    found = group_layers([64, None, None, 64], [8, 8, 4, 8], block_size=16)

    assert [(group.name, group.block_size) for group in found.groups] == [
        ("full, blocks times 1", None), ("full, blocks times 2", 32), ("window 64", None), ("window 64, 2 of 2", None),
    ]  # fmt: skip
    assert [group.block_size for group in group_layers([64, 64], [8, 4], block_size=16).groups] == [None]


def test_a_model_of_one_window_has_the_blocks_of_one_group() -> None:
    assert group_layers([32] * 6).most_blocks(100, block_size=16, max_step_tokens=8) == 4
    assert group_layers([None] * 6).most_blocks(100, block_size=16, max_step_tokens=8) == 7
    assert group_layers([32, None]).most_blocks(100, block_size=16, max_step_tokens=8) == 11
    assert group_layers([32, None]).most_blocks(100, block_size=16) == 14


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([], "windows is empty; give one entry for each layer with a cache."),
        ([None, 0], "windows[1] is 0; it must be from 1 to 2147483647, or None."),
    ],
)
def test_what_is_no_window_is_refused(windows, message) -> None:
    with pytest.raises(InvalidInput) as error:
        group_layers(windows)

    assert str(error.value) == message


def test_a_width_that_divides_no_block_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^widths\[1\] is 3; it must divide the largest one \(8\)\.$"):
        group_layers([64, None], [8, 3], block_size=16)
