"""Compiled kernels for the native bridge: in memory, and on disk in a directory that only its owner can write.

Triton has its own disk cache and trusts its files, in a directory that TRITON_CACHE_DIR may move anywhere. A
compilation here neither reads nor writes it. Kernels that torch runs (`torch_core.launch.run`) still use it, like every
Triton kernel of the process; keep this in mind if accounts are shared or that variable is set.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_core.base.errors import Unsupported

if TYPE_CHECKING:
    from torch_core.launch.compile import KernelVariant

# Part of every key: raise it when the contents of a file change their meaning.
_FORMAT = 2
_LOCK = threading.Lock()
# One for each compilation under way, and Triton's setting while there is one.
_UNDER_WAY: list[None] = []
_SETTING = contextlib.ExitStack()


@dataclass(frozen=True)
class TensorMap:
    """The compile-time facts of one TMA descriptor parameter.

    Attributes:
        element_type: CUtensorMapDataType, as the driver numbers it.
        swizzle: CUtensorMapSwizzle.
        box: elements of one copy per axis, as the kernel's shared memory is laid out.
    """

    element_type: int
    swizzle: int
    box: tuple[int, ...]


@dataclass(frozen=True)
class KernelImage:
    """A compiled kernel, as much of it as a launch needs.

    Attributes:
        name: the entry point in `ptx`.
        ptx: the code.
        cubin: Triton's machine code, which torch launches too.
        num_warps: warps of one block, the workers of a warp-specialised kernel included.
        shared_memory: bytes of dynamic shared memory.
        tensor_maps: one per descriptor parameter, in order.
    """

    name: str
    ptx: str
    cubin: bytes
    num_warps: int
    shared_memory: int
    tensor_maps: tuple[TensorMap, ...] = ()


def default_directory() -> Path:
    """Returns the directory that is used unless another one is given: `.cache/jattn/kernels` in the user's home."""
    return Path.home() / ".cache" / "jattn" / "kernels"


class KernelCache:
    """Compiles each kernel variant once, for this process and for later ones.

    Files are code: a user who can write them controls the device. So a directory that others may write is refused, a
    file is written completely or not at all, and a kernel whose checksum does not match is compiled again. A full or
    read-only disk only costs later processes a compilation.

    Args:
        directory: directory of the kernels; created with mode 700. None keeps them in memory only.

    Raises:
        Unsupported: the directory belongs to another user, or others may write it; the message has the command.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._images: dict[tuple[KernelVariant, int], Future[KernelImage]] = {}
        self._lock = threading.Lock()
        self.num_compiled = 0
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(directory)

    def get(self, variant: KernelVariant, arch: int) -> KernelImage:
        """Returns the compiled variant for CUDA compute capability `arch` (90 for Hopper).

        Raises:
            Unsupported: the kernel needs scratch memory made by the launcher, which a captured custom call cannot have.
        """
        with self._lock:
            made = self._images.get((variant, arch))
            is_new = made is None
            if made is None:
                made = self._images[variant, arch] = Future()
        if not is_new:
            try:
                return made.result()
            except CancelledError:
                return self.get(variant, arch)
        try:
            made.set_result(self._load_or_compile(variant, arch))
        except BaseException:
            with self._lock:
                del self._images[variant, arch]
            # An interrupt is for this thread alone: those that wait try for themselves.
            made.cancel()
            raise
        return made.result()

    def _load_or_compile(self, variant: KernelVariant, arch: int) -> KernelImage:
        path = None if self._directory is None else self._directory / f"{_key(variant, arch)}.json"
        image = None if path is None else _read(path)
        if image is None:
            image = _compile(variant, arch)
            with self._lock:
                self.num_compiled += 1
            if path is not None:
                _write(path, image)
        return image


def _key(variant: KernelVariant, arch: int) -> str:
    import triton

    parts = (_FORMAT, variant.key(), triton.__version__, arch)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _compile(variant: KernelVariant, arch: int) -> KernelImage:
    from torch_core.launch.compile import compile_variant

    with _without_tritons_cache():
        compiled = compile_variant(variant, arch)
    metadata = compiled.metadata
    if metadata.global_scratch_size:
        raise Unsupported(
            f"kernel {variant.name} asks the launcher for {metadata.global_scratch_size} bytes of scratch, which a "
            "captured custom call cannot give; make its TMA descriptors on the host, its scratch a buffer of the plan."
        )
    return KernelImage(
        name=metadata.name,
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        num_warps=metadata.num_warps,
        shared_memory=metadata.shared,
        tensor_maps=tuple(_tensor_map(entry) for entry in getattr(metadata, "tensordesc_meta", None) or ()),
    )


@contextlib.contextmanager
def _without_tritons_cache() -> Iterator[None]:
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class UnsharedCache(FileCacheManager):
        """Gives each compilation a new private directory, gone with the compilation."""

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            if override or dump:
                # The settings of TRITON_KERNEL_OVERRIDE and TRITON_KERNEL_DUMP, by name.
                super().__init__(key, override, dump)
                return
            self.key, self.cache_dir = key, tempfile.mkdtemp(prefix="jattn-")
            self.lock_path = self._make_path("lock")
            weakref.finalize(self, shutil.rmtree, self.cache_dir, ignore_errors=True)

    # The setting is the process's, for as long as any compilation runs. A kernel that another thread compiles meanwhile
    # is not kept on disk, nothing else.
    with _LOCK:
        if not _UNDER_WAY:
            _SETTING.enter_context(knobs.cache.scope())
            knobs.cache.manager_class = UnsharedCache
        _UNDER_WAY.append(None)
    try:
        yield
    finally:
        with _LOCK:
            _UNDER_WAY.pop()
            if not _UNDER_WAY:
                _SETTING.close()


def _tensor_map(entry: dict[str, Any]) -> TensorMap:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return TensorMap(
        TMA_DTYPE_DEVICE_TO_HOST[entry["elem_type"]], entry["swizzle"], tuple(int(size) for size in entry["block_size"])
    )


def _read(path: Path) -> KernelImage | None:
    try:
        record = json.loads(path.read_text())
        body = record["kernel"]
        if record["checksum"] != _checksum(body):
            return None
        maps = tuple(TensorMap(m["element_type"], m["swizzle"], tuple(m["box"])) for m in body["tensor_maps"])
        return KernelImage(**{**body, "cubin": base64.b64decode(body["cubin"]), "tensor_maps": maps})
    except (OSError, ValueError, KeyError, TypeError):
        # Missing, or cut short by another program: the caller compiles and replaces it.
        return None


def _write(path: Path, image: KernelImage) -> None:
    body = {**asdict(image), "cubin": base64.b64encode(image.cubin).decode()}
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        temporary = Path(name)
        with os.fdopen(handle, "w") as file:
            json.dump({"checksum": _checksum(body), "kernel": body}, file)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def check_private(directory: Path) -> None:
    """Refuses a directory of compiled code that another user may write.

    Raises:
        Unsupported: it may be written or replaced by others; the message has the command.
    """
    status = directory.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise Unsupported(f"the cache {directory} is a symbolic link; name the directory itself.")
    if status.st_uid != os.getuid():
        raise Unsupported(
            f"the cache {directory} belongs to user {status.st_uid}; use one of your own (uid {os.getuid()})."
        )
    if status.st_mode & 0o022:
        raise Unsupported(f"others may write the cache {directory}; run: chmod go-w {directory}")
    for parent in directory.resolve().parents:
        mode = parent.stat().st_mode
        if mode & 0o002 and not mode & stat.S_ISVTX:
            raise Unsupported(f"everybody may replace the cache {directory}; run: chmod o-w {parent}")
