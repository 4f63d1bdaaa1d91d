"""What a block cache is made of: the frozen, validated sizes and the attention groups that share its blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_core.errors import InvalidInput

__all__ = ["NULL_BLOCK", "CacheConfig", "CacheGroup"]

#: Block 0 stands for "nothing here": it is never owned, keyed, freed or counted as capacity.
NULL_BLOCK = 0

_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share one block table per sequence, because they need the same tokens of the past.

    All groups draw blocks from one pool. A block has the same number of bytes in every group, so a group whose tokens
    are narrower (multi-head latent attention) puts more of them into one block: a larger `block_size`. The idea of
    groups over one pool of equal pages is vLLM's (vllm/v1/core/kv_cache_coordinator.py).

    Attributes:
        name: how messages call the group.
        block_size: tokens of one block in this group; None takes the cache's.
        sliding_window: a query sees this many tokens, its own included; None for all.
        attention_chunk: a query sees only its own chunk of this many positions (chunked-local attention); None for all.

    Example:
        >>> window = CacheGroup(name="local", block_size=16, sliding_window=32)
        >>> window.first_needed_token(100)
        69
    """

    name: str
    block_size: int | None = None
    sliding_window: int | None = None
    attention_chunk: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidInput(f"the name of a cache group is {self.name!r}; it must be a string that is not empty.")
        for field in ("block_size", "sliding_window", "attention_chunk"):
            value = getattr(self, field)
            if value is not None:
                _check_int(f"{field} of cache group {self.name!r}", value, 1, _INT32_MAX)
        if self.sliding_window is not None and self.attention_chunk is not None:
            raise InvalidInput(
                f"cache group {self.name!r} has both sliding_window {self.sliding_window} and attention_chunk "
                f"{self.attention_chunk}; a layer has one of them. Set the other to None."
            )

    @property
    def keeps_everything(self) -> bool:
        """True when no token of the past is ever out of sight."""
        return self.sliding_window is None and self.attention_chunk is None

    def first_needed_token(self, position: int) -> int:
        """Returns the oldest token that a query at `position`, or at any later one, can see."""
        if self.sliding_window is not None:
            return max(0, position - self.sliding_window + 1)
        if self.attention_chunk is not None:
            return position // self.attention_chunk * self.attention_chunk
        return 0

    def position_that_frees(self, num_tokens: int) -> int | float:
        """Returns the first query position that no longer needs any of the first `num_tokens` tokens."""
        if self.sliding_window is not None:
            return num_tokens + self.sliding_window - 1
        if self.attention_chunk is not None:
            return -(-num_tokens // self.attention_chunk) * self.attention_chunk
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The sizes of a cache and what its prefix keys vouch for.

    Attributes:
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens of one block.
        enable_prefix_caching: share full blocks between sequences with equal tokens, salt and extra keys.
        watermark_blocks: blocks that the first step of a sequence leaves free for those already running.
        sliding_window: window of every layer, for a cache without `groups`.
        attention_chunk: chunk of every layer, for a cache without `groups`.
        groups: groups of layers with needs of their own; empty for one group of all layers.
        model_fingerprint: identifies weights, layout and anything else that changes the cached numbers.
        cache_dtype: the element type by name; part of every key.
        verify_tokens: compare the token ids behind a key as well, and so survive a collision of SHA-256.
        num_host_blocks: blocks of host memory for `swap_out`; 0 for none.
        max_blocks_per_seq: width of the block tables on the device; None for no limit but the pool.
        max_step_tokens: most new tokens that one step gives one sequence. It lets a window hold a prompt that is
            longer than the pool; None assumes that a prompt is computed in one piece.

    Example:
        >>> CacheConfig(num_blocks=64, block_size=16).capacity
        63
    """

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    watermark_blocks: int = 0
    sliding_window: int | None = None
    attention_chunk: int | None = None
    groups: tuple[CacheGroup, ...] = ()
    model_fingerprint: bytes = b""
    cache_dtype: str = ""
    verify_tokens: bool = False
    num_host_blocks: int = 0
    max_blocks_per_seq: int | None = None
    max_step_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_int("num_blocks", self.num_blocks, 2, _INT32_MAX)
        _check_int("block_size", self.block_size, 1, _INT32_MAX)
        _check_int("watermark_blocks", self.watermark_blocks, 0, self.num_blocks - 2)
        _check_int("num_host_blocks", self.num_host_blocks, 0, _INT32_MAX)
        for field in ("max_blocks_per_seq", "max_step_tokens"):
            value = getattr(self, field)
            if value is not None:
                _check_int(field, value, 1, _INT32_MAX)
        for field in ("enable_prefix_caching", "verify_tokens"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidInput(f"{field} is {getattr(self, field)!r}; it must be True or False.")
        if not isinstance(self.model_fingerprint, bytes):
            raise InvalidInput(f"model_fingerprint is a {type(self.model_fingerprint).__name__}; it must be bytes.")
        if not isinstance(self.cache_dtype, str):
            raise InvalidInput(f"cache_dtype is {self.cache_dtype!r}; it must be the name of a dtype, a string.")
        if not isinstance(self.groups, tuple) or not all(isinstance(group, CacheGroup) for group in self.groups):
            raise InvalidInput("groups must be a tuple of CacheGroup, empty for one group of all layers.")
        if self.groups and (self.sliding_window is not None or self.attention_chunk is not None):
            raise InvalidInput(
                "groups and sliding_window or attention_chunk are both set; put the window into a group."
            )
        names = [group.name for group in self.resolved_groups]
        if len(set(names)) != len(names):
            raise InvalidInput(f"groups has two groups of one name: {names}; give each its own.")

    @property
    def capacity(self) -> int:
        """Blocks that sequences can own: all but the null block."""
        return self.num_blocks - 1

    @property
    def resolved_groups(self) -> tuple[CacheGroup, ...]:
        """The groups with their block sizes filled in: one group of all layers when none was given."""
        groups = self.groups or (
            CacheGroup(name="all", sliding_window=self.sliding_window, attention_chunk=self.attention_chunk),
        )
        return tuple(
            CacheGroup(
                name=group.name,
                block_size=group.block_size or self.block_size,
                sliding_window=group.sliding_window,
                attention_chunk=group.attention_chunk,
            )
            for group in groups
        )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{name} is {value!r}; it must be an int from {low} to {high}.")
    if not low <= value <= high:
        raise InvalidInput(f"{name} is {value}; it must be from {low} to {high}.")
