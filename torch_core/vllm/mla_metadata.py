"""The metadata that layers of multi-head latent attention read, decodes before prefills."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["MLACommonDecodeMetadata", "MLACommonMetadata", "MLACommonPrefillMetadata", "MLAContextChunk"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAContextChunk:
    """Earlier tokens of the prefills that are expanded to keys and values together.

    Attributes:
        slots: int64 [tokens], where their latents lie in the cache, sequence after sequence.
        key_start_loc: int32 [num_prefills + 1].
        max_key_len: an upper bound on the tokens of one sequence.
    """

    slots: Tensor
    key_start_loc: Tensor
    max_key_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLACommonPrefillMetadata:
    """The sequences whose new tokens attend with expanded keys and values.

    Attributes:
        query_start_loc: int32 [num_prefills + 1], counted from the first prefill's first token.
        max_query_len: an upper bound on the query lengths.
        context: the tokens before them, in parts that fit the chunked-prefill workspace; empty without any.
    """

    query_start_loc: Tensor
    max_query_len: int
    context: tuple[MLAContextChunk, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLACommonDecodeMetadata:
    """The sequences whose new tokens attend to latents; padding rows are empty.

    Attributes:
        block_table: int32 [rows, max_blocks].
        seq_lens: int32 [rows]; this rank's part of them if ranks share sequences.
        query_start_loc: int32 [rows + 1].
        max_query_len: an upper bound on the query lengths.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLACommonMetadata:
    """The metadata of one step for the layers of one cache group; field names are those of vLLM's class of this name.

    Attributes:
        num_reqs, num_actual_tokens: real sequences and new tokens.
        max_query_len, max_seq_len: upper bounds.
        query_start_loc: int32 [num_seqs + 1].
        slot_mapping: int32 [num_tokens].
        block_size: tokens of one block.
        cache_group: the allocator's group of layers.
        num_decodes, num_decode_tokens: sequences and tokens of `decode`, which come first; with padding if there is
            no prefill.
        num_prefills: sequences of `prefill`.
        decode, prefill: either part; None without any.
    """

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    slot_mapping: Tensor
    block_size: int
    cache_group: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    decode: MLACommonDecodeMetadata | None = None
    prefill: MLACommonPrefillMetadata | None = None
