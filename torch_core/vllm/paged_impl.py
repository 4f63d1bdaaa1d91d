"""The implementation of the Triton and the torch backend, over the operations of `torch_core.launch.run`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_core import ops
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.cascade import cascade_calls
from torch_core.attention.context_parallel import among_call, context_call, local_call, merge_parts
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.vllm.impl import AttentionLayer, check_metadata, check_tensor
from torch_core.vllm.paged_layer import PagedLayer
from torch_core.vllm.paged_metadata import PagedAttentionMetadata
from torch_core.vllm.ranks import PromptShare, merge_over_group
from torch_core.vllm.types import AttentionType

_NO_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class PagedAttentionImpl(PagedLayer):
    """Attention of one layer; the tensors' device decides whether Triton kernels or plain torch compute it.

    Args are those of `PagedLayer`.

    Raises:
        InvalidInput: an argument is out of range or does not fit the heads.
    """

    def forward(
        self, layer: AttentionLayer, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor | None,
        attn_metadata: PagedAttentionMetadata | None, output: Tensor | None = None, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes the step's keys and values to the cache, attends, writes `output` and returns it.

        Where sequences are spread over ranks, each rank has its own query heads and all tokens' keys and values:
        queries are gathered over `ContextParallel.dcp_group`, and an all-to-all returns each head's parts back.

        Args:
            layer: has the scales; read for 8-bit caches and queries only.
            query: [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size].
            key: [num_tokens, num_kv_heads, head_size] or flat; the encoder's tokens in cross attention. None when
                nothing is written: a shared cache, or cross attention after its first step.
            value: like `key`.
            kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], written in place; None in encoders. An fp8
                cache may be stored as uint8.
            attn_metadata: metadata of the step; None in a profiling run, which only clears the output.
            output: needed; like `query`, in its dtype, or e4m3 with `output_scale`; padding rows become 0.
            output_scale: the output holds `result / output_scale`.
            output_block_scale: not served.

        Raises:
            InvalidInput: the metadata is for another cache or lacks fields; shapes do not fit.
            Unsupported: block scales. For sequences that are spread over ranks: options that
                `torch_core.attention.context_parallel` cannot compute from one rank's share, an output scale, and ranks
                without a `dcp_group` (see `forward_with_lse`).
        """
        if output is None:
            raise InvalidInput("output", value=None, wanted="pass a tensor like query, which forward writes")
        check_tensor("output", output)
        if output_block_scale is not None:
            raise Unsupported("output_block_scale", "is given", "the output can be stored with one static scale only")
        if attn_metadata is None:
            return output.zero_()
        check_metadata(attn_metadata, PagedAttentionMetadata, self)
        if self.context_parallel.total_cp_world_size > 1:
            return self._forward_over_ranks(layer, query, key, value, kv_cache, attn_metadata, output, output_scale)
        out, query = self._rows("output", output), self._rows("query", query)
        key, value = self._kv_rows("key", key), self._kv_rows("value", value)
        if self.attn_type in _NO_CACHE:
            self._attend_dense(query, key, value, attn_metadata, out=out, out_scale=output_scale)
            return output
        cache = self._checked_cache(kv_cache, attn_metadata)
        call, prefix = self._call(layer, query, cache, attn_metadata, out=out, out_scale=output_scale), None
        if attn_metadata.shared_prefix is not None:
            prefix = attn_metadata.shared_prefix
            cascade_calls(call, prefix)  # Refuses before anything is written.
        self._write(layer, key, value, cache, attn_metadata)
        ops.run(call) if prefix is None else ops.cascade_attention(call, prefix)
        return output

    def forward_with_lse(
        self, layer: AttentionLayer, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: PagedAttentionMetadata,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Writes keys and values, attends to this rank's part of each sequence, and returns the inputs of a merge.

        Args are those of `forward`: all ranks give the same query and their own cache, slots of other ranks' tokens are
        -1, and the metadata have `dcp_local_seq_lens` when sequences are spread over ranks.

        Returns:
            The output [num_tokens, num_heads, head_size] and the lse, float32 [num_tokens, num_heads], as
            `torch_core.ops.merge_states` takes them. Sinks would count once per rank and are left out on all ranks
            but the first.

        Raises:
            InvalidInput: the metadata is for another cache or lacks fields.
            Unsupported: a layer without a cache; options that `torch_core.attention.context_parallel` cannot compute
                from one rank's share.
        """
        if self.attn_type is not AttentionType.DECODER:
            raise Unsupported("attn_type", value=self.attn_type.value, wanted="forward_with_lse is for decoder layers")
        check_metadata(attn_metadata, PagedAttentionMetadata, self)
        query, key, value = self._rows("query", query), self._kv_rows("key", key), self._kv_rows("value", value)
        cache = self._checked_cache(kv_cache, attn_metadata)
        call = self._call(layer, query, cache, attn_metadata, with_lse=True)
        if attn_metadata.prompt_share is not None:
            raise self._refused_prompts()
        alone = self.context_parallel.total_cp_world_size == 1
        local, lse_more = (call, None) if alone else self._part_of_rank(call, attn_metadata)
        self._write(layer, key, value, cache, attn_metadata)
        out, lse = _run_part(local, lse_more)
        if alone or self.sinks is None or self.context_parallel.total_cp_rank:
            return out, lse
        merged, lse = merge_parts(out[None], lse[None], self.sinks, library=torch)
        return merged.to(out.dtype), lse

    def _attend_dense(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, metadata: PagedAttentionMetadata, **results: Any
    ) -> None:
        if key is None or value is None:
            wanted = f"{self.attn_type.value} attention has no cache to read them from"
            raise InvalidInput("key", "or value is None", wanted)
        ops.run(
            DenseCall(
                query=query,
                key=key,
                value=value,
                query_start_loc=metadata.query_start_loc,
                key_start_loc=metadata.query_start_loc,
                spec=self.spec,
                max_query_len=metadata.max_query_len,
                max_key_len=metadata.max_query_len,
                **self._scoring(metadata),
                **results,
            )
        )

    def _forward_over_ranks(
        self, layer: AttentionLayer, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor | None,
        metadata: PagedAttentionMetadata, output: Tensor, output_scale: Tensor | None,
    ) -> Tensor:  # fmt: skip
        place = self.context_parallel
        group, ranks = place.dcp_group or place.pcp_group, place.total_cp_world_size
        if group is None:
            wanted = (
                f"this layer holds 1 of {ranks} parts of each sequence: give its ContextParallel the group of those "
                "ranks, or call forward_with_lse and merge the parts"
            )
            raise Unsupported("dcp_group", value=None, wanted=wanted)
        if output_scale is not None or self.attn_type is not AttentionType.DECODER:
            raise Unsupported(
                f"sequences are spread over {ranks} ranks: that is for decoder layers (this one is of type "
                f"{self.attn_type.value}) and for an output without output_scale.",
                argument="attn_type" if output_scale is None else "output_scale",
            )
        cache = self._checked_cache(kv_cache, metadata)
        query, key, value = self._rows("query", query), self._kv_rows("key", key), self._kv_rows("value", value)
        rows = self._rows("output", output)
        if metadata.prompt_share is not None:
            self._attend_prompts(layer, query, key, value, cache, metadata, metadata.prompt_share, rows)
            return output
        call = self._call(layer, query, cache, metadata)
        if place.pcp_world_size > 1:
            local, lse_more = self._part_of_rank(call, metadata)
            self._write(layer, key, value, cache, metadata)
            outs, lses = (group.all_gather(x[None], 0) for x in _run_part(local, lse_more))
            out, _ = merge_parts(outs, lses, self.sinks, library=torch)
            rows.copy_(out)
            return output
        slopes = None if self.alibi_slopes is None else group.all_gather(self.alibi_slopes, 0)
        whole = replace(call, query=group.all_gather(query, 1), alibi_slopes=slopes)
        among, apart = None, self._attends_new_tokens_apart(metadata)
        if apart and key is not None and value is not None and key.dtype == query.dtype:
            # The new tokens attend to each other from the step's keys, and to the cache as one row of queries.
            _local_seq_lens(metadata)
            local, lse_more = context_call(whole, **place.dcp_place, library=torch), None
            among = self._call_among_new_tokens(call, key, value)
        else:
            local, lse_more = self._part_of_rank(whole, metadata)
        self._write(layer, key, value, cache, metadata)
        out, lse = _run_part(local, lse_more)
        out, lse = merge_over_group(out, lse, group, ranks, self.sinks if among is None else None)
        if among is not None:
            new = ops.run(among)
            out, _ = merge_parts(torch.stack([out, new["out"]]), torch.stack([lse, new["lse"]]), library=torch)
        rows.copy_(out)
        return output

    def _attend_prompts(
        self, layer: AttentionLayer, query: Tensor, key: Tensor | None, value: Tensor | None, cache: Tensor,
        metadata: PagedAttentionMetadata, share: PromptShare, out: Tensor,
    ) -> None:  # fmt: skip
        """Attends this rank's chunks of whole prompts to the keys of all ranks, and keeps its share of those."""
        group, more = self.context_parallel.pcp_group, (metadata.mm_prefix_range, metadata.seq_causal)
        alone = self.kv_sharing_target_layer_name is None and metadata.causal and all(x is None for x in more)
        if group is None or key is None or value is None or not alone:
            raise self._refused_prompts()
        if key.shape[0] != share.token_indices.shape[0]:
            wanted = f"this rank has {share.token_indices.shape[0]} of the prompts' (prompt_share.token_indices)"
            raise InvalidInput("key", f"has {key.shape[0]} tokens", wanted)
        key, value = (group.all_gather(x, 0)[share.pcp_allgather_restore_idx] for x in (key, value))
        self._write(layer, key, value, cache, replace(metadata, slot_mapping=metadata.slot_mapping[: key.shape[0]]))
        ops.run(
            DenseCall(
                query=query,
                key=key[share.key_rows],
                value=value[share.key_rows],
                query_start_loc=share.query_start_loc,
                key_start_loc=share.key_start_loc,
                spec=self._spec_of(metadata),
                max_query_len=share.max_query_len,
                max_key_len=share.max_key_len,
                alibi_slopes=self.alibi_slopes,
                sinks=self.sinks,
                out=out,
            )
        )

    def _refused_prompts(self) -> Unsupported:
        wanted = (
            "the tokens of prompts are split for causal layers with keys, values and a cache of their own, without "
            "mm_prefix_range and seq_causal"
        )
        return Unsupported("pcp_world_size", value=self.context_parallel.pcp_world_size, wanted=wanted)

    def _part_of_rank(
        self, call: PagedCall[Tensor], metadata: PagedAttentionMetadata
    ) -> tuple[PagedCall[Tensor], Tensor | None]:
        """Returns the attention to this rank's keys, and a term that is added to its lse, or None."""
        place, lens = self.context_parallel.dcp_place, _local_seq_lens(metadata)
        return local_call(call, **place, local_seq_lens=lens, library=torch, device=call.query.device)

    def _attends_new_tokens_apart(self, metadata: PagedAttentionMetadata) -> bool:
        """Returns whether rows have several new tokens, whose attention can be split from that to the cache."""
        fewer, more = sorted((self.num_kv_heads, self.context_parallel.dcp_world_size))
        near = (self.spec.window_left, self.spec.attention_chunk, self.alibi_slopes, self.kv_sharing_target_layer_name)
        return metadata.max_query_len > 1 and metadata.causal and more % fewer == 0 and all(x is None for x in near)

    def _call_among_new_tokens(self, call: PagedCall[Tensor], key: Tensor, value: Tensor) -> DenseCall[Tensor]:
        """Returns the attention of the new tokens to each other, by this rank's query heads."""
        ranks, kv_heads = self.context_parallel.dcp_world_size, self.num_kv_heads
        first = self.context_parallel.dcp_rank * kv_heads // ranks
        mine = slice(first, first + max(1, kv_heads // ranks))
        return among_call(call, key[:, mine], value[:, mine])


def _local_seq_lens(metadata: PagedAttentionMetadata) -> Tensor:
    if metadata.dcp_local_seq_lens is None:
        raise InvalidInput("dcp_local_seq_lens", "of the metadata is None", "its builder was not told of the ranks")
    return metadata.dcp_local_seq_lens


def _run_part(call: PagedCall[Tensor], lse_more: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the output and lse of a rank's part."""
    found = ops.run(call)
    return found["out"], found["lse"] if lse_more is None else found["lse"] + lse_more
