"""The attention backend contract of vLLM's engine as a library: backends, their choice, builders and graph capture.

The `__all__` of each file lists its public names; import `torch_core.vllm.ops`, which has the operations, by itself.
"""

# ruff: noqa: F403
from torch_core.vllm.backend import *
from torch_core.vllm.backends import *
from torch_core.vllm.builder import *
from torch_core.vllm.capture import *
from torch_core.vllm.config import *
from torch_core.vllm.groups import *
from torch_core.vllm.impl import *
from torch_core.vllm.legacy import *
from torch_core.vllm.mla import *
from torch_core.vllm.mla_builder import *
from torch_core.vllm.mla_impl import *
from torch_core.vllm.mla_metadata import *
from torch_core.vllm.paged_builder import *
from torch_core.vllm.paged_impl import *
from torch_core.vllm.paged_metadata import *
from torch_core.vllm.prompt_ranks import *
from torch_core.vllm.registry import *
from torch_core.vllm.types import *
from torch_core.vllm.upload import *
from torch_core.vllm.workspace import *
