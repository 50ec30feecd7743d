"""Keys and values of many texts of any length in the blocks of one pool, for forward passes over the new tokens of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig

from course_lib.attention import attention
from course_lib.attention.sdpa import narrow
from course_lib.kernels.flash_decoding import decoding_refusal, flash_decoding
from course_lib.kernels.flash_decoding_arguments import MOST_ROWS
from course_lib.kv_cache.base import KVCache, Pair
from course_lib.kv_cache.blocks import BlockPool
from course_lib.kv_cache.paged import PagedLayer
from course_lib.kv_cache.tables import Pages, Tables
from course_lib.memory.units import whole

#: What a group of texts that attend together may hold on a CPU: slots of one head, and the part of them that is filled up.
GROUP_SLOTS, FILLED_UP = 4096, 0.2


class Row:
    """One text in a `PackedCache`.

    Attributes
    ----------
    tables : Tables
        Of one sequence; its single bound holds for all layers.
    """

    def __init__(self, pages: Pages) -> None:
        self.tables = Tables(pages)
        self.free()

    def free(self) -> None:
        """Hold nothing, and give all blocks back."""
        self.tables.replace([[]])
        self.tables.starts, self.tables.ends, self.tables.origin = [0], [0], 0

    @property
    def length(self) -> int:
        """Tokens that have passed through: the next one's position."""
        return self.tables.origin + self.tables.ends[0]

    @property
    def blocks(self) -> list[int]:
        """What it has of the pool, in the order of its tokens."""
        return self.tables.rows[0]

    @property
    def bounds(self) -> tuple[int, int]:
        """The slot of its blocks that holds the first token, and the one after the last."""
        return self.tables.starts[0], self.tables.ends[0]

    def missing(self, count: int) -> int:
        """Return how many blocks must become free before so many tokens more can be stored."""
        end = self.tables.ends[0]
        return self.tables.pages.pool.missing(self.tables.plan(end, end + count).total)

    def fitting(self, count: int) -> int:
        """Return how many tokens more can be stored in the blocks that are free, at most so many."""
        pages = self.tables.pages
        room = (len(self.blocks) + pages.pool.free) * pages.block_size - self.tables.ends[0]
        return min(count, room) if pages.pool.fixed else count

    def reserve(self, count: int) -> None:
        """Take the blocks that so many tokens more need.

        Raises
        ------
        OutOfBlocks
            If too few are free; nothing is taken then.
        """
        end = self.tables.ends[0]
        plan = self.tables.plan(end, end + count)
        self.tables.pages.pool.require(plan.total)
        self.tables.carry_out(plan)

    def advance(self, count: int, window: int | None) -> None:
        """Count so many tokens more as stored, and give back the blocks that a window has passed."""
        self.tables.ends[0] += count
        if window is not None:
            self.tables.starts[0] = max(self.tables.starts[0], self.tables.ends[0] - (window - 1))
            self.tables.settle()


