"""Which layers share a block table: groups of equal windows over cache arrays that all groups use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_core.base.checks import INT32_MAX, check_int
from torch_core.base.errors import InvalidInput
from torch_core.cache.config import CacheGroup, GroupLayout

# A kind of layers may be padded by less than this share of the smallest one's number, to be one group and not two.
_MOST_PADDING = 0.25


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

    def most_blocks(self, num_tokens: int, *, block_size: int, max_step_tokens: int | None = None) -> int:
        """Returns the most blocks that a sequence of this many tokens holds, in all groups together.

        Args:
            num_tokens: number of tokens of the whole sequence.
            block_size: tokens of one block.
            max_step_tokens: most new tokens of one step; None for a sequence that is computed in one piece.
        """
        layouts = (GroupLayout(group, block_size) for group in self.groups)
        return sum(layout.most_blocks(num_tokens, max_step_tokens) for layout in layouts)


def group_layers(windows: Sequence[int | None]) -> LayerGroups:
    """Puts the layers of a model into groups of one window each and of about as many layers each.

    Groups are as large as the rarest window has layers, as models alternate in a fixed ratio; more common windows get
    several groups. The idea, and the order of layers in the groups, are those of vLLM's hybrid KV cache manager
    (vllm/v1/core/kv_cache_utils.py).

    Args:
        windows: for each layer the number of tokens that a query sees, its own included; None for all.

    Raises:
        InvalidInput: no layer, or a window below 1.

    Example:
        >>> found = group_layers([512, 512, None, 512, 512, None])
        >>> [group.name for group in found.groups], found.num_arrays
        (['full', 'window 512', 'window 512, 2 of 2'], 2)
        >>> found.layer_groups, found.layer_arrays
        ((1, 2, 0, 1, 2, 0), (0, 0, 0, 1, 1, 1))
    """
    if not windows:
        raise InvalidInput("windows", "is empty", "give one entry for each layer with a cache")
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        if window is not None:
            check_int(f"windows[{layer}]", window, 1, INT32_MAX, also=", or None")
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < (1 + _MOST_PADDING) * min(counts) else min(counts)
    groups: list[CacheGroup] = []
    layer_groups, layer_arrays = [0] * len(windows), [0] * len(windows)
    for window in sorted(kinds, key=lambda window: (window is not None, window)):
        layers = kinds[window]
        num_groups = -(-len(layers) // size)
        for index in range(num_groups):
            # Dealt out in turn, so that each group has layers from all over the model.
            for array, layer in enumerate(layers[index::num_groups]):
                layer_groups[layer], layer_arrays[layer] = len(groups), array
            groups.append(CacheGroup(name=_name(window, index, num_groups, len(kinds)), sliding_window=window))
    return LayerGroups(tuple(groups), max(layer_arrays) + 1, tuple(layer_groups), tuple(layer_arrays))


def _name(window: int | None, index: int, num_groups: int, num_kinds: int) -> str:
    if num_kinds == 1:
        return "all"
    name = "full" if window is None else f"window {window}"
    return f"{name}, {index + 1} of {num_groups}" if index else name
