"""The frozen, validated sizes of a block cache, and its groups of layers that need the same tokens of the past."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from torch_core.base.checks import INT32_MAX, check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Limits, check_fields

#: Block 0 stands for "nothing here": it is never owned, keyed, freed or counted as capacity.
NULL_BLOCK = 0
# A kind of layers may be padded by less than this share of the smallest one's number, to be one group and not two.
_MOST_PADDING = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The sizes of a cache and the root fields of its prefix keys.

    Attributes:
        num_blocks: number of blocks of the pool, including the null block.
        block_size: number of tokens of one block.
        enable_prefix_caching: share full blocks between sequences with equal tokens, salt and extra keys.
        watermark_blocks: number of blocks that the first step of a sequence leaves free for running sequences.
        sliding_window: window of every layer, for a cache without `groups`.
        attention_chunk: chunk of every layer, for a cache without `groups`.
        groups: groups of layers that need different tokens; empty for one group of all layers.
        model_fingerprint: identifies weights, layout and anything else that changes the cached numbers.
        cache_dtype: the element type by name; part of every key.
        verify_tokens: also compare the token ids of a key, which detects a collision of SHA-256.
        scrub_on_free: list every block that lost its content in `blocks_to_scrub` of the next step, so that the device
            zeroes it before another sequence gets it. A block whose prefix key is still valid keeps its content.
        num_host_blocks: number of blocks of host memory for `swap_out`; 0 for none.
        max_blocks_per_seq: width of the block tables on the device; None if only the pool limits it.
        states: slots of layers that keep a recurrent state; None for a model without such layers.
        max_step_tokens: most new tokens that one step gives one sequence. With it, a cache with a window can hold a
            prompt that is longer than the pool; None assumes that a prompt is computed in one piece.

    Example:
        >>> CacheConfig(num_blocks=64, block_size=16).capacity
        63
    """

    num_blocks: Annotated[int, Limits(2, INT32_MAX)]
    block_size: Annotated[int, Limits(1, INT32_MAX)]
    enable_prefix_caching: bool = True
    watermark_blocks: int = 0
    sliding_window: int | None = None
    attention_chunk: int | None = None
    groups: tuple[CacheGroup, ...] = ()
    model_fingerprint: bytes = b""
    cache_dtype: Annotated[str, Limits(wanted="the name of a dtype, a string")] = ""
    verify_tokens: bool = False
    scrub_on_free: bool = False
    num_host_blocks: Annotated[int, Limits(0, INT32_MAX)] = 0
    max_blocks_per_seq: Annotated[int | None, Limits(1, INT32_MAX)] = None
    max_step_tokens: Annotated[int | None, Limits(1, INT32_MAX)] = None
    states: StateConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model_fingerprint, bytes):
            raise InvalidInput("model_fingerprint", f"is a {type(self.model_fingerprint).__name__}", "it must be bytes")
        if not isinstance(self.groups, tuple) or not all(isinstance(group, CacheGroup) for group in self.groups):
            raise InvalidInput("groups", "must be a tuple of CacheGroup, empty for one group of all layers")
        if not (self.states is None or isinstance(self.states, StateConfig)):
            raise InvalidInput("states", value=self.states, wanted="it must be a StateConfig, or None")
        check_fields(self)
        check_int("watermark_blocks", self.watermark_blocks, 0, self.num_blocks - 2)
        if self.groups and (self.sliding_window is not None or self.attention_chunk is not None):
            wanted = "put the window into a group"
            raise InvalidInput("groups", "and sliding_window or attention_chunk are both set", wanted)
        names = [layout.name for layout in self.layouts]
        if len(set(names)) != len(names):
            raise InvalidInput("groups", f"has two groups of one name: {names}", "give each its own")

    @property
    def capacity(self) -> int:
        """Number of blocks that sequences can own: all except the null block."""
        return self.num_blocks - 1

    @property
    def layouts(self) -> tuple[GroupLayout, ...]:
        """The groups with their block sizes filled in: one group of all layers when none was given."""
        groups = self.groups or (
            CacheGroup(name="all", sliding_window=self.sliding_window, attention_chunk=self.attention_chunk),
        )
        return tuple(GroupLayout(group, self.block_size) for group in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """The slots of layers that keep a recurrent state, and which states are kept for other sequences.

    A sequence has one slot, which each of its steps replaces. A snapshot is the state at a block boundary; it is kept
    under the key of the block that ends there. A prefix is shared up to a boundary that has its blocks and a snapshot.
    Snapshots take the slots that no sequence needs: the one that was used longest ago goes first.

    Attributes:
        num_slots: number of slots, including the null slot 0. One sequence may need three for a moment.
        snapshot_blocks: a snapshot is kept at every boundary of this many blocks, at the last boundary before the end
            of a prompt, and at the one where a prompt leaves blocks that are cached (Marconi's branch points,
            arXiv:2411.19379), if a step ends there (`CacheManager.until_snapshot`).
        num_host_slots: number of slots of host memory for `swap_out`; 0 for none.

    Example:
        >>> StateConfig(num_slots=64).snapshot_blocks
        64
    """

    num_slots: Annotated[int, Limits(4, INT32_MAX)]
    snapshot_blocks: Annotated[int, Limits(1, INT32_MAX)] = 64
    num_host_slots: Annotated[int, Limits(0, INT32_MAX)] = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share one block table per sequence, because they need the same tokens of the past.

    All groups draw blocks from one pool. A block has the same number of bytes in every group, so a group whose tokens
    are narrower (multi-head latent attention) puts more of them into one block: a larger `block_size`. The idea of
    groups over one pool of equal pages is vLLM's (vllm/v1/core/kv_cache_coordinator.py).

    Attributes:
        name: name of the group in messages.
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
            wanted = "the name of a cache group must be a string that is not empty"
            raise InvalidInput("name", value=self.name, wanted=wanted)
        for field in ("block_size", "sliding_window", "attention_chunk"):
            value = getattr(self, field)
            if value is not None:
                check_int(f"{field} of cache group {self.name!r}", value, 1, INT32_MAX)
        if self.sliding_window is not None and self.attention_chunk is not None:
            both = f"is {self.sliding_window} and attention_chunk {self.attention_chunk}"
            wanted = "a layer has one of them. Set the other to None"
            raise InvalidInput("sliding_window", f"of cache group {self.name!r} {both}", wanted)


class GroupLayout:
    """A group with its block size filled in, and the values that follow from its window. Never changed.

    Attributes:
        name: name of the group in messages.
        block_size: tokens of one block.
        reach: the sliding window or the attention chunk; None for neither.
        keeps_everything: whether every earlier token stays visible.

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

    def most_blocks(self, num_tokens: int, max_step_tokens: int | None = None) -> int:
        """Returns the most blocks that a sequence holds at any time; see `LayerGroups.most_blocks`."""
        everything = -(-num_tokens // self.block_size)
        if self.reach is None or max_step_tokens is None:
            return everything
        # The keys that a step sees, and its own tokens, can begin and end inside a block.
        seen = self.reach - 1 + max_step_tokens
        return min(everything, (seen - 2) // self.block_size + 2)

    def position_that_frees(self, num_tokens: int) -> int | float:
        """Returns the first query position that no longer needs any of the first `num_tokens` tokens."""
        if self._window is not None:
            return num_tokens + self._window - 1
        if self._chunk is not None:
            return -(-num_tokens // self._chunk) * self._chunk
        return math.inf


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The cache groups of a model, and where each layer's keys and values lie.

    A block is the same block of every array, and it belongs to one group: array `i` holds the `i`-th layer of that
    group in it. So a block costs as much in every group, and all of them draw on one pool.

    Attributes:
        groups: those whose layers see everything come first.
        num_arrays: cache arrays: the layers of the largest group.
        layer_groups: the group of each layer.
        layer_arrays: the array of each layer.
    """

    groups: tuple[CacheGroup, ...]
    num_arrays: int
    layer_groups: tuple[int, ...]
    layer_arrays: tuple[int, ...]

    def block_sizes(self, block_size: int) -> tuple[int, ...]:
        """Returns the tokens of a block in each group, of which those of the widest layers have `block_size`."""
        return tuple(GroupLayout(group, block_size).block_size for group in self.groups)

    def most_blocks(self, num_tokens: int, *, block_size: int, max_step_tokens: int | None = None) -> int:
        """Returns the most blocks that a sequence of this many tokens holds, in all groups together.

        Args:
            num_tokens: number of tokens of the whole sequence.
            block_size: tokens of one block.
            max_step_tokens: most new tokens of one step; None for a sequence that is computed in one piece.
        """
        layouts = (GroupLayout(group, block_size) for group in self.groups)
        return sum(layout.most_blocks(num_tokens, max_step_tokens) for layout in layouts)


def group_layers(
    windows: Sequence[int | None], widths: Sequence[int] = (), *, block_size: int | None = None
) -> LayerGroups:
    """Puts the layers of a model into groups of one window each and of about as many layers each.

    Where windows differ, layers of other widths are in groups of their own, whose blocks have more tokens: a block has
    as many bytes in every group.

    Groups are as large as the rarest window has layers, as models alternate in a fixed ratio; more common windows get
    several groups. The idea, and the order of layers in the groups, are those of vLLM's hybrid KV cache manager
    (vllm/v1/core/kv_cache_utils.py).

    Args:
        windows: for each layer the number of tokens that a query sees, its own included; None for all.
        widths: for each layer the elements of a token's keys and values; empty for the same number in all.
        block_size: tokens of a block of the widest layers; only needed if widths differ.

    Raises:
        InvalidInput: no layer, a window below 1, or a width that does not divide the largest one.

    Example:
        >>> found = group_layers([512, 512, None, 512, 512, None])
        >>> [group.name for group in found.groups], found.num_arrays
        (['full', 'window 512', 'window 512, 2 of 2'], 2)
        >>> found.layer_groups, found.layer_arrays
        ((1, 2, 0, 1, 2, 0), (0, 0, 0, 1, 1, 1))
        >>> [group.block_size for group in group_layers([512, None], [4096, 2048], block_size=16).groups]
        [32, None]
    """
    if not windows:
        raise InvalidInput("windows", "is empty", "give one entry for each layer with a cache")
    kinds: dict[tuple[int | None, int], list[int]] = {}
    widest = max(widths, default=1)
    is_uneven = bool(widths) and len(set(windows)) > 1
    for layer, window in enumerate(windows):
        if window is not None:
            check_int(f"windows[{layer}]", window, 1, INT32_MAX, also=", or None")
        width = widths[layer] if is_uneven else widest
        if widest % width:
            raise InvalidInput(f"widths[{layer}]", value=width, wanted=f"it must divide the largest one ({widest})")
        kinds.setdefault((window, widest // width), []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < (1 + _MOST_PADDING) * min(counts) else min(counts)
    groups: list[CacheGroup] = []
    layer_groups, layer_arrays = [0] * len(windows), [0] * len(windows)
    for window, factor in sorted(kinds, key=lambda kind: (kind[0] is not None, *kind)):
        layers = kinds[window, factor]
        tokens = None if factor == 1 or block_size is None else factor * block_size
        twice = sum(each == window for each, _ in kinds) > 1
        num_groups = -(-len(layers) // size)
        for index in range(num_groups):
            # Dealt out in turn, so that each group has layers from all over the model.
            for array, layer in enumerate(layers[index::num_groups]):
                layer_groups[layer], layer_arrays[layer] = len(groups), array
            name = _name(window, index, num_groups, len(kinds)) + f", blocks times {factor}" * twice
            groups.append(CacheGroup(name=name, block_size=tokens, sliding_window=window))
    return LayerGroups(tuple(groups), max(layer_arrays) + 1, tuple(layer_groups), tuple(layer_arrays))


def _name(window: int | None, index: int, num_groups: int, num_kinds: int) -> str:
    if num_kinds == 1:
        return "all"
    name = "full" if window is None else f"window {window}"
    return f"{name}, {index + 1} of {num_groups}" if index else name
