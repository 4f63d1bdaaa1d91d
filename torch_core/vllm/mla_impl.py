"""The implementation of the latent-attention backends: expanded for prefill, absorbed for decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_core import ops
from torch_core.attention.call import DenseCall
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec, packed_latent_bytes
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.vllm.buffers import WorkspaceManager
from torch_core.vllm.impl import AttentionLayer, MLAAttentionImpl, as_heads, check_metadata, check_tensor, checked_scale
from torch_core.vllm.mla import MLACommonMetadata
from torch_core.vllm.types import CACHE_DTYPES, PACKED_LATENTS, AttentionType, ContextParallel, is_quantized_kv_cache


class TritonMLAImpl(MLAAttentionImpl[MLACommonMetadata]):
    """Multi-head latent attention of one layer; the tensors' device decides whether kernels or plain torch compute it.

    Args:
        num_heads: query heads of this rank.
        head_size: elements of a row of the cache, `kv_lora_rank + qk_rope_head_dim`.
        scale: factor on the scores.
        num_kv_heads: 1: all heads share a latent.
        alibi_slopes, sliding_window, logits_soft_cap: must be None; no model with latents uses them.
        kv_cache_dtype: a name of `CACHE_DTYPES`, or "fp8_ds_mla" for packed rows, which have scales of their own.
        attn_type: "decoder".
        kv_sharing_target_layer_name: the layer whose cache this one reads, and does not write; None for its own.
        q_lora_rank: width of the compressed query, which is expanded before it comes here; None for none.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, qk_head_dim, v_head_dim: see `MLADims`.
        kv_b_proj: projection from latents to the keys (without rotary part) and values of all heads; its `weight` is
            [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]. Its result may be a pair, as in vLLM.
        indexer: None; chosen tokens (sparse attention) are not served.
        workspace: memory of partial results; None allocates it for each call.
        context_parallel: this rank's place.

    Raises:
        InvalidInput: sizes that do not fit each other.
        Unsupported: an option that is not None above, another kind of attention.
    """

    can_return_lse_for_decode: ClassVar[bool] = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, *, q_lora_rank: int | None, kv_lora_rank: int,
        qk_nope_head_dim: int, qk_rope_head_dim: int, qk_head_dim: int, v_head_dim: int, kv_b_proj: torch.nn.Module,
        indexer: object | None = None, workspace: WorkspaceManager | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> None:  # fmt: skip
        options = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        for name, value in {**options, "indexer": indexer}.items():
            if value is not None:
                raise Unsupported(name, value=value, wanted="latent attention is served without it: pass None")
        if AttentionType(attn_type) is not AttentionType.DECODER:
            raise Unsupported("attn_type", value=attn_type, wanted="latent attention is served in decoders only")
        known = (*CACHE_DTYPES, PACKED_LATENTS)
        if kv_cache_dtype not in known:
            raise InvalidInput("kv_cache_dtype", value=kv_cache_dtype, wanted=f"it must be one of {', '.join(known)}")
        for name, found, wanted in (
            ("num_kv_heads", num_kv_heads, 1),
            ("head_size", head_size, kv_lora_rank + qk_rope_head_dim),
            ("qk_head_dim", qk_head_dim, qk_nope_head_dim + qk_rope_head_dim),
        ):
            if found != wanted:
                raise InvalidInput(name, f"is {found}", f"by the other sizes it must be {wanted}")
        self.num_heads = num_heads
        self.head_size = head_size
        packed = kv_cache_dtype == PACKED_LATENTS
        self.row_size = packed_latent_bytes(kv_lora_rank, qk_rope_head_dim) if packed else head_size
        self.scale = checked_scale(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_head_dim = qk_head_dim
        self.v_head_dim = v_head_dim
        self.kv_b_proj = kv_b_proj
        self.workspace = workspace
        self.context_parallel = context_parallel or ContextParallel()
        if self.context_parallel.pcp_world_size > 1:
            fix = "prompts that are spread over ranks are not served by latent attention: use 1"
            raise Unsupported("pcp_world_size", value=self.context_parallel.pcp_world_size, wanted=fix)
        self.spec = AttentionSpec(scale=self.scale)
        self._absorbed: tuple[Tensor, Tensor] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Splits the expansion of latents into the part that decode absorbs into the query, and the part for the
        result.

        Call it again when the weights have changed.

        Raises:
            InvalidInput: the weight has another shape.
        """
        weight: Any = self.kv_b_proj.weight
        sizes = (self.qk_nope_head_dim, self.v_head_dim)
        expected = (self.num_heads * sum(sizes), self.kv_lora_rank)
        if tuple(weight.shape) != expected:
            raise InvalidInput("kv_b_proj.weight", f"has shape {tuple(weight.shape)}", f"it must be {expected}")
        by_head = weight.detach().to(act_dtype).view(self.num_heads, sum(sizes), self.kv_lora_rank)
        to_latent, to_value = by_head.split(sizes, dim=1)
        self._absorbed = to_latent.contiguous(), to_value.transpose(1, 2).contiguous()

    def forward(
        self, layer: AttentionLayer, hidden_states_or_cq: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor,
        attn_metadata: MLACommonMetadata | None, output: Tensor | None = None, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes the step's latents to the cache, attends, writes `output` and returns it.

        Args:
            layer: has `_k_scale`; read for 8-bit caches only.
            hidden_states_or_cq: the query, [num_tokens, num_heads, qk_head_dim] or flat, its rotary part last, rotated.
            kv_c_normed: [num_tokens, kv_lora_rank].
            k_pe: [num_tokens, qk_rope_head_dim] or with an axis of one head, rotated.
            kv_cache: [num_blocks, block_size, head_size], written in place. An fp8 cache may be stored as uint8.
            attn_metadata: metadata of the step; None in a profiling run, which only clears the output.
            output: needed; [num_tokens, num_heads * v_head_dim] or with the heads apart; padding rows become 0.
            output_scale, output_block_scale: not served.

        Raises:
            InvalidInput: the metadata is for another cache; shapes do not fit; the weights were not processed.
            Unsupported: an output scale; sequences that are spread over ranks (merge the results of `forward_mqa`).
        """
        if output is None:
            raise InvalidInput("output", value=None, wanted="pass a tensor of num_heads * v_head_dim columns")
        check_tensor("output", output)
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("output_scale", "is given", "latent attention does not scale its output")
        if attn_metadata is None:
            return output.zero_()
        if self.need_to_return_lse_for_decode:
            wanted = "this layer holds one part of each sequence: call forward_mqa and merge the parts"
            raise Unsupported("dcp_world_size", value=self.context_parallel.dcp_world_size, wanted=wanted)
        check_metadata(attn_metadata, MLACommonMetadata, self)
        metadata, cache = attn_metadata, self._checked_cache(kv_cache, attn_metadata)
        query = as_heads("hidden_states_or_cq", hidden_states_or_cq, self.num_heads, self.qk_head_dim)
        out = as_heads("output", output, self.num_heads, self.v_head_dim)
        k_pe = self._rotary_rows(k_pe)
        check_tensor("kv_c_normed", kv_c_normed)
        if kv_c_normed.dim() != 2 or kv_c_normed.shape[1] != self.kv_lora_rank:
            wanted = f"it must be [num_tokens, {self.kv_lora_rank}]"
            raise InvalidInput("kv_c_normed", f"has shape {tuple(kv_c_normed.shape)}", wanted)
        tokens = metadata.slot_mapping.shape[0]
        given = {"hidden_states_or_cq": query, "kv_c_normed": kv_c_normed, "k_pe": k_pe, "output": out}
        for name, rows in given.items():
            if rows.shape[0] < tokens:
                raise InvalidInput(name, f"has {rows.shape[0]} rows", f"the metadata is for {tokens} tokens")
        if self.kv_sharing_target_layer_name is None:
            self.do_kv_cache_update(
                kv_c_normed, k_pe, cache, metadata.slot_mapping, self.kv_cache_dtype, layer._k_scale
            )
        first, end = metadata.num_decode_tokens, metadata.num_actual_tokens
        if metadata.prefill is not None:
            rows = slice(first, end)
            self.forward_mha(query[rows], kv_c_normed[rows], k_pe[rows], cache, metadata, layer._k_scale, out[rows])
            out[end:].zero_()
        if metadata.decode is not None:
            q_nope, q_pe = query[:first].split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
            if self._absorbed is None:
                wanted = "call process_weights_after_loading once it is loaded"
                raise InvalidInput("kv_b_proj", "was not processed", wanted)
            to_latent, to_value = self._absorbed
            latent, _ = self.forward_mqa((_by_head(q_nope, to_latent), q_pe), cache, metadata, layer)
            out[:first] = _by_head(latent, to_value)
        return output

    def forward_mha(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata, k_scale: Tensor, output: Tensor, output_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attends for prefill rows, with expanded keys and values; earlier tokens are expanded chunk by chunk.

        Args:
            q: [num_prefill_tokens, num_heads, qk_head_dim].
            kv_c_normed: [num_prefill_tokens, kv_lora_rank], their own latents.
            k_pe: [num_prefill_tokens, qk_rope_head_dim].
            kv_c_and_k_pe_cache: cache with the latents of earlier tokens.
            attn_metadata: has the prefills.
            k_scale: dequantisation scale of an 8-bit cache.
            output: [num_prefill_tokens, num_heads, v_head_dim]; written.
            output_scale: not served.

        Raises:
            InvalidInput: the metadata has no prefill.
            Unsupported: an output scale.
        """
        check_metadata(attn_metadata, MLACommonMetadata, self)
        prefill = attn_metadata.prefill
        if prefill is None:
            raise InvalidInput("attn_metadata", "has no prefill", "forward_mha attends for prefill rows")
        if output_scale is not None:
            raise Unsupported("output_scale", "is given", "latent attention does not scale its output")
        starts, longest = prefill.query_start_loc, prefill.max_query_len
        key, value = self._expanded(kv_c_normed, k_pe)
        call = DenseCall(
            query=q, key=key, value=value, query_start_loc=starts, key_start_loc=starts, spec=self.spec,
            max_query_len=longest, max_key_len=longest, with_lse=bool(prefill.context),
        )  # fmt: skip
        results = ops.run(call)
        for chunk in prefill.context:
            rows = kv_c_and_k_pe_cache.view(-1, self.row_size)[chunk.slots]
            if self.kv_cache_dtype == PACKED_LATENTS:
                rows = ops.unpack_latents(rows, self.kv_lora_rank, q.dtype)
            elif rows.dtype.itemsize == 1:
                rows = (rows.float() * k_scale).to(q.dtype)
            key, value = self._expanded(*rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1))
            earlier = ops.run(
                replace(
                    call, key=key, value=value, key_start_loc=chunk.key_start_loc, max_key_len=chunk.max_key_len,
                    spec=replace(self.spec, causal=False),
                )
            )  # fmt: skip
            merged = ops.merge_states(results["out"], results["lse"], earlier["out"], earlier["lse"])
            results = dict(zip(("out", "lse"), merged, strict=True))
        output.copy_(results["out"])

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attends for decode rows, to the latents themselves.

        Args:
            q: [num_decode_tokens, num_heads, head_size], absorbed, or its latent and its rotary part. With ranks that
                share sequences, of the heads of all ranks.
            kv_c_and_k_pe_cache: [num_blocks, block_size, head_size].
            attn_metadata: has the decodes.
            layer: has `_k_scale`; read for 8-bit caches only.

        Returns:
            The output [num_decode_tokens, num_heads, kv_lora_rank] and the natural log-sum-exp, float32
            [num_decode_tokens, num_heads], as `torch_core.ops.merge_states` takes them.

        Raises:
            InvalidInput: the metadata has no decode; shapes do not fit; a locked workspace is too small.
        """
        check_metadata(attn_metadata, MLACommonMetadata, self)
        decode = attn_metadata.decode
        if decode is None:
            raise InvalidInput("attn_metadata", "has no decode", "forward_mqa attends for decode rows")
        results = ops.run(
            LatentCall(
                query=torch.cat(q, dim=-1) if isinstance(q, tuple) else q,
                latent_cache=self._checked_cache(kv_c_and_k_pe_cache, attn_metadata),
                kv_lora_rank=self.kv_lora_rank,
                block_tables=decode.block_table,
                seq_lens=decode.seq_lens,
                query_start_loc=decode.query_start_loc,
                spec=self.spec,
                max_query_len=decode.max_query_len,
                k_scale=_scale_of(self.kv_cache_dtype, layer._k_scale),
                with_lse=True,
            ),
            workspace=self.workspace,
        )
        return results["out"], results["lse"]

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:  # fmt: skip
        """Writes the step's latents and rotary keys to the cache.

        Args:
            kv_c_normed: [num_tokens, kv_lora_rank].
            k_pe: [num_tokens, qk_rope_head_dim] or with an axis of one head.
            kv_cache: [num_blocks, block_size, head_size].
            slot_mapping: int32 [num_tokens]; -1 writes nothing.
            kv_cache_dtype: as of the layer.
            k_scale: dequantisation scale of an 8-bit cache.
        """
        ops.run(
            LatentWriteCall(
                kv_c=kv_c_normed,
                k_pe=self._rotary_rows(k_pe),
                slot_mapping=slot_mapping,
                latent_cache=_as_stored(kv_cache, kv_cache_dtype),
                k_scale=_scale_of(kv_cache_dtype, k_scale),
            )
        )

    def _rotary_rows(self, k_pe: Tensor) -> Tensor:
        check_tensor("k_pe", k_pe)
        size = self.qk_rope_head_dim
        if tuple(k_pe.shape[1:]) not in ((size,), (1, size)):
            wanted = f"it must be [num_tokens, {size}], or with an axis of one head"
            raise InvalidInput("k_pe", f"has shape {tuple(k_pe.shape)}", wanted)
        return k_pe[:, 0] if k_pe.dim() == 3 else k_pe

    def _expanded(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all heads, of latents and the rotary keys that all heads share."""
        expanded: Any = self.kv_b_proj(kv_c)
        expanded = expanded[0] if isinstance(expanded, tuple) else expanded
        sizes = (self.qk_nope_head_dim, self.v_head_dim)
        k_nope, value = expanded.view(-1, self.num_heads, sum(sizes)).split(sizes, dim=-1)
        return torch.cat([k_nope, k_pe[:, None].expand(-1, self.num_heads, -1)], dim=-1), value

    def _checked_cache(self, kv_cache: Tensor, metadata: MLACommonMetadata) -> Tensor:
        check_tensor("kv_cache", kv_cache)
        if kv_cache.dim() != 3 or tuple(kv_cache.shape[1:]) != (metadata.block_size, self.row_size):
            wanted = f"the metadata is for latents of (num_blocks, {metadata.block_size}, {self.row_size})"
            raise InvalidInput("kv_cache", f"has shape {tuple(kv_cache.shape)}", wanted)
        return _as_stored(kv_cache, self.kv_cache_dtype)


class TorchMLAImpl(TritonMLAImpl):
    """Multi-head latent attention of one layer by plain torch; arguments as for `TritonMLAImpl`."""


def _as_stored(kv_cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """Returns a cache as elements of its own type, which may have been allocated as bytes."""
    stored = CACHE_DTYPES.get(kv_cache_dtype)
    return kv_cache.view(stored) if kv_cache.dtype == torch.uint8 and stored is not None else kv_cache


def _scale_of(kv_cache_dtype: str, k_scale: Tensor) -> Tensor | None:
    return k_scale if kv_cache_dtype != PACKED_LATENTS and is_quantized_kv_cache(kv_cache_dtype) else None


def _by_head(rows: Tensor, matrices: Tensor) -> Tensor:
    """Returns each head's rows, [rows, heads, size], times its own matrix, [heads, size, new size]."""
    return torch.bmm(rows.transpose(0, 1), matrices).transpose(0, 1)
