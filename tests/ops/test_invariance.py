"""What must not show in a single bit: batch mates, block order, dead slots, table tails and the table's width."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import pytest

from tests.ops import runner
from tests.ops.runner import IMPLEMENTATIONS
from tests.support.attention_cases import AttentionCase, paged_case
from torch_core.base.specs import AttentionSpec

SPECS = {
    "causal": AttentionSpec(scale=0.2),
    "window and soft cap": AttentionSpec(scale=0.2, window_left=20, logits_soft_cap=5.0),
}
# One prefill, one chunk of a prompt, decode rows; the last two rows are padding.
SEQ_LENS, QUERY_LENS, PADDING = [37, 1, 64, 25, 90, 150], [1, 1, 20, 5, 1, 1], 2

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


@functools.cache
def mixed_batch(spec: AttentionSpec, seed: int = 3, poison: float = np.nan) -> AttentionCase:
    return paged_case(seed, seq_lens=SEQ_LENS, query_lens=QUERY_LENS, padding_tokens=PADDING, spec=spec, poison=poison)


def decode_batch(seed: int = 4) -> AttentionCase:
    return paged_case(seed, seq_lens=SEQ_LENS, query_lens=[1] * len(SEQ_LENS), spec=SPECS["causal"])


run_numpy = functools.partial(runner.run_numpy, quick=False)


def rows_of(case: AttentionCase, sequences: Sequence[int]) -> np.ndarray:
    starts = case.operands["query_start_loc"]
    return np.concatenate([np.arange(starts[seq], starts[seq + 1]) for seq in sequences])


def selected(case: AttentionCase, sequences: Sequence[int]) -> AttentionCase:
    """The case with these sequences only, in this order."""
    lens = np.diff(case.operands["query_start_loc"])[list(sequences)]
    operands = {
        **case.operands,
        "query": case.operands["query"][rows_of(case, sequences)],
        "block_tables": case.operands["block_tables"][list(sequences)],
        "seq_lens": case.operands["seq_lens"][list(sequences)],
        "query_start_loc": np.cumsum([0, *lens], dtype=np.int32),
    }
    return dataclasses.replace(case, operands=operands)


def used_columns(case: AttentionCase) -> np.ndarray:
    """bool like block_tables: entries that hold tokens of their sequence."""
    tables, block_size = case.operands["block_tables"], case.operands["kv_cache"].shape[2]
    return np.arange(tables.shape[1]) * block_size < case.operands["seq_lens"][:, None]


def assert_same_bits(actual: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    for part, (one, other) in zip(("output", "lse"), zip(actual, expected, strict=True), strict=True):
        assert one.tobytes() == other.tobytes(), f"{part} differs by up to {np.abs(one - other).max()}"


@each_implementation
@each_spec
def test_physical_block_order_does_not_show(spec: AttentionSpec, implementation: str, seed: int) -> None:
    case = mixed_batch(spec)
    cache, tables = case.operands["kv_cache"], case.operands["block_tables"]
    new_place = np.concatenate([[0], 1 + np.random.default_rng(seed).permutation(len(cache) - 1)]).astype(np.int32)
    moved = np.empty_like(cache)
    moved[new_place] = cache
    relabelled = np.where(used_columns(case), new_place[np.clip(tables, 0, len(cache) - 1)], tables)
    assert not np.array_equal(relabelled, tables)
    assert_same_bits(
        run_numpy(case, implementation, kv_cache=moved, block_tables=relabelled), run_numpy(case, implementation)
    )


@each_implementation
@each_spec
@pytest.mark.parametrize("poison", [np.inf, -np.inf, 3e38, 0.0])
def test_what_dead_slots_and_padding_rows_hold_does_not_show(
    spec: AttentionSpec, implementation: str, poison: float
) -> None:
    expected = run_numpy(mixed_batch(spec), implementation)
    assert np.isfinite(expected[0]).all()
    assert_same_bits(run_numpy(mixed_batch(spec, poison=poison), implementation), expected)


@each_implementation
@each_spec
def test_what_table_tails_hold_does_not_show(spec: AttentionSpec, implementation: str, seed: int) -> None:
    case = mixed_batch(spec)
    tables = case.operands["block_tables"]
    garbage = np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, tables.shape).astype(np.int32)
    assert_same_bits(
        run_numpy(case, implementation, block_tables=np.where(used_columns(case), tables, garbage)),
        run_numpy(case, implementation),
    )


@each_implementation
def test_the_width_of_the_table_does_not_show(implementation: str) -> None:
    case = mixed_batch(SPECS["causal"])
    tables = case.operands["block_tables"]
    wider = np.concatenate([tables, np.full((len(tables), 30), -7, np.int32)], axis=1)
    assert_same_bits(run_numpy(case, implementation, block_tables=wider), run_numpy(case, implementation))


@each_implementation
@pytest.mark.parametrize("kept", [0, 2, 4])
def test_what_batch_mates_hold_and_how_long_they_are_does_not_show(implementation: str, kept: int) -> None:
    spec = SPECS["window and soft cap"]
    case, others = mixed_batch(spec), mixed_batch(spec, seed=99)
    # The mates' queries, contexts and lengths are another batch's; one sequence keeps its own.
    rows = rows_of(case, [kept])
    query = others.operands["query"].copy()
    query[rows] = case.operands["query"][rows]
    seq_lens = np.maximum(QUERY_LENS, case.operands["seq_lens"] // 2).astype(np.int32)
    seq_lens[kept] = SEQ_LENS[kept]
    blocks = len(case.operands["kv_cache"])
    cache = np.concatenate([case.operands["kv_cache"], np.nan_to_num(others.operands["kv_cache"])])
    mates = np.where(used_columns(others), others.operands["block_tables"] + blocks, 0)
    tables = np.where((np.arange(len(mates)) == kept)[:, None], case.operands["block_tables"], mates)
    tables = tables.astype(np.int32)
    actual = run_numpy(case, implementation, query=query, kv_cache=cache, block_tables=tables, seq_lens=seq_lens)
    expected = run_numpy(case, implementation, kv_cache=cache)
    assert_same_bits((actual[0][rows], actual[1][rows]), (expected[0][rows], expected[1][rows]))


@each_implementation
def test_the_order_of_the_batch_does_not_show(implementation: str, seed: int) -> None:
    case = decode_batch()
    order = np.random.default_rng(seed).permutation(len(SEQ_LENS)).tolist()
    output, lse = run_numpy(case, implementation)
    assert_same_bits(run_numpy(selected(case, order), implementation), (output[order], lse[order]))


@pytest.mark.usefixtures("on_cpu")
@each_spec
@pytest.mark.parametrize("sequences", [[0], [2], [4], [5, 1], [3, 2, 0]], ids=str)
def test_with_torch_a_smaller_batch_gives_the_same_bits(spec: AttentionSpec, sequences: list[int]) -> None:
    case = mixed_batch(spec)
    few = selected(case, sequences)
    few = dataclasses.replace(few, limits={"max_query_len": max(QUERY_LENS[seq] for seq in sequences)})
    output, lse = run_numpy(case, "torch")
    rows = rows_of(case, sequences)
    assert_same_bits(run_numpy(few, "torch"), (output[rows], lse[rows]))


@each_implementation
def test_nan_in_one_query_stays_in_its_own_row(implementation: str) -> None:
    case = mixed_batch(SPECS["causal"])
    query = case.operands["query"].copy()
    row = rows_of(case, [2])[7]
    query[row, 1, 0] = np.nan
    actual, expected = run_numpy(case, implementation, query=query)[0], run_numpy(case, implementation)[0]
    assert np.isnan(actual[row, 1]).all()
    expected[row, 1] = actual[row, 1]
    assert actual.tobytes() == expected.tobytes()


@each_implementation
def test_nan_in_a_visible_value_stays_in_its_own_sequence(implementation: str) -> None:
    case = mixed_batch(SPECS["causal"])
    cache = case.operands["kv_cache"].copy()
    cache[case.operands["block_tables"][4, 0], 1, 3] = np.nan
    actual, expected = run_numpy(case, implementation, kv_cache=cache)[0], run_numpy(case, implementation)[0]
    row = rows_of(case, [4])[0]
    assert np.isnan(actual[row]).all()
    expected[row] = actual[row]
    assert actual.tobytes() == expected.tobytes()
