"""The prefix index: which block holds the content that a key identifies for, and the longest prefix that is cached."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence

from torch_core.cache.config import NULL_BLOCK, GroupLayout
from torch_core.cache.keys import KeyChain, LineageNode, same_lineage

#: Keys are computed this many blocks ahead at first, so that a cold prompt is not hashed whole.
_HASH_AHEAD = 32


class PrefixIndex:
    """Keys to blocks and blocks to keys, one namespace for each cache group.

    Two sequences that computed equal blocks at the same time both keep theirs, since tables only grow: one key may
    name several blocks, and the first is handed out. So a sequence that holds a block also holds a block for each
    ancestor; tables are released back to front, and children fall to the eviction order before their parents.

    Attributes:
        blocks: for each group, key to the block with that content that was published first.
        twins: for each group, key to the other blocks with that content; only for keys that have some.
        keys: block to its group, its key and the key of its parent (None for a first block). At most one per block.
        nodes: block to the lineage of its key, when tokens are verified.
    """

    def __init__(self, num_groups: int, *, verify: bool) -> None:
        self.verify = verify
        self.blocks: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.twins: list[dict[bytes, list[int]]] = [{} for _ in range(num_groups)]
        self.keys: dict[int, tuple[int, bytes, bytes | None]] = {}
        self.nodes: dict[int, LineageNode] = {}

    def publish(
        self, group: int, chain: KeyChain, table: Sequence[int] | Mapping[int, int], start: int, stop: int
    ) -> None:
        """Makes the blocks of a table from column `start` to `stop - 1` findable under the keys of its chain.

        The null block is passed over, and a block that is published already stays as it is.
        """
        keys, blocks, digests = self.keys, self.blocks[group], chain.digests
        parent = digests[start - 1] if start else None
        for position in range(start, stop):
            block, digest = table[position], digests[position]
            if block != NULL_BLOCK and block not in keys:
                keys[block] = (group, digest, parent)
                if blocks.setdefault(digest, block) != block:
                    self.twins[group].setdefault(digest, []).append(block)
                if self.verify:
                    self.nodes[block] = chain.nodes[position]
            parent = digest

    def forget(self, block: int) -> None:
        """Takes a block's key away; its content is about to be overwritten."""
        group, digest, _ = self.keys.pop(block)
        self.nodes.pop(block, None)
        twins = self.twins[group].get(digest)
        if twins is None:
            del self.blocks[group][digest]
        else:
            if self.blocks[group][digest] == block:
                self.blocks[group][digest] = block = twins[0]
            twins.remove(block)
            if not twins:
                del self.twins[group][digest]

    def match(
        self,
        groups: Sequence[GroupLayout],
        chains: Sequence[KeyChain],
        tokens: array[int],
        limit: int,
        shorten: Callable[[KeyChain, int], int] | None = None,
    ) -> tuple[int, list[list[int]]]:
        """Finds the longest cached prefix of at most `limit` tokens that every group can continue from.

        Extends the sequence's key chains, one for each group, as far as needed. Returns the number of tokens and, for
        each group, its block table so far (null if the group needs nothing). `shorten` returns the most tokens, of the
        first chain's and up to a limit, that another cache can continue from, too.
        """
        sizes = [chain.block_size for chain in chains]
        align = math.lcm(*sizes)
        length = limit // align * align
        for index, group in enumerate(groups):
            if group.keeps_everything and length:
                length = self._run_length(index, chains[index], tokens, length) // align * align
        longer = None
        while longer != length:
            longer = length
            if shorten is not None:
                chains[0].extend(tokens, length // sizes[0])
                length = shorten(chains[0], length)
            for index, group in enumerate(groups):
                if not group.keeps_everything:
                    length = self._longest_tail(index, group, chains[index], tokens, length, align)
        return length, [self._table(i, group, chains[i], length) for i, group in enumerate(groups)]

    def find(self, group: int, chain: KeyChain, position: int) -> int | None:
        """Returns a block with the content of the chain's block number `position`, or None."""
        digest = chain.digests[position]
        first = self.blocks[group].get(digest)
        if first is None or not self.verify:
            return first
        own = chain.nodes[position]
        parent = chain.nodes[position - 1] if position else own.parent
        for block in (first, *self.twins[group].get(digest, ())):
            node = self.nodes[block]
            if node.tokens == own.tokens and same_lineage(node.parent, parent):
                # Adopting the node makes the comparison of the next block's parent end at once.
                chain.nodes[position] = node
                return block
        return None

    def _run_length(self, group: int, chain: KeyChain, tokens: array[int], limit: int) -> int:
        size = chain.block_size
        count = limit // size
        blocks, digests = self.blocks[group], chain.digests
        start, ahead = 0, _HASH_AHEAD
        while start < count:
            stop = min(count, start + ahead)
            chain.extend(tokens, stop)
            for position, digest in enumerate(digests[start:stop], start):
                if digest not in blocks or (self.verify and self.find(group, chain, position) is None):
                    return position * size
            # Blocks found so far make further hits likely.
            start, ahead = stop, 2 * ahead
        return count * size

    def _longest_tail(
        self, index: int, group: GroupLayout, chain: KeyChain, tokens: array[int], limit: int, align: int
    ) -> int:
        size = chain.block_size
        chain.extend(tokens, limit // size)
        length = limit
        while length:
            # A new chunk needs no earlier keys; but a block that was never computed is no hit.
            first = min(group.first_needed_token(length), length - 1) // size
            missing = next(
                (i for i in range(length // size - 1, first - 1, -1) if self.find(index, chain, i) is None), None
            )
            if missing is None:
                return length
            length = missing * size // align * align
        return 0

    def _table(self, index: int, group: GroupLayout, chain: KeyChain, length: int) -> list[int]:
        first, stop = group.first_needed_token(length) // chain.block_size, length // chain.block_size
        if self.verify:
            found = [self.find(index, chain, position) or NULL_BLOCK for position in range(first, stop)]
        else:
            blocks = self.blocks[index]
            found = [blocks[digest] for digest in chain.digests[first:stop]]
        return [NULL_BLOCK] * first + found
