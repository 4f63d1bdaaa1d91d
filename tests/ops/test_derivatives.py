"""Derivatives in JAX: an implementation's own, jnp's where the default has none, and both under transformations."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import ops
from jattn.ops import transforms
from tests.ops.runner import QUICK_COMPILE, keywords
from tests.support.attention_cases import AttentionCase, dense_case, paged_case
from tests.support.backward_cases import random_backward_case
from tests.support.pretended_gpu import ON_CUDA
from torch_core.base.errors import Unsupported
from torch_core.base.specs import AttentionSpec

jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
BIAS = np.tril(np.ones((5, 5), np.float32))


@pytest.fixture
def torch_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of this machine is an implementation with few derivatives, as on CUDA."""
    # Not by import, which would bind the function of that name.
    monkeypatch.setattr(sys.modules["jattn.ops.choose"], "_CPU_DEFAULT", "torch")


def _loss(case: AttentionCase, implementation: str | None, **changes: Any) -> Callable[[dict[str, Any]], jax.Array]:
    arrays = {name: jnp.asarray(x) for name, x in {**case.operands, **case.options, **changes}.items()}
    function = ops.paged_attention_with_lse if case.paged else ops.attention_with_lse

    def loss(inputs: dict[str, jax.Array]) -> jax.Array:
        arguments: dict[str, Any] = {**arrays, **inputs, **keywords(case.spec), **case.limits}
        out, lse = function(**arguments, implementation=implementation)
        factors = jnp.sin(jnp.arange(out.size)).reshape(out.shape)
        return (out * factors).astype(jnp.float32).sum() + 0.3 * jnp.where(jnp.isfinite(lse), lse, 0).sum()

    return loss


def _inputs(case: AttentionCase) -> dict[str, jax.Array]:
    floats = {**case.operands, **case.options}
    return {name: jnp.asarray(x) for name, x in floats.items() if jnp.issubdtype(x.dtype, jnp.floating)}


