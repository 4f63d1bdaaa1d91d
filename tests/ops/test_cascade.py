"""A shared prefix, attended once by torch and by JAX: the result of plain paged attention, and clear refusals."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jattn.ops
import torch_core.ops
from tests.support import reference
from tests.support.attention_cases import AttentionCase, assert_as_exact, paged_case, to_torch
from torch_core.attention.call import PagedCall
from torch_core.attention.cascade import SharedPrefix, cascade_calls, shared_prefix
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec

BLOCK, SHARED = 16, 3
SPEC = AttentionSpec(scale=0.2)
HEADS = 6
SINKS = np.linspace(-1, 2, HEADS, dtype=np.float32)
BIAS = np.where(np.tri(5, dtype=bool), 0.5, -np.inf).astype(np.float32)


def shared_case(seed: int, *, spec: AttentionSpec = SPEC, dtype: str = "float32", **options: Any) -> AttentionCase:
    """Four sequences behind one prefix and a padding row."""
    case = paged_case(
        seed,
        seq_lens=[70, 53, 49, 90, 0],
        query_lens=[5, 1, 1, 3, 0],
        num_heads=HEADS,
        spec=spec,
        dtype=dtype,
        padding_tokens=2,
        **options,
    )
    tables = case.operands["block_tables"]
    tables[1:4, :SHARED] = tables[0, :SHARED]
    return case


def call_of(case: AttentionCase, convert: Any, **changes: Any) -> PagedCall[Any]:
    arrays = {name: convert(array) for name, array in (case.operands | case.options).items()}
    return PagedCall(**arrays, spec=case.spec, **case.limits, **{"with_lse": True, **changes})


def split(call: PagedCall[Any], library: Any) -> SharedPrefix[Any]:
    return shared_prefix(
        call.block_tables,
        call.seq_lens,
        call.query_start_loc,
        num_tokens=call.num_tokens,
        block_size=BLOCK,
        common_prefix_len=SHARED * BLOCK,
        piece_tokens=4,
        library=library,
    )


def by_torch_core(case: AttentionCase, **changes: Any) -> dict[str, torch.Tensor]:
    call = call_of(case, to_torch, **changes)
    return torch_core.ops.cascade_attention(call, split(call, torch))


def by_jax(implementation: str, case: AttentionCase, **changes: Any) -> dict[str, torch.Tensor]:
    call = call_of(case, jnp.asarray, **changes)
    prefix = jattn.ops.shared_prefix(call, SHARED * BLOCK, piece_tokens=4)
    attend = functools.partial(jattn.ops.cascade_attention, implementation=implementation)
    return {name: to_torch(np.array(array)) for name, array in jax.jit(attend)(call, prefix).items()}


RUNS = {
    "torch_core": by_torch_core,
    "torch": functools.partial(by_jax, "torch"),
    "xla": functools.partial(by_jax, "xla"),
}
each_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def expected(case: AttentionCase, compute_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    operands = {name: to_torch(array) for name, array in (case.operands | case.options).items()}
    return reference.paged_attention_with_lse(**operands, spec=case.spec, compute_dtype=compute_dtype)


@each_run
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"spec": replace(SPEC, causal=False)},
        {"spec": replace(SPEC, logits_soft_cap=3.0)},
        {"sinks": SINKS},
        {"qq_bias": BIAS},
        {"seq_causal": np.array([True, False, True, False, True])},
    ],
    ids=lambda options: ",".join(map(str, options)) or "plain",
)
def test_cascade_equals_plain_attention(run: Any, options: dict[str, Any], seed: int) -> None:
    case = shared_case(seed, **options)
    dtype = to_torch(case.operands["query"]).dtype

    results = run(case)

    exact, plain = expected(case, torch.float64), expected(case, dtype)
    assert_as_exact(results["out"], exact[0], plain[0], dtype)
    assert_as_exact(results["lse"], exact[1], plain[1], torch.float32, "lse")


@each_run
def test_the_lse_is_returned_where_it_is_wanted(run: Any, seed: int) -> None:
    assert set(run(shared_case(seed), with_lse=False)) == {"out"}


@each_run
def test_an_fp8_output_is_rounded_once(run: Any, seed: int) -> None:
    case = shared_case(seed)
    exact = expected(case, torch.float64)[0]

    found = run(case, out_dtype="float8_e4m3fn", out_scale=0.02)["out"]

    assert found.dtype == torch.float8_e4m3fn
    # Half a spacing of e4m3's numbers, or of its smallest ones.
    error = (found.double() * 0.02 - exact).abs()
    assert (error <= exact.abs() / 16 * 1.001 + 0.02 * 2**-10 * 1.001).all()


def test_partial_results_have_the_dtype_of_the_output(seed: int) -> None:
    call = call_of(shared_case(seed, dtype="bfloat16"), to_torch, out_dtype="float32")

    assert {part.result_dtype for part in cascade_calls(call, split(call, torch))} == {"float32"}


def test_the_output_that_is_given_is_written(seed: int) -> None:
    call = call_of(shared_case(seed), to_torch)
    prefix = split(call, torch)
    out = torch.full_like(call.query, torch.nan)

    results = torch_core.ops.cascade_attention(replace(call, out=out), prefix)

    assert results["out"] is out
    assert torch.equal(out, torch_core.ops.cascade_attention(call, prefix)["out"])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"spec": replace(SPEC, window_left=3)}, "a sliding window"),
        ({"spec": replace(SPEC, causal=False, window_right=3)}, "a sliding window"),
        ({"spec": replace(SPEC, attention_chunk=32)}, "attention_chunk"),
        ({"alibi_slopes": torch.ones(HEADS)}, "ALiBi"),
        ({"relative_bias": torch.ones(HEADS, 3)}, "relative_bias"),
        ({"mm_prefix_range": torch.zeros(5, 1, 2, dtype=torch.int32)}, "mm_prefix_range"),
    ],
)
def test_what_depends_on_the_distance_to_the_prefix_is_refused(change: dict, name: str, seed: int) -> None:
    call = call_of(shared_case(seed), to_torch)
    with pytest.raises(Unsupported, match=f"^cascade attention does not serve {name}; build the metadata with common_"):
        torch_core.ops.cascade_attention(replace(call, **change), split(call, torch))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suffix_kv_lens": None}, "cascade_attention: suffix_kv_lens is missing; it must be [num_seqs]."),
        (
            {"prefix_kv_lens": torch.zeros(1, dtype=torch.int32)},
            "prefix_kv_lens has shape [1]; it must be [pieces] with pieces = 3, that of prefix_block_table.",
        ),
        (
            {"suffix_kv_lens": torch.zeros(5, dtype=torch.int64)},
            "suffix_kv_lens is int64; it must be int32. Cast it.",
        ),
    ],
)
def test_a_prefix_that_does_not_hold_together_is_refused(change: dict, message: str, seed: int) -> None:
    call = call_of(shared_case(seed), to_torch)
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        torch_core.ops.cascade_attention(call, replace(split(call, torch), **change))


def test_the_bound_on_the_queries_of_a_piece_is_static(seed: int) -> None:
    call = call_of(shared_case(seed), to_torch)
    with pytest.raises(InvalidInput, match=r"^max_prefix_query_len is -1; it must be a static int, 0 or more\.$"):
        replace(split(call, torch), max_prefix_query_len=-1)
