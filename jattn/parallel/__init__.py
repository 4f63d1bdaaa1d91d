"""Inside `jax.shard_map`: sequences whose tokens are spread over devices, and sums of small arrays."""

from jattn.parallel.all_reduce import Peers, all_reduce, all_reduce_norm, exchange, sum_in_order
from jattn.parallel.decode import attend_spread, merge_over_axis, paged_attention, write_kv_cache
from jattn.parallel.prefill import all_gather_attention, ring_attention, zigzag_order

__all__ = [
    "Peers",
    "all_gather_attention",
    "all_reduce",
    "all_reduce_norm",
    "attend_spread",
    "exchange",
    "merge_over_axis",
    "paged_attention",
    "ring_attention",
    "sum_in_order",
    "write_kv_cache",
    "zigzag_order",
]
