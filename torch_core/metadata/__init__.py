"""From the rows of a step to the int32 arrays that every backend and JAX share; numpy only, no torch, no jax.

The `__all__` of each file lists its public names.
"""

# ruff: noqa: F403
from torch_core.metadata.batch import *
from torch_core.metadata.buckets import *
from torch_core.metadata.build import *
from torch_core.metadata.cache_groups import *
from torch_core.metadata.cascade import *
from torch_core.metadata.check import *
from torch_core.metadata.common import *
from torch_core.metadata.context_parallel import *
from torch_core.metadata.dense import *
from torch_core.metadata.derived import *
from torch_core.metadata.encoder import *
from torch_core.metadata.groups import *
from torch_core.metadata.layout import *
from torch_core.metadata.rows import *
from torch_core.metadata.slots import *
from torch_core.metadata.table_cache import *
