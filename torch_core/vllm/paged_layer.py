"""A layer over a paged cache of keys and values: its options, and its calls on the tensors of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_core import ops
from torch_core.attention.call import PagedCall
from torch_core.base.checks import check_heads, check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Choices
from torch_core.base.specs import AttentionSpec
from torch_core.cache_writes.call import WriteCall
from torch_core.vllm.impl import AttentionImpl, AttentionLayer, as_heads, check_tensor, checked_scale
from torch_core.vllm.paged_metadata import PagedAttentionMetadata
from torch_core.vllm.types import (
    CACHE_DTYPES,
    FP8_STATIC_TENSOR,
    AttentionType,
    ContextParallel,
    QuantKey,
    is_quantized_kv_cache,
)


class PagedLayer(AttentionImpl[PagedAttentionMetadata]):
    """The options of one layer, checked, and the calls that `PagedAttentionImpl` runs.

    Args:
        num_heads: query heads.
        head_size: elements of one head.
        scale: factor on the scores.
        num_kv_heads: key/value heads; None for as many as query heads.
        alibi_slopes: one number for each query head, or None.
        sliding_window: tokens that a query sees, its own included; that many on either side in encoders and where a
            batch or sequence is not causal. None for all.
        kv_cache_dtype: a name of `CACHE_DTYPES`.
        logits_soft_cap: scores become `cap * tanh(score / cap)`; None or 0 for off.
        attn_type: kind of attention of the layer.
        kv_sharing_target_layer_name: the layer whose cache this one reads, and does not write; None for its own.
        sinks: float [num_heads], a logit without a value in every softmax.
        device: device of the slopes and of the queries.
        attention_chunk: positions of a local-attention chunk; None for none.
        use_alibi_sqrt: ALiBi with the square root of the distance.
        context_parallel: this rank's place.
        cache_group: the allocator's group of layers that the cache belongs to.

    Raises:
        InvalidInput: an argument is out of range or does not fit the heads.
    """

    can_return_lse_for_decode: ClassVar[bool] = True
    supports_pcp: ClassVar[bool] = True
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar[bool] = True
    min_head_size: ClassVar[int] = 1

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: AttentionType | str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None, *,
        device: torch.device | str = "cpu", attention_chunk: int | None = None, use_alibi_sqrt: bool = False,
        context_parallel: ContextParallel | None = None, cache_group: int = 0,
    ) -> None:  # fmt: skip
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = checked_scale(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = AttentionType(attn_type)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi_slopes = None
        self.context_parallel = context_parallel or ContextParallel()
        self.context_parallel.refuse_both_kinds()
        self.cache_group = cache_group
        self.supports_quant_query_input = True
        if head_size < self.min_head_size:
            wanted = f"{type(self).__name__} needs at least {self.min_head_size}"
            raise InvalidInput("head_size", value=head_size, wanted=wanted)
        check_heads("num_heads", num_heads, self.num_kv_heads)
        Choices(*CACHE_DTYPES)("kv_cache_dtype", kv_cache_dtype)
        if sliding_window is not None:
            check_int("sliding_window", sliding_window, 1, also=", or None for off")
        if sinks is not None and not isinstance(sinks, Tensor):
            raise InvalidInput("sinks", f"is a {type(sinks).__name__}", f"it must be a tensor of {num_heads} numbers")
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            wanted = f"it must be ({num_heads},), one per query head"
            raise InvalidInput("sinks", f"has shape {tuple(sinks.shape)}", wanted)
        if alibi_slopes is not None:
            if len(alibi_slopes) != num_heads:
                raise InvalidInput("alibi_slopes", f"has {len(alibi_slopes)} entries", f"it must have {num_heads}")
            if not all(map(math.isfinite, alibi_slopes)):
                raise InvalidInput("alibi_slopes", value=alibi_slopes, wanted="it must be of finite numbers")
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        causal = self.attn_type is AttentionType.DECODER
        window_left = None if sliding_window is None else sliding_window - 1
        self.spec = AttentionSpec(
            scale=self.scale,
            causal=causal,
            window_left=window_left,
            window_right=None if causal else window_left,
            logits_soft_cap=logits_soft_cap or None,
            attention_chunk=attention_chunk,
            use_alibi_sqrt=use_alibi_sqrt,
        )

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Returns True for one static e4m3 scale, which the kernels apply as they store."""
        return quant_key == FP8_STATIC_TENSOR

    def _rows(self, name: str, tensor: Tensor) -> Tensor:
        return as_heads(name, tensor, self.num_heads, self.head_size)

    def _kv_rows(self, name: str, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else as_heads(name, tensor, self.num_kv_heads, self.head_size)

    def _checked_cache(self, kv_cache: Tensor | None, metadata: PagedAttentionMetadata) -> Tensor:
        if kv_cache is None:
            wanted = f"{self.attn_type.value} attention reads its keys from it"
            raise InvalidInput("kv_cache", value=None, wanted=wanted)
        check_tensor("kv_cache", kv_cache)
        if kv_cache.dim() != 5 or kv_cache.shape[2] != metadata.block_size:
            wanted = (
                f"the metadata is for (num_blocks, 2, {metadata.block_size}, {self.num_kv_heads}, {self.head_size}). "
                "It was built for another block size"
            )
            raise InvalidInput("kv_cache", f"has shape {tuple(kv_cache.shape)}", wanted)
        if metadata.cache_group != self.cache_group:
            wanted = f"this layer is in group {self.cache_group}"
            raise InvalidInput("cache_group", f"of the metadata is {metadata.cache_group}", wanted)
        if kv_cache.dtype == torch.uint8 and is_quantized_kv_cache(self.kv_cache_dtype):
            dtype = CACHE_DTYPES[self.kv_cache_dtype]
            return kv_cache.view(dtype)  # type: ignore[arg-type]
        return kv_cache

    def _write(
        self, layer: AttentionLayer, key: Tensor | None, value: Tensor | None, cache: Tensor,
        metadata: PagedAttentionMetadata,
    ) -> None:  # fmt: skip
        if (key is None) != (value is None):
            name = "key" if key is None else "value"
            raise InvalidInput(name, value=None, wanted="give key and value, or none to write nothing")
        if self.kv_sharing_target_layer_name is not None or key is None or value is None:
            return
        slots = metadata.slot_mapping
        if self.attn_type is AttentionType.ENCODER_DECODER:
            slots = _needed(metadata.cross_slot_mapping, "cross_slot_mapping")
        ops.run(WriteCall(key=key, value=value, kv_cache=cache, slot_mapping=slots, **self._cache_scales(layer)))

    def _cache_scales(self, layer: AttentionLayer) -> dict[str, Any]:
        if not is_quantized_kv_cache(self.kv_cache_dtype):
            return {}
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale}

    def _call(
        self, layer: AttentionLayer, query: Tensor, cache: Tensor, metadata: PagedAttentionMetadata, **results: Any
    ) -> PagedCall[Tensor]:
        tables, seq_lens = metadata.block_table, metadata.seq_lens
        if self.attn_type is AttentionType.ENCODER_DECODER:
            tables = _needed(metadata.cross_block_tables, "cross_block_tables")
            seq_lens = _needed(metadata.encoder_seq_lens, "encoder_seq_lens")
        return PagedCall(
            query=query,
            kv_cache=cache,
            block_tables=tables,
            seq_lens=seq_lens,
            query_start_loc=metadata.query_start_loc,
            spec=self._spec_of(metadata),
            max_query_len=metadata.max_query_len,
            q_scale=layer._q_scale if query.dtype.itemsize == 1 else None,
            **self._cache_scales(layer),
            **self._scoring(metadata),
            **results,
        )

    def _scoring(self, metadata: PagedAttentionMetadata) -> dict[str, Any]:
        return {
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            "mm_prefix_range": metadata.mm_prefix_range,
            "seq_causal": metadata.seq_causal,
        }

    def _spec_of(self, metadata: PagedAttentionMetadata) -> AttentionSpec:
        # A decoder layer without the causal mask is asked for batch by batch (diffusion drafts, bidirectional models).
        if metadata.causal == self.spec.causal and metadata.seq_causal is None:
            return self.spec
        return replace(self.spec, causal=metadata.causal, window_right=self.spec.window_left)


def _needed(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise InvalidInput(name, "of the metadata is None", "cross attention needs it. Build it with encoder_rows")
    return tensor
