"""Attention on JAX arrays: keywords make a call, and one function checks it, chooses and crosses the bridge."""

from jattn.ops.adapters import AdapterRows, add_lora_linear
from jattn.ops.arguments import MASK_OPTIONS
from jattn.ops.attention import (
    POSITIONAL,
    CallOptions,
    PagedOptions,
    attention,
    attention_with_lse,
    paged_attention,
    paged_attention_with_lse,
)
from jattn.ops.cache import CacheScales, write_kv_cache, write_kv_cache_per_token_head
from jattn.ops.cascade import cascade_attention, shared_prefix
from jattn.ops.causal_conv import causal_conv1d
from jattn.ops.choose import available_implementations, choose, launches_kernels
from jattn.ops.deferred import DeferredStates
from jattn.ops.dropout import dropout_seeds
from jattn.ops.expert_adapters import ExpertAdapters
from jattn.ops.experts import fused_experts, route_experts
from jattn.ops.fp8_query import fp8_query, takes_fp8_query
from jattn.ops.gated_delta import gated_delta_rule
from jattn.ops.latent import mla_attention, mla_attention_with_lse, write_latent_cache
from jattn.ops.leaks import refuse_leaked
from jattn.ops.logprobs import token_logprobs
from jattn.ops.mamba import mamba_chunk_scan
from jattn.ops.masked import masked_attention
from jattn.ops.merge import merge_states
from jattn.ops.rotate_and_write import rotate_and_write
from jattn.ops.rowwise import (
    QuantizedRows,
    gates_rows,
    quantizes_rows,
    row_logsumexp,
    row_norm,
    row_product,
    row_quantize,
)
from jattn.ops.run import run
from jattn.ops.sparse import indexer_topk, sparse_mla_attention, sparse_mla_attention_with_lse
from jattn.ops.tiles import in_tiles, rowwise
from jattn.ops.transforms import RESIDUAL_NAMES
from torch_core.launch.serves import IMPLEMENTATIONS

__all__ = [
    "IMPLEMENTATIONS",
    "MASK_OPTIONS",
    "POSITIONAL",
    "RESIDUAL_NAMES",
    "AdapterRows",
    "CacheScales",
    "CallOptions",
    "DeferredStates",
    "ExpertAdapters",
    "PagedOptions",
    "QuantizedRows",
    "add_lora_linear",
    "attention",
    "attention_with_lse",
    "available_implementations",
    "cascade_attention",
    "causal_conv1d",
    "choose",
    "dropout_seeds",
    "fp8_query",
    "fused_experts",
    "gated_delta_rule",
    "gates_rows",
    "in_tiles",
    "indexer_topk",
    "launches_kernels",
    "mamba_chunk_scan",
    "masked_attention",
    "merge_states",
    "mla_attention",
    "mla_attention_with_lse",
    "paged_attention",
    "paged_attention_with_lse",
    "quantizes_rows",
    "refuse_leaked",
    "rotate_and_write",
    "route_experts",
    "row_logsumexp",
    "row_norm",
    "row_product",
    "row_quantize",
    "rowwise",
    "run",
    "shared_prefix",
    "sparse_mla_attention",
    "sparse_mla_attention_with_lse",
    "takes_fp8_query",
    "token_logprobs",
    "write_kv_cache",
    "write_kv_cache_per_token_head",
    "write_latent_cache",
]
