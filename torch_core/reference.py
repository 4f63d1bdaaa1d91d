"""The specification of every op: plain torch, one sequence at a time, written to be read.

The fast implementations are tested against it. A function takes a call and returns its outputs. It makes no attempt at
speed. `compute_dtype=torch.float64` gives the oracle of the tests; `compute_dtype=query.dtype` gives the "same-dtype
torch reference" whose error bounds the error that a kernel may have.

The functions lie in the ops' rooms. This module finds them by the name that an op's record gives:

    >>> from torch_core import reference
    >>> reference.paged_attention.__module__
    'torch_core.attention.reference.attention'
"""

from __future__ import annotations

from typing import Any

from torch_core.launch.op import loaded, registered_ops
from torch_core.serves import ROOMS as ROOMS


def __getattr__(name: str) -> Any:
    for op in registered_ops():
        if op.reference.endswith(f":{name}"):
            return loaded(op.reference)
    raise AttributeError(f"module 'torch_core.reference' has no attribute {name!r}")
