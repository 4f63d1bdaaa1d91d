"""The ops under JAX's transformations: the same values, in place, or a refusal with its remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jattn import ops
from tests.ops.runner import IMPLEMENTATIONS, QUICK_COMPILE, arrays, keywords
from tests.support.attention_cases import dense_case, paged_case
from torch_core.base.errors import Unsupported

CASE = paged_case(1, seq_lens=[9, 21], query_lens=[1, 1], num_heads=4, num_kv_heads=2, head_size=8, block_size=8)
SLOTS = np.array([7, 8], np.int32)

jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def attend(implementation: str, query: jax.Array, kv_cache: jax.Array) -> jax.Array:
    operands: dict[str, Any] = {**arrays(CASE), "query": query, "kv_cache": kv_cache}
    return ops.paged_attention(**operands, **keywords(CASE.spec), max_query_len=1, implementation=implementation)


def layer(implementation: str, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Writes the first heads of the hidden state as keys and values, then attends with it."""
    hidden, cache = state
    tokens = hidden[:, :2] + 1
    cache = ops.write_kv_cache(tokens, tokens * 2, cache, jnp.asarray(SLOTS), implementation=implementation)
    return attend(implementation, hidden, cache), cache


def unrolled(implementation: str, state: Any) -> Any:
    for _ in range(3):
        state = layer(implementation, state)
    return state


def in_scan(implementation: str, state: Any) -> Any:
    return lax.scan(lambda carry, _: (layer(implementation, carry), None), state, None, length=3)[0]


def in_while_loop(implementation: str, state: Any) -> Any:
    def body(carry: Any) -> Any:
        return carry[0] + 1, layer(implementation, carry[1])

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, state))[1]


def in_cond(implementation: str, state: Any) -> Any:
    run = functools.partial(layer, implementation)
    for _ in range(3):
        state = lax.cond(state[0].sum() < jnp.inf, run, lambda same: same, state)
    return state


def in_checkpoint(implementation: str, state: Any) -> Any:
    for _ in range(3):
        state = jax.checkpoint(functools.partial(layer, implementation))(state)
    return state


def fresh_state() -> tuple[jax.Array, jax.Array]:
    return jnp.array(CASE.operands["query"]), jnp.array(np.nan_to_num(CASE.operands["kv_cache"]))


# The "xla" implementation is plain jnp: JAX's own tests cover it under control flow.
@pytest.mark.parametrize("program", [in_scan, in_while_loop, in_cond, in_checkpoint])
def test_under_control_flow_torch_gives_the_unrolled_programs_bits_in_place(program: Callable[..., Any]) -> None:
    expected, expected_cache = jax.jit(functools.partial(unrolled, "torch"))(fresh_state())
    step = jax.jit(functools.partial(program, "torch"), donate_argnums=0)
    hidden, cache = fresh_state()
    address = cache.unsafe_buffer_pointer()
    hidden, cache = step((hidden, cache))
    assert cache.unsafe_buffer_pointer() == address
    assert (hidden == expected).all()
    assert (cache == expected_cache).all()


def test_eager_and_jitted_calls_agree() -> None:
    state = fresh_state()
    assert (jax.jit(functools.partial(attend, "torch"))(*state) == attend("torch", *state)).all()


