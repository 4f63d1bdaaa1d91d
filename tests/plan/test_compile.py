"""A plan's variant tells the compiler what Triton's own launcher would have found out."""

from __future__ import annotations

import dataclasses
import re

import pytest
from triton import knobs
from triton.experimental import gluon

from tests.support.attention_plans import paged_plan
from tests.support.gluon_kernels import scaled_copy
from tests.support.sample_kernels import double_kernel, double_launch, product
from torch_core.base.errors import Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.compile import check_fits, compile_variant, kernel_variant
from torch_core.launch.plan import Descriptor, DeviceLimits, LaunchPlan, Pointer, Scalar
from torch_core.state.kernels.conv.plan import plan_causal_conv
from torch_core.state.op import calls_in_use

SPECS = {"x": ArraySpec((64,), "bfloat16"), "bias": ArraySpec((1,), "float32"), "doubled": ArraySpec((64,), "float32")}


def test_absent_pointers_and_unit_strides_are_constants():
    variant = kernel_variant(double_launch(16), SPECS)
    assert dict(variant.signature) == {
        "x_ptr": "*bf16",
        "bias_ptr": "constexpr",
        "factor": "fp32",
        "count": "i32",
        "stride": "constexpr",
        "y_ptr": "*fp32",
        "N": "constexpr",
    }
    assert variant.constants == ((1, None), (4, 1), (6, 16))


def test_divisibility_follows_strides_and_alignment_but_not_counts():
    assert kernel_variant(double_launch(16, stride=32), SPECS).divisible == (0, 4, 5)
    unaligned = {**SPECS, "x": dataclasses.replace(SPECS["x"], aligned=False)}
    assert kernel_variant(double_launch(16, stride=3), unaligned).divisible == (5,)


def test_launches_of_other_sizes_share_a_variant():
    assert kernel_variant(double_launch(16), SPECS) == kernel_variant(double_launch(48), SPECS)
    assert kernel_variant(double_launch(16), SPECS) != kernel_variant(double_launch(16, stride=2), SPECS)


def test_a_variant_compiles_for_hopper_without_a_device():
    compiled = compile_variant(kernel_variant(double_launch(16, bias=True), SPECS), 90)
    assert ".target sm_90a" in compiled.asm["ptx"]
    assert compiled.metadata.name == "double_kernel"


def test_a_limit_on_registers_reaches_the_compiler():
    launch = dataclasses.replace(double_launch(16), maxnreg=64)
    assert ".maxnreg 64" in compile_variant(kernel_variant(launch, SPECS), 90).asm["ptx"]


def test_products_and_sums_are_fused_whatever_the_compiler_prefers(monkeypatch):
    monkeypatch.setattr(knobs.language, "default_fp_fusion", False)
    assert "fma.rn" in compile_variant(kernel_variant(double_launch(16, bias=True), SPECS), 90).asm["ptx"]


def test_a_kernel_that_does_not_fit_the_device_is_refused():
    plan = product()
    compiled = compile_variant(kernel_variant(plan.launches[0], plan.specs), 90)
    limits = DeviceLimits(arch=75, num_sms=40, shared_memory=compiled.metadata.shared - 1)
    with pytest.raises(Unsupported, match=r"kernel product_kernel needs \d+ bytes of shared memory .*7\.5"):
        check_fits("product_kernel", compiled.metadata.shared, limits)
    check_fits("product_kernel", compiled.metadata.shared, DeviceLimits())


@gluon.jit
def _described_kernel(x_desc, count):
    pass


def test_a_descriptor_is_typed_by_its_box_and_layout():
    descriptor = Descriptor("x", (64, 32), (32, 1), (16, 32), layout="L")
    launch = LaunchPlan(_described_kernel, (1,), (("x_desc", descriptor), ("count", Scalar(3, "i32"))))
    variant = kernel_variant(launch, {"x": ArraySpec((64, 32), "float16")})
    assert variant.signature[0] == ("x_desc", "tensordesc<fp16[16, 32],'L'>")
    assert variant.is_gluon
    assert "num_stages" not in variant.options()


