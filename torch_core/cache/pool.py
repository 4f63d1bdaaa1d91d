"""The pool of blocks, or of state slots: who holds each one, which are free, and in which order they are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from torch_core.base.errors import CacheCorruption, OutOfBlocks
from torch_core.cache.config import NULL_BLOCK
from torch_core.cache.prefix import PrefixIndex


class BlockPool:
    """Reference counts, the free list and the eviction order of blocks 1 to `num_blocks - 1`.

    A block is free (no holder, no key), cached (no holder, but a key that can still be hit) or held. Free blocks are
    taken last in, first out; when none is left, the cached block that was released longest ago loses its key. The
    order depends on nothing but the calls, so equal traces give equal ids.

    Attributes:
        refs: holds on each block: live tables, tables that wait for a step, and pins.
        pins: the part of `refs` that belongs to copy sources of steps in flight. A pin does not stop the other
            holder from writing: a step's copies run before its writes.
        free: free blocks; the next one to be taken is the last.
        cached: cached blocks without a holder, the next one to be evicted first.
        noun: name of a block in messages: "block" or "state slot".
        dirty: blocks that lost their content since the last step, which the next step scrubs; None without scrubbing.
        evictions: cached blocks that lost their key so far.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex, *, scrub: bool = False, noun: str = "block") -> None:
        self.num_blocks = num_blocks
        self.noun = noun
        self.index = index
        self.refs = [0] * num_blocks
        self.pins: dict[int, int] = {}
        self.free = list(range(num_blocks - 1, 0, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.dirty: list[int] | None = [] if scrub else None
        self.evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free and cached."""
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one hold; all of them, or none and OutOfBlocks."""
        if count > self.num_available:
            raise self.out_of_blocks(f"{count} {self.noun}s are needed", count)
        taken: list[int] = []
        for _ in range(count):
            block = self.free.pop() if self.free else self._evict()
            self.refs[block] = 1
            taken.append(block)
        return taken

    def out_of_blocks(self, text: str, needed: int, more: str = "") -> OutOfBlocks:
        """Returns the error, which gives the numbers of needed and free blocks and further details."""
        free, evictable = len(self.free), len(self.cached)
        text = f"{text}; {free} are free and {evictable} evictable{more or '.'}"
        return OutOfBlocks(text, needed=needed, free=free, evictable=evictable)

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a hold to each block; they are held or cached already. The null block is passed over."""
        refs, cached = self.refs, self.cached
        for block in blocks:
            if block != NULL_BLOCK:
                if not refs[block]:
                    del cached[block]
                refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Gives one hold on each block back; the last one makes it cached if it has a key, else free.

        Cached blocks are evicted in the order of their release. The null block is passed over. Raises
        CacheCorruption for a block without a holder.
        """
        refs, keys, dirty = self.refs, self.index.keys, self.dirty
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            left = refs[block] - 1
            if left < 0:
                raise CacheCorruption(f"{self.noun} {block} was released more often than it was taken.")
            refs[block] = left
            if left == 0:
                if block in keys:
                    self.cached[block] = None
                else:
                    self.free.append(block)
                    if dirty is not None:
                        dirty.append(block)

    def pin(self, block: int) -> None:
        """Turns one hold of a table into a pin, which `unpin` gives back."""
        self.pins[block] = self.pins.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        """Gives a pin and its hold back."""
        left = self.pins[block] - 1
        if left:
            self.pins[block] = left
        else:
            del self.pins[block]
        self.release((block,))

    def take_dirty(self) -> tuple[int, ...]:
        """Returns the blocks that the step that is being committed scrubs, and forgets them."""
        if not self.dirty:
            return ()
        taken = tuple(self.dirty)
        self.dirty.clear()
        return taken

    def _evict(self) -> int:
        block, _ = self.cached.popitem(last=False)
        self.index.forget(block)
        if self.dirty is not None:
            self.dirty.append(block)
        self.evictions += 1
        return block
