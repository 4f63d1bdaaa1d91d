"""Which sums over devices a kernel takes, and in how many shots."""

from __future__ import annotations

import pytest

from torch_core.all_reduce.plan import (
    _sum_region,
    merges,
    plan_all_reduce,
    plan_all_reduce_norm,
    plan_merge,
    sums,
    sums_and_norms,
    workspace_words,
)
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec


@pytest.mark.parametrize(("size", "dtype"), [(3, "bfloat16"), (0, "float32"), (4, "int32"), ((2 << 20) + 1, "float32")])
def test_what_is_no_small_array_of_whole_words_is_refused_with_the_limit(size: int, dtype: str) -> None:
    x = ArraySpec((size,), dtype)
    assert not sums(x, 2)
    with pytest.raises(InvalidInput, match="8388608 bytes"):
        plan_all_reduce(x, 2)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2049, 2048), "bfloat16"), ((1, 64), "float32"), ((1, 16386), "float16"), ((2, 63), "float16")],
)
def test_rows_that_do_not_fit_are_not_summed_and_normed_at_once(shape: tuple[int, ...], dtype: str) -> None:
    x, weight = ArraySpec(shape, dtype), ArraySpec(shape[1:], dtype)
    assert not sums_and_norms(x, weight, 2)
    with pytest.raises(InvalidInput, match="8388608 bytes at most, each in steps of 4096"):
        plan_all_reduce_norm(x, weight, 2, epsilon=1e-6, round_first=True, add_one=False)


@pytest.mark.parametrize(
    ("world", "shape"), [(2, (64, 4096)), (2, (16, 16384)), (4, (8, 8192)), (4, (512, 8192)), (8, (256, 16384))]
)
def test_steps_of_large_models_fit(world: int, shape: tuple[int, int]) -> None:
    assert sums_and_norms(ArraySpec(shape, "bfloat16"), ArraySpec(shape[1:], "bfloat16"), world)


@pytest.mark.parametrize(
    ("world", "rows", "shots"), [(2, 256, 1), (4, 8, 1), (4, 16, 2), (8, 3, 1), (8, 4, 2), (8, 128, 2)]
)
def test_a_large_sum_over_four_devices_or_more_takes_two_shots(world: int, rows: int, shots: int) -> None:
    x = ArraySpec((rows, 8192), "bfloat16")
    assert plan_all_reduce(x, world) == plan_all_reduce(x, world, shots) != plan_all_reduce(x, world, 3 - shots)


def test_shots_that_the_workspace_is_too_small_for_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"shots is 1; such an array can be summed in 2"):
        plan_all_reduce(ArraySpec((512, 8192), "bfloat16"), 4, 1)


@pytest.mark.parametrize("world", range(2, 17))
def test_the_slots_of_a_workspace_begin_at_multiples_of_16_bytes(world: int) -> None:
    region = _sum_region(world)
    assert region.max_blocks % 4 == region.words(world) % 4 == 0


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_device_keeps_less_than_a_hundred_megabytes(world: int) -> None:
    assert 4 * workspace_words(world) < 100e6


@pytest.mark.parametrize(
    ("shape", "dtype", "num_heads"),
    [
        ((64, 32, 128), "bfloat16", 32),
        ((1, 32, 256), "float32", 32),
        ((1, 32, 128), "bfloat16", 8),
        ((1, 2, 127), "float16", 2),
    ],
)
def test_rows_that_do_not_fit_are_not_merged(shape: tuple[int, int, int], dtype: str, num_heads: int) -> None:
    x = ArraySpec(shape, dtype)
    assert not merges(x, num_heads, 2)
    with pytest.raises(InvalidInput, match="1024 rows of 1020 bytes and 1048576 bytes in all"):
        plan_merge(x, None, num_heads, dtype, 2)
