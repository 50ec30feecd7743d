"""Blocks of a pool: which are free, and how many refer to each of the others. What stands in them is kept elsewhere."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable


class OutOfBlocks(RuntimeError):
    """A pool of fixed size has fewer free blocks than are needed; nothing was changed."""


class BlockPool:
    """An allocator of blocks with reference counts; it holds no tensors.

    Parameters
    ----------
    num_blocks : int, optional
        How many blocks there are. By default their number grows when none is free, by an eighth or what is needed.

    Notes
    -----
    Kwon et al. 2023, section 4.2. Chapter 09 measures what blocks save.
    """

    def __init__(self, num_blocks: int | None = None) -> None:
        self.fixed = num_blocks is not None
        self._references = [0] * (num_blocks or 0)
        # A heap: the lowest come first, so that blocks taken one after the other tend to stand beside each other.
        self._free = list(range(len(self._references)))

    @property
    def total(self) -> int:
        """How many blocks there are."""
        return len(self._references)

    @property
    def free(self) -> int:
        """How many blocks nothing refers to."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many blocks something refers to."""
        return self.total - self.free

    def missing(self, count: int) -> int:
        """Return how many blocks must become free before so many can be allocated."""
        return max(0, count - self.free) if self.fixed else 0

    def require(self, count: int) -> None:
        """Refuse a number of blocks that cannot be allocated.

        Raises
        ------
        OutOfBlocks
            If the pool is fixed and too few are free.
        """
        if self.missing(count):
            raise OutOfBlocks(
                f"num_blocks is {self.total}, of which {self.free} are free, and this takes {count}; free sequences, or build the "
                "cache with more blocks"
            )

    def allocate(self, count: int) -> list[int]:
        """Take free blocks, each with one reference; see `require`."""
        self.require(count)
        if count > self.free:
            extra = max(count - self.free, self.total // 8)
            # Greater than all there are, so that the list stays a heap.
            self._free.extend(range(self.total, self.total + extra))
            self._references.extend([0] * extra)
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def references(self, block: int) -> int:
        """Return how many refer to a block."""
        return self._references[block]

    def share(self, blocks: Iterable[int], times: int = 1) -> None:
        """Refer to blocks once more, or so many times.

        Raises
        ------
        ValueError
            If a block is free.
        """
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"block {block} is free; only one that is in use can be shared")
            self._references[block] += times

    def release(self, blocks: Iterable[int]) -> None:
        """Refer to blocks once less; those that nothing refers to any more become free.

        Raises
        ------
        ValueError
            If a block is free already.
        """
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"block {block} is free; it was released more often than taken")
            self._references[block] -= 1
            if not self._references[block]:
                heapq.heappush(self._free, block)

    def recount(self, tables: Iterable[Iterable[int]]) -> None:
        """Count only the references of these tables, as in a copy, where others have none."""
        found = Counter(block for table in tables for block in table)
        self._references = [found[block] for block in range(self.total)]
        self._free = [block for block, count in enumerate(self._references) if not count]

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Compare the counts with all tables there are.

        Raises
        ------
        ValueError
            If a block is counted wrongly, or is both free and in use, or neither: one has leaked.
        """
        found = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._references):
            if count != found.pop(block, 0):
                raise ValueError(
                    f"block {block} has a count of {count}, which is not the number of its entries in tables"
                )
        free = sorted(self._free)
        if found or free != [block for block, count in enumerate(self._references) if not count]:
            raise ValueError(f"blocks {free} are listed as free, and {sorted(found)} are in tables only")
