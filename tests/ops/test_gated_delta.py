"""The gated delta rule in plain torch and in JAX: against the reference, its gradients, its refusals, its splits."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

from jattn import ops
from jattn.ops.chunks import decay_between
from tests.bridge.test_partition import assert_close, each_way, run_opaque
from tests.ops.runner import QUICK_COMPILE, arrays_of
from tests.support.attention_cases import to_torch
from tests.support.delta_cases import assert_as_exact_as_torch, delta_backward_call, delta_call
from tests.support.devices import collectives, mesh, on_four_devices, place
from tests.support.state_cases import KEPT, assert_gradients_are_as_exact, each_implementation, on_long_sequences
from torch_core import ops as torch_ops
from torch_core import reference
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.launch.call import Call

OPTIONS: list[dict[str, Any]] = [
    {"lens": (5, 1, 0, 40, 1, 2), "dtype": "bfloat16", "state_dtype": "bfloat16"},
    {"lens": (5, 1, 0, 70), "gates": "gk"},
    KEPT,
    {"lens": (5, 1, 0, 130), "gates": None, "states": False},
    {**KEPT, "dtype": "bfloat16", "sizes": (128, 40)},
    {**KEPT, "dtype": "bfloat16", "sizes": (128, 40), "gates": "gk"},
]
_quick = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_plain_torch_is_as_exact_as_the_reference(options, seed):
    call = delta_call(seed, **options)
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, torch_ops.run(given)["out"], given.states)


@each_implementation(OPTIONS)
def test_a_program_is_as_exact_as_the_reference(implementation, options, seed):
    call = delta_call(seed, **options)
    statics = {"max_query_len": call.max_query_len, "use_qk_l2norm_in_kernel": True, "implementation": implementation}
    run = _quick(lambda given: ops.gated_delta_rule(**given, **statics))
    out, states = run(arrays_of(call))
    assert_as_exact_as_torch(call, to_torch(np.array(out)), None if states is None else to_torch(np.array(states)))


@on_long_sequences
@pytest.mark.parametrize("gates", ["g", "gk"])
def test_65_536_tokens_that_forget_little_leave_the_references_state(implementation, dtype, gates, seed):
    call = delta_call(seed, (65_536,), heads=(1, 1), sizes=(128, 32), gates=gates, dtype=dtype, padding=0)
    getattr(call, gates).div_(4096)
    statics = {"max_query_len": call.max_query_len, "use_qk_l2norm_in_kernel": True, "implementation": implementation}
    out, states = _quick(lambda given: ops.gated_delta_rule(**given, **statics))(arrays_of(call))
    assert_as_exact_as_torch(call, to_torch(np.array(out)), to_torch(np.array(states)))


@each_implementation(OPTIONS[4:])
def test_the_state_does_not_read_tokens_that_are_not_kept(implementation, options, seed):
    call = delta_call(seed, **options)
    poisoned = {
        name: getattr(call, name).clone() for name in ("query", "key", "value", "beta", options.get("gates", "g"))
    }
    starts, ends = call.query_start_loc[:-1], call.query_start_loc[1:]
    for start, end, kept in zip(starts, ends, call.num_kept_tokens, strict=True):
        for array in poisoned.values():
            array[start + kept : end] = torch.nan
    statics = {"max_query_len": call.max_query_len, "use_qk_l2norm_in_kernel": True, "implementation": implementation}
    run = _quick(lambda given: ops.gated_delta_rule(**given, **statics)[1])

    held, expected = (to_torch(np.array(run(arrays_of(each)))) for each in (call.with_arrays(poisoned), call))

    torch.testing.assert_close(held, expected, rtol=0, atol=0, equal_nan=True)


def test_the_decay_between_neighbours_does_not_have_the_rounding_of_the_whole_chunk(seed):
    gate = -np.random.default_rng(seed).exponential(2, (1, 64)).astype(np.float32)
    gate[0, 5] = -np.inf
    found = np.asarray(decay_between(jnp.asarray(gate)), np.float64)[0]

    exact = np.exp(gate[0].astype(np.float64))
    assert (np.abs(found.diagonal(-1) - exact[1:]) <= 2.0**-22 * exact[1:]).all()
    assert (found.diagonal() == 1).all()
    assert not found[5:, :5].any()
    assert not np.triu(found, 1).any()


def test_a_prompt_in_chunks_has_the_bits_of_the_whole_prompt(seed):
    call = delta_call(seed, (9,), padding=0)
    whole = call.map(torch.clone)
    expected, found = torch_ops.run(whole)["out"], []
    for part in (slice(0, 4), slice(4, 9)):
        rows = {name: getattr(call, name)[part] for name in ("query", "key", "value", "beta", "g")}
        starts = torch.tensor([0, len(rows["query"])], dtype=torch.int32)
        found.append(torch_ops.run(call.with_arrays({**rows, "query_start_loc": starts}))["out"])
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(call.states[call.cache_indices], whole.states[call.cache_indices])


@pytest.mark.parametrize(
    ("gates", "lens", "implementation"),
    [("g", (5, 1, 0, 3), "xla"), ("gk", (20, 1, 2), "xla"), ("g", (5, 1, 0, 3), "torch")],
)
def test_gradients_are_those_of_autograd(gates, lens, implementation, seed):
    call = delta_call(seed, lens, sizes=(4, 3), heads=(2, 1), gates=gates, padding=0)
    call = call.map(lambda array: torch.nan_to_num(array) if array.is_floating_point() else array)
    given: dict[str, Any] = arrays_of(call)
    moved = {name: given.pop(name) for name in ("query", "key", "value", "beta", gates, "states")}
    rng = np.random.default_rng(seed)
    d_out, d_states = (rng.normal(size=moved[name].shape).astype(np.float32) for name in ("value", "states"))

    def total(moved: dict[str, jax.Array]) -> jax.Array:
        out, states = ops.gated_delta_rule(
            **moved,
            **given,
            max_query_len=call.max_query_len,
            use_qk_l2norm_in_kernel=True,
            implementation=implementation,
        )
        assert states is not None
        return (out * d_out).sum() + (states * d_states).sum()

    found = _quick(jax.grad(total))(moved)

    wide = {name: getattr(call, name).double().requires_grad_() for name in moved}
    copies = call.with_arrays({name: array.clone() for name, array in wide.items()})
    loss = (reference.gated_delta_rule(copies) * torch.from_numpy(d_out)).sum()
    gradients = torch.autograd.grad(loss + (copies.states * torch.from_numpy(d_states)).sum(), list(wide.values()))
    for name, gradient in zip(wide, gradients, strict=True):
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_jnp_differentiates_as_the_specification_does(seed):
    call = delta_backward_call(delta_call(seed, (5, 1, 0, 3), sizes=(4, 3), heads=(2, 1)))
    exact = reference.gated_delta_backward(call)
    for name, found in _quick(lambda call: ops.run(call, "xla"))(call.map(lambda x: jnp.asarray(x.numpy()))).items():
        scale = float(exact[name].abs().max())
        np.testing.assert_allclose(found, exact[name], rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def test_autograd_gets_the_gradients_of_all_arrays_but_the_states(seed):
    call = delta_call(seed, (5, 1, 0, 3), sizes=(4, 3), heads=(2, 1))
    given = call.arrays()
    moved = {name: given.pop(name).clone().requires_grad_() for name in ("query", "key", "value", "beta", "g")}
    backward = delta_backward_call(call)
    d_out = backward.d_out.nan_to_num()
    exact = reference.gated_delta_backward(backward.with_arrays({"d_last": torch.zeros_like(backward.d_last)}))
    options = {"max_query_len": call.max_query_len, "use_qk_l2norm_in_kernel": True}
    (torch_ops.gated_delta_rule(**moved, **given, **options)[:9] * d_out[:9]).sum().backward()
    for name, x in moved.items():
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), exact[f"d_{name}"], rtol=1e-4, atol=1e-5)
    with pytest.raises(Unsupported, match=r"states requires a gradient; pass states\.detach"):
        torch_ops.gated_delta_rule(**moved, **{**given, "states": given["states"].requires_grad_()}, **options)


def test_autograd_refuses_a_second_derivative(seed):
    call = delta_call(seed, (3,), sizes=(4, 3), heads=(2, 1), states=False, padding=0)
    given = call.arrays()
    query = given.pop("query").requires_grad_()
    out = torch_ops.gated_delta_rule(query, **given, max_query_len=3)

    (slope,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        (slope.square().sum() + out.sum()).backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gk": torch.zeros(31, 4, 8)}, "gk is given together with g; give one of them"),
        ({"value": torch.zeros(31, 3, 6)}, "beta has shape .31, 4.; it must be .* with num_heads = 3, that of value"),
        ({"states": None}, "cache_indices is given without states; give both or neither"),
        ({"states": torch.zeros(8, 4, 8, 6)}, "states has shape .8, 4, 8, 6.; it must be .* with value_size = 6"),
        ({"states": torch.zeros(8, 4, 6, 8).double()}, "states is float64; it must be float32, bfloat16 or float16"),
        ({"cache_indices": torch.tensor([0, 1, 2, 3, 8, 5]).int()}, "cache_indices.4. is 8; states has slots 0 to 7"),
        ({"query_start_loc": torch.tensor([0, 5, 6, 6, 26, 27, 28]).int()}, "sequence 3 has 20 rows in query_start_lo"),
        ({"states": torch.zeros(8, 3, 20)}, "states has shape .8, 3, 20.; it must have 4 axes"),
        ({"has_initial_state": torch.ones(5).bool()}, "has_initial_state has shape .5.; it must be .*num_seqs = 6"),
        (
            {"num_kept_tokens": torch.tensor([5, 2, 0, 3, 1, 2]).int()},
            "num_kept_tokens.1. is 2; .* from 0 to 1, the tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, message, seed):
    call = delta_call(seed)
    before = call.states.clone()
    with pytest.raises(InvalidInput, match=message):
        torch_ops.run(call.with_arrays(change))
    torch.testing.assert_close(call.states, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [0.0, float("inf"), True, "1", torch.ones(())], ids=str)
def test_a_scale_that_is_no_positive_number_is_refused(scale, seed):
    with pytest.raises(InvalidInput, match=r"^scale is .*; it must be positive and finite"):
        replace(delta_call(seed), scale=scale)


def test_value_heads_that_no_key_head_serves_are_refused(seed):
    call = delta_call(seed, heads=(4, 2))
    call = replace(call, query=torch.zeros(31, 3, 8), key=torch.zeros(31, 3, 8))
    with pytest.raises(InvalidInput, match="value has 4 heads; they must be a multiple of the 3 heads of key"):
        torch_ops.run(call)


@each_way
@on_four_devices
def test_each_device_updates_its_own_heads_without_a_collective(kind: str, name: str) -> None:
    call: Call[Any] = delta_call(7, (5, 1, 0, 3), heads=(8, 4)).map(lambda array: np.nan_to_num(array.numpy()))
    expected = _quick(lambda call: ops.run(call, "xla"))(call.map(jnp.asarray))
    on, heads = mesh(kind), PartitionSpec(None, "tp")
    names = ("query", "key", "value", "beta", "g", "states")
    given = call.with_arrays(
        {k: place(x, on, heads if k in names else PartitionSpec()) for k, x in call.arrays().items()}
    )
    program = _quick(lambda call: run_opaque(call, name) if name == "opaque" else ops.run(call, name))

    assert collectives(program, given) == []
    for key, array in program(given).items():
        assert array.sharding.spec[1] == "tp"
        assert_close(array, expected[key])


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["g", "gk"])
@pytest.mark.parametrize(
    ("lens", "sizes"),
    [
        ((300, 1, 0, 700, 5), (128, 128)),
        ((1,) * 70, (128, 128)),
        ((4, 1, 0, 3), (128, 40)),
        ((8, 1, 0, 5, 13), (128, 128)),
        ((5000,), (64, 128)),
    ],
    ids=["mixed", "one", "a turn", "turns", "in segments"],
)
def test_torch_and_jax_launch_one_kernel_with_the_same_bits(lens, sizes, gates, seed):
    call = delta_call(seed, lens, heads=(4, 2), sizes=sizes, gates=gates, dtype="bfloat16")
    given = call.map(torch.Tensor.cuda)
    theirs = torch_ops.run(given)["out"].cpu()
    assert_as_exact_as_torch(call, theirs, given.states.cpu())
    statics = {"max_query_len": call.max_query_len, "use_qk_l2norm_in_kernel": True, "implementation": "triton"}

    out, states = jax.jit(lambda given: ops.gated_delta_rule(**given, **statics))(arrays_of(call))

    assert torch.equal(to_torch(np.array(out)), theirs)
    held = to_torch(np.array(states))
    torch.testing.assert_close(held, given.states.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gates", ["g", "gk"])
def test_keys_that_are_alike_leave_the_systems_of_chunks_their_digits(gates, dtype, seed):
    call = delta_call(seed, (200,), heads=(2, 1), sizes=(128, 128), gates=gates, dtype=dtype, padding=0)
    call.key[:] = call.key[0] + call.key / 32
    call.beta[:] = 1
    getattr(call, gates)[:] = 0
    given = call.map(torch.Tensor.cuda)
    assert_as_exact_as_torch(call, torch_ops.run(given)["out"].cpu(), given.states.cpu(), added=64)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("gates", ["g", "gk"])
def test_a_gate_that_is_nan_is_not_hidden(gates, tokens, seed):
    call = delta_call(seed, (tokens, 3), heads=(4, 2), sizes=(128, 128), gates=gates, dtype="bfloat16", padding=0)
    call = call.map(lambda array: array.nan_to_num(0) if array.ndim == 4 else array)
    getattr(call, gates)[0, 1] = torch.nan
    out = torch_ops.run(call.map(torch.Tensor.cuda))["out"].cpu()
    assert out[:tokens, 1].isnan().all()
    assert out[:, [0, 2, 3]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "sizes"), [(1, (128, 128)), (4, (128, 128)), (1, (96, 192))])
@pytest.mark.parametrize("gates", ["g", "gk"])
def test_few_decoded_sequences_have_the_bits_that_they_have_in_a_large_batch(gates, tokens, sizes, seed):
    large = delta_call(seed, (tokens,) * 64, heads=(8, 4), sizes=sizes, gates=gates, dtype="bfloat16", padding=0)
    rows = {name: getattr(large, name)[: 3 * tokens].cuda() for name in ("query", "key", "value", "beta", gates)}
    slots = {"query_start_loc": large.query_start_loc[:4].cuda()}
    slots |= {name: getattr(large, name)[:3].cuda() for name in ("cache_indices", "has_initial_state")}
    large = large.map(torch.Tensor.cuda)
    few = large.with_arrays({**rows, **slots, "states": large.states.clone()})
    assert torch.equal(torch_ops.run(few)["out"], torch_ops.run(large)["out"][: 3 * tokens])
    used = [slot for slot in slots["cache_indices"].tolist() if slot >= 0]
    assert torch.equal(few.states[used], large.states[used])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "gates": "gk"},
        {"dtype": "float16", "sizes": (256, 200)},
        {"gates": "gk", "sizes": (128, 40)},
        {"heads": (2, 1)},
    ],
    ids=str,
)
def test_the_derivatives_kernels_are_exact_and_give_torch_and_jax_the_same_bits(options, seed):
    call = delta_backward_call(delta_call(seed, (300, 1, 0, 70), **{"sizes": (128, 128), **options}))
    theirs = torch_ops.run(call.map(torch.Tensor.cuda))
    found = jax.jit(lambda call: ops.run(call, "triton"))(call.with_arrays(arrays_of(call)))
    for name, gradient in theirs.items():
        assert torch.equal(to_torch(np.array(found[name])), gradient.cpu()), name
    on_host = {name: gradient.cpu() for name, gradient in theirs.items()}
    assert_gradients_are_as_exact(reference.gated_delta_backward, call, on_host)
