"""vLLM's attention operations by their names and parameters, over this project's: code written for vLLM runs by import.

Parameter names, order and defaults are those of vLLM 0.33 (vllm/v1/attention/ops); a test compares them with its table
of vLLM's. Arguments that vLLM passes only for its own kernels (segment buffers, thresholds, descriptor switches) are
accepted and ignored. Options without a counterpart here are accepted with vLLM's default and raise `Unsupported` for
another value; shapes and dtypes that do not fit raise `InvalidInput`. vLLM has two operations
`context_attention_fwd`: the one without a cache is here, the other in `torch_core.vllm.ops.prefix_prefill`.
"""

from torch_core.vllm.ops.attention import (
    context_attention_fwd,
    merge_attn_states,
    unified_attention,
    unified_attention_diffkv,
)
from torch_core.vllm.ops.cache import (
    triton_reshape_and_cache_flash,
    triton_reshape_and_cache_flash_diffkv,
    triton_reshape_and_cache_flash_per_token_head_quant,
)
from torch_core.vllm.ops.decode import decode_attention_fwd
from torch_core.vllm.ops.prefix_prefill import chunked_prefill_paged_decode

__all__ = [
    "chunked_prefill_paged_decode",
    "context_attention_fwd",
    "decode_attention_fwd",
    "merge_attn_states",
    "triton_reshape_and_cache_flash",
    "triton_reshape_and_cache_flash_diffkv",
    "triton_reshape_and_cache_flash_per_token_head_quant",
    "unified_attention",
    "unified_attention_diffkv",
]
