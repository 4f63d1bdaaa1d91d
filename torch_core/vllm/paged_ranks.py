"""The forward pass of a layer whose sequences or prompts are shared by several ranks: gather, attention, merge."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_core import ops
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.context_parallel import context_call, local_call, merge_parts
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.vllm.groups import merge_over_group
from torch_core.vllm.impl import AttentionLayer
from torch_core.vllm.paged_metadata import PagedAttentionMetadata
from torch_core.vllm.prompt_ranks import PromptShare
from torch_core.vllm.types import AttentionType

if TYPE_CHECKING:
    from torch_core.vllm.paged_impl import PagedAttentionImpl

__all__ = ["forward_over_ranks", "no_prompts", "part_of_rank", "run_part"]


def forward_over_ranks(
    impl: PagedAttentionImpl,
    layer: AttentionLayer,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor | None,
    metadata: PagedAttentionMetadata,
    output: Tensor,
    output_scale: Tensor | None,
) -> Tensor:
    """See `PagedAttentionImpl.forward`, whose arguments these are."""
    place = impl.context_parallel
    group, ranks = place.dcp_group or place.pcp_group, place.total_cp_world_size
    if group is None:
        raise Unsupported(
            f"this layer holds 1 of {ranks} parts of each sequence; give its ContextParallel the dcp_group of "
            "those ranks, or call forward_with_lse and merge the parts."
        )
    if output_scale is not None or impl.attn_type is not AttentionType.DECODER:
        raise Unsupported(
            f"sequences are spread over {ranks} ranks: that is for decoder layers (this one is of type "
            f"{impl.attn_type.value}) and for an output without output_scale."
        )
    cache = impl._checked_cache(kv_cache, metadata)
    query, key, value = impl._rows("query", query), impl._kv_rows("key", key), impl._kv_rows("value", value)
    rows = impl._rows("output", output)
    if metadata.prompt_share is not None:
        return _forward_prompts(impl, layer, query, key, value, cache, metadata, metadata.prompt_share, output)
    call = impl._call(layer, query, cache, metadata)
    if place.pcp_world_size > 1:
        local, lse_more = part_of_rank(impl, call, metadata)
        impl._write(layer, key, value, cache, metadata)
        outs, lses = (group.all_gather(x[None], 0) for x in run_part(local, lse_more))
        out, _ = merge_parts(outs, lses, impl.sinks, library=torch)
        rows.copy_(out)
        return output
    slopes = None if impl.alibi_slopes is None else group.all_gather(impl.alibi_slopes, 0)
    whole = replace(call, query=group.all_gather(query, 1), alibi_slopes=slopes)
    among = None
    if _is_long(impl, metadata) and key is not None and value is not None and key.dtype == query.dtype:
        # The new tokens attend to each other through the step's own keys, and to the cache as one row of queries.
        _local_seq_lens(metadata)
        local, lse_more = context_call(whole, **place.dcp_place, library=torch), None
        among = _among(impl, call, key, value)
    else:
        local, lse_more = part_of_rank(impl, whole, metadata)
    impl._write(layer, key, value, cache, metadata)
    out, lse = run_part(local, lse_more)
    out, lse = merge_over_group(out, lse, group, ranks, impl.sinks if among is None else None)
    if among is not None:
        new = ops.run(among)
        out, _ = merge_parts(torch.stack([out, new["out"]]), torch.stack([lse, new["lse"]]), library=torch)
    rows.copy_(out)
    return output


def _forward_prompts(
    impl: PagedAttentionImpl,
    layer: AttentionLayer,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: Tensor,
    metadata: PagedAttentionMetadata,
    share: PromptShare,
    output: Tensor,
) -> Tensor:
    """Attends this rank's chunks of whole prompts to the keys of all ranks, and keeps its share of those."""
    group, more = impl.context_parallel.pcp_group, (metadata.mm_prefix_range, metadata.seq_causal)
    alone = impl.kv_sharing_target_layer_name is None and metadata.causal and all(x is None for x in more)
    if group is None or key is None or value is None or not alone:
        raise no_prompts(impl)
    if key.shape[0] != share.token_indices.shape[0]:
        raise InvalidInput(
            f"key has {key.shape[0]} tokens; this rank has {share.token_indices.shape[0]} of the prompts' "
            "(prompt_share.token_indices)."
        )
    key, value = (group.all_gather(x, 0)[share.pcp_allgather_restore_idx] for x in (key, value))
    impl._write(layer, key, value, cache, replace(metadata, slot_mapping=metadata.slot_mapping[: key.shape[0]]))
    ops.run(
        DenseCall(
            query=query,
            key=key[share.key_rows],
            value=value[share.key_rows],
            query_start_loc=share.query_start_loc,
            key_start_loc=share.key_start_loc,
            spec=impl._spec_of(metadata),
            max_query_len=share.max_query_len,
            max_key_len=share.max_key_len,
            alibi_slopes=impl.alibi_slopes,
            sinks=impl.sinks,
            out=impl._rows("output", output),
        )
    )
    return output


def no_prompts(impl: PagedAttentionImpl) -> Unsupported:
    """Returns the refusal of prompts over ranks."""
    return Unsupported(
        f"the tokens of prompts are split over {impl.context_parallel.pcp_world_size} ranks: that is for causal "
        "layers with keys, values and a cache of their own, without mm_prefix_range and seq_causal."
    )


def part_of_rank(
    impl: PagedAttentionImpl, call: PagedCall[Tensor], metadata: PagedAttentionMetadata
) -> tuple[PagedCall[Tensor], Tensor | None]:
    """Returns the attention to this rank's keys, and the term to add to its lse."""
    place, lens = impl.context_parallel.dcp_place, _local_seq_lens(metadata)
    return local_call(call, **place, local_seq_lens=lens, library=torch, device=call.query.device)


def _local_seq_lens(metadata: PagedAttentionMetadata) -> Tensor:
    if metadata.dcp_local_seq_lens is None:
        raise InvalidInput("the metadata has no dcp_local_seq_lens; its builder was not told of the ranks.")
    return metadata.dcp_local_seq_lens


def _is_long(impl: PagedAttentionImpl, metadata: PagedAttentionMetadata) -> bool:
    """Returns whether new tokens are many, and may be told from those before them by rows and heads."""
    fewer, more = sorted((impl.num_kv_heads, impl.context_parallel.dcp_world_size))
    near = (impl.spec.window_left, impl.spec.attention_chunk, impl.alibi_slopes, impl.kv_sharing_target_layer_name)
    return metadata.max_query_len > 1 and metadata.causal and more % fewer == 0 and all(x is None for x in near)


def run_part(call: PagedCall[Tensor], lse_more: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the output and lse of a rank's part."""
    found = ops.run(call)
    return found["out"], found["lse"] if lse_more is None else found["lse"] + lse_more


def _among(impl: PagedAttentionImpl, call: PagedCall[Tensor], key: Tensor, value: Tensor) -> DenseCall[Tensor]:
    """Returns the attention of the new tokens to each other, by this rank's query heads."""
    ranks, kv_heads = impl.context_parallel.dcp_world_size, impl.num_kv_heads
    first = impl.context_parallel.dcp_rank * kv_heads // ranks
    mine = slice(first, first + max(1, kv_heads // ranks))
    return DenseCall(
        query=call.query,
        key=key[:, mine],
        value=value[:, mine],
        query_start_loc=call.query_start_loc,
        key_start_loc=call.query_start_loc,
        sinks=impl.sinks,
        spec=call.spec,
        max_query_len=call.max_query_len,
        max_key_len=call.max_query_len,
        with_lse=True,
    )
