"""Sequences in groups that share prefixes, each attended once: the result of plain paged attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn.ops
from jattn.metadata import PrefixGroups
from tests.support.attention_cases import AttentionCase, assert_matches_reference, paged_case, to_torch
from torch_core.base.specs import AttentionSpec

BLOCK = 16
IMPLEMENTATIONS = ["xla", "torch", pytest.param("triton", marks=pytest.mark.gpu)]


def grouped_case(seed: int, spec: AttentionSpec) -> AttentionCase:
    """Groups of three sequences and of two, one alone, and a padding row; a piece has two at most."""
    case = paged_case(
        seed, seq_lens=[70, 53, 49, 90, 40, 33, 0], query_lens=[1] * 6 + [0], num_heads=6, spec=spec, dtype="float32"
    )
    tables = case.operands["block_tables"]
    tables[1:3, :3] = tables[0, :3]
    tables[4, :2] = tables[3, :2]
    return case


def attended(case: AttentionCase, implementation: str, groups: PrefixGroups | None, **options: Any) -> np.ndarray:
    spec = case.spec
    attend = jax.jit(
        lambda operands, groups: jattn.ops.paged_attention(
            **operands,
            **case.limits,
            scale=spec.scale,
            sliding_window=None if spec.window_left is None else spec.window_left + 1,
            groups=groups,
            implementation=implementation,
            **options,
        )
    )
    return np.asarray(attend({name: jnp.asarray(array) for name, array in case.operands.items()}, groups))


GROUPS = PrefixGroups(
    prefix_lens=jnp.array([48, 48, 48, 32, 32, 0, 0], jnp.int32),
    piece_starts=jnp.array([0, 2, 3, 5, 6, 6, 6], jnp.int32),
    piece_tokens=2,
)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_groups_give_what_each_sequence_gives_on_its_own(implementation, seed) -> None:
    case = grouped_case(seed, AttentionSpec(scale=0.2))

    # Not beside "xla", whose products on a GPU are of TF32.
    assert_matches_reference(case, to_torch(attended(case, implementation, GROUPS)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_window_is_attended_plainly_groups_or_not(implementation, seed) -> None:
    case = grouped_case(seed, AttentionSpec(scale=0.2, window_left=20))

    # NaN where a shared block is out of its first owner's sight, in both.
    np.testing.assert_array_equal(attended(case, implementation, GROUPS), attended(case, implementation, None))


def test_a_batch_invariant_call_is_attended_plainly(seed) -> None:
    case = grouped_case(seed, AttentionSpec(scale=0.2))
    plain, found = (attended(case, "xla", groups, batch_invariant=True) for groups in (None, GROUPS))

    np.testing.assert_array_equal(found, plain)


def test_sequences_of_several_new_tokens_are_attended_plainly(seed) -> None:
    case = paged_case(seed, seq_lens=[70, 53], query_lens=[2, 2], num_heads=6, spec=AttentionSpec(scale=0.2))
    tables = case.operands["block_tables"]
    tables[1, :3] = tables[0, :3]
    starts = jnp.array([0, 2, 2], jnp.int32)
    groups = PrefixGroups(prefix_lens=jnp.array([48, 48], jnp.int32), piece_starts=starts, piece_tokens=2)

    np.testing.assert_array_equal(attended(case, "xla", groups), attended(case, "xla", None))


def test_what_the_later_tables_of_a_piece_say_of_its_prefix_is_not_looked_at(seed) -> None:
    case = grouped_case(seed, AttentionSpec(scale=0.2))
    plain = attended(case, "xla", None)
    tables = case.operands["block_tables"]
    poisoned = int(np.setdiff1d(np.arange(1, len(case.operands["kv_cache"])), tables)[0])
    case.operands["kv_cache"][poisoned] = np.nan
    tables[1, :3] = poisoned
    tables[4, :2] = poisoned

    np.testing.assert_allclose(attended(case, "torch", GROUPS), plain, rtol=1e-5, atol=1e-5)
