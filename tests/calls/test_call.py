"""A call's arrays, its map, and what JAX sees of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn.ops  # noqa: F401 - calls become pytrees
from tests.support.attention_plans import dense_call, paged_call
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.launch.call import array_fields

CALLS = {
    "paged": paged_call(sinks=ArraySpec((8,), "float32"), k_scale=0.5),
    "dense": dense_call(with_lse=True),
    "write": WriteCall(
        key=ArraySpec((3, 2, 8), "float32"),
        value=ArraySpec((3, 2, 8), "float32"),
        slot_mapping=ArraySpec((3,), "int32"),
        kv_cache=ArraySpec((4, 2, 4, 2, 8), "float32"),
    ),
    "copy": CopyCall(kv_cache=ArraySpec((4, 2), "float32"), block_mapping=ArraySpec((1, 2), "int32")),
    "merge": MergeCall(
        out_a=ArraySpec((3, 2, 8), "float32"),
        lse_a=ArraySpec((3, 2), "float32"),
        out_b=ArraySpec((3, 2, 8), "float32"),
        lse_b=ArraySpec((3, 2), "float32"),
    ),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@each_call
def test_a_call_that_fits_passes_its_check(call):
    call.check()


@pytest.mark.parametrize(("window", "right"), [(3, 2), ((3, None), None), (None, None)])
def test_a_window_counts_to_the_right_where_flags_of_sequences_can_end_the_causal_mask(window, right):
    starts = ArraySpec((3,), "int32")
    arrays: dict[str, Any] = dense_call().arrays()
    arrays |= {"query_start_loc": starts, "key_start_loc": starts, "seq_causal": ArraySpec((2,), "bool")}
    assert DenseCall(**arrays, sliding_window=window, max_query_len=4).spec.window_right == right


@each_call
def test_a_map_changes_the_arrays_and_nothing_else(call):
    mapped = call.map(lambda spec: spec.shape)
    assert mapped.arrays() == {name: spec.shape for name, spec in call.arrays().items()}
    others = set(vars(call)) - set(call.arrays())
    assert {name: getattr(mapped, name) for name in others} == {name: getattr(call, name) for name in others}


@each_call
def test_a_call_equals_its_copy_and_hashes_alike(call):
    copy = call.map(lambda spec: ArraySpec(spec.shape, spec.dtype))
    assert copy == call
    assert hash(copy) == hash(call)


@each_call
def test_a_call_of_jax_arrays_is_a_pytree_with_static_options(call):
    arrays = call.map(lambda spec: jnp.zeros(spec.shape, spec.dtype))
    leaves, structure = jax.tree.flatten(arrays)
    assert len(leaves) == len(call.arrays())
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert type(rebuilt) is type(call)
    assert all(getattr(rebuilt, name) is getattr(arrays, name) for name in vars(call))


def test_a_scale_that_is_a_number_is_static_and_one_that_is_an_array_is_a_leaf():
    number = paged_call(k_scale=0.5)
    array = paged_call(k_scale=ArraySpec((1,), "float32"))
    assert len(jax.tree.leaves(array)) == len(jax.tree.leaves(number)) + 1
    assert jax.tree.structure(number) != jax.tree.structure(paged_call(k_scale=0.25))


def test_a_call_passes_through_jit():
    call = CALLS["merge"].map(lambda spec: jnp.ones(spec.shape, spec.dtype))
    doubled = jax.jit(lambda call: call.map(lambda array: 2 * array))(call)
    np.testing.assert_array_equal(doubled.out_a, 2.0)


def test_the_shapes_of_a_call_stand_in_its_annotations():
    found = {name: str(field) for name, field in array_fields(PagedCall).items()}
    assert found["query_start_loc"] == "[num_seqs+1]"
    assert found["kv_cache"] == "[num_blocks, 2, block_size, num_kv_heads, head_size]"
    assert array_fields(PagedCall)["k_scale"].number
    assert not array_fields(PagedCall)["query"].optional


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_query_len": 1.0}, r"max_query_len is 1\.0; it must be a static int, 0 or more"),
        ({"max_query_len": True}, "max_query_len is True; it must be a static int"),
        ({"kv_chunk_size": 96}, "kv_chunk_size is 96; it must be a power of two, 128 or more"),
    ],
)
def test_an_option_that_is_no_plain_number_is_refused_when_the_call_is_made(changes, message):
    with pytest.raises(InvalidInput, match=message):
        paged_call(**changes)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), True])
def test_a_scale_that_is_not_positive_and_finite_is_refused(scale):
    with pytest.raises(InvalidInput, match=r"k_scale is .*; it must be positive and finite"):
        paged_call(k_scale=scale).check()


@pytest.mark.parametrize(
    "caches",
    [{}, {"key_cache": ArraySpec((4, 4, 2, 128), "bfloat16")}, {"kv_cache": None}],
)
def test_a_cache_is_one_array_or_a_pair(caches):
    call = paged_call()
    broken = call.with_arrays({"kv_cache": None, **caches})
    with pytest.raises(InvalidInput, match="kv_cache must be one array, or a pair"):
        broken.check()


def test_a_missing_array_is_named():
    with pytest.raises(InvalidInput, match=r"paged_attention: seq_lens is missing; it must be \[num_seqs\]"):
        paged_call().with_arrays({"seq_lens": None}).check()


@pytest.mark.parametrize("name", ["causal", "use_alibi_sqrt"])
def test_a_choice_of_a_spec_is_true_or_false(name):
    with pytest.raises(InvalidInput, match=f"^{name} is None; it must be True or False.$"):
        AttentionSpec(scale=1.0, **{name: None})  # type: ignore[arg-type]
