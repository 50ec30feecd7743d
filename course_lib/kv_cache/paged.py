"""A cache in blocks: each sequence has a table of blocks of one pool, and sequences share the blocks that they have in common."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from transformers import PretrainedConfig

from course_lib.kernels.flash_decoding import decoding_refusal, flash_decoding
from course_lib.kernels.flash_decoding_arguments import MOST_ROWS
from course_lib.kv_cache.base import CacheLayer, KVCache, Pair
from course_lib.kv_cache.tables import Pages, Tables
from course_lib.memory.units import whole


class PagedLayer(CacheLayer):
    """Keys and values of one layer in the blocks of a pool."""

    def __init__(self, window: int | None, tables: Mapping[int | None, Tables]) -> None:
        super().__init__(window)
        self.tables = tables
        self.index = self.table.add_layer()

    @property
    def table(self) -> Tables:
        """The tables of this layer, which others with the same window share."""
        return self.tables[self.window]

    def over(self, tables: Mapping[int | None, Tables]) -> PagedLayer:
        """Return the same layer of a fork, with the fork's tables."""
        twin = copy.copy(self)
        twin.tables = tables
        return twin

    def take(self, batch: int, length: int) -> None:
        """Hold what the tables were given, so many tokens of each sequence."""
        self.held = self.seen = length
        self.is_initialized = length > 0
        if length:
            keys, values = self.table.pages.of(self.index)
            self.dtype, self.device = keys.dtype, keys.device
            self.batch, self.kv_heads, self.head_dim, self.value_dim = batch, len(keys), keys.shape[3], values.shape[3]

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for table in self.tables.values():
            table.begin(keys.shape[0])
        self.table.pages.check(self.index, keys, values)
        self._reserve(keys.shape[2])
        self.table.pages.open(self.index, keys, values)

    def _reserve(self, count: int) -> None:
        """Take the blocks that so many tokens need in all layers of the model, or none."""
        table, target = self.table, self.table.origin + self.table.ends[self.index] + count
        plans = []
        for one in self.tables.values():
            plan = one.plan(one.ends[self.index] if one is table else max(one.ends), target - one.origin)
            missing = one.pages.pool.missing(plan.total)
            if missing:
                one.pages.reclaim(missing)
            one.pages.pool.require(plan.total)
            plans.append((one, plan))
        for one, plan in plans:
            one.carry_out(plan)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        table, first = self.table, self.table.ends[self.index]
        end = first + keys.shape[2]
        # Where the layer before has just written, the blocks are there, and this cache's own.
        if not table.known(first, end, keys.device):
            self._reserve(end - first)
        slots = table.slots(first, end, keys.device)
        with torch.no_grad():
            for pool, new in zip(table.pages.of(self.index), (keys, values), strict=True):
                pool.flatten(1, 2).index_copy_(1, slots, new.transpose(0, 1).flatten(1, 2))
        table.ends[self.index] = end

    def _read(self) -> Pair:
        keys, values = self.table.pages.of(self.index)
        return self._gather(keys), self._gather(values)

    def _gather(self, pool: torch.Tensor) -> torch.Tensor:
        blocks, run = self.table.blocks(pool.device)
        heads, _, size, dim = pool.shape
        held = pool.index_select(1, blocks.flatten()) if run is None else pool[:, run : run + blocks.numel()]
        held = held.view(heads, blocks.shape[0], blocks.shape[1] * size, dim).transpose(0, 1)
        start, end = self.table.starts[self.index], self.table.ends[self.index]
        return held[:, :, start:end] if len(held) else pool.new_empty(0, heads, end - start, dim)

    def attend(
        self, q: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor, **rules: Any
    ) -> torch.Tensor | None:
        """See :meth:`CacheLayer.attend`; None where no kernel reads the blocks in place, as on a CPU, where a copy costs less."""
        if not (self.is_initialized and self.held and q.is_cuda and 0 < q.shape[2] <= MOST_ROWS):
            return None
        blocks, _ = self.table.for_kernel(self.held, q.device)
        if decoding_refusal(q, *self._pools(), blocks):
            return None
        return self._attend(q, key_states, value_states, **rules)

    def _attend(
        self, q: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor, **rules: Any
    ) -> torch.Tensor:
        self.store(key_states, value_states)
        keys, values = self._pools()
        blocks, lengths = self.table.for_kernel(self.table.ends[self.index], q.device)
        # Slots before the first held one are out of every window.
        attended = flash_decoding(
            q,
            keys,
            values,
            lengths=lengths,
            block_table=blocks,
            sliding_window=self.window,
            **rules,
        )
        self.trim()
        assert isinstance(attended, torch.Tensor)
        return attended

    def _pools(self) -> Pair:
        """Return keys and values as kernels read them, ``[blocks, kv_heads, block_size, ...]``."""
        keys, values = self.table.pages.of(self.index)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _drop_first(self, count: int) -> None:
        self.table.starts[self.index] += count
        self.table.settle()

    def _drop_last(self, count: int) -> None:
        self.table.ends[self.index] -= count
        self.table.settle()

    def _select(self, rows: torch.Tensor) -> None:
        # The tables are common: the first of their layers turns them for all.
        if self.index == 0:
            self.table.select(rows.tolist())

    def _forget(self) -> None:
        self.table.forget(self.index)

    def tensors(self) -> dict[str, torch.Tensor]:
        pair = self.table.pages.layers[self.index]
        return {} if pair is None else {"keys": pair[0].transpose(0, 1), "values": pair[1].transpose(0, 1)}

    @property
    def used_nbytes(self) -> int:
        """Bytes that the tokens held need, those that sequences share once."""
        return sum(self.table.filled(self.index).values()) * self.table.pages.token_nbytes(self.index)

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
        super().restore(tensors, plain)
        self.table.origin = self.seen - self.table.ends[self.index]
        self.table.settle()


