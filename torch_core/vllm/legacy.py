"""The helpers of vLLM's older attention stack under their own names, over this project's records.

They come from `vllm/attention/backends/utils.py` before its second engine. Code that was written for them finds them
here; nothing else in this project uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torch_core.errors import InvalidInput
from torch_core.metadata import (
    CommonAttentionMetadata,
    SequenceRowLike,
    build_common_metadata,
    compute_slot_mapping,
    compute_slot_mapping_start_idx,
)
from torch_core.vllm.types import AttentionType

__all__ = [
    "CommonMetadataBuilder",
    "get_num_prefill_decode_query_kv_tokens",
    "get_seq_len_block_table_args",
    "is_all_cross_attn_metadata_set",
    "is_all_encoder_attn_metadata_set",
    "is_block_tables_empty",
]


def is_block_tables_empty(block_tables: Mapping[Any, Any] | None) -> bool:
    """Returns whether there are no block tables: None, or None for every sequence (a profiling run).

    Example:
        >>> is_block_tables_empty({0: None}), is_block_tables_empty({0: [3]})
        (True, False)
    """
    return block_tables is None or all(table is None for table in block_tables.values())


class CommonMetadataBuilder:
    """Collects the sequences of a step one by one, then builds its metadata.

    Args:
        block_size: tokens of one block.
        num_blocks: blocks of the pool.
        sliding_window: tokens of a prompt before the last so many get no slot, for engines that attend to a prompt's
            fresh keys and only later to the cache. None for all.

    Attributes:
        num_prefills: sequences with more than one new token.
        num_prefill_tokens: their new tokens.
        num_decode_tokens: the other sequences' new tokens.
        context_lens: tokens before the step, by sequence.
        prefill_seq_lens: lengths of the prefills after it.
        curr_seq_lens: lengths of the decodes after it.

    Example:
        >>> from torch_core.metadata import SequenceRow
        >>> builder = CommonMetadataBuilder(block_size=4, num_blocks=8)
        >>> builder.add_seq_group(SequenceRow([3], 0, 3))
        >>> builder.add_seq_group(SequenceRow([5], 2, 1))
        >>> builder.build(cuda_graph_pad_size=2).seq_lens.tolist(), builder.num_prefill_tokens
        ([3, 3, 0, 0], 3)
    """

    def __init__(self, *, block_size: int, num_blocks: int, sliding_window: int | None = None) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.sliding_window = sliding_window
        self.prepare()

    def prepare(self) -> None:
        """Forgets the sequences of the step before."""
        self._rows: list[SequenceRowLike] = []
        self.num_prefills = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.context_lens: list[int] = []
        self.prefill_seq_lens: list[int] = []
        self.curr_seq_lens: list[int] = []

    def add_seq_group(self, row: SequenceRowLike) -> None:
        """Adds a sequence to the step."""
        self._rows.append(row)
        length = row.num_computed_tokens + row.num_new_tokens
        self.context_lens.append(row.num_computed_tokens)
        if row.num_new_tokens > 1:
            self.num_prefills += 1
            self.num_prefill_tokens += row.num_new_tokens
            self.prefill_seq_lens.append(length)
        else:
            self.num_decode_tokens += row.num_new_tokens
            self.curr_seq_lens.append(length)

    def build(self, *, cuda_graph_pad_size: int = -1, max_blocks: int | None = None) -> CommonAttentionMetadata:
        """Returns the metadata of the sequences added since `prepare`.

        Args:
            cuda_graph_pad_size: padding rows, and padding tokens, to reach a captured batch size; -1 for no graph.
            max_blocks: columns of the block tables; None for just enough.

        Raises:
            InvalidInput: as `torch_core.metadata.build_common_metadata`.
        """
        padding = max(cuda_graph_pad_size, 0)
        metadata = build_common_metadata(
            self._rows,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_seqs=len(self._rows) + padding,
            num_tokens=self.num_prefill_tokens + self.num_decode_tokens + padding,
            max_blocks=max_blocks,
        )
        if self.sliding_window is not None and metadata.packed is not None and metadata.layout is not None:
            computed = metadata.compute_num_computed_tokens()
            start_idx = compute_slot_mapping_start_idx(metadata.query_lens, computed, self.sliding_window)
            start_idx[metadata.query_lens <= 1] = 0
            metadata.layout["slot_mapping"].of(metadata.packed)[:] = compute_slot_mapping(
                metadata.block_tables,
                metadata.query_start_loc,
                computed,
                block_size=self.block_size,
                num_tokens=metadata.num_tokens,
                start_idx=start_idx,
            )
        return metadata


def is_all_encoder_attn_metadata_set(attn_metadata: Any) -> bool:
    """Returns whether a step's metadata has what encoder attention needs."""
    return attn_metadata.encoder_seq_lens is not None and attn_metadata.max_encoder_seq_len is not None


def is_all_cross_attn_metadata_set(attn_metadata: Any) -> bool:
    """Returns whether a step's metadata has what cross attention needs, which includes what an encoder needs."""
    return (
        is_all_encoder_attn_metadata_set(attn_metadata)
        and attn_metadata.cross_slot_mapping is not None
        and attn_metadata.cross_block_tables is not None
    )


def get_seq_len_block_table_args(
    attn_metadata: Any, is_prompt: bool, attn_type: AttentionType | str
) -> tuple[Tensor, int, Tensor | None]:
    """Returns the key lengths, their bound and the block tables that a kind of attention reads.

    Decoders read their own, cross attention the encoder's lengths and the cross tables, encoders have no tables. One
    batch holds prompts and decodes, so `is_prompt` changes nothing.

    Raises:
        InvalidInput: the metadata lacks the encoder's fields, or the kind is unknown.
    """
    del is_prompt
    kind = AttentionType(attn_type)
    if kind is AttentionType.DECODER:
        return attn_metadata.seq_lens, attn_metadata.max_seq_len, attn_metadata.block_table
    if kind is AttentionType.ENCODER_ONLY:
        return attn_metadata.seq_lens, attn_metadata.max_seq_len, None
    needed = (
        is_all_cross_attn_metadata_set if kind is AttentionType.ENCODER_DECODER else is_all_encoder_attn_metadata_set
    )
    if not needed(attn_metadata):
        raise InvalidInput(f"the metadata has no encoder fields, which {kind.value} attention needs.")
    tables = attn_metadata.cross_block_tables if kind is AttentionType.ENCODER_DECODER else None
    return attn_metadata.encoder_seq_lens, attn_metadata.max_encoder_seq_len, tables


def get_num_prefill_decode_query_kv_tokens(attn_metadata: Any, attn_type: AttentionType | str) -> tuple[int, int, int]:
    """Returns the query tokens of prefills, their key tokens, and the query tokens of decodes.

    Encoders have prefills only, of their own tokens; cross attention has the encoder's tokens as keys.

    Raises:
        InvalidInput: the metadata does not count encoder tokens and the kind needs it, or the kind is unknown.
    """
    kind = AttentionType(attn_type)
    if kind in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        prefill = attn_metadata.num_prefill_tokens
        return prefill, prefill, attn_metadata.num_decode_tokens
    encoder = attn_metadata.num_encoder_tokens
    if encoder is None:
        raise InvalidInput(f"num_encoder_tokens of the metadata is None; {kind.value} attention needs it.")
    if kind is AttentionType.ENCODER:
        return encoder, encoder, 0
    return attn_metadata.num_prefill_tokens, encoder, attn_metadata.num_decode_tokens
