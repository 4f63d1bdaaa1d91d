"""Encoders: the metadata of a batch without a cache, and the encoder side of a step with cross attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.base.specs import PAD_SLOT_ID
from torch_core.metadata.check import check_written_blocks, first_true, row_name
from torch_core.metadata.common import CommonAttentionMetadata, EncoderMetadata
from torch_core.metadata.layout import PackedLayout, metadata_layout
from torch_core.metadata.slots import compute_positions, write_slots
from torch_core.metadata.tables import write_checked_tables


def build_dense_metadata(
    query_lens: Sequence[int], *, num_seqs: int | None = None, num_tokens: int | None = None, causal: bool = False
) -> CommonAttentionMetadata:
    """Returns the metadata of sequences that attend to their own tokens of this step only; nothing is written.

    Args:
        query_lens: tokens of each sequence, at least 1.
        num_seqs: padded number of sequences; None for none.
        num_tokens: padded number of tokens; None for none.
        causal: recorded as it is.

    Raises:
        InvalidInput: a length is not positive.
        RequestTooLong: the sequences do not fit in the padded sizes.

    Example:
        >>> build_dense_metadata([3, 2], num_tokens=8).query_start_loc.tolist()
        [0, 3, 5]
    """
    lens = np.array(query_lens, np.int64)
    if lens.size and lens.min() < 1:
        index = int(np.argmin(lens))
        raise InvalidInput(f"query_lens[{index}]", value=lens[index], wanted="it must be at least 1")
    total = int(lens.sum())
    num_seqs = lens.size if num_seqs is None else num_seqs
    num_tokens = total if num_tokens is None else num_tokens
    if lens.size > num_seqs or total > num_tokens:
        wanted = f"it is padded to {num_seqs} and {num_tokens}. Pad to a larger bucket"
        raise RequestTooLong("query_lens", f"has {lens.size} sequences of {total} tokens", wanted)
    layout = metadata_layout(num_seqs=num_seqs, num_tokens=num_tokens, max_blocks=0)
    buffer = np.zeros(layout.num_elements, np.int32)
    fields = layout.unpack(buffer)
    fields["query_start_loc"][1 : lens.size + 1] = np.cumsum(lens)
    fields["query_start_loc"][lens.size + 1 :] = total
    fields["seq_lens"][: lens.size] = lens
    fields["slot_mapping"][:] = PAD_SLOT_ID
    fields["positions"][:total] = compute_positions(fields["query_start_loc"], np.zeros(num_seqs, np.int32))
    longest = int(lens.max(initial=0))
    return CommonAttentionMetadata(
        **fields,
        num_reqs=lens.size,
        num_actual_tokens=total,
        max_query_len=longest,
        max_seq_len=longest,
        block_size=1,
        num_blocks=1,
        causal=causal,
        packed=buffer,
        layout=layout,
    )


@dataclass(frozen=True, slots=True)
class EncoderRow:
    """The encoder tokens of one sequence, as cross attention sees them in one step.

    Attributes:
        block_ids: the blocks of their keys and values, in order; of the cross-attention layers' cache group.
        num_tokens: encoder tokens; at least 1.
        num_new_tokens: how many of them, the last ones, get their keys and values in this step: all in the step that
            ran the encoder, 0 afterwards.
    """

    block_ids: Sequence[int]
    num_tokens: int
    num_new_tokens: int = 0


def encoder_layout(*, num_seqs: int, num_encoder_tokens: int, max_encoder_blocks: int) -> list[tuple[str, tuple]]:
    """Returns the names and shapes to pass as `extra` to `metadata_layout` for a step with cross attention."""
    return [
        ("encoder_seq_lens", (num_seqs,)),
        ("cross_slot_mapping", (num_encoder_tokens,)),
        ("cross_block_tables", (num_seqs, max_encoder_blocks)),
    ]


def check_encoder_rows(rows: Sequence[Any]) -> None:
    """Raises InvalidInput for the first row without ints as lengths; numpy would cut a float."""
    for index, row in enumerate(rows):
        for name in ("num_tokens", "num_new_tokens"):
            value = getattr(row, name, None)
            if not isinstance(value, int | np.integer):
                raise InvalidInput(f"encoder_rows[{index}]", f"has {name} {value!r}", "an EncoderRow has ints there")


def build_encoder_metadata(
    rows: Sequence[EncoderRow],
    *,
    layout: PackedLayout,
    buffer: np.ndarray,
    block_size: int,
    num_blocks: int,
    seq_ids: Sequence[str | None],
) -> EncoderMetadata:
    """Writes the encoder fields of a step, one row for each of the decoder's, into its packed buffer."""
    if len(rows) != len(seq_ids):
        raise InvalidInput("encoder_rows", f"has {len(rows)} entries", f"the step has {len(seq_ids)} rows")
    totals = np.array([row.num_tokens for row in rows], np.int64)
    new = np.array([row.num_new_tokens for row in rows], np.int64)
    if (index := first_true((totals < 1) | (new < 0) | (new > totals))) is not None:
        problem = f"has num_tokens {totals[index]} and num_new_tokens {new[index]} for {row_name(index, seq_ids)}"
        wanted = "the first must be at least 1 and the second from 0 to the first"
        raise InvalidInput(f"encoder_rows[{index}]", problem, wanted)
    seq_lens, slots, tables = (
        layout[name].of(buffer) for name in ("encoder_seq_lens", "cross_slot_mapping", "cross_block_tables")
    )
    live = -(-totals // block_size)
    num_new = int(new.sum())
    if live.max(initial=0) > tables.shape[1]:
        index = int(np.argmax(live))
        raise RequestTooLong(
            f"encoder_seq_lens[{index}]",
            f"is {totals[index]} ({live[index]} blocks of {block_size}) but cross_block_tables has {tables.shape[1]} "
            f"columns for {row_name(index, seq_ids)}",
        )
    if num_new > slots.shape[0]:
        wanted = f"cross_slot_mapping has {slots.shape[0]} entries. Pad to a larger bucket"
        raise RequestTooLong("encoder_rows", f"have {num_new} new tokens", wanted)

    seq_lens[: len(rows)] = totals
    seq_lens[len(rows) :] = 0
    names: dict[str, Any] = {"block_size": block_size, "seq_ids": lambda: seq_ids}
    write_checked_tables([row.block_ids for row in rows], tables, totals, new, num_blocks=num_blocks, **names)
    write_slots(slots, np.cumsum([0, *new]), totals - new, tables, block_size=block_size)
    check_written_blocks(slots[:num_new], new, **names)
    for view in (seq_lens, tables, slots):
        view.setflags(write=False)
    return EncoderMetadata(
        encoder_seq_lens=seq_lens,
        cross_block_tables=tables,
        cross_slot_mapping=slots,
        num_encoder_tokens=num_new,
        max_encoder_seq_len=int(totals.max(initial=0)),
    )
