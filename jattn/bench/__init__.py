"""Benchmarks: `jattn bench NAME` runs the module NAME of this package; each has `run(...)` and `main(argv)`."""