def test_a_pointer_argument_has_the_type_of_its_buffer():
    launch = double_launch(16)
    for dtype, name in (("float8_e4m3fn", "*fp8e4nv"), ("int64", "*i64"), ("bool", "*i1")):
        specs = {**SPECS, "x": ArraySpec((16,), dtype)}
        assert kernel_variant(launch, specs).signature[0] == ("x_ptr", name)
    assert isinstance(dict(launch.arguments)["x_ptr"], Pointer)
    assert launch.kernel is double_kernel


def test_a_gluon_kernel_with_a_descriptor_compiles_for_hopper():
    plan = scaled_copy()
    compiled = compile_variant(kernel_variant(plan.launches[0], plan.specs), 90)
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert [tuple(entry["block_size"]) for entry in compiled.metadata.tensordesc_meta] == [(64, 64)]


def test_tokens_of_a_decoded_sequence_are_multiplied_with_a_constant_stride_in_64_bits():
    call = calls_in_use()["causal conv decode apart"].with_arrays({"x": ArraySpec((64, 12356), "bfloat16")})
    plan = plan_causal_conv(call, DeviceLimits())  # pyright: ignore[reportArgumentType]
    assert dict(plan.launches[0].constexprs)["x_token_stride"] == 12356
    code = compile_variant(kernel_variant(plan.launches[0], plan.specs), 90).asm["ptx"]
    assert not re.findall(r"(?:mul|mad)\.lo\.s32.*12356", code)


def test_the_merge_of_chunks_begins_before_they_are_made_and_waits_where_devices_can():
    split, merge = (plan := paged_plan(num_seqs=1)).launches
    variant = kernel_variant(merge, plan.specs)
    assert variant.options()["launch_pdl"]
    ptx = compile_variant(variant, 90).asm["ptx"]
    assert 0 < ptx.index("griddepcontrol.wait") < ptx.index("ld.global.v4")
    assert "griddepcontrol.launch_dependents" in compile_variant(kernel_variant(split, plan.specs), 90).asm["ptx"]


@pytest.mark.parametrize(("num_seqs", "arch", "early"), [(1, 90, True), (64, 90, False), (1, 89, False)])
def test_chunks_begin_early_where_a_multiprocessor_has_one_and_wait_before_all_else(num_seqs, arch, early):
    plan = paged_plan(
        num_seqs=num_seqs, block_tables=ArraySpec((num_seqs, 16384), "int32"), limits=DeviceLimits(arch=arch)
    )
    split = plan.launches[0]
    assert split.dependent == early
    ptx = compile_variant(kernel_variant(split, plan.specs), arch).asm["ptx"]
    assert ("griddepcontrol.wait" in ptx) == early
    if early:
        wait, let = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
        assert 0 < wait < let < ptx.index("ld.global")


@pytest.mark.parametrize(
    ("blocks", "changes", "has_room"),
    [
        (4096, {}, True),
        (128, {}, False),
        (4096, {"arch": 89}, False),
        (4096, {"arch": 120, "shared_memory": 101376}, False),
    ],
)
def test_a_merge_that_begins_early_on_a_full_device_is_spread(blocks, changes, has_room):
    limits = DeviceLimits(**{"arch": 90, **changes})
    split, merge = paged_plan(num_seqs=1, block_tables=ArraySpec((1, blocks), "int32"), limits=limits).launches
    assert (split.room, merge.room > 0) == (0, has_room)


def test_the_merge_of_chunks_waits_for_nothing_on_older_devices():
    plan = paged_plan(num_seqs=1, limits=DeviceLimits(arch=89))
    for launch in plan.launches:
        variant = kernel_variant(launch, plan.specs)
        assert "launch_pdl" not in variant.options()
        assert "griddepcontrol" not in compile_variant(variant, 89).asm["ptx"]
