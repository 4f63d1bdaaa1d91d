"""The host record of one step's batch, from which every backend and JAX take their arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from torch_core.base.errors import InvalidInput
from torch_core.metadata.layout import PackedLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderMetadata:
    """The arrays of cross attention; int32, padded like the decoder's, read-only views of the step's packed buffer.

    Attributes:
        encoder_seq_lens: [S]; encoder tokens of each sequence, 0 for padding.
        cross_block_tables: [S, max_encoder_blocks]; their blocks, 0 where unused.
        cross_slot_mapping: [E]; the slot of each encoder token that is written now, -1 for padding.
        num_encoder_tokens: real entries of `cross_slot_mapping`.
        max_encoder_seq_len: an upper bound on `encoder_seq_lens`.
    """

    encoder_seq_lens: np.ndarray
    cross_block_tables: np.ndarray
    cross_slot_mapping: np.ndarray
    num_encoder_tokens: int
    max_encoder_seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonAttentionMetadata:
    """One step's batch: computed once in numpy, then uploaded and shared by all layers.

    All arrays are int32. `S` and `T` are the padded numbers of sequences and new tokens. Rows from `num_reqs` on and
    tokens from `num_actual_tokens` on are padding: their sequences have length 0 and no query, their slots are -1.
    The arrays are read-only views of `packed` when the builder made them. vLLM: `vllm/v1/attention/backend.py`; there
    the record holds device tensors, here the device side is made from `packed` with one copy.

    Attributes:
        query_start_loc: [S + 1]; cumulative sum of the query lengths from 0; flat over padding rows.
        seq_lens: [S]; tokens of each sequence when the step's own are written; 0 for padding.
        block_tables: [S, max_blocks]; unused entries are 0, the null block.
        slot_mapping: [T]; `block * block_size + offset` of each new token, -1 for none.
        positions: [T]; position of each new token in its sequence; 0 for padding.
        num_reqs: real sequences.
        num_actual_tokens: real new tokens.
        max_query_len: an upper bound on the query lengths (the largest one, unless the builder was given a bound).
        max_seq_len: an upper bound on `seq_lens`, likewise.
        block_size: tokens of one block.
        num_blocks: blocks of the pool that the ids refer to.
        cache_group: the group of layers whose tables these are; 0 when there is only one.
        causal: whether a query sees no key after itself.
        encoder: the arrays of cross attention, or None for a batch without.
        state_slots: [S]; slot of each sequence's recurrent state, -1 for padding; None for a batch without states.
        packed: the one buffer that holds the arrays, or None when they were given separately.
        layout: place of each array in `packed`.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    positions: np.ndarray
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    num_blocks: int
    cache_group: int = 0
    causal: bool = True
    encoder: EncoderMetadata | None = None
    state_slots: np.ndarray | None = None
    packed: np.ndarray | None = None
    layout: PackedLayout | None = None

    @property
    def num_seqs(self) -> int:
        """Rows with padding."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """New tokens with padding."""
        return self.slot_mapping.shape[0]

    @property
    def encoder_seq_lens(self) -> np.ndarray | None:
        """int32[S]: encoder tokens of each sequence; None for a batch without an encoder."""
        return None if self.encoder is None else self.encoder.encoder_seq_lens

    @property
    def query_lens(self) -> np.ndarray:
        """int32[S]: new tokens of each sequence; 0 for padding."""
        return np.diff(self.query_start_loc)

    def compute_num_computed_tokens(self) -> np.ndarray:
        """Returns int32[S]: the tokens of each sequence that were in the cache before the step."""
        return self.seq_lens - self.query_lens

    def unpadded(
        self, num_actual_tokens: int | None = None, num_actual_reqs: int | None = None
    ) -> CommonAttentionMetadata:
        """Returns the record of the real sequences and tokens alone; the arrays are views, `packed` is dropped.

        Args:
            num_actual_tokens: tokens of the sequences that stay; None for all.
            num_actual_reqs: sequences that stay, the first ones; None for all.

        Raises:
            InvalidInput: the batch has fewer sequences, or another number of tokens.
        """
        reqs = self.num_reqs if num_actual_reqs is None else num_actual_reqs
        if not 0 <= reqs <= self.num_reqs:
            raise InvalidInput("num_actual_reqs", value=reqs, wanted=f"the batch has {self.num_reqs} sequences")
        tokens = int(self.query_start_loc[reqs])
        if num_actual_tokens not in (None, tokens):
            wanted = f"the first {reqs} sequences have {tokens}"
            raise InvalidInput("num_actual_tokens", value=num_actual_tokens, wanted=wanted)
        if reqs == self.num_seqs and tokens == self.num_tokens:
            return self
        encoder = self.encoder
        if encoder is not None:
            encoder = replace(
                encoder,
                encoder_seq_lens=encoder.encoder_seq_lens[:reqs],
                cross_block_tables=encoder.cross_block_tables[:reqs],
                cross_slot_mapping=encoder.cross_slot_mapping[: encoder.num_encoder_tokens],
            )
        return replace(
            self,
            query_start_loc=self.query_start_loc[: reqs + 1],
            seq_lens=self.seq_lens[:reqs],
            block_tables=self.block_tables[:reqs],
            slot_mapping=self.slot_mapping[:tokens],
            positions=self.positions[:tokens],
            num_reqs=reqs,
            num_actual_tokens=tokens,
            encoder=encoder,
            state_slots=None if self.state_slots is None else self.state_slots[:reqs],
            packed=None,
            layout=None,
        )
