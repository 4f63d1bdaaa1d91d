"""Memory for block ids: the cache arrays of a model, their size, and room for blocks that wait on the host."""

from jattn.pool.host import HostBlocks
from jattn.pool.kv_pool import KVPool
from jattn.pool.plan import PoolPlan, check_room, free_bytes, plan_pool

__all__ = ["HostBlocks", "KVPool", "PoolPlan", "check_room", "free_bytes", "plan_pool"]
