"""The metadata that the paged implementations read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_core.attention.cascade import SharedPrefix, shared_prefix
from torch_core.vllm.ranks import PromptShare


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedAttentionMetadata:
    """The metadata of one step for the layers of one cache group. Tensors are int32 on the device; padded rows are
    empty.

    Field names are those of vLLM's `TritonAttentionMetadata`, and of its older metadata for encoder-decoder models.
    For the other fields see `CommonAttentionMetadata` and `EncoderMetadata` in `torch_core.metadata`.

    Attributes:
        block_table: [num_seqs, max_blocks].
        num_decodes, num_decode_tokens: rows with one new token, and their tokens.
        num_prefills, num_prefill_tokens: the other rows, and their tokens.
        max_prefill_seq_len, max_decode_seq_len: bounds on the `seq_lens` of either.
        common_prefix_len: tokens of a prefix that is attended once for all sequences; 0 for none.
        shared_prefix: the batch split at that prefix.
        prompt_share: this rank's part of a batch of prompts whose tokens are split over ranks.
        mm_prefix_range: [num_seqs, ranges, 2]; spans that see each other in both directions.
        seq_causal: bool [num_seqs]; which sequences are causal, if they differ.
        scheduler_metadata, prefix_scheduler_metadata: always None: the kernels plan on the device.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    cache_group: int = 0
    causal: bool = True
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    max_prefill_seq_len: int = 0
    max_decode_seq_len: int = 0
    common_prefix_len: int = 0
    shared_prefix: SharedPrefix[Tensor] | None = None
    encoder_seq_lens: Tensor | None = None
    max_encoder_seq_len: int | None = None
    cross_block_tables: Tensor | None = None
    cross_slot_mapping: Tensor | None = None
    num_encoder_tokens: int | None = None
    dcp_local_seq_lens: Tensor | None = None
    prompt_share: PromptShare | None = None
    mm_prefix_range: Tensor | None = None
    seq_causal: Tensor | None = None
    scheduler_metadata: None = None
    prefix_scheduler_metadata: None = None

    @property
    def use_cascade(self) -> bool:
        """A shared prefix is attended once."""
        return self.shared_prefix is not None

    # Of `shared_prefix`; None without one.
    cu_prefix_query_lens = property(lambda self: getattr(self.shared_prefix, "cu_prefix_query_lens", None))
    prefix_kv_lens = property(lambda self: getattr(self.shared_prefix, "prefix_kv_lens", None))
    suffix_kv_lens = property(lambda self: getattr(self.shared_prefix, "suffix_kv_lens", None))

    def update_shared_prefix(self) -> None:
        """Splits the batch again, in place, after other lengths and tables were uploaded to the same tensors.

        A step that is captured in a graph calls this first; otherwise its replays attend with the split of the step
        that was captured. The prefix stays as long as it is, and nothing is checked: tables that are on the device only
        must share it, as `build` checks those of the host. Without a shared prefix nothing happens.
        """
        if self.shared_prefix is not None:
            # The prefix's own tables are a view of the first row, and its lengths constant.
            fresh = _split(self, self.shared_prefix.max_prefix_query_len)
            for name in ("cu_prefix_query_lens", "suffix_block_table", "suffix_kv_lens"):
                getattr(self.shared_prefix, name).copy_(getattr(fresh, name))

    def with_shared_prefix(self, common_prefix_len: int, piece_tokens: int) -> PagedAttentionMetadata:
        """Returns the same with a prefix that is attended once, in pieces of this number of queries."""
        metadata = replace(self, common_prefix_len=common_prefix_len)
        return replace(metadata, shared_prefix=_split(metadata, piece_tokens))


def _split(metadata: PagedAttentionMetadata, piece_tokens: int) -> SharedPrefix[Tensor]:
    # Computed on the device from uploaded arrays: a second upload would cost more than these small kernels.
    split = shared_prefix(
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        num_tokens=metadata.slot_mapping.shape[0],
        block_size=metadata.block_size,
        common_prefix_len=metadata.common_prefix_len,
        piece_tokens=piece_tokens,
        library=torch,
        device=metadata.seq_lens.device,
    )
    return replace(split, suffix_block_table=split.suffix_block_table.contiguous())
