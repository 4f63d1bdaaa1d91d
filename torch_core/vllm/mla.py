"""Multi-head latent attention: its sizes, read from a model's configuration, and the metadata that its layers read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from torch_core.base.checks import check_int

_SPLIT_TOKENS = 512
#: The metadata of decodes.
D = TypeVar("D", bound="MLACommonDecodeMetadata")


@dataclass(frozen=True, slots=True)
class MLADims:
    """The sizes of one layer; field names are those of a Hugging Face DeepSeek configuration.

    Attributes:
        q_lora_rank, kv_lora_rank: widths of the compressed query (None when it is not) and of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: parts of a query or key head without rotary embedding and with it; the
            second is stored once per token, for all heads.
        v_head_dim: width of a value head.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Width of a whole query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_head_size(self) -> int:
        """Numbers that the cache holds for one token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def get_mla_dims(config: Any) -> MLADims:
    """Returns the sizes that a model's text configuration (any object with these attributes) states.

    Args:
        config: the configuration, or an engine's that has it as `hf_text_config`.

    Raises:
        InvalidInput: an attribute is missing or not a positive int.

    Example:
        >>> from types import SimpleNamespace
        >>> get_mla_dims(SimpleNamespace(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
        ...                              qk_rope_head_dim=64, v_head_dim=128)).cache_head_size
        576
    """
    config = getattr(config, "hf_text_config", config)
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: getattr(config, name, None) for name in names}
    rank = getattr(config, "q_lora_rank", None)
    for name, size in {**sizes, **({} if rank is None else {"q_lora_rank": rank})}.items():
        check_int(f"{name} of the model configuration", size, 1)
    return MLADims(q_lora_rank=rank, **sizes)  # type: ignore[arg-type]


def compute_num_kv_splits(max_seq_len: int, num_compute_units: int) -> int:
    """Returns into how many parts vLLM's Triton MLA cuts a sequence: one for 512 tokens, two a unit at most.

    A pure function of sizes that the host knows, so that a captured graph and its replays agree. This project's plans
    cut by the padded batch instead; it is for callers that size vLLM's `attn_logits`.

    Args:
        max_seq_len: an upper bound on the tokens of a sequence.
        num_compute_units: multiprocessors of the device.

    Raises:
        InvalidInput: a size is not positive.

    Example:
        >>> compute_num_kv_splits(8192, 132), compute_num_kv_splits(100, 132), compute_num_kv_splits(10**6, 132)
        (16, 1, 264)
    """
    check_int("max_seq_len", max_seq_len, 1)
    check_int("num_compute_units", num_compute_units, 1)
    parts = max(1, max_seq_len // _SPLIT_TOKENS)
    return min(1 << (parts - 1).bit_length(), 2 * num_compute_units)


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
class MLACommonMetadata(Generic[D]):
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
    decode: D | None = None
    prefill: MLACommonPrefillMetadata | None = None
