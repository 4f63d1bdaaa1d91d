"""The fast plain-torch implementation of every public operation, for CPU tensors and without any argument checks.

`torch_core.run` checks its arguments and then calls these functions; a caller that has checked already (at trace
time, say) may call them directly. Results do not depend on the other sequences of a batch, on where blocks lie in
the cache, or on what unused slots hold: bit for bit, for a fixed number of threads.
"""

from torch_core.cpu.blocks import copy_blocks, write_kv_cache
from torch_core.cpu.dense import attention, attention_with_lse
from torch_core.cpu.merge import merge_states
from torch_core.cpu.paged import paged_attention, paged_attention_with_lse

__all__ = [
    "attention",
    "attention_with_lse",
    "copy_blocks",
    "merge_states",
    "paged_attention",
    "paged_attention_with_lse",
    "write_kv_cache",
]
