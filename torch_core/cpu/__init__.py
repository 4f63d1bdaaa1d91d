"""The fast plain-torch implementation of every call, for CPU tensors and without any check.

`torch_core.run` checks a call and then runs it here; a caller that has checked already (at trace time, say) may run it
directly. Results do not depend on the other sequences of a batch, on where blocks lie in the cache, or on what unused
slots hold: bit for bit, for a fixed number of threads.
"""

from torch_core.cpu.run import run_on_cpu

__all__ = ["run_on_cpu"]
