"""Flax modules around the ops; the linen twin is `jattn.nn.linen`."""

from jattn.nn.dense import attention_fn
from jattn.nn.kimi_delta import KimiDeltaAttention
from jattn.nn.latent import MultiHeadLatentAttention
from jattn.nn.lightning import LightningAttention
from jattn.nn.lora import LoRA
from jattn.nn.mamba import Mamba2
from jattn.nn.module_cache import PagedCache
from jattn.nn.multi_head import MultiHeadAttention
from jattn.nn.norms import LayerNorm, RMSNorm
from jattn.nn.paged import PagedAttention
from jattn.nn.scan import scan_layers
from jattn.nn.sparse_latent import LatentIndexer, SparseLatentAttention
from jattn.nn.states import GatedDeltaNet, ShortConv
from jattn.nn.yarn import DeepSeekRoPE

__all__ = [
    "DeepSeekRoPE",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LatentIndexer",
    "LayerNorm",
    "LightningAttention",
    "LoRA",
    "Mamba2",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "PagedAttention",
    "PagedCache",
    "RMSNorm",
    "ShortConv",
    "SparseLatentAttention",
    "attention_fn",
    "scan_layers",
]
