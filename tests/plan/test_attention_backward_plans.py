"""What the plan of the backward pass holds, and that its tiles fit the smallest device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.attention_plans import backward_call, backward_plan
from torch_core.attention.backward_call import backward_of, forward_of
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.compile import compile_variant, kernel_variant
from torch_core.launch.plan import DeviceLimits

OLDER = DeviceLimits(arch=86, shared_memory=101376)
SLOPES = ArraySpec((8,), "bfloat16")


def test_each_gradient_has_one_owner():
    plan = backward_plan(limits=OLDER)
    assert [launch.writes[0] for launch in plan.launches] == ["d_query", "d_key"]
    assert [name for name, _ in plan.outputs] == ["d_query", "d_key", "d_value"]


def test_slopes_and_sinks_get_gradients_of_their_dtype_from_parts():
    plan = backward_plan(limits=OLDER, alibi_slopes=SLOPES, sinks=SLOPES)
    assert [launch.writes[0] for launch in plan.launches[2:]] == ["d_alibi_slopes", "d_sinks"]
    assert dict(plan.outputs)["d_sinks"] == SLOPES
    assert {"slope_parts", "sink_parts"} <= dict(plan.scratch).keys()


@pytest.mark.parametrize("launch", [0, 1])
def test_the_largest_heads_fit_a_device_with_little_shared_memory(launch):
    rows, keys = ArraySpec((300, 8, 256), "bfloat16"), ArraySpec((300, 2, 256), "bfloat16")
    plan = backward_plan(limits=OLDER, query=rows, key=keys, value=keys)
    compiled = compile_variant(kernel_variant(plan.launches[launch], plan.specs), OLDER.arch)
    assert compiled.metadata.shared <= OLDER.shared_memory


def test_the_forward_call_of_a_backward_call_is_the_one_that_it_was_made_of():
    call = backward_call()
    forward = forward_of(call)
    assert call.out is not None
    assert backward_of(forward, out=call.out, lse=call.lse, d_out=call.d_out) == call
    assert forward.outputs()["out"] == call.out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": None}, "out is missing; give the forward pass's output."),
        (
            {"d_out": ArraySpec((300, 8, 128), "float32")},
            "d_out is float32 and out bfloat16; they must be equal.",
        ),
        ({"lse": ArraySpec((300, 8), "bfloat16")}, "lse is bfloat16; it must be float32."),
        ({"d_lse": ArraySpec((300, 8), "bfloat16")}, "d_lse is bfloat16; it must be float32."),
    ],
)
def test_results_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(InvalidInput) as error:
        replace(backward_call(), **changes).check()
    assert str(error.value) == message


def test_an_8_bit_output_has_no_derivative():
    coded = ArraySpec((300, 8, 128), "float8_e4m3fn")
    with pytest.raises(Unsupported) as error:
        replace(backward_call(), out=coded, d_out=coded).check()
    assert str(error.value) == "out is float8_e4m3fn; an 8-bit output has no derivative: ask for a wider out_dtype."
