"""Every refusal of the ops at trace time, word for word; nothing runs before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn import ops
from tests.ops.runner import IMPLEMENTATIONS
from torch_core.errors import InvalidInput, Unsupported

CACHE_TYPES = "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int8"


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
    # query
    (paged, {"query": [1.0]}, InvalidInput,
     "query is a list; it must be a JAX array of shape (num_tokens, num_heads, head_size)."),
    (paged, {"query": torch.ones(3, 4, 8)}, InvalidInput,
     "query is a Tensor; it must be a JAX array of shape (num_tokens, num_heads, head_size)."),
    (paged, {"query": jnp.ones((3, 32))}, InvalidInput,
     "query has 2 dimensions (shape (3, 32)); it must have 3: (num_tokens, num_heads, head_size)."),
    (paged, {"query": jnp.ones((3, 4, 0))}, InvalidInput,
     "query has shape (3, 4, 0); head_size must be at least 1."),
    (paged, {"query": jnp.ones((3, 0, 8))}, InvalidInput,
     "query has shape (3, 0, 8); num_heads must be at least 1."),
    (paged, {"query": jnp.ones((3, 4, 8), jnp.int32)}, Unsupported,
     "query has dtype int32; use one of float32, bfloat16, float16."),
    (paged, {"query": jnp.ones((3, 5, 8))}, InvalidInput,
     "query has 5 heads and kv_cache 2; the first must be a multiple of the second."),
    (paged, {"query": jnp.ones((3, 4, 16))}, InvalidInput,
     "query has head_size 16 and kv_cache 8; they must be equal."),
    (paged, {"query": jnp.ones((3, 4, 8), jnp.float16), "kv_cache": jnp.zeros((6, 2, 4, 2, 8), jnp.bfloat16)},
     InvalidInput,
     "query has dtype float16 and kv_cache bfloat16; cast one of them (query.astype(kv_cache.dtype))."),
    # cache
    (paged, {"kv_cache": jnp.zeros((6, 2, 4, 16))}, InvalidInput,
     ("kv_cache has 4 dimensions (shape (6, 2, 4, 16)); it must have 5: (num_blocks, 2, block_size, num_kv_heads, "
      "head_size).")),
    (paged, {"kv_cache": jnp.zeros((6, 4, 2, 2, 8))}, InvalidInput,
     "kv_cache has shape (6, 4, 2, 2, 8); its second axis is 4 and must be 2 (keys, values)."),
    (paged, {"kv_cache": jnp.zeros((6, 2, 0, 2, 8))}, InvalidInput,
     "kv_cache has shape (6, 2, 0, 2, 8); block_size must be at least 1."),
    (paged, {"kv_cache": jnp.zeros((0, 2, 4, 2, 8))}, InvalidInput,
     "kv_cache has shape (0, 2, 4, 2, 8); num_blocks must be at least 1."),
    (paged, {"kv_cache": jnp.zeros((6, 2, 4, 0, 8))}, InvalidInput,
     "kv_cache has shape (6, 2, 4, 0, 8); num_kv_heads must be at least 1."),
    (paged, {"kv_cache": jnp.zeros((6, 2, 4, 2, 8), jnp.int16)}, Unsupported,
     f"kv_cache has dtype int16; use one of {CACHE_TYPES}."),
    # metadata arrays
    (paged, {"block_tables": int32(1, 2)}, InvalidInput,
     "block_tables has 1 dimensions (shape (2,)); it must have 2: (num_seqs, max_blocks)."),
    (paged, {"block_tables": np.zeros((2, 2), np.int64)}, InvalidInput,
     "block_tables has dtype int64; int32 is required. Use block_tables.astype(jnp.int32)."),
    (paged, {"seq_lens": jnp.array([7.0, 3.0])}, InvalidInput,
     "seq_lens has dtype float32; int32 is required. Use seq_lens.astype(jnp.int32)."),
    (paged, {"seq_lens": [7, 3]}, InvalidInput,
     "seq_lens is a list; it must be a JAX array of shape (num_seqs)."),
    (paged, {"seq_lens": int32(7)}, InvalidInput,
     "seq_lens has 1 entries and block_tables 2 rows; one per sequence."),
    (paged, {"query_start_loc": int32(0, 3)}, InvalidInput,
     "query_start_loc has 2 entries; 2 sequences need 3 (a running sum that starts with 0)."),
    (paged, {"query_start_loc": jnp.zeros(3, jnp.uint32)}, InvalidInput,
     "query_start_loc has dtype uint32; int32 is required. Use query_start_loc.astype(jnp.int32)."),
    (paged, {"block_tables": jnp.zeros((2, 0), jnp.int32)}, InvalidInput,
     "block_tables has shape (2, 0); both sizes must be at least 1 (pad the batch)."),
    (paged, {"block_tables": jnp.zeros((0, 2), jnp.int32), "seq_lens": int32(), "query_start_loc": int32(0)},
     InvalidInput, "block_tables has shape (0, 2); both sizes must be at least 1 (pad the batch)."),
    (paged, {"max_query_len": 0}, InvalidInput, "max_query_len is 0; it must be at least 1."),
    (paged, {"max_query_len": True}, InvalidInput, "max_query_len is a bool; it must be a static int."),
    (paged, {"max_query_len": 2.0}, InvalidInput, "max_query_len is a float; it must be a static int."),
    # options
    (paged, {"scale": 0.0}, InvalidInput,
     "scale is 0.0; it must be finite and not zero (usually head_size ** -0.5)."),
    (paged, {"scale": float("inf")}, InvalidInput,
     "scale is inf; it must be finite and not zero (usually head_size ** -0.5)."),
    (paged, {"scale": "large"}, InvalidInput, "scale is 'large'; it must be a float."),
    (paged, {"logits_soft_cap": 0.0}, InvalidInput,
     "logits_soft_cap is 0.0; it must be a positive finite number, or None for off."),
    (paged, {"logits_soft_cap": "30"}, InvalidInput, "logits_soft_cap is '30'; it must be a float."),
    (paged, {"sliding_window": 0}, InvalidInput,
     ("sliding_window is 0; it must be an int of at least 1 (the query's own token counts), a tuple (left, right), "
      "or None.")),
    (paged, {"sliding_window": (1, 2, 3)}, InvalidInput,
     "sliding_window is (1, 2, 3); a tuple must be (left, right)."),
    (paged, {"sliding_window": (-1, None)}, InvalidInput, "window_left is -1; it must be from 0 to 2147483647."),
    (paged, {"sliding_window": (None, 2.5)}, InvalidInput,
     "window_right is 2.5; it must be an int from 0 to 2147483647."),
    (paged, {"attention_chunk": 0}, InvalidInput, "attention_chunk is 0; it must be from 1 to 2147483647."),
    (paged, {"alibi_slopes": jnp.ones(3)}, InvalidInput,
     "alibi_slopes has shape (3,); it must be (4,), one for each query head."),
    (paged, {"alibi_slopes": int32(1, 1, 1, 1)}, InvalidInput,
     "alibi_slopes has dtype int32; it must be a floating point type."),
    (paged, {"sinks": jnp.ones((4, 1))}, InvalidInput,
     "sinks has shape (4, 1); it must be (4,), one for each query head."),
    (paged, {"k_scale": -1.0}, InvalidInput, "k_scale is -1.0; it must be positive and finite."),
    (paged, {"v_scale": np.float32("nan")}, InvalidInput, "v_scale is nan; it must be positive and finite."),
    (paged, {"v_scale": jnp.ones(2)}, InvalidInput,
     "v_scale has shape (2,); one scale for the whole tensor is supported."),
    # dense
    (dense, {"key": jnp.ones((5, 2))}, InvalidInput,
     "key has 2 dimensions (shape (5, 2)); it must have 3: (num_keys, num_kv_heads, head_size)."),
    (dense, {"value": jnp.ones((5, 2))}, InvalidInput,
     "value has 2 dimensions (shape (5, 2)); it must have 3: (num_keys, num_kv_heads, value_head_size)."),
    (dense, {"key": jnp.ones((5, 2, 8), jnp.float16)}, InvalidInput,
     "key has dtype float16 and query float32; they must be equal."),
    (dense, {"value": jnp.ones((5, 2, 8), jnp.bfloat16)}, InvalidInput,
     "value has dtype bfloat16 and query float32; they must be equal."),
    (dense, {"value": jnp.ones((4, 2, 8))}, InvalidInput,
     "key has shape (5, 2, 8) and value (4, 2, 8); all but head_size must be equal."),
    (dense, {"key": jnp.ones((5, 2, 4))}, InvalidInput, "query has head_size 8 and key 4; they must be equal."),
    (dense, {"key": jnp.ones((5, 3, 8)), "value": jnp.ones((5, 3, 8))}, InvalidInput,
     "query has 4 heads and key 3; the first must be a multiple of the second."),
    (dense, {"key": jnp.ones((5, 0, 8)), "value": jnp.ones((5, 0, 8))}, InvalidInput,
     "key has shape (5, 0, 8); num_kv_heads must be at least 1."),
    (dense, {"value": jnp.ones((5, 2, 0))}, InvalidInput,
     "value has shape (5, 2, 0); value_head_size must be at least 1."),
    (dense, {"key_start_loc": int32(0, 5)}, InvalidInput,
     "query_start_loc has 3 entries and key_start_loc 2; both need num_seqs + 1, at least 2."),
    (dense, {"query_start_loc": int32(0), "key_start_loc": int32(0)}, InvalidInput,
     "query_start_loc has 1 entries and key_start_loc 1; both need num_seqs + 1, at least 2."),
    (dense, {"key_start_loc": np.array([0, 3, 5])}, InvalidInput,
     "key_start_loc has dtype int64; int32 is required. Use key_start_loc.astype(jnp.int32)."),
    (dense, {"max_key_len": 0}, InvalidInput, "max_key_len is 0; it must be at least 1."),
    (dense, {"max_query_len": None}, InvalidInput, "max_query_len is a NoneType; it must be a static int."),
    # write
    (write, {"key": jnp.ones((3, 16))}, InvalidInput,
     "key has 2 dimensions (shape (3, 16)); it must have 3: (num_tokens, num_kv_heads, head_size)."),
    (write, {"value": jnp.ones((3, 2, 4))}, InvalidInput,
     "value has (num_kv_heads, head_size) (2, 4) and kv_cache (2, 8); they must be equal."),
    (write, {"value": jnp.ones((2, 2, 8))}, InvalidInput,
     "key has shape (3, 2, 8) and value (2, 2, 8); they must be equal."),
    (write, {"value": jnp.ones((3, 2, 8), jnp.float16)}, InvalidInput,
     "key has dtype float32 and value float16; they must be equal."),
    (write, {"slot_mapping": int32(4)}, InvalidInput,
     "slot_mapping has 1 entries and key 3 tokens; pad slot_mapping with -1."),
    (write, {"slot_mapping": np.array([4, 5, 6])}, InvalidInput,
     "slot_mapping has dtype int64; int32 is required. Use slot_mapping.astype(jnp.int32)."),
    (write, {"slot_mapping": jnp.ones((3, 1), jnp.int32)}, InvalidInput,
     "slot_mapping has 2 dimensions (shape (3, 1)); it must have 1: (num_tokens)."),
    (write, {"kv_cache": jnp.zeros((6, 2, 4, 2, 8), jnp.float16)}, InvalidInput,
     "key has dtype float32 and kv_cache float16; cast one of them (key.astype(kv_cache.dtype))."),
    (write, {name: jnp.ones((3, 2, 8), jnp.int32) for name in ("key", "value")}
     | {"kv_cache": jnp.zeros((6, 2, 4, 2, 8), jnp.int8)}, InvalidInput,
     "key has dtype int32 and kv_cache int8; cast one of them (key.astype(kv_cache.dtype))."),
    (write, {"kv_cache": jnp.zeros((6, 3, 4, 2, 8))}, InvalidInput,
     "kv_cache has shape (6, 3, 4, 2, 8); its second axis is 3 and must be 2 (keys, values)."),
    (write, {"k_scale": 0}, InvalidInput, "k_scale is 0; it must be positive and finite."),
    # merge
    (merge, {"out_a": jnp.ones((3, 4))}, InvalidInput,
     "out_a has 2 dimensions (shape (3, 4)); it must have 3: (num_tokens, num_heads, head_size)."),
    (merge, {"lse_b": jnp.ones((3, 4, 1))}, InvalidInput,
     "lse_b has 3 dimensions (shape (3, 4, 1)); it must have 2: (num_tokens, num_heads)."),
    (merge, {"lse_a": jnp.ones((3, 4), jnp.bfloat16)}, InvalidInput,
     "lse_a has dtype bfloat16; float32 is required."),
    (merge, {"lse_b": jnp.ones((4, 3))}, InvalidInput,
     "lse_b has shape (4, 3); out_a of shape (3, 4, 8) needs (3, 4)."),
    (merge, {"out_b": jnp.ones((3, 4, 8), jnp.float16)}, InvalidInput,
     "out_a is float32(3, 4, 8) and out_b float16(3, 4, 8); they must be alike."),
    (merge, {name: jnp.ones((3, 4, 8), jnp.int32) for name in ("out_a", "out_b")}, Unsupported,
     "out_a has dtype int32; use one of float32, bfloat16, float16."),
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


@pytest.mark.parametrize(
    ("operation", "name"),
    [(paged, "query"), (dense, "query"), (write, "kv_cache"), (merge, "out_a")],
)
def test_float64_needs_the_xla_implementation(operation: Callable[..., Any], name: str) -> None:
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
    assert str(error.value) == (
        f"{name} has dtype float64; implementation='torch' serves float32, bfloat16, float16. Use "
        f"{name}.astype(jnp.float32), or implementation='xla'."
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
def test_outside_jit_the_torch_core_checks_values_too_and_its_error_comes_out(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput) as error:
        paged(**changes, implementation="torch")
    assert str(error.value) == message
