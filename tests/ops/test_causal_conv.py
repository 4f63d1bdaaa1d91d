"""The short convolution in plain torch and in JAX: against the reference, in chunks, its gradients, its refusals."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from jattn import ops
from jattn.bridge import typed_errors
from tests.bridge.test_partition import assert_close, each_kind, each_way, opaque, run_opaque
from tests.ops.runner import QUICK_COMPILE, arrays_of
from tests.support.attention_cases import to_torch
from tests.support.conv_cases import assert_as_exact_as_torch, conv_call, cut_in_two, whole_results
from tests.support.devices import collectives, mesh, on_four_devices, place
from tests.support.state_cases import KEPT, each_implementation
from torch_core import ops as torch_ops
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.launch.call import Call
from torch_core.state.conv_call import CausalConvCall

OPTIONS: list[dict[str, Any]] = [
    {"lens": (5, 1, 0, 6), "dtype": "bfloat16", "first_column": 3, "out_sizes": (5, 12, 3)},
    {"lens": (5, 1, 0, 19, 1, 2), "dtype": "bfloat16"},
    {"lens": (5, 1, 0, 6), "width": 2, "activation": None, "bias": False, "state_dtype": "bfloat16"},
    {"lens": (5, 1, 0, 6), "states": False},
    KEPT,
]
_quick = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
CHANNELS = {
    "x": PartitionSpec(None, "tp"),
    "weight": PartitionSpec("tp"),
    "bias": PartitionSpec("tp"),
    "conv_states": PartitionSpec(None, None, "tp"),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plain_torch_is_as_exact_as_the_reference(options, seed):
    call = conv_call(seed, **options)
    given = call.map(torch.clone)
    assert_as_exact_as_torch(call, whole_results(torch_ops.run(given)), given.conv_states)


@each_implementation(OPTIONS)
def test_a_program_is_as_exact_as_the_reference(implementation, options, seed):
    call = conv_call(seed, **options)
    convolve = _quick(
        lambda given: ops.causal_conv1d(
            **given,
            activation=call.activation,
            first_column=call.first_column,
            out_sizes=call.out_sizes,
            implementation=implementation,
        )
    )
    out, states = convolve(arrays_of(call))
    out = to_torch(np.concatenate(out if isinstance(out, tuple) else [out], 1))
    assert_as_exact_as_torch(call, out, None if states is None else to_torch(np.array(states)))


@pytest.mark.parametrize("at", [1, 7])
def test_a_prompt_in_chunks_has_the_bits_of_the_whole_prompt(at, seed):
    call = conv_call(seed, (9,), dtype="bfloat16", padding=0)
    whole = call.map(torch.clone)
    expected = torch_ops.run(whole)["out"]
    found = [torch_ops.run(part)["out"] for part in cut_in_two(call, at)]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(call.conv_states[call.cache_indices], whole.conv_states[call.cache_indices])


def test_results_are_written_where_the_caller_says(seed):
    call = conv_call(seed)
    given = call.map(torch.clone).with_arrays({"out": torch.full_like(call.x, torch.nan)})
    assert torch_ops.run(given)["out"] is given.out
    assert_as_exact_as_torch(call, given.out, given.conv_states)


@pytest.mark.parametrize("implementation", ["xla", "torch"])
def test_gradients_are_those_of_autograd(implementation, seed):
    call = conv_call(seed, (5, 1, 0, 3), num_channels=4, padding=1)
    given: dict[str, Any] = arrays_of(call)
    rng = np.random.default_rng(seed)
    d_out, d_states = (jnp.asarray(rng.normal(size=given[key].shape), jnp.float32) for key in ("x", "conv_states"))
    names = ("x", "weight", "bias", "conv_states")

    def total(*moved: jax.Array) -> jax.Array:
        out, states = ops.causal_conv1d(
            **{**given, **dict(zip(names, moved, strict=True))}, activation="silu",
            implementation=None if implementation == "xla" else implementation,
        )  # fmt: skip
        assert states is not None
        return (out * d_out).sum() + jnp.where(jnp.isnan(states), 0, states * d_states).sum()

    found = _quick(jax.grad(total, argnums=(0, 1, 2, 3)))(*(given[n] for n in names))

    for name, gradient in zip(names, found, strict=True):
        np.testing.assert_allclose(gradient, _autograd(call, d_out, d_states, name), rtol=2e-5, atol=1e-5)


def _autograd(call: Any, d_out: jax.Array, d_states: jax.Array, name: str) -> torch.Tensor:
    """The gradient of one array in float64, sequence by sequence."""
    wide = {key: array.double() if array.is_floating_point() else array for key, array in call.arrays().items()}
    wide[name].requires_grad_()
    starts, total = call.query_start_loc.tolist(), torch.zeros((), dtype=torch.float64)
    d_x, d_held = (to_torch(np.array(array)).double() for array in (d_out, d_states))
    untouched = torch.ones(len(d_held), dtype=torch.bool)
    for seq, slot in enumerate(call.cache_indices.tolist()):
        start, end = starts[seq : seq + 2]
        known = slot >= 0 and bool(call.has_initial_state[seq])
        past = wide["conv_states"][slot] if known else torch.zeros(3, call.x.shape[1], dtype=torch.float64)
        inputs = torch.cat([past, wide["x"][start:end]])
        out = sum(wide["weight"][:, tap] * inputs[tap : tap + end - start] for tap in range(4)) + wide["bias"]
        total = total + (torch.nn.functional.silu(out) * d_x[start:end]).sum()
        if slot >= 0 and end > start:
            untouched[slot] = False
            total = total + (inputs[end - start :] * d_held[slot]).sum()
    # A slot that is not replaced is passed on, as far as it holds numbers.
    kept = wide["conv_states"][untouched]
    total = total + torch.where(kept.isnan(), 0, kept * d_held[untouched]).sum()
    return torch.autograd.grad(total, wide[name])[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(20, 9)}, "weight has width 9; it must be from 2 to 8"),
        ({"weight": torch.ones(20, 3)}, "conv_states holds 3 tokens in a slot; a width of 3 needs 2"),
        ({"weight": torch.ones(20, 4).double()}, "weight is float64; it must be float32, bfloat16 or float16"),
        ({"bias": torch.ones(19)}, "bias has shape .19.; it must be .num_channels. with num_channels = 20, that of we"),
        (
            {"weight": torch.ones(19, 4), "bias": None, "conv_states": torch.ones(8, 3, 19)},
            "weight has shape .19, 4.; num_channels must be 20, as in x, or fewer with fir",
        ),
        ({"conv_states": None}, "cache_indices is given without conv_states; give both or neither"),
        ({"conv_states": torch.ones(1, 3, 20), "cache_indices": None}, "conv_states has 1 slots for 6 sequences"),
        ({"out": torch.ones(31, 20).half()}, "out is float16; it must be float32, as x is"),
        (
            {"query_start_loc": torch.tensor([0, 5, 4, 6, 7, 8, 9]).int()},
            "query_start_loc.2. is 4, less than 5 before it",
        ),
        ({"query_start_loc": torch.tensor([0, 5, 5, 6, 7, 8, 32]).int()}, "query_start_loc.-1. is 32; x has only 31"),
        ({"cache_indices": torch.tensor([0, 1, 2, 3, 8, 5]).int()}, "cache_indices.4. is 8; conv_states has slots 0 "),
        ({"cache_indices": torch.tensor([0, 1, 2, 3, 1, 5]).int()}, "cache_indices.4. is 1, the slot of sequence 1 to"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, seed):
    call = conv_call(seed)
    before = call.conv_states.clone()
    with pytest.raises(InvalidInput, match=message):
        torch_ops.run(call.with_arrays(change))
    torch.testing.assert_close(call.conv_states, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("first_column", [-1, 8, True])
def test_channels_that_are_no_columns_are_refused(first_column, seed):
    call = conv_call(seed, first_column=0)
    with pytest.raises(InvalidInput, match=f"first_column is {first_column}; it must be "):
        torch_ops.run(CausalConvCall(**call.__dict__ | {"first_column": first_column}))


def test_a_weight_of_more_channels_than_x_has_columns_is_refused(seed):
    call = conv_call(seed, first_column=0)
    with pytest.raises(InvalidInput, match=r"weight has shape .20, 4.; num_channels must be 19, as in x"):
        torch_ops.run(call.with_arrays({"x": torch.ones(31, 19)}))


@on_four_devices
def test_what_does_not_fit_is_refused_on_several_devices() -> None:
    x, weight, starts = jnp.ones((2, 3)), jnp.ones((2, 4)), jnp.array([0, 2])
    for given, first_column in (
        (([[1.0]], weight, starts), 0),
        ((None, weight, starts), 0),
        ((x, None, starts), 0),
        ((x, 1.0, starts), 0),
        ((x, weight, starts), 4),
        ((None, weight, starts), None),
    ):
        with pytest.raises(InvalidInput, match=r"x|weight|first_column"):
            ops.causal_conv1d(*given, first_column=first_column)  # type: ignore[arg-type]


@pytest.mark.parametrize("out_sizes", [(20,), (10, 9), (5, 5, 5, 5), [10, 10], (20, 0)])
def test_sizes_of_results_that_are_not_the_channels_are_refused(out_sizes, seed):
    with pytest.raises(InvalidInput, match="out_sizes"):
        torch_ops.run(conv_call(seed, out_sizes=out_sizes))


def test_columns_of_no_channel_have_no_gradient(seed):
    call = conv_call(seed, (5, 1, 0, 3), first_column=2, states=False)
    given: dict[str, Any] = arrays_of(call)
    found = _quick(jax.grad(lambda x: ops.causal_conv1d(**{**given, "x": x}, first_column=2)[0].sum()))(given["x"])
    alone = given["x"][:, 2:22]
    wanted = _quick(jax.grad(lambda x: ops.causal_conv1d(**{**given, "x": x})[0].sum()))(alone)
    np.testing.assert_array_equal(found, jnp.pad(wanted, ((0, 0), (2, 5))))


@on_four_devices
def test_channels_among_other_columns_may_be_split(seed: int) -> None:
    call: Any = conv_call(seed, (5, 1, 0, 3), first_column=0).map(lambda array: np.asarray(array))
    on = mesh("auto")
    given = {k: place(x, on, CHANNELS.get(k, PartitionSpec())) for k, x in call.arrays().items() if k != "x"}
    options: dict[str, Any] = {"first_column": 0, "out_sizes": (8, 12), "activation": "silu"}
    convolve = _quick(lambda x, given: ops.causal_conv1d(x, **given, **options))
    expected = convolve(call.x, {k: np.asarray(x) for k, x in given.items()})
    for found, wanted in zip(jax.tree.leaves(convolve(call.x, given)), jax.tree.leaves(expected), strict=True):
        assert_close(found, wanted)


def test_an_unknown_activation_is_refused(seed):
    with pytest.raises(InvalidInput, match="activation is 'gelu'; it must be None or 'silu'"):
        torch_ops.run(conv_call(seed, activation="gelu"))


def test_a_sequence_without_tokens_may_share_a_slot(seed):
    call = conv_call(seed, (2, 0))
    call.cache_indices[:] = call.cache_indices[0]
    torch_ops.run(call)


@each_way
@on_four_devices
def test_each_device_convolves_its_own_channels_without_a_collective(kind: str, name: str) -> None:
    call: Call[Any] = conv_call(7, (5, 1, 0, 3)).map(lambda array: np.asarray(array))
    expected = _quick(lambda call: ops.run(call, "xla"))(call.map(jnp.asarray))
    on = mesh(kind)
    given = call.with_arrays({k: place(x, on, CHANNELS.get(k, PartitionSpec())) for k, x in call.arrays().items()})
    program = _quick(lambda call: run_opaque(call, name) if name == "opaque" else ops.run(call, name))

    assert collectives(program, given) == []
    found = program(given)
    assert found["out"].sharding.is_equivalent_to(NamedSharding(on, CHANNELS["x"]), 2)
    for key, array in found.items():
        assert_close(array, expected[key])


@each_kind
@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"x": PartitionSpec(None, "tp")}, r"channels are split .* x \(20 channels\) by tp, .* the number of channels"),
        ({"x": PartitionSpec("tp")}, "sequences are split by mesh axes as follows: x by tp"),
    ],
    ids=["channels of x alone", "tokens"],
)
@on_four_devices
def test_another_split_is_refused(kind: str, split: dict[str, PartitionSpec], message: str) -> None:
    call: Call[Any] = conv_call(7, (5, 1, 0, 6), padding=0).map(lambda array: np.asarray(array))
    on = mesh(kind)
    given = call.with_arrays({k: place(x, on, split.get(k, PartitionSpec())) for k, x in call.arrays().items()})
    with pytest.raises(Unsupported, match=f"^causal_conv1d: {message}"), typed_errors():
        jax.block_until_ready(jax.jit(opaque)(given))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("lens", [(300, 1, 0, 2049, 1, 5), (1,) * 70, (8, 1, 4, 2, 8)], ids=["mixed", "one", "few"])
@pytest.mark.parametrize(
    "apart",
    [
        {},
        {"first_column": 1, "out_sizes": (300, 700)},
        {"first_column": 0, "num_channels": 1001, "out_sizes": (256, 256, 489)},
    ],
    ids=["whole", "two", "three"],
)
def test_torch_and_jax_launch_one_kernel_with_the_same_bits(apart, lens, dtype, seed):
    call = conv_call(seed, lens, **{"num_channels": 1000, "dtype": dtype, **apart})
    given = call.map(torch.Tensor.cuda)
    theirs = whole_results({name: found.cpu() for name, found in torch_ops.run(given).items()})
    assert_as_exact_as_torch(call, theirs, given.conv_states.cpu())

    options: dict[str, Any] = {"first_column": call.first_column, "out_sizes": call.out_sizes, "activation": "silu"}
    convolve = jax.jit(lambda given: ops.causal_conv1d(**given, **options, implementation="triton"))
    out, states = convolve(arrays_of(call))

    assert torch.equal(to_torch(np.concatenate(jax.tree.leaves(out), 1)), theirs)
    held = to_torch(np.array(states))
    torch.testing.assert_close(held, given.conv_states.cpu(), rtol=0, atol=0, equal_nan=True)