@each_implementation
def test_eval_shape_runs_nothing_and_gives_shape_and_dtype(implementation: str) -> None:
    query = jax.ShapeDtypeStruct((2, 4, 8), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((9, 2, 8, 2, 8), jnp.bfloat16)
    result = jax.eval_shape(functools.partial(attend, implementation), query, cache)
    assert (result.shape, result.dtype) == ((2, 4, 8), jnp.bfloat16)


@each_implementation
def test_one_compiled_program_serves_changing_metadata(implementation: str) -> None:
    traces = []

    def program(operands: dict[str, Any]) -> jax.Array:
        traces.append(1)
        return ops.paged_attention(**operands, max_query_len=1, implementation=implementation)

    step = jit(program)
    operands = arrays(CASE)
    outputs = [step({**operands, "seq_lens": jnp.array(lens, jnp.int32)}) for lens in ([9, 21], [1, 2], [0, 5])]
    assert len(traces) == 1
    assert not outputs[2][0].any()


def paged_call(implementation: str, query: jax.Array) -> Any:
    return attend(implementation, query, fresh_state()[1])


def dense_call(implementation: str, query: jax.Array) -> Any:
    starts = jnp.array([0, 2], jnp.int32)
    return ops.attention(query, query, query, starts, max_query_len=2, implementation=implementation)


def write_call(implementation: str, query: jax.Array) -> Any:
    tokens = query[:, :2]
    return ops.write_kv_cache(tokens, tokens, fresh_state()[1], jnp.asarray(SLOTS), implementation=implementation)


def merge_call(implementation: str, query: jax.Array) -> Any:
    return ops.merge_states(query, query[..., 0], query, query[..., 1], implementation=implementation)[0]


CALLS = {
    "paged_attention": paged_call,
    "attention": dense_call,
    "write_kv_cache": write_call,
    "merge_states": merge_call,
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_merge_by_torch_has_no_gradient_and_says_what_has(wrap: Callable[..., Any]) -> None:
    call = functools.partial(merge_call, "torch")
    with pytest.raises(Unsupported) as error:
        jax.grad(wrap(lambda query: call(query).sum()))(fresh_state()[0])
    assert str(error.value) == (
        "merge_states with implementation='torch' has no derivative: it is for inference. Differentiate with "
        "implementation='xla', or stop the gradient at its inputs (jax.lax.stop_gradient)."
    )


def test_a_write_by_torch_has_forward_derivatives() -> None:
    query = fresh_state()[0]
    _, tangent = jax.jvp(functools.partial(write_call, "torch"), (query,), (query,))
    assert (tangent[0, 0, 7] == query[0, :2]).all()
    assert not tangent[0, 0, 6].any()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_mapped_call_gives_the_results_of_its_examples(name: str, wrap: Callable[..., Any]) -> None:
    call = functools.partial(CALLS[name], "torch")
    query = fresh_state()[0]
    mapped = jax.vmap(wrap(call))(jnp.stack([query, query * 2]))
    assert (mapped[1] == call(query * 2)).all()


def test_a_stopped_gradient_lets_torch_run_inside_a_loss() -> None:
    def loss(query: jax.Array) -> jax.Array:
        return (lax.stop_gradient(paged_call("torch", lax.stop_gradient(query))) * query).sum()

    query = fresh_state()[0]
    assert np.allclose(jax.grad(loss)(query), paged_call("torch", query), rtol=1e-6)


def test_xla_is_mapped_over_queries() -> None:
    query = fresh_state()[0]
    mapped = jit(jax.vmap(functools.partial(paged_call, "xla")))(jnp.stack([query, query * 2]))
    assert np.allclose(mapped[1], paged_call("torch", query * 2), rtol=1e-5, atol=1e-6)


def test_the_gradient_of_xla_attention_is_that_of_finite_differences(seed: int) -> None:
    options = {"sliding_window": (3, None), "logits_soft_cap": 2.0, "alibi_slopes": jnp.array([0.1, 0.2, 0.3, 0.4])}
    case = dense_case(3, key_lens=[6, 3], query_lens=[4, 3], num_heads=4, num_kv_heads=2, head_size=4)

    def loss(values: dict[str, Any]) -> jax.Array:
        output, lse = ops.attention_with_lse(
            **{**options, **values}, query_start_loc=starts[0], key_start_loc=starts[1], max_query_len=4,
            max_key_len=6, implementation="xla",
        )  # fmt: skip
        return (output**2).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * 0.3).sum()

    with jax.enable_x64(True):
        starts = [jnp.array(case.operands[name]) for name in ("query_start_loc", "key_start_loc")]
        rng = np.random.default_rng(seed)
        values = {name: jnp.array(case.operands[name], jnp.float64) for name in ("query", "key", "value")}
        values["sinks"] = jnp.array([0.5, -1.0, 0.0, 2.0])
        direction = jax.tree.map(lambda x: jnp.array(rng.normal(size=x.shape)), values)
        ahead = jax.tree.map(lambda x, d: x + 1e-5 * d, values, direction)
        behind = jax.tree.map(lambda x, d: x - 1e-5 * d, values, direction)
        value_and_grad = jit(jax.value_and_grad(loss))
        slope = float(value_and_grad(ahead)[0] - value_and_grad(behind)[0]) / 2e-5
        gradient = value_and_grad(values)[1]
        along = sum(float((gradient[name] * direction[name]).sum()) for name in values)
    assert along == pytest.approx(slope, rel=1e-6)


def test_the_gradient_of_xla_paged_attention_equals_that_of_dense_attention(seed: int) -> None:
    def paged_loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        cache = ops.write_kv_cache(key, value, jnp.zeros((3, 2, 4, 2, 8)), slots, implementation="xla")
        batch = (jnp.array([[2, 1]], jnp.int32), jnp.array([6], jnp.int32), jnp.array([0, 6], jnp.int32))
        return (ops.paged_attention(query, cache, *batch, max_query_len=6, implementation="xla") ** 2).sum()

    def dense_loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return (jax.nn.dot_product_attention(query[None], key[None], value[None], is_causal=True) ** 2).sum()

    slots = jnp.array([8, 9, 10, 11, 4, 5], jnp.int32)
    rng = np.random.default_rng(seed)
    query, key, value = (jnp.array(rng.normal(size=(6, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    paged = jit(jax.grad(paged_loss, argnums=(0, 1, 2)))(query, key, value)
    dense = jit(jax.grad(dense_loss, argnums=(0, 1, 2)))(query, key, value)
    for one, other in zip(jax.tree.leaves(paged), jax.tree.leaves(dense), strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_neighbours_nan_and_padding_stay_out_of_a_sequences_gradient() -> None:
    def loss(query: jax.Array, key: jax.Array) -> jax.Array:
        starts = (jnp.array([0, 2, 2, 5], jnp.int32), jnp.array([0, 3, 3, 4], jnp.int32))
        output = ops.attention(query, key, key, *starts, max_query_len=4, max_key_len=4, implementation="xla")
        return (output[:2] ** 2).sum()

    query = jnp.ones((7, 4, 8)).at[3].set(jnp.nan)
    query_gradient, key_gradient = jit(jax.grad(loss, argnums=(0, 1)))(query, jnp.ones((4, 2, 8)))
    assert np.isfinite(query_gradient[:2]).all()
    assert np.isfinite(key_gradient[:3]).all()
