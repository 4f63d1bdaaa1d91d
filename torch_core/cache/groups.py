"""Groups of layers that need the same tokens of the past: what a window or a chunk lets a cache forget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_core.checks import INT32_MAX, check_int
from torch_core.errors import InvalidInput

__all__ = ["CacheGroup", "GroupLayout"]


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
        >>> CacheGroup(name="local", sliding_window=4096).attention_chunk is None
        True
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
                check_int(f"{field} of cache group {self.name!r}", value, 1, INT32_MAX)
        if self.sliding_window is not None and self.attention_chunk is not None:
            raise InvalidInput(
                f"cache group {self.name!r} has both sliding_window {self.sliding_window} and attention_chunk "
                f"{self.attention_chunk}; a layer has one of them. Set the other to None."
            )


class GroupLayout:
    """A group with its block size filled in, and what follows from its window. Never changed.

    Attributes:
        name: how messages call the group.
        block_size: tokens of one block.
        reach: the sliding window or the attention chunk; None for neither.
        keeps_everything: no token of the past is ever out of sight.

    Example:
        >>> layout = GroupLayout(CacheGroup(name="local", sliding_window=32), default_block_size=16)
        >>> layout.first_needed_token(100)
        69
    """

    __slots__ = ("_chunk", "_window", "block_size", "keeps_everything", "name", "reach")

    def __init__(self, group: CacheGroup, default_block_size: int) -> None:
        self.name = group.name
        self.block_size = default_block_size if group.block_size is None else group.block_size
        self._window = group.sliding_window
        self._chunk = group.attention_chunk
        self.reach = self._chunk if self._window is None else self._window
        self.keeps_everything = self.reach is None

    def first_needed_token(self, position: int) -> int:
        """Returns the oldest token that a query at `position`, or at any later one, can see."""
        if self._window is not None:
            return max(0, position - self._window + 1)
        if self._chunk is not None:
            return position // self._chunk * self._chunk
        return 0

    def position_that_frees(self, num_tokens: int) -> int | float:
        """Returns the first query position that no longer needs any of the first `num_tokens` tokens."""
        if self._window is not None:
            return num_tokens + self._window - 1
        if self._chunk is not None:
            return -(-num_tokens // self._chunk) * self._chunk
        return math.inf
