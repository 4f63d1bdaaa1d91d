"""What XLA makes of a program for an H200, on a machine without one: its text after all passes.

Needs JAX's CUDA plugin beside jaxlib (`pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt`, of jax's version) and
Triton, whose assembler XLA borrows; no driver and no CUDA. Kernels are empty: what is looked at is what lies around.
"""

from __future__ import annotations

import atexit
import importlib.util
import multiprocessing
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

__all__ = ["compiled_for_cuda", "computations", "why_not"]

_PLUGIN = "jax_plugins.xla_cuda13"
# stream_executor.GpuTargetConfigProto, as far as XLA's passes ask for it.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation"
  name: "NVIDIA H200" device_address_bits: 64 driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def why_not() -> str | None:
    """Returns what is missing here, or None."""
    for name in ("triton", "jax_plugins", _PLUGIN):
        if importlib.util.find_spec(name) is None:
            return f"needs {name}"
    return None


def compiled_for_cuda(
    make: Callable[..., tuple[Any, ...]],
    *args: Any,
    donate: tuple[int, ...] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Returns the text of a program; it is made in a process of its own, where JAX has an H200 to compile for.

    Args:
        make: a module's function that returns the function and its arguments, arrays or their specs.
        *args: for it.
        donate: numbers of the function's arguments.
        options: XLA's, of this program.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start) as process:
        return process.submit(_compile, make, args, donate, dict(options)).result()


def computations(text: str) -> dict[str, list[str]]:
    """Returns the instructions of a program's computations by their names."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"\n(?=%|ENTRY )", text):
        head, *lines = part.splitlines()
        found[head.split(" (")[0]] = [line.strip() for line in lines]
    return found


def _start() -> None:
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia"
    os.environ["PATH"] = f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    # XLA looks for mathematical functions where CUDA has them, and JAX tells it where that is.
    cuda = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, cuda)
    (cuda / "nvvm").mkdir()
    (cuda / "nvvm/libdevice").symlink_to(tools / "lib")
    os.environ["CUDA_ROOT"] = str(cuda)
    # There is no device to try tiles of products on, and no CUDA whose version could be looked at.
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)


def _compile(
    make: Callable[..., tuple[Any, ...]], args: tuple[Any, ...], donate: tuple[int, ...], options: dict[str, Any]
) -> str:
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    topology = topologies.get_topology_desc(platform="cuda", target_config=_H200, topology="1x1x1")
    place = SingleDeviceSharding(topology.devices[0])
    jax.config.update("jax_platforms", "cpu")
    _take_cuda_for_granted()
    function, *operands = make(*args)
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), operands)
    traced = jax.jit(function, donate_argnums=donate).trace(*specs)
    return str(traced.lower(lowering_platforms=("cuda",)).compile(options).as_text())


def _take_cuda_for_granted() -> None:
    import importlib

    from jattn.bridge import native
    from torch_core.launch.plan import DeviceLimits

    choose: Any = importlib.import_module("jattn.ops.choose")
    choose.available_implementations = lambda: dict.fromkeys(choose.IMPLEMENTATIONS)
    patched: Any = native
    patched.device_limits, patched._code = DeviceLimits, _empty_kernel


def _empty_kernel(launch: Any, specs: Any, *_: Any) -> Any:
    from jaxlib import gpu_triton

    from jattn.bridge.launch import KernelCode

    launcher: Any = getattr(gpu_triton, "_cuda_triton", gpu_triton)
    parameters = [launcher.create_array_parameter(0, 1) for _ in specs]
    # The launcher adds two of its own.
    declared = ", ".join(f".param .u64 p{index}" for index in range(len(parameters) + 2))
    code = f".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry {launch.name}({declared}) {{ ret; }}"
    kernel = launcher.TritonKernel(launch.name, 4, 1, 0, code, "", 90)
    call = launcher.TritonKernelCall(kernel, 1, 1, 1, parameters)
    return KernelCode(whole=zlib.compress(call.to_proto(launch.name, b"")))