class Piece:
    """Queries that attend in one call: the only new ones of several texts, or all new ones of one.

    Parameters
    ----------
    first : int
        Which of a step's tokens come first.
    rows : list of Row
        Of the texts.
    count : int
        New tokens of each.
    heads : int
        Of keys and values.
    window : int, optional
        How many tokens a query sees.
    device : torch.device
        The pool's.

    Attributes
    ----------
    table, filled : Tensor
        Blocks of each row, int32 ``[rows, blocks]``, and how many of their slots are filled, int32 ``[rows]``.
    where : Tensor or None
        The same blocks in a pool seen as ``[heads * blocks, ...]``, int64 ``[rows * heads * blocks]``; None where all keys are new.
    slots : slice
        Those that are used of a row's slots.
    distance : Tensor
        int64 ``[rows, 1, count, keys]``: how far before a query a key stands.
    seen : Tensor or None
        Boolean, in the same shape; None where every key is seen, or with no `where` every one that is not after the query.
    """

    def __init__(
        self, first: int, rows: list[Row], count: int, *, heads: int, window: int | None, device: torch.device
    ) -> None:
        self.first, self.end, self.rows, self.count = first, first + count * len(rows), len(rows), count
        pages = rows[0].tables.pages
        bounds = torch.tensor([row.bounds for row in rows])
        starts, ends = bounds[:, 0], bounds[:, 1] + count
        length = -(-int(ends.max()) // pages.block_size)
        # A shorter row is filled up with a block of its own, in which nothing more is seen.
        table = torch.tensor([(row.blocks + row.blocks[-1:] * length)[:length] for row in rows])
        self.table, self.filled = table.int().to(device), ends.int().to(device)
        self.where: torch.Tensor | None = None
        if len(rows) == 1 and bounds[0, 0] == bounds[0, 1]:
            starts, ends = torch.zeros(1, dtype=torch.long), torch.full((1,), count)
        else:
            self.where = (table[:, None] + torch.arange(heads)[:, None] * pages.pool.total).flatten().to(device)
        self.slots = slice(int(starts.min()), int(ends.max()))
        keys = torch.arange(self.slots.start, self.slots.stop)
        queries = ends[:, None] - count + torch.arange(count)
        distance = (queries[:, :, None] - keys)[:, None]
        seen = (distance >= 0) & (keys >= starts[:, None, None, None])
        if window is not None:
            seen &= distance < window
        simple = bool((seen if self.where is not None else seen == (distance >= 0)).all())
        self.seen = None if simple else seen.to(device)
        self.distance = distance.to(device)
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None

    def mask(self, slopes: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return which keys are seen, or with ALiBi what is added to scores: four axes, ``[rows, query_heads, count, keys]`` or 1."""
        if slopes is None:
            return self.seen
        if self._bias is None or self._bias[0] is not slopes:
            working = torch.float64 if dtype == torch.float64 else torch.float32
            bias = -slopes.to(working).view(1, -1, 1, 1) * self.distance
            bias = bias.masked_fill(~(self.distance >= 0 if self.seen is None else self.seen), -torch.inf)
            self._bias = slopes, bias if bias.device.type == "cpu" else narrow(bias, dtype)
        return self._bias[1]


class Packing:
    """The tokens of one forward pass: where each is stored, and what it sees. All layers share it.

    Parameters
    ----------
    rows : sequence of (Row, int)
        Texts, with blocks for so many tokens more. Those with one that follow each other attend together, best in order of length.
    heads, window, device
        As for `Piece`.
    """

    def __init__(
        self, rows: Sequence[tuple[Row, int]], *, heads: int, window: int | None, device: torch.device
    ) -> None:
        slots, blank = list[int](), list[int]()
        for row, count in rows:
            size, end = row.tables.pages.block_size, row.tables.ends[0]
            first = max(end + count, -(-end // size) * size)
            for found, span in ((slots, range(end, end + count)), (blank, range(first, len(row.blocks) * size))):
                found += [row.blocks[slot // size] * size + slot % size for slot in span]
        #: Where in the pool each token is stored, int64 ``[tokens]``.
        self.slots = torch.tensor(slots, device=device)
        #: The slots that stay empty in new blocks, int64. What others left there must not be NaN, which no mask hides.
        self.blank = torch.tensor(blank, device=device) if blank else None
        self.pieces: list[Piece] = []
        first = 0
        for group, count in _groups(rows, apart=device.type == "cpu"):
            piece = Piece(first, group, count, heads=heads, window=window, device=device)
            self.pieces.append(piece)
            first = piece.end


def _groups(rows: Sequence[tuple[Row, int]], *, apart: bool) -> list[tuple[list[Row], int]]:
    """Return which texts attend together, in the given order; ``apart`` are those of too different lengths."""
    groups: list[tuple[list[Row], int]] = []
    for row, count in rows:
        if groups and count == groups[-1][1] == 1 and row.bounds[1] and groups[-1][0][0].bounds[1]:
            group = groups[-1][0]
            slots = [one.tables.ends[0] + 1 for one in (*group, row)]
            room = max(slots) * len(slots)
            if not apart or (room <= GROUP_SLOTS and room - sum(slots) <= FILLED_UP * room):
                group.append(row)
                continue
        groups.append(([row], count))
    return groups


class Desk:
    """What the layers of a cache work with in turn.

    Attributes
    ----------
    packing : Packing or None
        Of the forward pass that is due.
    """

    def __init__(self) -> None:
        self.packing: Packing | None = None
        self._rooms: dict[str, torch.Tensor] = {}

    def room(self, name: str, like: torch.Tensor, length: int) -> torch.Tensor:
        """Return memory for a copy of so many rows, the same at each call: taking it anew would cost more than the copy."""
        held = self._rooms.get(name)
        if held is None or len(held) < length or (held.shape[1:], held.dtype) != (like.shape[1:], like.dtype):
            with torch.inference_mode(False):
                held = like.new_empty(length + length // 4, *like.shape[1:])
            self._rooms[name] = held
        return held[:length]


class PackedLayer(PagedLayer):
    """Keys and values of one layer."""

    def __init__(self, window: int | None, tables: Mapping[int | None, Tables], desk: Desk) -> None:
        super().__init__(window, tables)
        self.desk = desk

    def attend(
        self, q: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor, **rules: Any
    ) -> torch.Tensor:
        """See :meth:`course_lib.kv_cache.CacheLayer.attend`; here the batch is 1, and its tokens are those of the cache's packing."""
        packing, pages = self.desk.packing, self.table.pages
        if packing is None or q.shape[::2] != (1, len(packing.slots)):
            raise ValueError(f"q has shape {list(q.shape)}, which is not one row of the tokens that `pack` was given")
        pages.check(self.index, key_states, value_states)
        pages.open(self.index, key_states, value_states)
        pools = pages.of(self.index)
        with torch.no_grad():
            for pool, new in zip(pools, (key_states, value_states), strict=True):
                slots = pool.flatten(1, 2)
                slots.index_copy_(1, packing.slots, new[0])
                if packing.blank is not None:
                    slots.index_fill_(1, packing.blank, 0.0)
        query_heads, total, value_dim = q.shape[1], q.shape[2], value_states.shape[-1]
        attended = q.new_empty(total, query_heads, value_dim)
        for piece in packing.pieces:
            here = slice(piece.first, piece.end)
            queries = q[0, :, here]
            queries = queries.transpose(0, 1).unsqueeze(2) if piece.count == 1 else queries[None]
            found = self._attend_piece(piece, queries, key_states[:, :, here], value_states[:, :, here], pools, **rules)
            attended[here] = found[:, :, 0] if piece.count == 1 else found[0].transpose(0, 1)
        return attended.transpose(0, 1)[None]

    def _attend_piece(
        self,
        piece: Piece,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pools: Pair,
        *,
        scale: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Return attention of queries ``[rows, query_heads, count, head_dim]``, whose own keys and values are stored already."""
        if piece.where is not None:
            keys, values = (pool.transpose(0, 1) for pool in pools)
            if _reads_blocks(q, keys, values, piece.table):
                found = flash_decoding(
                    q,
                    keys,
                    values,
                    lengths=piece.filled,
                    block_table=piece.table,
                    scale=scale,
                    sliding_window=self.window,
                    softcap=softcap,
                    alibi_slopes=alibi_slopes,
                )
                assert isinstance(found, torch.Tensor)
                return found
            k, v = (self._copied(pool, piece, name) for name, pool in zip(("keys", "values"), pools, strict=True))
        mask = piece.mask(alibi_slopes, q.dtype)
        causal = piece.count > 1 and mask is None
        if softcap is not None:
            return attention(q, k, v, causal=causal, scale=scale, attention_mask=mask, softcap=softcap)
        if piece.count == 1:
            # Query heads that share keys stand in one product as its rows, so that no key is repeated for them.
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            if mask is not None and mask.shape[1] > 1:
                mask = mask.view(*grouped.shape[:3], -1)
            found = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
            return found.reshape(*q.shape[:3], -1)
        shared = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared)

    def _copied(self, pool: torch.Tensor, piece: Piece, name: str) -> torch.Tensor:
        """Return a copy of a piece's keys or values, ``[rows, heads, keys, ...]``, valid until the next piece's."""
        heads, _, _, dim = pool.shape
        assert piece.where is not None
        blocks = pool.flatten(2).flatten(0, 1)
        room = self.desk.room(name, blocks, len(piece.where))
        with torch.no_grad():
            torch.index_select(blocks, 0, piece.where, out=room)
        return room.view(piece.rows, heads, -1, dim)[:, :, piece.slots]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        raise ValueError(
            "texts of several lengths attend in their blocks only: a DecoderLM without attention_mask, whose attention_backend is "
            "'auto', is needed"
        )


def _reads_blocks(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> bool:
    """Tell whether a kernel reads the blocks in place, as on a card; elsewhere a copy costs less."""
    return q.is_cuda and q.shape[2] <= MOST_ROWS and decoding_refusal(q, keys, values, table) is None


class PackedCache(KVCache):
    """Keys and values of many texts in one pool, each a `Row`; for a `DecoderLM` whose windows, if any, are alike.

    A forward pass takes one row of tokens ``[1, tokens]``, the new ones of several texts behind each other, with their positions,
    after `pack` was told whose they are; `advance` counts them when it is done.

    Parameters
    ----------
    config : PretrainedConfig
        The model's.
    block_size : int
        Tokens in a block.
    num_blocks : int, optional
        How many blocks each layer has, all allocated at the first token. By default their number grows by an eighth.
    """

    def __init__(self, config: PretrainedConfig, *, block_size: int = 16, num_blocks: int | None = None) -> None:
        whole(block_size, "block_size", least=1)
        if num_blocks is not None:
            whole(num_blocks, "num_blocks", least=1)
        self.window: int | None = getattr(config, "sliding_window", None)
        self.pages = Pages(block_size, num_blocks)
        self._heads: int = config.num_key_value_heads
        self._desk, self._packed = Desk(), list[tuple[Row, int]]()
        tables = {self.window: Tables(self.pages)}
        super().__init__(
            config, lambda _: PackedLayer(self.window, tables, self._desk), block_size=block_size, num_blocks=num_blocks
        )

    @property
    def pool(self) -> BlockPool:
        """Which blocks are free."""
        return self.pages.pool

    def row(self) -> Row:
        """Return a place for a text, empty."""
        return Row(self.pages)

    def blocks_for(self, length: int, count: int) -> int:
        """Return the most blocks that a text has at once until so many tokens are stored, so many at a time."""
        size = self.pages.block_size
        slots = length if self.window is None else min(length, size - 1 + self.window - 1 + count)
        return -(-slots // size)

    def pack(self, rows: Sequence[tuple[Row, int]], device: torch.device) -> None:
        """Prepare a pass over so many new tokens of each text; `Row.reserve` has taken the blocks for them."""
        self._packed = list(rows)
        self._desk.packing = Packing(rows, heads=self._heads, window=self.window, device=device)

    def advance(self) -> None:
        """Count the tokens of the last pass as stored."""
        for row, count in self._packed:
            row.advance(count, self.window)
        self._packed, self._desk.packing = [], None
