"""Every refusal of the ops at trace time, word for word; nothing runs before it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jattn
from jattn import ops
from tests.ops.runner import IMPLEMENTATIONS
from tests.support.pretended_gpu import ON_CUDA
from torch_core.base.errors import InvalidInput, Unsupported


def int32(*values: Any) -> jax.Array:
    return jnp.array(values, jnp.int32)


def paged(**changes: Any) -> jax.Array:
    arguments: dict[str, Any] = {
        "query": jnp.ones((3, 4, 8)),
        "kv_cache": jnp.zeros((6, 2, 4, 2, 8)),
        "block_tables": jnp.array([[1, 2], [3, 0]], jnp.int32),
        "seq_lens": int32(7, 3),
        "query_start_loc": int32(0, 2, 3),
        "max_query_len": 2,
    }
    return ops.paged_attention(**{**arguments, **changes})


def dense(**changes: Any) -> jax.Array:
    arguments: dict[str, Any] = {
        "query": jnp.ones((3, 4, 8)),
        "key": jnp.ones((5, 2, 8)),
        "value": jnp.ones((5, 2, 8)),
        "query_start_loc": int32(0, 2, 3),
        "key_start_loc": int32(0, 3, 5),
        "max_query_len": 2,
        "max_key_len": 3,
    }
    return ops.attention(**{**arguments, **changes})


def write(**changes: Any) -> jax.Array:
    arguments: dict[str, Any] = {
        "key": jnp.ones((3, 2, 8)),
        "value": jnp.ones((3, 2, 8)),
        "kv_cache": jnp.zeros((6, 2, 4, 2, 8)),
        "slot_mapping": int32(4, 5, -1),
    }
    return ops.write_kv_cache(**{**arguments, **changes})


def merge(**changes: Any) -> tuple[jax.Array, jax.Array]:
    arguments: dict[str, Any] = {
        "out_a": jnp.ones((3, 4, 8)),
        "lse_a": jnp.ones((3, 4)),
        "out_b": jnp.ones((3, 4, 8)),
        "lse_b": jnp.ones((3, 4)),
    }
    return ops.merge_states(**{**arguments, **changes})


REFUSALS: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (paged, {"query": [1.0]}, InvalidInput,
     "query is a list; it must be a JAX array of shape [num_tokens, num_heads, head_size]."),
    (paged, {"query": torch.ones(3, 4, 8)}, InvalidInput,
     "query is a Tensor; it must be a JAX array of shape [num_tokens, num_heads, head_size]."),
    (paged, {"out_dtype": "junk"}, InvalidInput,
     "out_dtype is 'junk'; it must be a dtype, such as jnp.bfloat16."),
    (paged, {"query": jnp.ones((3, 32))}, InvalidInput,
     "query has shape [3, 32]; it must have 3 axes: [num_tokens, num_heads, head_size]."),
    (paged, {"query": jnp.ones((3, 4, 0))}, InvalidInput,
     ("kv_cache has shape [6, 2, 4, 2, 8]; it must be [num_blocks, 2, block_size, num_kv_heads, "
     "head_size] with head_size = 0, that of query.")),
    (paged, {"query": jnp.ones((3, 0, 8))}, InvalidInput,
     ("query has shape [3, 0, 8] and the key cache [6, 2, 4, 2, 8]; there must be at least one head, "
     "one element and one slot.")),
    (paged, {"query": jnp.ones((3, 4, 8), jnp.int32)}, InvalidInput,
     "query is int32; it must be a floating point type. Cast it."),
    (paged, {"query": jnp.ones((3, 5, 8))}, InvalidInput,
     "query has 5 heads and the key cache 2; the first must be a multiple of the second."),
    (paged, {"query": jnp.ones((3, 4, 16))}, InvalidInput,
     ("kv_cache has shape [6, 2, 4, 2, 8]; it must be [num_blocks, 2, block_size, num_kv_heads, "
     "head_size] with head_size = 16, that of query.")),
    (paged, {"query": jnp.ones((3, 4, 8), jnp.float16), "kv_cache": jnp.zeros((6, 2, 4, 2, 8), jnp.bfloat16)},
     InvalidInput,
     "query is float16 and the cache bfloat16; cast one of them, or quantise the cache."),
    (paged, {"kv_cache": jnp.zeros((6, 2, 4, 16))}, InvalidInput,
     ("kv_cache has shape [6, 2, 4, 16]; it must have 5 axes: [num_blocks, 2, block_size, "
     "num_kv_heads, head_size].")),
    (paged, {"kv_cache": jnp.zeros((6, 4, 2, 2, 8))}, InvalidInput,
     ("kv_cache has shape [6, 4, 2, 2, 8]; it must be [num_blocks, 2, block_size, num_kv_heads, "
     "head_size] with axis 1 = 2.")),
    (paged, {"kv_cache": jnp.zeros((6, 2, 0, 2, 8))}, InvalidInput,
     ("query has shape [3, 4, 8] and the key cache [6, 2, 0, 2, 8]; there must be at least one head, "
     "one element and one slot.")),
    (paged, {"kv_cache": jnp.zeros((0, 2, 4, 2, 8))}, InvalidInput,
     "the cache has no block; block 0 at least must be there."),
    (paged, {"kv_cache": jnp.zeros((6, 2, 4, 0, 8))}, InvalidInput,
     ("query has shape [3, 4, 8] and the key cache [6, 2, 4, 0, 8]; there must be at least one head, "
     "one element and one slot.")),
    (paged, {"kv_cache": jnp.zeros((6, 2, 4, 2, 8), jnp.int16)}, InvalidInput,
     "query is float32 and the cache int16; cast one of them, or quantise the cache."),
    (paged, {"block_tables": int32(1, 2)}, InvalidInput,
     "block_tables has shape [2]; it must have 2 axes: [num_seqs, max_blocks]."),
    (paged, {"block_tables": np.zeros((2, 2), np.int64)}, InvalidInput,
     "block_tables is int64; it must be int32. Cast it."),
    (paged, {"seq_lens": jnp.array([7.0, 3.0])}, InvalidInput,
     "seq_lens is float32; it must be int32. Cast it."),
    (paged, {"seq_lens": [7, 3]}, InvalidInput,
     "seq_lens is a list; it must be a JAX array of shape [num_seqs]."),
    (paged, {"seq_lens": int32(7)}, InvalidInput,
     "seq_lens has shape [1]; it must be [num_seqs] with num_seqs = 2, that of query_start_loc."),
    (paged, {"query_start_loc": int32(0, 3)}, InvalidInput,
     ("block_tables has shape [2, 2]; it must be [num_seqs, max_blocks] with num_seqs = 1, that of "
     "query_start_loc.")),
    (paged, {"query_start_loc": jnp.zeros(3, jnp.uint32)}, InvalidInput,
     "query_start_loc is uint32; it must be int32. Cast it."),
    (paged, {"block_tables": jnp.zeros((2, 0), jnp.int32)}, InvalidInput,
     "seq_lens[0] is 7; a row of block_tables holds 0 to 0 x 4 = 0 tokens."),
    (paged, {"max_query_len": 0}, InvalidInput,
     "sequence 0 has 2 rows in query_start_loc; the stated maximum is 0."),
    (paged, {"max_query_len": True}, InvalidInput,
     "max_query_len is True; it must be a static int, 0 or more."),
    (paged, {"max_query_len": 2.0}, InvalidInput,
     "max_query_len is 2.0; it must be a static int, 0 or more."),
    (paged, {"scale": 0.0}, InvalidInput,
     "scale is 0.0; it must be finite and not zero (usually head_size ** -0.5)."),
    (paged, {"scale": float("inf")}, InvalidInput,
     "scale is inf; it must be finite and not zero (usually head_size ** -0.5)."),
    (paged, {"scale": "large"}, InvalidInput,
     "scale is 'large'; it must be a float."),
    (paged, {"logits_soft_cap": 0.0}, InvalidInput,
     "logits_soft_cap is 0.0; it must be a positive finite number, or None for off."),
    (paged, {"logits_soft_cap": "30"}, InvalidInput,
     "logits_soft_cap is '30'; it must be a float."),
    (paged, {"sliding_window": 0}, InvalidInput,
     ("sliding_window is 0; it must be an int from 1 (the query's own token) to 2147483647, a tuple "
     "(left, right), or None.")),
    (paged, {"sliding_window": (1, 2, 3)}, InvalidInput,
     ("sliding_window is (1, 2, 3); a tuple must be (left, right), each an int from 0 to 2147483647, or None "
      "for all tokens there.")),
    (paged, {"sliding_window": (-1, None)}, InvalidInput,
     ("sliding_window is (-1, None); a tuple must be (left, right), each an int from 0 to 2147483647, or None "
      "for all tokens there.")),
    (paged, {"sliding_window": (None, 2.5)}, InvalidInput,
     ("sliding_window is (None, 2.5); a tuple must be (left, right), each an int from 0 to 2147483647, or None "
      "for all tokens there.")),
    (paged, {"sliding_window": 1 << 40}, InvalidInput,
     ("sliding_window is 1099511627776; it must be an int from 1 (the query's own token) to 2147483647, a tuple "
      "(left, right), or None.")),
    (paged, {"sliding_window": (1, 1 << 40)}, InvalidInput,
     ("sliding_window is (1, 1099511627776); a tuple must be (left, right), each an int from 0 to 2147483647, or None "
      "for all tokens there.")),
    (paged, {"attention_chunk": 0}, InvalidInput,
     "attention_chunk is 0; it must be from 1 to 2147483647."),
    (paged, {"alibi_slopes": jnp.ones(3)}, InvalidInput,
     "alibi_slopes has shape [3]; it must be [num_heads] with num_heads = 4, that of query."),
    (paged, {"alibi_slopes": int32(1, 1, 1, 1)}, InvalidInput,
     "alibi_slopes is int32; it must be a floating point type. Cast it."),
    (paged, {"sinks": jnp.ones((4, 1))}, InvalidInput,
     "sinks has shape [4, 1]; it must have 1 axes: [num_heads]."),
    (paged, {"k_scale": -1.0}, InvalidInput,
     "k_scale is -1.0; it must be positive and finite."),
    (paged, {"v_scale": np.float32("nan")}, InvalidInput,
     "v_scale is nan; it must be positive and finite."),
    (paged, {"v_scale": jnp.ones(2)}, InvalidInput,
     "v_scale has shape [2]; it must be a number or one element."),
    (dense, {"key": jnp.ones((5, 2))}, InvalidInput,
     "key has shape [5, 2]; it must have 3 axes: [num_keys, num_kv_heads, head_size]."),
    (dense, {"value": jnp.ones((5, 2))}, InvalidInput,
     "value has shape [5, 2]; it must have 3 axes: [num_keys, num_kv_heads, value_head_size]."),
    (dense, {"key": jnp.ones((5, 2, 8), jnp.float16)}, InvalidInput,
     "keys are float16 and values float32; both must be of one dtype."),
    (dense, {"value": jnp.ones((5, 2, 8), jnp.bfloat16)}, InvalidInput,
     "keys are float32 and values bfloat16; both must be of one dtype."),
    (dense, {"value": jnp.ones((4, 2, 8))}, InvalidInput,
     ("value has shape [4, 2, 8]; it must be [num_keys, num_kv_heads, value_head_size] with num_keys ="
     " 5, that of key.")),
    (dense, {"key": jnp.ones((5, 2, 4))}, InvalidInput,
     ("key has shape [5, 2, 4]; it must be [num_keys, num_kv_heads, head_size] with head_size = 8, "
     "that of query.")),
    (dense, {"key": jnp.ones((5, 3, 8)), "value": jnp.ones((5, 3, 8))}, InvalidInput,
     "query has 4 heads and key 3; the first must be a multiple of the second."),
    (dense, {"key": jnp.ones((5, 0, 8)), "value": jnp.ones((5, 0, 8))}, InvalidInput,
     ("query has shape [3, 4, 8] and key [5, 0, 8]; there must be at least one head, one element and "
     "one slot.")),
    (dense, {"value": jnp.ones((5, 2, 0))}, InvalidInput,
     ("query has shape [3, 4, 8] and key [5, 2, 8]; there must be at least one head, one element and "
     "one slot.")),
    (dense, {"key_start_loc": int32(0, 5)}, InvalidInput,
     ("key_start_loc has shape [2]; it must be [num_seqs+1] with num_seqs+1 = 3, that of "
     "query_start_loc.")),
    (dense, {"key_start_loc": np.array([0, 3, 5])}, InvalidInput,
     "key_start_loc is int64; it must be int32. Cast it."),
    (dense, {"max_key_len": 0}, InvalidInput,
     "sequence 0 has 3 rows in key_start_loc; the stated maximum is 0."),
    (dense, {"max_query_len": None}, InvalidInput,
     "max_query_len is None; it must be a static int, 0 or more."),
    (write, {"key": jnp.ones((3, 16))}, InvalidInput,
     "key has shape [3, 16]; it must have 3 axes: [num_tokens, num_kv_heads, head_size]."),
    (write, {"value": jnp.ones((3, 2, 4))}, InvalidInput,
     "value has head size 4 and key 8; in one cache they are equal."),
    (write, {"value": jnp.ones((2, 2, 8))}, InvalidInput,
     "slot_mapping has 3 entries and value 2 tokens; give at most one slot for each token."),
    (write, {"slot_mapping": np.array([4, 5, 6])}, InvalidInput,
     "slot_mapping is int64; it must be int32. Cast it."),
    (write, {"slot_mapping": jnp.ones((3, 1), jnp.int32)}, InvalidInput,
     "slot_mapping has shape [3, 1]; it must have 1 axes: [num_slots]."),
    (write, {name: jnp.ones((3, 2, 8), jnp.int32) for name in ("key", "value")}
     | {"kv_cache": jnp.zeros((6, 2, 4, 2, 8), jnp.int8)}, InvalidInput,
     "key is int32 and the cache int8; give float32, bfloat16 or float16, or the cache's own dtype."),
    (write, {"kv_cache": jnp.zeros((6, 3, 4, 2, 8))}, InvalidInput,
     ("kv_cache has shape [6, 3, 4, 2, 8]; it must be [num_blocks, 2, block_size, num_kv_heads, "
     "head_size] with axis 1 = 2.")),
    (write, {"k_scale": 0}, InvalidInput,
     "k_scale is 0; it must be positive and finite."),
    (merge, {"out_a": jnp.ones((3, 4))}, InvalidInput,
     "out_a has shape [3, 4]; it must have 3 axes: [num_tokens, num_heads, head_size]."),
    (merge, {"lse_b": jnp.ones((3, 4, 1))}, InvalidInput,
     "lse_b has shape [3, 4, 1]; it must have 2 axes: [num_tokens, num_heads]."),
    (merge, {"lse_a": jnp.ones((3, 4), jnp.bfloat16)}, InvalidInput,
     "lse_a is bfloat16; it must be float32."),
    (merge, {"lse_b": jnp.ones((4, 3))}, InvalidInput,
     "lse_b has shape [4, 3]; it must be [num_tokens, num_heads] with num_tokens = 3, that of out_a."),
    (merge, {"out_b": jnp.ones((3, 4, 8), jnp.float16)}, InvalidInput,
     "out_a is float32 and out_b float16; both must be float32, bfloat16 or float16."),
    (merge, {name: jnp.ones((3, 4, 8), jnp.int32) for name in ("out_a", "out_b")}, InvalidInput,
     "out_a is int32; it must be a floating point type. Cast it."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "changes", "error", "message"),
    REFUSALS,
    ids=[
        f"{operation.__name__}-{'-'.join(changes)}-{index}" for index, (operation, changes, *_) in enumerate(REFUSALS)
    ],
)
def test_a_bad_argument_is_refused_with_its_name_value_and_remedy(
    operation: Callable[..., Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        operation(**changes)
    assert str(caught.value) == message


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("operation", [paged, dense, write, merge])
def test_the_arguments_that_the_refusals_change_are_good_ones(
    operation: Callable[..., Any], implementation: str
) -> None:
    jax.block_until_ready(operation(implementation=implementation))


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_a_traced_number_that_must_be_static_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as error:
        jax.jit(lambda number: paged(**{name: number}))(0.5)
    assert str(error.value) == (
        f"{name} is a tracer; it must be a static float (mark it static, or multiply query by it)."
    )


@pytest.mark.parametrize("name", ["causal", "use_alibi_sqrt"])
def test_a_traced_choice_that_must_be_static_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as error:
        jax.jit(lambda choice: paged(**{name: choice}))(True)
    assert str(error.value) == f"{name} is a tracer; it must be a static True or False (mark it static)."


@pytest.mark.parametrize("name", ["causal", "use_alibi_sqrt", "deterministic"])
@pytest.mark.parametrize("value", [None, "no", 1, jnp.bool_(True)], ids=str)
def test_a_choice_that_is_neither_true_nor_false_is_refused(name: str, value: object) -> None:
    with pytest.raises(
        InvalidInput, match=rf"^{name} is {re.escape(repr(value))}; it must be (a static )?True or False"
    ):
        dense(**{name: value})


def test_a_traced_order_of_sums_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^deterministic is .*; it must be a static True or False\."):
        jax.jit(lambda choice: dense(deterministic=choice))(True)


@pytest.mark.parametrize(
    ("operation", "operation_name", "name"),
    [
        (paged, "paged_attention", "query"),
        (dense, "attention", "query"),
        (write, "write_kv_cache", "kv_cache"),
        (merge, "merge_states", "out_a"),
    ],
)
def test_float64_needs_the_xla_implementation(operation: Callable[..., Any], operation_name: str, name: str) -> None:
    with jax.enable_x64(True):
        wide = {
            argument: jnp.ones(shape, jnp.float64)
            for argument, shape in {
                paged: {"query": (3, 4, 8), "kv_cache": (6, 2, 4, 2, 8)},
                dense: {"query": (3, 4, 8), "key": (5, 2, 8), "value": (5, 2, 8)},
                write: {"key": (3, 2, 8), "value": (3, 2, 8), "kv_cache": (6, 2, 4, 2, 8)},
                merge: {"out_a": (3, 4, 8), "lse_a": (3, 4), "out_b": (3, 4, 8), "lse_b": (3, 4)},
            }[operation].items()
        }
        with pytest.raises(Unsupported) as error:
            operation(**wide, implementation="torch")
        results = jax.tree.leaves(operation(**wide, implementation="xla"))
    assert str(error.value).removesuffix(ON_CUDA) == (
        f"{operation_name}: {name} is float64, which implementation 'torch' does not serve; implementation 'xla' does."
    )
    assert results[0].dtype == jnp.float64


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numpy_arrays_are_taken(implementation: str) -> None:
    arrays = {
        "query": np.ones((3, 4, 8), np.float32),
        "kv_cache": np.zeros((6, 2, 4, 2, 8), np.float32),
        "block_tables": np.array([[1, 2], [3, 0]], np.int32),
        "seq_lens": np.array([7, 3], np.int32),
        "query_start_loc": np.array([0, 2, 3], np.int32),
    }
    assert (paged(**arrays, implementation=implementation) == paged(implementation=implementation)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_without_tokens_or_keys_are_served(implementation: str) -> None:
    empty = jnp.ones((0, 4, 8))
    assert paged(query=empty, query_start_loc=int32(0, 0, 0), implementation=implementation).shape == (0, 4, 8)
    nothing = {"query": empty, "query_start_loc": int32(0, 0, 0)}
    assert dense(**nothing, implementation=implementation).shape == (0, 4, 8)
    no_keys = {name: jnp.ones((0, 2, 8)) for name in ("key", "value")}
    assert not dense(**no_keys, key_start_loc=int32(0, 0, 0), implementation=implementation).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": jnp.full((2, 2), 9, jnp.int32)}, "block_tables[0, 0] is 9; the cache has blocks 0 to 5."),
        ({"seq_lens": int32(7, 9)}, "seq_lens[1] is 9; a row of block_tables holds 0 to 2 x 4 = 8 tokens."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("implementation", ["xla", "torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_outside_jit_values_are_checked_too_before_anything_runs(
    changes: dict[str, Any], message: str, implementation: str
) -> None:
    # Under the strictest guard: the check may fetch what it looks at only where it says so.
    with jax.transfer_guard_device_to_host("disallow"), pytest.raises(InvalidInput) as error:
        paged(**changes, implementation=implementation)
    assert str(error.value) == message


def test_a_missing_argument_is_missed_under_the_name_that_was_called():
    with pytest.raises(TypeError, match=r"^paged_attention_with_lse\(\) missing .*: 'kv_cache', 'block_tables', "):
        ops.paged_attention_with_lse(jnp.ones((3, 4, 8)))  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["attention", "paged_attention", "mla_attention", "sparse_mla_attention"])
def test_help_says_what_an_operation_returns(name: str) -> None:
    found = [inspect.signature(getattr(jattn, each)).return_annotation for each in (name, f"{name}_with_lse")]
    assert found == ["jax.Array", "tuple[jax.Array, jax.Array]"]
