"""Calls on torch tensors: launch plans on CUDA, plain torch on a CPU."""

from torch_core.run.run import run, run_all, scratch_of
from torch_core.run.tensors import array_spec, dtype_name, torch_dtype

__all__ = ["array_spec", "dtype_name", "run", "run_all", "scratch_of", "torch_dtype"]
