"""The sizes of multi-head latent attention, read from a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_core.base.checks import check_int

__all__ = ["MLADims", "compute_num_kv_splits", "get_mla_dims"]

_SPLIT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
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
