"""JAX's persistent compilation cache, for a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

__all__ = ["programs_kept_in"]


@contextlib.contextmanager
def programs_kept_in(folder: Path) -> Iterator[None]:
    """JAX keeps each program that is compiled in a folder, however little time that took, and finds it there."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
