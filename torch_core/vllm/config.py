"""A layer's requirements of a backend, and a metadata builder's configuration; frozen and validated."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torch_core.base.checks import check_heads, check_int
from torch_core.base.errors import InvalidInput
from torch_core.metadata import CascadeCosts
from torch_core.vllm.buffers import WorkspaceManager
from torch_core.vllm.mla import MLADims
from torch_core.vllm.types import AttentionType, ContextParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSelectorConfig:
    """The demands by which a backend is chosen.

    A value that can never be right raises here; one that some backend may serve does not, and the backends that do
    not serve it say so.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`, 1 with `use_mla`.
        head_size: elements of one head.
        dtype: dtype of queries, keys and values.
        kv_cache_dtype: a name of `CACHE_DTYPES`.
        block_size: tokens of one block; None when it is not decided yet.
        attn_type: kind of attention of the layer.
        use_mla: multi-head latent attention.
        has_sink: each query head has a sink logit.
        use_sparse: attention to chosen tokens only (DeepSeek sparse attention).
        use_mm_prefix: spans of tokens that see each other in both directions.
        use_per_head_quant_scales: a cache scale for each head.
        use_alibi_sqrt: ALiBi with the square root of the distance.
        use_non_causal: a decoder layer without the causal mask.
        use_batch_invariant: a sequence's result must not depend on the others.
        use_kv_connector: blocks are sent to or received from another process.

    Raises:
        InvalidInput: a size is not positive or the heads do not divide.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    attn_type: AttentionType = AttentionType.DECODER
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    use_alibi_sqrt: bool = False
    use_non_causal: bool = False
    use_batch_invariant: bool = False
    use_kv_connector: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_size"):
            check_int(name, getattr(self, name), 1)
        if self.block_size is not None:
            check_int("block_size", self.block_size, 1)
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidInput("dtype", value=self.dtype, wanted="it must be a torch.dtype")
        check_heads("num_heads", self.num_heads, self.num_kv_heads)
        if self.use_mla and self.num_kv_heads != 1:
            wanted = "it must be 1 with use_mla: all heads share a latent"
            raise InvalidInput("num_kv_heads", value=self.num_kv_heads, wanted=wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderConfig:
    """A metadata builder's configuration of model and engine, apart from the cache.

    Attributes:
        num_heads: query heads.
        attn_type: kind of attention of the layers.
        sliding_window: tokens that a query sees, its own included; None for all.
        attention_chunk: positions of a local-attention chunk; None for none.
        use_alibi: the layers use ALiBi.
        num_speculative_tokens: drafted tokens that a decode step verifies.
        parallel_drafting: drafts are made all at once, which doubles the tokens of a decode.
        context_parallel: this rank's place.
        cache_group: the allocator's group of layers.
        cascade_costs: cost model of cascade attention; None for the rates of an H200.
        batch_invariant: no cascade attention, whose bits depend on the rest of the batch.
        mla_dims: the sizes of latent attention; None without it.
        workspace: memory of latent attention's partial results; reserved for `max_num_seqs` decodes.
        max_num_seqs, max_model_len: the largest batch, and the longest sequence.
        mamba_chunk_size: tokens of a chunk of Mamba-2's layers; None without them.
        chunked_prefill_workspace_size: cached tokens that latent attention expands at a time for prefills.

    Raises:
        InvalidInput: a number is out of range.
    """

    num_heads: int
    attn_type: AttentionType = AttentionType.DECODER
    sliding_window: int | None = None
    attention_chunk: int | None = None
    use_alibi: bool = False
    num_speculative_tokens: int = 0
    parallel_drafting: bool = False
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    cache_group: int = 0
    cascade_costs: CascadeCosts | None = None
    batch_invariant: bool = False
    mla_dims: MLADims | None = None
    workspace: WorkspaceManager | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    mamba_chunk_size: int | None = None
    chunked_prefill_workspace_size: int = 65536

    def __post_init__(self) -> None:
        check_int("num_heads", self.num_heads, 1)
        for name in ("sliding_window", "attention_chunk", "max_num_seqs", "max_model_len", "mamba_chunk_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_int("chunked_prefill_workspace_size", self.chunked_prefill_workspace_size, 1)
        for name in ("num_speculative_tokens", "cache_group"):
            check_int(name, getattr(self, name), 0)
