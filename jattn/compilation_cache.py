"""The folder in which the command line keeps compiled programs for its next run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_core.base.errors import Unsupported

#: The programs used last stay within this size.
MAX_BYTES = 2 << 30
# A program that compiles faster is not worth a file.
_LEAST_SECONDS = 0.1


def default_folder() -> Path:
    """Returns `jattn/programs` in the user's cache folder, which XDG_CACHE_HOME or the platform's rule names."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    # The specification ignores a relative path.
    return (Path(given) if os.path.isabs(given) else base) / "jattn" / "programs"


@contextlib.contextmanager
def keeping_programs(is_wanted: bool = True) -> Iterator[None]:
    """JAX keeps the programs that the body compiles in `default_folder`, and finds them there.

    JAX_COMPILATION_CACHE_DIR names another folder, with JAX's own settings. A folder that cannot be made, or that
    others may write, is not used, and stderr says so.
    """
    if not is_wanted or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        yield
        return
    # Imported here, so that a command's help does not wait for jax.
    from jattn.bridge.kernel_cache import check_private

    folder = default_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name == "posix":
            check_private(folder)
    except (OSError, Unsupported) as error:
        sys.stderr.write(f"jattn: compiled programs are not kept: {error}\n")
        yield
        return
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": MAX_BYTES,
        "jax_persistent_cache_min_compile_time_secs": _LEAST_SECONDS,
    }
    with cache_settings(settings):
        yield


@contextlib.contextmanager
def cache_settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """Sets options of JAX's compilation cache for the body, by name."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        # JAX reads these settings once.
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
