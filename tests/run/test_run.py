"""Running operation plans on torch tensors; on the CPU through Triton's interpreter."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from triton.experimental import gluon

from tests.support.attention_plans import paged_call
from tests.support.gluon_kernels import scaled_copy
from tests.support.interpret import run_interpreted, run_interpreted_operation
from tests.support.sample_kernels import double_and_add, double_kernel, double_launch
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch import launcher
from torch_core.launch.compile import compile_variant, kernel_variant
from torch_core.launch.launcher import run_operation, run_planned
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.tensors import array_spec, torch_dtype


def test_launches_of_an_operation_see_what_earlier_ones_wrote():
    x, total = torch.arange(16.0), torch.ones(16)
    results = run_interpreted_operation(double_and_add(), {"x": x, "total": total})
    assert torch.equal(total, 1 + 3 * x)
    assert torch.equal(results["copy"], total)
    assert list(results) == ["copy"]


def test_a_given_output_is_filled_and_returned():
    x, copy = torch.arange(16.0), torch.full((16,), torch.nan)
    results = run_interpreted_operation(double_and_add(), {"x": x, "total": torch.zeros(16), "copy": copy})
    assert results["copy"] is copy
    assert torch.equal(copy, 3 * x)


def test_a_missing_input_is_named():
    with pytest.raises(InvalidInput, match=r"double_and_add: tensors lacks the inputs \['total'\]; give"):
        run_operation(double_and_add(), {"x": torch.zeros(16)})


@pytest.mark.parametrize(
    "copy",
    [torch.zeros(15), torch.zeros(16, dtype=torch.float16), torch.zeros(32)[::2]],
    ids=["shape", "dtype", "strides"],
)
def test_an_output_of_another_layout_is_refused(copy):
    with pytest.raises(InvalidInput, match=r"double_and_add: copy is .* it must be float32\[16\] with strides \(1,\)"):
        run_operation(double_and_add(), {"x": torch.zeros(16), "total": torch.zeros(16)}, {"copy": copy})


def test_a_call_that_the_kernels_do_not_serve_is_refused_by_what_there_is_for_tensors():
    specs = paged_call(head_size=544, num_seqs=1, kv_cache=ArraySpec((2, 2, 16, 2, 544), "bfloat16"))
    call = specs.map(lambda spec: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)))
    with pytest.raises(Unsupported) as error:
        run_planned(call, call.arrays(), torch.device("cpu"))
    assert str(error.value) == (
        "paged_attention: head_size is 544 and its limit 512, which the kernels for CUDA do not serve; tensors on a "
        "CPU are served."
    )


def test_a_spec_of_a_tensor_says_layout_and_alignment():
    tensor = torch.zeros(4, 6, dtype=torch.float16)
    assert array_spec(tensor) == ArraySpec((4, 6), "float16")
    assert array_spec(tensor.T) == ArraySpec((6, 4), "float16", (1, 6))
    assert not array_spec(tensor.flatten()[1:]).aligned


def test_dtypes_have_the_names_of_the_specs():
    assert torch_dtype("float8_e4m3fn") is torch.float8_e4m3fn
    assert array_spec(torch.zeros(1, dtype=torch.bool)).dtype == "bool"


def test_a_kernel_compiles_after_it_was_interpreted_in_the_same_process():
    launch = double_launch(16)
    specs = {"x": ArraySpec((16,), "float32"), "doubled": ArraySpec((16,), "float32")}
    variant = kernel_variant(launch, specs)
    before = compile_variant(variant, 90).asm["ttir"]
    run_interpreted_operation(double_and_add(), {"x": torch.zeros(16), "total": torch.zeros(16)})
    assert compile_variant(variant, 90).asm["ttir"] == before


def test_the_interpreter_rounds_as_the_hardware_does():
    # Halfway cases go to even; 3.9 in e4m3 carries into the exponent; 1e5 saturates in fp8.
    values = torch.tensor([1.00390625, 1.01171875, 3.9, 1e5, -1e-9, 0.3, 449.0, 17.0])
    values = torch.cat([values, torch.tensor([torch.nan, torch.inf])]).repeat(2)[:16].contiguous() / 3
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        result = torch.zeros(16, dtype=dtype)
        arguments = {
            "x_ptr": values,
            "bias_ptr": None,
            "factor": 1.5,
            "count": 16,
            "stride": 1,
            "y_ptr": result,
            "N": 16,
        }
        run_interpreted(double_kernel, (1,), arguments)
        exact = (values + values) * 1.5
        if dtype.itemsize == 1:
            exact = exact.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        assert torch.equal(result.float().nan_to_num(7), exact.to(dtype).float().nan_to_num(7))


@gluon.jit
def _gluon_kernel(x_ptr):
    pass


def test_a_gluon_kernel_cannot_be_interpreted():
    with pytest.raises(Unsupported, match="kernel _gluon_kernel is written in Gluon, which has no interpreter"):
        run_interpreted(_gluon_kernel, (1,), {"x_ptr": torch.zeros(1)})


def test_code_is_loaded_onto_the_device_of_the_tensors_whichever_is_current(monkeypatch):
    current, loaded = [0], []

    @contextlib.contextmanager
    def device(index: int):
        before, current[0] = current[0], index
        yield
        current[0] = before

    class Compiled:
        """A kernel whose code goes to the current device when `run` is first read, as Triton's."""

        metadata = SimpleNamespace(shared=0)
        packed_metadata = (4, 1, 0)

        @property
        def run(self) -> None:
            loaded.append(current[0])

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launcher, "device_limits", lambda device: DeviceLimits())
    monkeypatch.setattr(launcher, "compile_variant", lambda variant, arch: Compiled())

    launcher._prepared.__wrapped__(double_and_add(), 1)

    assert loaded == [1] * len(double_and_add().launches)


