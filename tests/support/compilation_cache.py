"""JAX's persistent compilation cache, for a test."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from jattn.compilation_cache import cache_settings

__all__ = ["programs_kept_in"]


def programs_kept_in(folder: Path) -> AbstractContextManager[None]:
    """JAX keeps each program that is compiled in a folder, however little time that took, and finds it there."""
    return cache_settings(
        {
            "jax_compilation_cache_dir": str(folder),
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
    )
