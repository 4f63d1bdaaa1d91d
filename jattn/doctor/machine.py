"""The parts of the doctor that look without running anything: versions, devices, memory, environment, threads."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PACKAGES = ("jattn", "jax", "jaxlib", "flax", "torch", "triton", "numpy", "safetensors", "tokenizers", "transformers")
_OPTIONAL = {"transformers": "not installed (jattn crosscheck then uses its own torch decoder)"}
#: The variables that change jattn's behaviour or the memory of either side.
_VARIABLES = (
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_COMPILATION_CACHE_DIR",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
)


def versions() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields Python, the platform and every package that matters."""
    yield "python", platform.python_version
    yield "platform", platform.platform
    for package in _PACKAGES:
        yield package, functools.partial(_version, package)


def _version(package: str) -> str:
    if package in _OPTIONAL:
        # Slow to import, and not needed for its version.
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return _OPTIONAL[package]
    if package == "triton" and not sys.platform.startswith("linux"):
        return "not installed (Linux only)"
    return str(importlib.import_module(package).__version__)


def devices() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the devices that JAX and torch see."""
    yield from (("jax", _jax_devices), ("torch", _torch_devices), ("together", _together))


def _jax_devices() -> str:
    import jax

    kinds = [f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.devices()]
    return f"{', '.join(kinds)}; default backend {jax.default_backend()!r}"


def _together() -> str:
    import jax
    import torch

    jax_on_cuda, torch_on_cuda = jax.default_backend() == "gpu", torch.cuda.is_available()
    if torch_on_cuda and not jax_on_cuda:
        return "torch sees a GPU and JAX does not: pip install 'jattn[cuda13]', or look at JAX_PLATFORMS"
    if jax_on_cuda and not torch_on_cuda:
        return "JAX sees a GPU and torch does not: implementation='torch' and shared memory need a CUDA build of torch"
    return f"both use the {'GPU' if jax_on_cuda else 'CPU'}"


def _torch_devices() -> str:
    import torch

    if torch.version.cuda is None:
        return "cpu (this torch was built without CUDA)"
    if not torch.cuda.is_available():
        return f"cpu (built for CUDA {torch.version.cuda}, but torch finds no usable driver or device)"
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    names = [f"cuda:{index} ({each.name}, sm_{each.major}{each.minor})" for index, each in enumerate(found)]
    return f"{', '.join(names)}; built for CUDA {torch.version.cuda}"


def memory() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the host's memory, and on CUDA each side's share of every device."""
    yield "host", _host_memory
    import jax

    if jax.default_backend() == "gpu":
        for device in jax.local_devices():
            yield f"cuda:{device.id} jax", functools.partial(_jax_memory, device)
            yield f"cuda:{device.id} torch", functools.partial(_torch_memory, device.id)


def _host_memory() -> str:
    total = _gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    info = Path("/proc/meminfo")
    if not info.exists():
        return f"{total} in all"
    # The memory that Linux can give a new process without swapping, page cache included.
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    return f"{_gib(int(fields['MemAvailable'].split()[0]) * 1024)} available of {total}"


def _jax_memory(device: Any) -> str:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return "the allocator gives no figures (XLA_PYTHON_CLIENT_ALLOCATOR=platform?)"
    used, peak = (_gib(stats.get(name, 0)) for name in ("bytes_in_use", "peak_bytes_in_use"))
    return f"{used} in use, peak {peak}, takes up to {_gib(stats['bytes_limit'])}"


def _torch_memory(index: int) -> str:
    import torch

    if not torch.cuda.is_available():
        return "torch has no CUDA"
    free, total = torch.cuda.mem_get_info(index)
    return f"{_gib(torch.cuda.memory_reserved(index))} reserved; {_gib(free)} of {_gib(total)} free for both"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def environment() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the set variables that change jattn's behaviour or the memory of either side."""
    present = [(name, functools.partial(os.environ.__getitem__, name)) for name in _VARIABLES if name in os.environ]
    yield from present or [("variables", lambda: "none that matters here is set")]


def threads() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields cores and thread counts."""
    yield from (("cores", _cores), ("torch threads", _torch_threads))


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} usable of {os.cpu_count()}; XLA makes one thread for each usable core"


def _torch_threads() -> str:
    import torch

    return f"{torch.get_num_threads()} within an operation, {torch.get_num_interop_threads()} between operations"


def compile_caches() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the folders where compiled programs and kernels are kept."""
    yield from (("xla", _xla_cache), ("triton", _triton_cache), ("jattn kernels", _kernel_cache))


def _xla_cache() -> str:
    import jax

    from jattn.compilation_cache import MAX_BYTES, default_folder

    folder: str | None = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    if folder is None:
        return f"{_folder(default_folder())}, of the command line alone, at most {MAX_BYTES >> 20} MiB"
    return _folder(Path(folder))


def _triton_cache() -> str:
    from triton import knobs

    return _folder(Path(knobs.cache.dir))


def _kernel_cache() -> str:
    from jattn.bridge.kernel_cache import default_directory

    return _folder(default_directory())


def _folder(path: Path) -> str:
    if not path.exists():
        return f"{path} (not made yet)"
    sizes = [entry.stat().st_size for entry in path.rglob("*") if entry.is_file()]
    return f"{path} ({len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB)"
