"""Benchmarks: `jattn bench NAME` runs the `Benchmark` that `load_benchmark` returns by `jattn.bench.runner.main`."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["NAMES", "load_benchmark"]

#: The benchmarks of the command line, each with its module and its name there.
NAMES = {
    "generate": "generate.BENCHMARK",
    "allocator": "allocator.BENCHMARK",
    "decode": "decode.BENCHMARK",
    "prefill": "prefill.BENCHMARK",
    "backward": "backward.BENCHMARK",
    "load": "load.BENCHMARK",
    "overhead": "overhead.BENCHMARK",
    "module": "module.BENCHMARK",
    "mla": "mla.BENCHMARK",
    "moe": "moe.BENCHMARK",
    "states": "states.BENCHMARK",
    "engine": "engine.BENCHMARK",
    "tune": "tune.BENCHMARK",
    "compilers": "compilers.BENCHMARK",
    "devices": "devices.BENCHMARK",
    "serve": "serve.BENCHMARK",
    "cascade": "decode.CASCADE",
    "chunks": "prefill.CHUNKS",
    "mixed": "prefill.MIXED",
    "mla-prefill": "mla.PREFILL",
    "mla-sparse": "mla_sparse.BENCHMARK",
}


def load_benchmark(name: str) -> Any:
    """Returns the `jattn.bench.runner.Benchmark` of a name, whose libraries are imported only now."""
    module, _, attribute = NAMES[name].partition(".")
    return getattr(importlib.import_module(f"jattn.bench.{module}"), attribute)
