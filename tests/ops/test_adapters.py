"""Low-rank adapters from JAX: torch's results, derivatives, splits and refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jattn
from jattn.ops import AdapterRows, add_lora_linear
from tests.support.lora_cases import allowed_error, lora_call
from torch_core import reference
from torch_core.base.errors import InvalidInput
from torch_core.launch.run import run

GATED = {"slices": (7, 7), "activation": "silu"}


def arrays_of(call):
    given = call.map(lambda x: x.float()).arrays().items()
    return (
        {"y": None}
        | {name: jnp.asarray(np.asarray(array)) for name, array in given}
        | {
            name: jnp.asarray(getattr(call, name).numpy())
            for name in ("token_indices_sorted_by_lora_ids", "lora_token_start_loc")
        }
    )


@pytest.mark.parametrize("implementation", ["xla", "torch"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slices": (12, 7, 9), "slots": (3, 3, -1, 0)},
        {"adds": False},
        GATED,
        {"heads": (3, 1)},
        {"heads": (1, 3)},
        {"slots": (3, -1, 0, 2, 2, -1), "rows_of_input": 3, "adds": False},
    ],
    ids=str,
)
def test_results_are_as_exact_as_the_references(implementation, options, seed):
    call = lora_call(seed, **options)
    (exact,) = reference.add_lora_linear(call).values()
    found = jax.jit(
        lambda arrays: add_lora_linear(
            **arrays,
            output_slices=call.output_slices,
            num_heads=call.num_heads,
            activation=call.activation,
            implementation=implementation,
        )
    )(arrays_of(call))
    assert (torch.tensor(np.asarray(found)).double() - exact).abs().max() <= allowed_error(call, exact)


def test_torch_adds_in_place(seed):
    call = lora_call(seed, dtype="bfloat16")
    exact = reference.add_lora_linear(call)["y"]
    allowed = allowed_error(call, exact)
    assert run(call)["y"] is call.y
    assert (call.y.double() - exact).abs().max() <= allowed


def test_gradients_are_those_of_each_rows_own_matrices(seed):
    call = lora_call(seed, slices=(5, 4))
    names = ("x", "y", "lora_a", "lora_b")
    slots = np.array((2, -1, 0, 2, 2))
    with jax.enable_x64(True):
        arrays = {name: np.nan_to_num(np.asarray(getattr(call, name), np.float64)) for name in names}
        rows = AdapterRows.of(jnp.asarray(slots), call.num_slots)

        def plain(x, y, lora_a, lora_b):
            a, b = lora_a[slots], lora_b[slots]
            inner = jnp.einsum("ti,tri->tr", x, a).reshape(5, 2, 3)
            added = [jnp.einsum("tr,tor->to", inner[:, 0], b[:, :5]), jnp.einsum("tr,tor->to", inner[:, 1], b[:, 5:])]
            return y + jnp.where((slots >= 0)[:, None], jnp.concatenate(added, 1), 0)

        def ours(*operands):
            return add_lora_linear(**dict(zip(names, operands, strict=True)), **rows._asdict(), output_slices=(5, 4))

        operands = [jnp.asarray(arrays[name]) for name in names]
        found, wanted = (
            jax.grad(lambda *given, f=f: jnp.sin(f(*given)).sum(), argnums=range(4))(*operands) for f in (ours, plain)
        )
    for each, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-9, atol=1e-12)


def test_no_row_is_no_error():
    x, rows = jnp.zeros((0, 8)), AdapterRows.of(jnp.zeros(0, jnp.int32), 3)
    lora_a, lora_b = jnp.ones((3, 2, 8)), jnp.ones((3, 8, 2))
    assert add_lora_linear(x, x, lora_a, lora_b, *rows).shape == (0, 8)
    assert add_lora_linear(x, None, lora_a, lora_b, *rows).shape == (0, 8)


def test_rows_of_unknown_slots_have_no_adapter():
    rows = AdapterRows.of(jnp.array([3, 1, -1, 0, 1]), 3)
    assert rows.lora_token_start_loc.tolist() == [0, 1, 3, 3]
    assert rows.token_indices_sorted_by_lora_ids.tolist()[:3] == [3, 1, 4]


def test_slots_of_a_type_that_cannot_count_them_all():
    rows = AdapterRows.of(jnp.array([2, -1], jnp.int8), 300)
    assert rows.lora_token_start_loc.tolist() == [0, 0, 0, *[1] * 298]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"output_slices": (5, 6)}, "output_slices is .5, 6.; it must be 1 to 6 numbers whose sum is y's 12 columns"),
        ({"output_slices": (6, 6)}, "lora_a has 3 rows in a slot; 2 slices of rank 3 have as many each"),
        ({"lora_b": jnp.ones((4, 12, 3), jnp.bfloat16)}, "lora_b is bfloat16; it must be float32"),
        ({"lora_token_start_loc": jnp.array([0, 2, 1, 1, 4])}, r"lora_token_start_loc\[2\] is 1, less than 2"),
        ({"activation": "gelu"}, "activation is 'gelu'; it must be None or 'silu'"),
        ({"activation": "silu"}, "activation is 'silu'; it takes y, and two slices of equal size, gate and up"),
        ({"token_indices_sorted_by_lora_ids": jnp.array([2, 0, 0, 4, 1])}, r"\[2\] is 0 again; a row has one adapter"),
        ({"x": jnp.ones((2, 20))}, "x has 2 rows; the 5 of token_indices_sorted_by_lora_ids must be as many for each"),
        ({"lora_tiles": jnp.zeros((5, 20), jnp.int32)}, r"lora_tiles has shape \[5, 20\]; of these .* it is \[5, 32\]"),
        ({"lora_tiles": jnp.zeros((5, 32), jnp.int32)}, r"lora_tiles\[0\] is \[0, 0, .*; see AdapterRows.of"),
    ],
)
def test_what_does_not_fit_is_refused(changes, text, seed):
    call = lora_call(seed)
    with pytest.raises(jattn.InvalidInput, match=text):
        add_lora_linear(**{**arrays_of(call), "output_slices": call.output_slices, **changes})


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_heads", 0), ("num_heads", "2"), ("num_heads", None), ("y", jnp.zeros(4)), ("y", [[0.0]]), ("lora_b", None)],
    ids=str,
)
def test_a_wrong_operand_of_one_layer_is_refused_by_its_name(name, value):
    rows = AdapterRows.of(jnp.array([-1, 0]), 1)
    operands: Any = {
        "x": jnp.ones((2, 3)),
        "y": jnp.zeros((2, 4)),
        "lora_a": jnp.ones((1, 1, 3)),
        "lora_b": jnp.ones((1, 4, 1)),
    }
    with pytest.raises(InvalidInput, match=f"^(add_lora_linear: )?{name} "):
        add_lora_linear(**operands | rows._asdict() | {name: value})


@pytest.mark.parametrize("slots", [[0, 1], "a", jnp.array([0.5]), jnp.zeros((2, 2), jnp.int32)], ids=str)
def test_slots_are_whole_numbers_with_one_axis(slots):
    with pytest.raises(InvalidInput, match=r"(?s)^slots is .*; it must be an array of int32\[num_rows\]"):
        AdapterRows.of(slots, 2)
