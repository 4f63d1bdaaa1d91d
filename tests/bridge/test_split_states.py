"""Ops of layers with a state on sequences that are split over devices: they split where no state is kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jattn import ops
from jattn.bridge import typed_errors
from jattn.bridge.split import HEADS
from tests.bridge.test_partition import assert_close, each_kind, each_way, opaque, run_opaque
from tests.support.conv_cases import conv_call
from tests.support.delta_cases import delta_backward_call, delta_call
from tests.support.devices import WHOLE, collectives, mesh, on_four_devices, place
from tests.support.mamba_cases import mamba_backward_call, mamba_call
from torch_core.base.errors import Unsupported
from torch_core.launch.call import Call, array_fields

NAMES = ("convolution", "delta rule", "Mamba-2", "derivative of the delta rule", "derivative of Mamba-2")
each_call = pytest.mark.parametrize("call_name", NAMES)


def call_of(name: str, lens: tuple[int, ...], *, padding: int = 0) -> Call[np.ndarray]:
    """A call that keeps no states."""
    kind = name.removeprefix("derivative of ").removeprefix("the ")
    make: Any = {"convolution": conv_call, "delta rule": delta_call, "Mamba-2": mamba_call}[kind]
    call = make(7, lens, states=False, padding=padding)
    if name.startswith("derivative"):
        call = {"delta rule": delta_backward_call, "Mamba-2": mamba_backward_call}[kind](call)
    return call.map(lambda array: array.numpy())


def placed(call: Call[Any], on: jax.sharding.Mesh) -> Call[jax.Array]:
    """The call with the rows of its tokens over the devices."""
    dims = {name: field.dims[0] for name, field in array_fields(type(call)).items()}
    rows = {name for name in call.arrays() if dims[name] == "num_tokens"}
    specs = {name: PartitionSpec("dp") if name in rows else WHOLE for name in call.arrays()}
    return call.with_arrays({name: place(x, on, specs[name]) for name, x in call.arrays().items()})


@each_call
@each_way
@on_four_devices
def test_each_device_computes_its_own_sequences(kind: str, name: str, call_name: str) -> None:
    call = call_of(call_name, (3,) * 8)
    expected = jax.jit(lambda call: ops.run(call, "xla"))(call.map(jnp.asarray))
    given = placed(call, mesh(kind, dp=4))
    program = jax.jit(lambda call: run_opaque(call, name) if name == "opaque" else ops.run(call, name))

    if (kind, name) != ("auto", "xla"):
        # Only the gradients of what all sequences share are summed.
        summed = {key for key in expected if key in ("d_A", "d_D", "d_dt_bias")}
        assert set(collectives(program, given)) == ({"all-reduce"} if summed else set())
    for key, found in program(given).items():
        assert_close(found, expected[key])


@each_call
@each_kind
@on_four_devices
def test_uneven_sequences_give_nan(kind: str, call_name: str) -> None:
    call = call_of(call_name, (1, 2, 3, 3), padding=3)
    found = jax.jit(opaque)(placed(call, mesh(kind, dp=4)))
    assert np.isnan(np.asarray(next(iter(found.values())))[:3]).all()


@each_kind
@on_four_devices
def test_sequences_with_states_are_not_split(kind: str) -> None:
    call: Call[Any] = delta_call(7, (3,) * 8, padding=0).map(lambda array: array.numpy())
    with pytest.raises(Unsupported, match=r"^gated_delta_rule: sequences are split .* not cut"), typed_errors():
        jax.block_until_ready(jax.jit(opaque)(placed(call, mesh(kind, dp=4))))


@pytest.mark.parametrize("kind_of_state", ["delta rule", "Mamba-2"])
@each_way
@on_four_devices
def test_gradients_of_states_are_split_over_heads_as_the_states_are(kind: str, name: str, kind_of_state: str) -> None:
    call: Any = {"delta rule": delta_call, "Mamba-2": mamba_call}[kind_of_state](7, (3, 5, 2), heads=(8, 4), padding=0)
    call = {"delta rule": delta_backward_call, "Mamba-2": mamba_backward_call}[kind_of_state](call)
    call = call.map(lambda array: np.nan_to_num(array.numpy()))
    expected = jax.jit(lambda call: ops.run(call, "xla"))(call.map(jnp.asarray))
    dims = {key: field.dims for key, field in array_fields(type(call)).items()}
    specs = {key: PartitionSpec(*["tp" if dim in HEADS else None for dim in dims[key]]) for key in call.arrays()}
    given = call.with_arrays({key: place(x, mesh(kind), specs[key]) for key, x in call.arrays().items()})

    found = jax.jit(lambda call: run_opaque(call, name) if name == "opaque" else ops.run(call, name))(given)

    for key, array in found.items():
        assert_close(array, expected[key])
