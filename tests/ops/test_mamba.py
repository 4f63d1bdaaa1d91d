"""Mamba-2 in plain torch and in JAX: against the reference, its gradients, its refusals, its splits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

from jattn import ops
from tests.bridge.test_partition import assert_close, each_way, run_opaque
from tests.ops.runner import QUICK_COMPILE, arrays_of
from tests.support.attention_cases import to_torch
from tests.support.devices import collectives, mesh, on_four_devices, place
from tests.support.mamba_cases import assert_as_exact_as_torch, mamba_backward_call, mamba_call
from tests.support.state_cases import KEPT, assert_gradients_are_as_exact, each_implementation, on_long_sequences
from torch_core import ops as torch_ops
from torch_core import reference
from torch_core.base.errors import InvalidInput
from torch_core.launch.call import Call

OPTIONS: list[dict[str, Any]] = [
    {"lens": (5, 1, 0, 40, 1, 2), "dtype": "bfloat16", "in_place": True},
    {"lens": (5, 1, 0, 40, 1, 2), "dtype": "bfloat16", "state_dtype": "bfloat16"},
    {"lens": (5, 1, 0, 130), "optional": False, "states": False},
    KEPT,
]
_quick = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plain_torch_is_as_exact_as_the_reference(options, seed):
    call = mamba_call(seed, **options)
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, torch_ops.run(given)["out"], given.states)


@each_implementation(OPTIONS)
def test_a_program_is_as_exact_as_the_reference(implementation, options, seed):
    call = mamba_call(seed, **options)
    names = ("max_query_len", "dt_softplus", "dt_column", "log_rates")
    statics = {name: getattr(call, name) for name in names} | {"implementation": implementation}
    out, states = _quick(lambda given: ops.mamba_chunk_scan(**given, **statics))(arrays_of(call))
    assert_as_exact_as_torch(call, to_torch(np.array(out)), None if states is None else to_torch(np.array(states)))


@on_long_sequences
def test_65_536_tokens_that_forget_little_leave_the_references_state(implementation, dtype, seed):
    call = mamba_call(seed, (65_536,), heads=(2, 1), sizes=(32, 128), dtype=dtype, padding=0)
    call.A.div_(1024)
    statics = {"max_query_len": call.max_query_len, "dt_softplus": True, "implementation": implementation}
    out, states = _quick(lambda given: ops.mamba_chunk_scan(**given, **statics))(arrays_of(call))
    assert_as_exact_as_torch(call, to_torch(np.array(out)), to_torch(np.array(states)))


def test_a_prompt_in_chunks_has_the_bits_of_the_whole_prompt(seed):
    call = mamba_call(seed, (9,), padding=0)
    whole = call.map(torch.clone)
    expected, found = torch_ops.run(whole)["out"], []
    for part in (slice(0, 4), slice(4, 9)):
        rows = {name: getattr(call, name)[part] for name in ("x", "dt", "B", "C")}
        starts = torch.tensor([0, len(rows["x"])], dtype=torch.int32)
        found.append(torch_ops.run(call.with_arrays({**rows, "query_start_loc": starts}))["out"])
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(call.states[call.cache_indices], whole.states[call.cache_indices])


@pytest.mark.parametrize(
    ("implementation", "in_place"), [("xla", False), ("torch", False), ("xla", True), ("torch", True)]
)
def test_gradients_are_those_of_autograd(implementation, in_place, seed):
    call = mamba_call(seed, (66, 1, 0, 3), sizes=(3, 4), heads=(2, 1), in_place=in_place)
    call = call.map(lambda array: torch.nan_to_num(array) if array.ndim == 4 else array)
    statics = {name: getattr(call, name) for name in ("max_query_len", "dt_column", "log_rates")}
    given: dict[str, Any] = arrays_of(call)
    moved = {name: given.pop(name) for name in ("x", "dt", "A", "B", "C", "D", "dt_bias", "states")}
    rng = np.random.default_rng(seed)
    d_out, d_states = (rng.normal(size=moved[name].shape).astype(np.float32) for name in ("x", "states"))

    def total(moved: dict[str, jax.Array]) -> jax.Array:
        out, states = ops.mamba_chunk_scan(**moved, **given, **statics, dt_softplus=True, implementation=implementation)
        assert states is not None
        return (out * d_out).sum() + (states * d_states).sum()

    found = _quick(jax.grad(total))(moved)

    # Padded rows of the others are NaN.
    wide = {name: getattr(call, name).double().nan_to_num().requires_grad_() for name in moved}
    copies = call.with_arrays({name: array.clone() for name, array in wide.items()})
    loss = (reference.mamba_chunk_scan(copies) * torch.from_numpy(d_out)).sum()
    gradients = torch.autograd.grad(loss + (copies.states * torch.from_numpy(d_states)).sum(), list(wide.values()))
    for name, gradient in zip(wide, gradients, strict=True):
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_jnp_differentiates_as_the_specification_does(seed):
    call = mamba_backward_call(mamba_call(seed, (5, 1, 0, 3), sizes=(3, 4), heads=(2, 1)))
    exact = reference.mamba_chunk_scan_backward(call)
    for name, found in _quick(lambda call: ops.run(call, "xla"))(call.map(lambda x: jnp.asarray(x.numpy()))).items():
        scale = float(exact[name].abs().max())
        np.testing.assert_allclose(found, exact[name], rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def test_autograd_gets_the_gradients_of_all_arrays_but_the_states(seed):
    call = mamba_call(seed, (5, 1, 0, 3), sizes=(3, 4), heads=(2, 1))
    given = call.arrays()
    moved = {name: given.pop(name).clone().requires_grad_() for name in ("x", "dt", "A", "B", "C", "D", "dt_bias")}
    backward = mamba_backward_call(call)
    exact = reference.mamba_chunk_scan_backward(backward.with_arrays({"d_last": torch.zeros_like(backward.d_last)}))
    out = torch_ops.mamba_chunk_scan(**moved, **given, max_query_len=call.max_query_len, dt_softplus=True)
    (out[:9] * backward.d_out[:9]).sum().backward()
    for name, x in moved.items():
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), exact[f"d_{name}"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"C": torch.zeros(31, 2, 9)}, "C has shape .31, 2, 9.; it must be .* with state_size = 8, that of B"),
        ({"dt": torch.zeros(31, 3)}, "dt has shape .31, 3.; it must be .* with num_heads = 4, that of x"),
        ({"dt": torch.zeros(31, 5)}, "dt has shape .31, 5.; .* num_heads = 4, that of x, or wider with dt_column"),
        ({"states": None}, "cache_indices is given without states; give both or neither"),
        ({"states": torch.zeros(8, 4, 8, 6)}, "states has shape .8, 4, 8, 6.; it must be .* with head_dim = 6"),
        ({"A": torch.zeros(4).double()}, "A is float64; it must be float32, bfloat16 or float16"),
        ({"cache_indices": torch.tensor([0, 1, 2, 3, 8, 5]).int()}, "cache_indices.4. is 8; states has slots 0 to 7"),
        ({"B": torch.zeros(31, 3, 8), "C": torch.zeros(31, 3, 8)}, "x has 4 heads; .* a multiple of the 3 groups of B"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, seed):
    call = mamba_call(seed)
    before = call.states.clone()
    with pytest.raises(InvalidInput, match=message):
        torch_ops.run(call.with_arrays(change))
    torch.testing.assert_close(call.states, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("column", [0.0, False, -1, 1])
def test_the_column_of_step_sizes_is_a_whole_number_that_leaves_room_for_the_heads(column, seed):
    with pytest.raises(InvalidInput, match="dt_column"):
        torch_ops.run(mamba_call(seed, dt_column=column))


@pytest.mark.parametrize("limit", [(0.1,), (-1.0, 2.0), (2.0, 1.0), (0.0, float("nan")), [0.0, 1.0], 3], ids=str)
def test_limits_of_step_sizes_are_two_numbers_in_order(limit, seed):
    with pytest.raises(InvalidInput, match="dt_limit"):
        mamba_call(seed, dt_limit=limit)


@each_way
@on_four_devices
def test_each_device_updates_its_own_heads_without_a_collective(kind: str, name: str) -> None:
    call: Call[Any] = mamba_call(7, (5, 1, 0, 3), heads=(8, 1)).map(lambda array: np.nan_to_num(array.numpy()))
    expected = _quick(lambda call: ops.run(call, "xla"))(call.map(jnp.asarray))
    on, heads = mesh(kind), PartitionSpec(None, "tp")
    specs = {"x": heads, "dt": heads, "states": heads, **dict.fromkeys(("A", "D", "dt_bias"), PartitionSpec("tp"))}
    given = {k: place(x, on, specs[k] if k in specs else PartitionSpec()) for k, x in call.arrays().items()}
    given = call.with_arrays(given)
    program = _quick(lambda call: run_opaque(call, name) if name == "opaque" else ops.run(call, name))

    assert collectives(program, given) == []
    for key, array in program(given).items():
        assert array.sharding.spec[1] == "tp"
        assert_close(array, expected[key])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [((4, 2), (64, 128)), ((4, 1), (128, 256)), ((3, 1), (40, 20)), ((3, 3), (128, 128))],
    ids=["usual", "wide", "odd", "lightning"],
)
@pytest.mark.parametrize("lens", [(300, 1, 0, 700, 5), (1,) * 70, (1700, 1, 600)], ids=["mixed", "one", "in spans"])
def test_torch_and_jax_launch_one_kernel_with_the_same_bits(lens, heads, sizes, seed):
    call = mamba_call(seed, lens, heads=heads, sizes=sizes, dtype="bfloat16")
    given = call.map(torch.Tensor.cuda)
    theirs = torch_ops.run(given)["out"].cpu()
    assert_as_exact_as_torch(call, theirs, given.states.cpu())
    statics = {"max_query_len": call.max_query_len, "dt_softplus": True, "implementation": "triton"}

    out, states = jax.jit(lambda given: ops.mamba_chunk_scan(**given, **statics))(arrays_of(call))

    assert torch.equal(to_torch(np.array(out)), theirs)
    held = to_torch(np.array(states))
    torch.testing.assert_close(held, given.states.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [(1, 1), (3, 1), (70, 20), (1300,)], ids=str)
def test_a_step_size_that_is_nan_is_not_hidden(lens, seed):
    call = mamba_call(seed, lens, heads=(4, 2), sizes=(64, 128), dtype="bfloat16", states=False, padding=0)
    call.dt[0, 1] = torch.nan
    out = torch_ops.run(call.map(torch.Tensor.cuda))["out"].cpu()
    assert out[: lens[0], 1].isnan().all()
    assert out[:, [0, 2, 3]].isfinite().all()
    assert out[lens[0] :].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lens", "heads", "sizes", "dtype"),
    [
        ((300, 1, 0, 70), (4, 2), (64, 128), "bfloat16"),
        ((1100, 1, 30), (8, 1), (64, 128), "bfloat16"),
        ((70, 3), (2, 1), (128, 256), "float16"),
        ((300, 1, 70), (3, 3), (128, 128), "bfloat16"),
        ((130, 3), (2, 1), (256, 128), "bfloat16"),
        ((70, 0, 33), (4, 1), (40, 20), "float32"),
    ],
    ids=["usual", "in spans", "wide", "lightning", "large heads", "float32"],
)
def test_the_derivatives_kernels_are_exact_and_give_torch_and_jax_the_same_bits(lens, heads, sizes, dtype, seed):
    call = mamba_backward_call(mamba_call(seed, lens, heads=heads, sizes=sizes, dtype=dtype))
    theirs = torch_ops.run(call.map(torch.Tensor.cuda))
    found = jax.jit(lambda call: ops.run(call, "triton"))(call.with_arrays(arrays_of(call)))
    for name, gradient in theirs.items():
        assert torch.equal(to_torch(np.array(found[name])), gradient.cpu()), name
    on_host = {name: gradient.cpu() for name, gradient in theirs.items()}
    assert_gradients_are_as_exact(reference.mamba_chunk_scan_backward, call, on_host)


@pytest.mark.gpu
def test_heads_that_forget_all_and_chunks_that_are_not_full_keep_results_and_gradients_exact(seed):
    call = mamba_call(seed, (40, 66, 300), heads=(4, 2), sizes=(64, 128), dtype="bfloat16", padding=0)
    call.A[:] = torch.tensor([-1.0, -16.0, -128.0, -1e6])
    call = call.with_arrays({"dt_bias": call.dt_bias + 2})
    given = call.map(torch.Tensor.cuda)
    assert_as_exact_as_torch(call, torch_ops.run(given)["out"].cpu(), given.states.cpu())
    backward = mamba_backward_call(call)
    found = {name: each.cpu() for name, each in torch_ops.run(backward.map(torch.Tensor.cuda)).items()}
    assert_gradients_are_as_exact(reference.mamba_chunk_scan_backward, backward, found)
