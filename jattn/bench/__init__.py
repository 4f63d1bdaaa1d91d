"""Benchmarks: `jattn bench NAME` runs `BENCHMARK` of the module of that name by `jattn.bench.runner.main`."""

__all__ = ["NAMES"]

#: The benchmarks of the command line; a hyphen is an underscore in the module's name.
NAMES = (
    "generate",
    "allocator",
    "decode",
    "prefill",
    "backward",
    "load",
    "overhead",
    "module",
    "mla",
    "moe",
    "engine",
    "tune",
    "compilers",
    "serve",
    "cascade",
    "chunks",
    "mixed",
    "mla-prefill",
)
