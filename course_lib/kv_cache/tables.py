"""Which blocks hold a sequence's tokens, and the tensors in which these blocks lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from course_lib.kv_cache.base import Pair
from course_lib.kv_cache.blocks import BlockPool


class Pages:
    """What stands in the blocks: keys and values of each layer, ``[kv_heads, blocks, block_size, ...]``.

    In memory a head's blocks stand side by side, so that those which follow one another are read in place.

    Attributes
    ----------
    reclaim : callable
        Called with the number of blocks that are missing; it may free some.
    """

    def __init__(self, block_size: int, num_blocks: int | None) -> None:
        self.block_size, self.pool = block_size, BlockPool(num_blocks)
        self.layers: list[Pair | None] = []
        self.reclaim: Callable[[int], object] = _nothing

    def check(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Refuse tokens unlike those that others keep in the same blocks."""
        for name, new, old in zip(
            ("key_states", "value_states"), (keys, values), self.layers[layer] or (), strict=False
        ):
            wanted, found = ((t.shape[h], t.shape[3], t.dtype, t.device) for t, h in ((old, 0), (new, 1)))
            if wanted != found:
                raise TypeError(
                    "{} has {} heads of {}, {} on {}, but the blocks, which hold other sequences too, have {} heads of {}, {} on {}; "
                    "reset() empties them".format(name, *found, *wanted)
                )

    def open(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Prepare to keep tokens like these, ``[batch, kv_heads, length, ...]``."""
        if self.layers[layer] is None:
            shapes = ((t, (t.shape[1], 0, self.block_size, t.shape[3])) for t in (keys, values))
            key_pool, value_pool = (_empty(like, shape) for like, shape in shapes)
            self.layers[layer] = key_pool, value_pool

    def of(self, layer: int) -> Pair:
        """Return a layer's keys and values, with room for all blocks."""
        pair = self.layers[layer]
        assert pair is not None
        if pair[0].shape[1] < self.pool.total:
            grown = []
            for old in pair:
                new = _empty(old, (old.shape[0], self.pool.total, *old.shape[2:]))
                new[:, : old.shape[1]] = old
                grown.append(new)
            self.layers[layer] = pair = grown[0], grown[1]
        return pair

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy blocks in every layer."""
        for layer, pair in enumerate(self.layers):
            if pair is not None:
                for tensor in self.of(layer):
                    tensor[:, targets] = tensor[:, sources]

    def token_nbytes(self, layer: int) -> int:
        """Return the bytes of one token's keys and values."""
        return sum(t.shape[0] * t.shape[3] * t.itemsize for t in self.layers[layer] or ())

    def drop(self) -> None:
        """Give all memory back if no block is in use."""
        if not self.pool.used:
            self.layers = [None] * len(self.layers)


class Plan(NamedTuple):
    """What a table needs before tokens are written: blocks of its own for shared ones, and more blocks for each sequence."""

    copies: list[tuple[int, int]]
    fresh: int
    total: int


class Tables:
    """The block tables of a cache's sequences, shared by the layers that see equally far.

    Between calls all layers hold the same tokens; within one, the first layers are ahead, and each has its own bounds.

    Attributes
    ----------
    rows : list of list of int
        The blocks of each sequence, in the order of its tokens.
    starts, ends : list of int
        Which slots of the tables each layer holds; all sequences have the same.
    origin : int
        The position of the first slot's token: those before it have left the window.
    """

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.rows: list[list[int]] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.origin = 0
        self._known: dict[Any, Any] = {}  # what follows from the rows and is needed in every layer

    def __del__(self) -> None:
        for row in self.rows:
            self.pages.pool.release(row)

    def add_layer(self) -> int:
        """Return the index of a new layer."""
        self.pages.layers.append(None)
        self.starts.append(0)
        self.ends.append(0)
        return len(self.ends) - 1

    def fork(self) -> Tables:
        """Return tables of the same blocks, which from now on are copied before either side writes into them."""
        twin = Tables(self.pages)
        twin.starts, twin.ends, twin.origin = list(self.starts), list(self.ends), self.origin
        twin.replace(self.rows)
        self.changed()
        return twin

    def replace(self, rows: Iterable[Iterable[int]]) -> None:
        """Refer to the blocks of other tables instead."""
        fresh = [list(row) for row in rows]
        for row in fresh:
            self.pages.pool.share(row)
        for row in self.rows:
            self.pages.pool.release(row)
        self.rows = fresh
        self.changed()

    def take(self, rows: Iterable[Iterable[int]], length: int) -> None:
        """Hold so many tokens of each sequence, which stand in these blocks, in all layers."""
        self.replace(rows)
        self.starts, self.ends, self.origin = [0] * len(self.ends), [length] * len(self.ends), 0

    def changed(self) -> None:
        """Work out anew what follows from the tables and from who shares them."""
        self._known.clear()

    def begin(self, batch: int) -> None:
        """Prepare tables of so many sequences."""
        if any(self.rows) and len(self.rows) != batch:
            raise ValueError(
                f"key_states has a batch of {batch}, but other layers hold one of {len(self.rows)}; reset() empties them"
            )
        if len(self.rows) != batch:
            self.rows = [[] for _ in range(batch)]
            self.changed()

    def plan(self, first: int, end: int) -> Plan:
        """Return what writing into the slots from ``first`` to ``end`` takes."""
        size, pool = self.pages.block_size, self.pages.pool
        length = len(self.rows[0]) if self.rows else 0
        copies: list[tuple[int, int]] = []
        given_up: dict[int, int] = {}  # references that copies before this one release
        for position in range(first // size, min(length, -(-end // size))) if first < end else ():
            for index, row in enumerate(self.rows):
                block = row[position]
                if pool.references(block) - given_up.get(block, 0) > 1:
                    copies.append((index, position))
                    given_up[block] = given_up.get(block, 0) + 1
        fresh = max(0, -(-end // size) - length)
        return Plan(copies, fresh, len(copies) + fresh * len(self.rows))

    def carry_out(self, plan: Plan) -> None:
        """Take the blocks of a plan, for which there is room."""
        if not plan.total:
            return
        pool, blocks = self.pages.pool, self.pages.pool.allocate(plan.total)
        old = [self.rows[index][position] for index, position in plan.copies]
        try:
            self.pages.copy(old, blocks[: len(old)])
        except BaseException:
            pool.release(blocks)
            raise
        for (index, position), block in zip(plan.copies, blocks, strict=False):
            self.rows[index][position] = block
        pool.release(old)
        for index, row in enumerate(self.rows):
            start = len(old) + index * plan.fresh
            row.extend(blocks[start : start + plan.fresh])
        self.changed()

    def settle(self) -> None:
        """Release the blocks that no layer holds tokens in any more."""
        size = self.pages.block_size
        first, last = min(self.starts) // size, -(-max(self.ends) // size)
        if not first and all(len(row) <= last for row in self.rows[:1]):
            return
        for row in self.rows:
            self.pages.pool.release(row[:first] + row[last:])
            row[:] = row[first:last]
        self.origin += first * size
        for bounds in (self.starts, self.ends):
            bounds[:] = [bound - first * size for bound in bounds]
        self.changed()

    def forget(self, layer: int) -> None:
        """Hold nothing in a layer; with the last one everything is given back."""
        self.starts[layer] = self.ends[layer] = 0
        self.settle()
        if not any(self.ends):
            self.rows, self.origin = [], 0
            self.changed()
            self.pages.drop()

    def select(self, rows: list[int]) -> None:
        """Keep these sequences, in this order; one may come twice, or not at all."""
        self.replace([self.rows[row] for row in rows])

    def filled(self, layer: int) -> dict[int, int]:
        """Return how many slots a layer has filled in each block."""
        size, start, end = self.pages.block_size, self.starts[layer], self.ends[layer]
        return {
            block: min(end, (position + 1) * size) - max(start, position * size)
            for row in self.rows
            for position, block in enumerate(row)
            if start < (position + 1) * size and position * size < end
        }

    def blocks(self, device: torch.device) -> tuple[torch.Tensor, int | None]:
        """Return the tables as int64 ``[batch, blocks]``, and the first block if all follow one another."""
        found: tuple[torch.Tensor, int | None] | None = self._known.get(device)
        if found is None:
            length = len(self.rows[0]) if self.rows else 0
            table = torch.tensor(self.rows, dtype=torch.long).reshape(len(self.rows), length)
            flat = table.flatten()
            run = int(flat[0]) if len(flat) and bool((flat.diff() == 1).all()) else None
            self._known[device] = found = table.to(device), run
        return found

    def known(self, first: int, end: int, device: torch.device) -> bool:
        """Tell whether `slots` was asked for these since the tables last changed."""
        return (first, end, device) in self._known

    def slots(self, first: int, end: int, device: torch.device) -> torch.Tensor:
        """Return where in the pool the slots from ``first`` to ``end`` are, int64 ``[batch * slots]``."""
        found: torch.Tensor | None = self._known.get((first, end, device))
        if found is None:
            size = self.pages.block_size
            slots = torch.arange(first, end if self.rows else first, device=device)
            found = (self.blocks(device)[0][:, slots // size] * size + slots % size).flatten()
            self._known[first, end, device] = found
        return found

    def for_kernel(self, end: int, device: torch.device) -> Pair:
        """Return the tables, int32 ``[batch, blocks]``, and how many slots each sequence has filled, int32 ``[batch]``."""
        found: Pair | None = self._known.get((end, device))
        if found is None:
            lengths = torch.full((len(self.rows),), end, dtype=torch.int32, device=device)
            self._known[end, device] = found = self.blocks(device)[0].int(), lengths
        return found


def _nothing(missing: int) -> None:
    pass


def _empty(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode(False):  # what is made in inference mode cannot be written outside it
        return torch.empty(shape, dtype=like.dtype, device=like.device)
