"""The experts that each cached token was routed to: a host copy by cache slot, which prefix hits and forks share."""

from __future__ import annotations

from collections import deque

import jax
import numpy as np

from jattn.llm.engine.request.request import Request
from jattn.pool.kv_pool import BlockMoves
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.cache import CacheManager, LayerGroups
from torch_core.metadata import PackedLayout, group_fields

#: What has no expert: a dense layer, or a token that was not computed.
NO_EXPERT = -1


class RoutingRecord:
    """The routed experts of every slot of the cache, in host memory.

    Steps and block operations are noted when they are dispatched, and carried out in that order when the results of a
    step have come. So the record of a slot is that of the computation whose keys and values are in the cache.

    Args:
        layers: the cache groups; a group without a window has a slot for every token.
        num_blocks: blocks of the pool.
        num_host_blocks: blocks of swapped requests.
        tokens_per_block: tokens of a block on all devices together, of the widest layers.

    Raises:
        Unsupported: every layer has a window, and the blocks of early tokens are given back.
    """

    def __init__(self, layers: LayerGroups, num_blocks: int, num_host_blocks: int, tokens_per_block: int) -> None:
        whole = [index for index, group in enumerate(layers.groups) if group.sliding_window is None]
        if not whole:
            raise Unsupported(
                "enable_return_routed_experts",
                "is True and every layer has a sliding window",
                "blocks are freed with their records as soon as the window has passed; set max_model_len to the window",
            )
        self._group = whole[0]
        tokens_per_block = layers.block_sizes(tokens_per_block)[self._group]
        self._num_blocks, self._num_slots = num_blocks, (num_blocks + num_host_blocks) * tokens_per_block
        self._tokens_per_block = tokens_per_block
        self._experts: np.ndarray | None = None
        self._noted: deque[list[tuple[int, int]] | tuple[np.ndarray, jax.Array]] = deque()

    def moved(self, step: BlockMoves) -> None:
        """Notes the operations of a step on whole blocks."""
        copies = [
            (swap.device_block, self._num_blocks + swap.host_block)[:: 1 if swap.to_host else -1] for swap in step.swaps
        ]
        self._noted.append([*copies, *((copy[0], copy[1]) for copy in step.copies)])

    def dispatched(self, layout: PackedLayout, buffer: np.ndarray, experts: jax.Array) -> None:
        """Notes a step that was dispatched.

        Args:
            layout, buffer: its packed arrays.
            experts: int16[tokens, layers, top_k], on the device, equal on all.
        """
        own = experts.addressable_data(0)
        own.copy_to_host_async()
        self._noted.append((layout[group_fields(self._group)[1]].of(buffer).copy(), own))

    def came(self) -> None:
        """Takes the experts of the oldest step, whose results have come, after the block operations before it."""
        while self._noted:
            noted = self._noted.popleft()
            if isinstance(noted, tuple):
                slots, experts = noted[0], np.asarray(noted[1])
                self._blocks(experts.shape[1:]).reshape(-1, *experts.shape[1:])[slots[slots >= 0]] = experts[slots >= 0]
                return
            for source, target in noted:
                if self._experts is not None:
                    self._experts[target] = self._experts[source]

    def forget(self) -> None:
        """Drops the steps whose results will not be read."""
        self._noted.clear()

    def give(self, cache: CacheManager, request: Request, num_computed: int = 0) -> None:
        """Gives a request that ends its experts, if it wants them and has blocks on the device.

        Args:
            cache: the allocator.
            request: it still has its blocks.
            num_computed: its tokens whose results have come, if they are more than those of retired steps.
        """
        if self._experts is None or request.params.return_routed_experts is False or not request.num_computed_tokens:
            return
        num_retired, tables = cache.computed_blocks(request.request_id)
        if tables:
            wanted = request.num_known_tokens - 1
            blocks = np.asarray(tables[self._group], np.int64)
            found = self._experts[blocks].reshape(-1, *self._experts.shape[2:])[: max(num_retired, num_computed)]
            rest = ((0, max(wanted - len(found), 0)), (0, 0), (0, 0))
            request.routed_experts = np.pad(found[:wanted], rest, constant_values=NO_EXPERT)

    def _blocks(self, sizes: tuple[int, ...]) -> np.ndarray:
        if self._experts is None:
            # Zeros are pages that the system gives when they are written.
            shape = (self._num_slots // self._tokens_per_block, self._tokens_per_block, *sizes)
            self._experts = np.zeros(shape, np.int16)
        return self._experts


def check_routes(model: object) -> None:
    """Refuses a model that does not say which experts its tokens are routed to.

    Raises:
        InvalidInput: it has no `with_routed_experts`, or no experts.
    """
    config = getattr(model, "config", None)
    if not callable(getattr(model, "with_routed_experts", None)) or getattr(config, "moe", True) is None:
        problem = f"is True and model is a {type(model).__name__} without routed experts"
        wanted = "give a Decoder with ModelConfig(moe=...), or a jattn.llm.models.RoutedModel"
        raise InvalidInput("enable_return_routed_experts", problem, wanted)
