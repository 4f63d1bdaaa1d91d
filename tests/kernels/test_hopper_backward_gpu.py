"""The Hopper backward kernel on a CUDA device: random problems against autograd in float64, poison, bits, JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jattn.ops
from jattn.bridge import to_jax
from tests.ops.runner import keywords
from tests.support.attention_cases import AttentionCase, dense_case
from tests.support.backward_cases import assert_poisoned_match, backward_call, hopper_backward_case, poisoned
from torch_core import ops
from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.base.specs import AttentionSpec
from torch_core.launch.launcher import device_limits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

pytestmark = pytest.mark.gpu

_HEAD_SIZES = [(64, 64), (128, 128), (192, 128), (256, 256)]


def _sizes(head_sizes: tuple[int, int]) -> dict[str, Any]:
    head_size, value_head_size = head_sizes
    return {
        "num_heads": 4, "num_kv_heads": 2, "head_size": head_size, "value_head_size": value_head_size,
        "dtype": "bfloat16",
    }  # fmt: skip


def _call(case: AttentionCase, *, with_d_lse: bool = False) -> DenseBackwardCall[torch.Tensor]:
    call = backward_call(case, ops.run, "cuda", with_d_lse=with_d_lse)
    plan = plan_call(call.map(array_spec), device_limits(torch.device("cuda", 0)))
    assert "hopper_backward_kernel" in [launch.name for launch in plan.launches]
    return call


@pytest.mark.parametrize("seed", range(300))
def test_gradients_of_a_random_problem_are_as_exact_as_torch_in_its_dtype(seed: int) -> None:
    case = hopper_backward_case(seed)
    call = _call(poisoned(case), with_d_lse=bool(seed % 2))
    assert_poisoned_match(case, call, ops.run(call))


@pytest.mark.parametrize("head_sizes", [(192, 128), (256, 256)])
@pytest.mark.parametrize("seed", range(40))
def test_gradients_of_wide_heads_are_as_exact_as_torch_in_its_dtype(seed: int, head_sizes: tuple[int, int]) -> None:
    case = hopper_backward_case(seed, head_sizes)
    call = _call(poisoned(case), with_d_lse=bool(seed % 2))
    assert_poisoned_match(case, call, ops.run(call))


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize(("queries", "keys"), [(300, 700), (700, 300)], ids=["keys", "queries"])
def test_rows_that_see_or_are_seen_by_nobody_may_hold_nan(queries: int, keys: int, head_size: int, seed: int) -> None:
    spec = AttentionSpec(scale=0.1, window_left=260)
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": head_size, "dtype": "bfloat16"}
    case = dense_case(seed, key_lens=[keys, 100], query_lens=[queries, 100], spec=spec, **sizes)
    clean = _call(case)
    blind = clean.lse.isinf()[..., None]
    assert blind.any() == (queries > keys)
    hidden = _call(poisoned(case))
    call = hidden.with_arrays(
        {name: getattr(hidden, name).masked_fill(blind, torch.nan) for name in ("query", "d_out")}
    )
    assert call.key.isnan().any() == (keys > queries)

    found, expected = ops.run(call), ops.run(clean)

    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("head_sizes", _HEAD_SIZES)
def test_tiles_of_keys_add_in_order_so_that_bits_never_change(head_sizes: tuple[int, int]) -> None:
    sizes = {**_sizes(head_sizes), "num_heads": 8}
    call = _call(dense_case(0, key_lens=[300, 5000, 3000], query_lens=[300, 5000, 3000], **sizes))
    first = ops.run(call)
    for _ in range(10):
        again = ops.run(call)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("head_sizes", _HEAD_SIZES)
def test_gradients_without_order_are_as_exact(head_sizes: tuple[int, int], seed: int) -> None:
    case = hopper_backward_case(seed, head_sizes)
    call = replace(_call(poisoned(case)), deterministic=False)
    assert_poisoned_match(case, call, ops.run(call))


@pytest.mark.parametrize("seed", range(40))
def test_gradients_of_long_sequences_without_order_are_as_exact(seed: int) -> None:
    case = hopper_backward_case(seed, (128, 128))
    call = replace(_call(poisoned(case)), deterministic=False, max_query_len=2048)
    assert_poisoned_match(case, call, ops.run(call))


def test_padding_gets_a_gradient_of_zero() -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "padding_tokens": 300}
    call = _call(dense_case(0, key_lens=[200, 0, 7], query_lens=[260, 0, 7], **sizes))
    found = ops.run(call)
    assert not found["d_query"][267:].any()
    assert not found["d_key"][207:].any()
    assert not found["d_value"][207:].any()


@pytest.mark.parametrize("head_sizes", _HEAD_SIZES)
def test_a_captured_graph_follows_new_lengths_and_values(head_sizes: tuple[int, int], seed: int) -> None:
    case = dense_case(seed, key_lens=[700, 0, 130], query_lens=[300, 0, 130], **_sizes(head_sizes))
    call = _call(case)
    expected = ops.run(call)
    captured = call.with_arrays({name: array.clone() for name, array in call.arrays().items()})
    for name in ("query_start_loc", "key_start_loc", "query", "d_out"):
        getattr(captured, name).zero_()
    ops.run(captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.run(captured)
    for name, array in call.arrays().items():
        getattr(captured, name).copy_(array)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_sizes", _HEAD_SIZES)
def test_the_gradient_in_jax_has_the_bits_of_torch(head_sizes: tuple[int, int], dtype: str) -> None:
    sizes = {**_sizes(head_sizes), "dtype": dtype, "padding_tokens": 3}
    case = dense_case(1, key_lens=[300, 513], query_lens=[300, 513], **sizes)
    call = _call(case)
    expected = ops.run(call)
    arguments: dict[str, Any] = {name: jnp.asarray(x) for name, x in case.operands.items()}
    differentiated = {name: arguments[name] for name in ("query", "key", "value")}
    arguments |= keywords(case.spec) | case.limits

    def attend(inputs: dict[str, jax.Array]) -> jax.Array:
        given: dict[str, Any] = {**arguments, **inputs}
        return jattn.ops.attention(**given, implementation="triton")

    _, pull = jax.vjp(attend, differentiated)
    (found,) = pull(to_jax(call.d_out))
    for name, gradient in found.items():
        bits = np.asarray(gradient).view(np.uint8)
        assert np.array_equal(bits, expected[f"d_{name}"].cpu().view(torch.uint8).numpy()), name