def _assert_close(found: Any, expected: Any, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        a, b = (np.asarray(y, np.float64) for y in (found[name], x))
        assert np.abs(a - b).max(initial=0) <= tolerance * max(1.0, np.abs(b).max(initial=0)), name


# Cases of float32; padding rows hold NaN.
@pytest.mark.parametrize("seed", [1, 9])
def test_the_gradient_by_torch_is_that_of_jnp(seed: int) -> None:
    case = random_backward_case(seed, 40)
    found, expected = (jit(jax.grad(_loss(case, implementation)))(_inputs(case)) for implementation in ("torch", "xla"))
    tolerance = 1e-5 if case.operands["query"].dtype == np.float32 else 2e-2
    _assert_close(found, expected, tolerance)


def test_a_derivative_that_a_named_implementation_lacks_is_refused() -> None:
    case = dense_case(0, key_lens=[5], query_lens=[5], qq_bias=BIAS)
    with pytest.raises(Unsupported) as error:
        jax.grad(_loss(case, "torch"))(_inputs(case))
    assert str(error.value).removesuffix(ON_CUDA) == (
        "attention_backward: qq_bias has a derivative, which implementation 'torch' does not serve; implementation "
        "'xla' does."
    )


# Dense calls: tests/nn/test_attention_fn.py.
@pytest.mark.usefixtures("torch_by_default")
def test_the_default_takes_the_derivative_of_jnp_where_it_has_none() -> None:
    case = paged_case(1, seq_lens=[9, 4], query_lens=[2, 4], head_size=8, block_size=4, poison=0.0, qq_bias=BIAS)
    found, expected = (jit(jax.grad(_loss(case, implementation)))(_inputs(case)) for implementation in (None, "xla"))
    _assert_close(found, expected, 1e-5)


def test_a_named_implementation_has_no_second_derivatives_and_says_what_has() -> None:
    case = dense_case(0, key_lens=[4], query_lens=[3], num_heads=2, num_kv_heads=1, head_size=4)
    gradient = jax.grad(_loss(case, "torch"))
    with pytest.raises(Unsupported) as error:
        jax.grad(lambda inputs: (gradient(inputs)["query"] ** 2).sum())(_inputs(case))
    assert str(error.value) == (
        "attention with implementation='torch' has no second derivative. Differentiate with implementation='xla', or "
        "stop the gradient at its inputs (jax.lax.stop_gradient)."
    )


SMALL = {
    "attention": dense_case(0, key_lens=[4, 3], query_lens=[3, 3], num_heads=2, num_kv_heads=1, head_size=4),
    "paged_attention": paged_case(
        1, seq_lens=[5, 4], query_lens=[2, 1], num_heads=2, num_kv_heads=1, head_size=4, block_size=4, poison=0.0
    ),
}


def _direction(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for name, x in inputs.items()}


def _slope(loss: Callable[[dict[str, Any]], jax.Array], inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"slope": jax.jvp(loss, (inputs,), (_direction(inputs),))[1]}


def _linearized(loss: Callable[[dict[str, Any]], jax.Array], inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"slope": jax.linearize(loss, inputs)[1](_direction(inputs))}


def _forward_over_reverse(
    loss: Callable[[dict[str, Any]], jax.Array], inputs: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    return jax.jvp(jax.grad(loss), (inputs,), (_direction(inputs),))[1]


def _reverse_over_forward(
    loss: Callable[[dict[str, Any]], jax.Array], inputs: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    return jax.grad(lambda given: jax.jvp(loss, (given,), (_direction(inputs),))[1])(inputs)


def _mapped_forward(loss: Callable[[dict[str, Any]], jax.Array], inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    directions = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x * x]), _direction(inputs))
    return {"slopes": jax.vmap(lambda one: jax.jvp(loss, (inputs,), (one,))[1])(directions)}


def _of_a_mapped_call(
    loss: Callable[[dict[str, Any]], jax.Array], inputs: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """The examples have queries of their own and share what else there is."""
    shared = {name: x for name, x in inputs.items() if name != "query"}

    def total(given: dict[str, jax.Array]) -> jax.Array:
        queries = jnp.stack([given["query"], 2 * given["query"]])
        return jax.vmap(lambda query: loss({**given, "query": query}))(queries).sum()

    return jax.grad(total)({**shared, "query": inputs["query"]})


@pytest.mark.usefixtures("torch_by_default")
@pytest.mark.parametrize(
    ("name", "derive"),
    [
        *(("attention", derive) for derive in (_linearized, _reverse_over_forward, _mapped_forward)),
        *(("paged_attention", derive) for derive in (_slope, _forward_over_reverse, _of_a_mapped_call)),
    ],
)
def test_every_derivative_of_the_default_is_that_of_jnp(name: str, derive: Callable[..., dict[str, jax.Array]]) -> None:
    case = SMALL[name]
    found, expected = (
        jit(functools.partial(derive, _loss(case, implementation)))(_inputs(case)) for implementation in (None, "xla")
    )
    _assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("derive", [_slope, _linearized])
@pytest.mark.parametrize("name", SMALL)
def test_a_named_implementation_has_no_forward_derivative_and_says_what_has(
    name: str, derive: Callable[..., Any], wrap: Callable[..., Any]
) -> None:
    with pytest.raises(Unsupported) as error:
        wrap(functools.partial(derive, _loss(SMALL[name], "torch")))(_inputs(SMALL[name]))
    assert str(error.value) == (
        f"{name} with implementation='torch' has no forward derivative. Differentiate with implementation='xla', or "
        "stop the gradient at its inputs (jax.lax.stop_gradient)."
    )


def test_a_checkpoint_that_saves_the_residuals_does_not_attend_again() -> None:
    case = dense_case(0, key_lens=[4], query_lens=[4])

    def callbacks(policy: Any) -> int:
        program = jax.value_and_grad(jax.checkpoint(_loss(case, "torch"), policy=policy))
        text = jax.jit(program).lower(_inputs(case)).as_text()
        return len(re.findall(r"custom_call @xla_buffer_python_[cg]pu_callback", text))

    names = transforms.RESIDUAL_NAMES
    assert callbacks(jax.checkpoint_policies.save_only_these_names(*names)) == 2
    assert callbacks(jax.checkpoint_policies.nothing_saveable) == 3


@pytest.mark.parametrize("extras", [{}, {"sinks": np.array([0.5, -1.0], np.float32)}], ids=["folded", "looped"])
def test_mapped_gradients_are_those_of_the_examples_padding_included(extras: dict[str, Any]) -> None:
    spec = AttentionSpec(scale=0.3, causal=False)
    cases = [
        dense_case(
            seed,
            key_lens=key_lens,
            query_lens=[3, 2],
            num_heads=2,
            num_kv_heads=1,
            head_size=8,
            padding_tokens=padding,
            spec=spec,
            seq_causal=np.array([True, False]),
            **extras,
        )
        for seed, key_lens, padding in ((0, [4, 5], 2), (1, [6, 3], 2))
    ]
    options = {**keywords(spec), "max_query_len": 3, "max_key_len": 6, "implementation": "torch"}
    stacked = {name: jnp.stack([x.operands[name] for x in cases]) for name in cases[0].operands}
    shared = {name: jnp.asarray(x) for name, x in cases[0].options.items()}

    def loss(inputs: dict[str, jax.Array], starts: dict[str, jax.Array]) -> jax.Array:
        arguments: dict[str, Any] = {**inputs, **starts, **options, "seq_causal": shared["seq_causal"]}
        out, lse = ops.attention_with_lse(**arguments)
        return (out * jnp.sin(jnp.arange(out.size)).reshape(out.shape)).sum() + jnp.where(lse > -99, lse, 0).sum()

    def split(operands: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        named = {name: x for name, x in operands.items() if not name.endswith("_loc")}
        return named, {name: x for name, x in operands.items() if name.endswith("_loc")}

    sinks = {"sinks": jnp.stack([shared["sinks"]] * 2)} if extras else {}
    found = jit(jax.vmap(jax.grad(loss)))(*split({**stacked, **sinks}))
    for index in range(2):
        alone = {name: x[index] for name, x in {**stacked, **sinks}.items()}
        expected = jit(jax.grad(loss))(*split(alone))
        _assert_close({name: x[index] for name, x in found.items()}, expected, 1e-6)