def test_the_room_of_a_launch_is_not_that_of_another_with_the_same_kernel(monkeypatch):
    seen = []
    compiled = SimpleNamespace(
        metadata=SimpleNamespace(shared=64),
        packed_metadata=(4, 1, 64),
        function=None,
        run=lambda x, y, z, stream, function, packed, *rest: seen.append(packed),
    )
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(launcher, "device_limits", lambda device: DeviceLimits())
    monkeypatch.setattr(launcher, "compile_variant", lambda variant, arch: compiled)
    plan = double_and_add()
    wide = replace(plan, launches=tuple(replace(launch, room=4096) for launch in plan.launches))
    tensors = {"x": torch.zeros(16), "total": torch.zeros(16), "copy": torch.zeros(16)}
    buffers = {**tensors, **{name: torch.zeros(spec.shape) for name, spec in plan.scratch}}

    for each in (wide, plan):
        launcher._launch(launcher._prepared.__wrapped__(each, 0), buffers, torch.device("cuda", 0))

    assert [packed[2] for packed in seen] == [4096] * len(plan.launches) + [64] * len(plan.launches)


@pytest.mark.gpu
@pytest.mark.skipif("__import__('torch').cuda.device_count() < 2", reason="needs two GPUs")
def test_an_operation_runs_on_a_device_that_is_not_the_current_one():
    x, total = torch.arange(16.0, device="cuda:1"), torch.zeros(16, device="cuda:1")
    run_operation(double_and_add(), {"x": x, "total": total})
    assert torch.equal(total, 3 * x)


@pytest.mark.gpu
def test_an_operation_runs_on_cuda_and_is_captured_in_a_graph():
    x, total = torch.arange(16.0, device="cuda"), torch.zeros(16, device="cuda")
    run_operation(double_and_add(), {"x": x, "total": total})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_operation(double_and_add(), {"x": x, "total": total})
    graph.replay()
    graph.replay()
    assert torch.equal(total, 9 * x)
    assert torch.equal(results["copy"], total)


@pytest.mark.gpu
def test_an_array_on_another_device_is_named():
    with pytest.raises(
        InvalidInput, match="double_and_add: total is on cpu and the first input on cuda:0; move it there"
    ):
        run_operation(double_and_add(), {"x": torch.zeros(16, device="cuda"), "total": torch.zeros(16)})


@pytest.mark.gpu
def test_an_array_that_is_less_aligned_than_planned_is_named():
    x = torch.arange(17.0, device="cuda")[1:]
    with pytest.raises(InvalidInput, match="double_and_add: x starts 4 bytes after a multiple of 16"):
        run_operation(double_and_add(), {"x": x, "total": torch.zeros(16, device="cuda")})


@pytest.mark.gpu
def test_a_gluon_kernel_reads_through_a_descriptor_in_and_out_of_a_graph():
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    found = run_operation(scaled_copy(), {"x": x})["y"]
    assert torch.equal(found, x * 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_operation(scaled_copy(), {"x": x})["y"]
    x.neg_()
    graph.replay()
    assert torch.equal(captured, x * 3)
