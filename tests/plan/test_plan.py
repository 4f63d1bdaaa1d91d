"""LaunchPlan and OperationPlan refuse what no runtime could launch."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.sample_kernels import add_into_kernel, double_and_add, double_kernel, double_launch
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import Descriptor, LaunchPlan, OperationPlan, Pointer, Scalar

SPEC = ArraySpec((16,), "float32")


def test_equal_plans_are_equal_and_hash_alike():
    assert double_and_add() == double_and_add()
    assert hash(double_and_add()) == hash(double_and_add())
    assert double_and_add(32) != double_and_add()


def test_a_launch_knows_its_name_and_buffers():
    launch = double_launch(16, bias=True)
    assert launch.name == "double_kernel"
    assert launch.buffers == ("x", "bias", "doubled")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"constexprs": ()}, r"gives \[\] too much and \['N'\] too little"),
        ({"constexprs": (("N", 16), ("M", 1))}, r"gives \['M'\] too much"),
        ({"grid": (0,)}, "grid axis 0 is 0; it must be from 1 to 2147483647"),
        ({"grid": (1, 65536)}, "grid axis 1 is 65536; it must be from 1 to 65535"),
        ({"writes": ("z",)}, r"writes \['z'\], but no argument points there"),
        ({"arguments": tuple(reversed(double_launch(16).arguments))}, "arguments are out of order"),
    ],
)
def test_a_launch_that_does_not_fit_its_kernel_is_refused(change, message):
    with pytest.raises(InvalidInput, match=message):
        dataclasses.replace(double_launch(16), **change)


def _operation(**change) -> OperationPlan:
    arguments = {
        "name": "op",
        "inputs": (("x", SPEC),),
        "outputs": (("doubled", SPEC),),
        "launches": (double_launch(16),),
    }
    return OperationPlan(**{**arguments, **change})


def _add(x: str, total: str, copy: str) -> LaunchPlan:
    return LaunchPlan(
        kernel=add_into_kernel,
        grid=(1,),
        arguments=(("x_ptr", Pointer(x)), ("total_ptr", Pointer(total)), ("copy_ptr", Pointer(copy))),
        constexprs=(("N", 16),),
        writes=(total, copy),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scratch": (("x", SPEC),)}, "inputs share a name with other buffers"),
        ({"in_place": ("doubled",)}, r"in_place names \['doubled'\], not an input"),
        ({"launches": (double_launch(16, bias=True),)}, "points to 'bias', which is no buffer of the plan"),
        ({"outputs": (("doubled", SPEC), ("never", SPEC))}, r"outputs has \['never'\], which no launch writes"),
        ({"launches": (double_launch(16, target="x"),), "outputs": ()}, "writes the input 'x'; name it in in_place"),
        (
            {"launches": (_add("doubled", "copy", "x"),), "in_place": ("x",), "scratch": (("copy", SPEC),)},
            "reads 'doubled' before any launch wrote it",
        ),
        (
            {
                "launches": (double_launch(16), _add("doubled", "copy", "x")),
                "in_place": ("x",),
                "scratch": (("copy", SPEC),),
            },
            "takes 'x' after 'copy', which it is the first to write; pointers to new buffers must come last",
        ),
        (
            {"launches": (double_launch(16), _add("doubled", "doubled", "copy")), "scratch": (("copy", SPEC),)},
            "takes 'doubled' twice and writes it",
        ),
    ],
)
def test_an_operation_that_no_runtime_could_launch_is_refused(change, message):
    with pytest.raises(InvalidInput, match=message):
        _operation(**change)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ArraySpec((1,), "complex64"), Unsupported, "dtype is 'complex64'; a kernel takes one of float64"),
        (lambda: ArraySpec((1, 2), "int8", (1,)), InvalidInput, r"strides \(1,\) and shape \(1, 2\) differ in length"),
        (lambda: Scalar(1, "i8"), InvalidInput, "type is 'i8'; it must be one of i32, i64, fp32"),
        (lambda: Scalar(2**31, "i32"), InvalidInput, "value is 2147483648; it does not fit i32"),
        (lambda: Scalar(-(2**63) - 1, "i64"), InvalidInput, "does not fit i64"),
        (
            lambda: Descriptor("x", (4, 4), (4, 1), (2,)),
            InvalidInput,
            "descriptor of x: shape differs in length from strides or box",
        ),
        (lambda: Descriptor("x", (4,), (2,), (2,)), InvalidInput, r"descriptor of x: strides\[-1\] is 2; TMA needs 1"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_integer_scalar_at_the_edge_of_its_type_is_accepted():
    assert Scalar(2**31 - 1, "i32").value == 2**31 - 1
    assert Scalar(-(2**63), "i64").value == -(2**63)


def test_a_spec_counts_elements_and_resolves_strides():
    spec = ArraySpec((2, 3, 4), "int8")
    assert spec.size == 24
    assert spec.element_strides == (12, 4, 1)
    assert ArraySpec((2, 3), "int8", (1, 2)).element_strides == (1, 2)


def test_the_kernel_of_a_plan_is_the_function_itself():
    assert double_launch(16).kernel is double_kernel
