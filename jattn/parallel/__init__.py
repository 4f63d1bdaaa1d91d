"""Context parallelism: sequences whose tokens are spread over the devices of a mesh axis, inside `jax.shard_map`."""

from jattn.parallel.decode import merge_over_axis, paged_attention, write_kv_cache
from jattn.parallel.layer import attend_spread
from jattn.parallel.prefill import all_gather_attention, ring_attention, zigzag_order

__all__ = [
    "all_gather_attention",
    "attend_spread",
    "merge_over_axis",
    "paged_attention",
    "ring_attention",
    "write_kv_cache",
    "zigzag_order",
]