class PagedCache(KVCache):
    """Keys and values in blocks of one pool, of which each sequence takes as many as its tokens fill.

    Reordered, repeated and selected sequences, and forks, share the blocks that they have in common; one into which a sequence
    that shares it writes is copied first. `batch_select_indices` frees a sequence, or takes it twice.

    Parameters
    ----------
    config : PretrainedConfig
        The model's.
    block_size : int
        Tokens in a block. Of the memory that a sequence takes, less than one block is unused (where a window has passed over its
        beginning, less than one at either end).
    num_blocks : int, optional
        How many blocks each layer has, all allocated at the first token. By default their number grows by an eighth.

    Raises
    ------
    ValueError
        If a number is below 1.

    Notes
    -----
    PagedAttention: Kwon et al. 2023, "Efficient memory management for large language model serving with PagedAttention". All layers
    with the same window, or without one, share one table of blocks for each sequence. A cache of fixed size that is full raises
    `course_lib.kv_cache.blocks.OutOfBlocks` and stays as it was. It keeps values only: no gradient flows through what is stored.
    Chapter 09 measures what it saves.
    """

    def __init__(self, config: PretrainedConfig, *, block_size: int = 16, num_blocks: int | None = None) -> None:
        whole(block_size, "block_size", least=1)
        if num_blocks is not None:
            whole(num_blocks, "num_blocks", least=1)
        self.tables: dict[int | None, Tables] = {}

        def layer(window: int | None) -> PagedLayer:
            if window not in self.tables:
                self.tables[window] = Tables(Pages(block_size, num_blocks))
            return PagedLayer(window, self.tables)

        super().__init__(config, layer, block_size=block_size, num_blocks=num_blocks)

    @property
    def _table(self) -> Tables:
        """The tables of the layers that see farthest."""
        return self.tables[max(self.tables, key=lambda window: (window is None, window or 0))]

    @property
    def block_tables(self) -> list[list[int]]:
        """The blocks of each sequence, in the order of its tokens, in the layers that see farthest."""
        return [list(row) for row in self._table.rows]

    @property
    def lengths(self) -> list[int]:
        """Tokens held of each sequence, in the layers that see farthest."""
        table = self._table
        return [table.ends[0] - table.starts[0] for _ in table.rows]

    @property
    def waste(self) -> list[int]:
        """Tokens that would still find room in the blocks of each sequence, in the layers that see farthest."""
        size = self._table.pages.block_size
        return [len(row) * size - length for row, length in zip(self.block_tables, self.lengths, strict=True)]

    def fork(self) -> Self:
        """Return a cache that holds the same tokens in the same blocks; both continue independently.

        Only what they write from now on costs memory. `nbytes` of each counts the whole pool; its blocks are given back when the
        last cache that uses them is reset or gone.
        """
        twin = copy.copy(self)
        twin.tables = {window: table.fork() for window, table in self.tables.items()}
        twin.layers = [
            layer.over(twin.tables) if isinstance(layer, PagedLayer) else copy.deepcopy(layer) for layer in self.layers
        ]
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        for table in twin.tables.values():
            # Forks are not copied with it, so that their references are to nothing.
            table.pages.pool.recount(twin._referring(table))
        return twin

    def _referring(self, table: Tables) -> list[Iterable[int]]:
        """Return what refers to blocks on this cache's behalf."""
        return [*table.rows]
