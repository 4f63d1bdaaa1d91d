"""The fast plain-torch implementation of every call, for CPU tensors and without any check.

`torch_core.launch.run` checks a call and then runs it here; a caller that has checked already (at trace time, say)
may run it directly. Results do not depend on the other sequences of a batch, on block ids, or on the content of unused
slots: bit for bit, for a fixed number of threads.
"""

from __future__ import annotations

from torch import Tensor

from torch_core.launch.call import Call
from torch_core.launch.op import loaded, op_of


def run_on_cpu(call: Call[Tensor]) -> dict[str, Tensor]:
    """Computes a checked call; returns its results by name (`out`, `lse`), given ones included."""
    return loaded(op_of(call).cpu)(call) or {}
