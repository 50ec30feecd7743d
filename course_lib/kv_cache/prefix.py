"""A paged cache that remembers: sequences that begin like an earlier one take that one's blocks."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig

from course_lib.kv_cache.blocks import BlockPool
from course_lib.kv_cache.paged import PagedCache, PagedLayer
from course_lib.kv_cache.tables import Tables
from course_lib.memory.units import whole

#: What stands before the first tokens, and what padding is taken for; no token has such a number.
ROOT, PADDING = -1, -1


@dataclass
class Node:
    """A block of a stored sequence.

    Attributes
    ----------
    tokens : tuple of int
        What stands in the block, as many as its size except at the end of a sequence.
    parent : int
        The block before it.
    children : dict of tuple of int to int
        By their tokens, the blocks that follow; none has tokens that another begins with.
    used : int
        When it was last stored or found.
    """

    tokens: tuple[int, ...]
    parent: int
    children: dict[tuple[int, ...], int] = field(default_factory=dict)
    used: int = 0


class PrefixTree:
    """A radix tree over token ids whose nodes are blocks: what follows from the root to a node is what a model has read.

    Parameters
    ----------
    pool : BlockPool
        Of the blocks, to each of which the tree refers once.
    block_size : int
        Tokens in a block.
    max_tokens : int, optional
        How many tokens it stores at most.

    Attributes
    ----------
    nodes : dict of int to Node
        By their blocks; the root is no block.
    stored_tokens : int
        Tokens in all blocks. Sequences that part within a block each have it whole.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_tokens: int | None) -> None:
        self.pool, self.block_size, self.max_tokens = pool, block_size, max_tokens
        self.nodes = {ROOT: Node((), ROOT)}
        self.stored_tokens = self._clock = 0

    def blocks(self) -> list[int]:
        """Return the blocks that the tree refers to."""
        return [block for block in self.nodes if block != ROOT]

    def match(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of these tokens are stored, from the first on, and their blocks."""
        self._clock += 1
        found: list[int] = []
        node, length = self.nodes[ROOT], 0
        while True:
            piece = tuple(tokens[length : length + self.block_size])
            block = node.children.get(piece) if len(piece) == self.block_size else None
            if block is None:
                common, block = max(
                    ((_common(piece, one), block) for one, block in node.children.items()), default=(0, ROOT)
                )
                if common:
                    found.append(block)
                    self.nodes[block].used = self._clock
                return length + common, found
            found.append(block)
            node = self.nodes[block]
            node.used = self._clock
            length += self.block_size

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Store a sequence that stands in these blocks, except what is stored already, or finds no room.

        Raises
        ------
        ValueError
            If one of the blocks is stored as the end of another sequence.
        """
        self._clock += 1
        parent = ROOT
        for start, block in zip(range(0, len(tokens), self.block_size), blocks, strict=False):
            piece = tuple(tokens[start : start + self.block_size])
            siblings = self.nodes[parent].children
            stored = self._longer(parent, piece)
            if stored is None:
                # One that ends within this block gives way to it.
                shorter = next((one for one in siblings if _common(piece, one) == len(one)), ())
                if block in self.nodes and siblings.get(shorter) != block:
                    raise ValueError(f"token_ids are not those that block {block} was stored with")
                piece = self._fitting(piece, shorter, keep=(parent, siblings.get(shorter, ROOT)))
                stored = self._longer(parent, piece)
            if stored is None:
                self.pool.share([block])
                if shorter:
                    self._remove(siblings[shorter])
                siblings[piece] = stored = block
                self.nodes[block] = Node(piece, parent)
                self.stored_tokens += len(piece)
            self.nodes[stored].used = self._clock
            if len(piece) < self.block_size:
                return
            parent = stored

    def _longer(self, parent: int, piece: tuple[int, ...]) -> int | None:
        """Return what follows ``parent`` and begins with these tokens, the parent itself if there are none, or None."""
        if not piece:
            return parent
        siblings = self.nodes[parent].children
        exact = siblings.get(piece)
        if exact is not None or len(piece) == self.block_size:
            return exact
        return next((block for one, block in siblings.items() if _common(piece, one) == len(piece)), None)

    def _fitting(self, piece: tuple[int, ...], shorter: tuple[int, ...], keep: Collection[int]) -> tuple[int, ...]:
        """Return how much of a piece there is room for where it replaces a shorter one, after others were forgotten for it."""
        if self.max_tokens is None:
            return piece
        over = self.stored_tokens + len(piece) - len(shorter) - self.max_tokens
        if over > 0:
            over -= self.evict(tokens=over, keep=keep)
        return piece[: len(piece) - max(0, over)]

    def evict(self, blocks: int = 0, *, tokens: int = 0, keep: Collection[int] = ()) -> int:
        """Forget the ends of sequences, those first that were not used for longest, never what a sequence in the cache uses.

        Parameters
        ----------
        blocks, tokens : int
            How much to forget at least; less where there is no more.
        keep : collection of int
            Blocks to keep.

        Returns
        -------
        int
            Tokens that were forgotten.
        """

        def evictable(block: int) -> bool:
            return block not in keep and not self.nodes[block].children and self.pool.references(block) == 1

        ends = [(self.nodes[block].used, block) for block in self.blocks() if evictable(block)]
        heapq.heapify(ends)
        forgotten = 0
        while ends and (blocks > 0 or forgotten < tokens):
            _, block = heapq.heappop(ends)
            node = self.nodes[block]
            self._remove(block)
            blocks, forgotten = blocks - 1, forgotten + len(node.tokens)
            if node.parent != ROOT and evictable(node.parent):
                heapq.heappush(ends, (self.nodes[node.parent].used, node.parent))
        return forgotten

    def clear(self) -> None:
        """Forget everything."""
        self.pool.release(self.blocks())
        self.nodes = {ROOT: Node((), ROOT)}
        self.stored_tokens = 0

    def _remove(self, block: int) -> None:
        node = self.nodes.pop(block)
        del self.nodes[node.parent].children[node.tokens]
        self.stored_tokens -= len(node.tokens)
        self.pool.release([block])


class PrefixCache(PagedCache):
    """A paged cache that keeps finished sequences, so that the next that begin like them need not be computed again.

    Around each request stand two calls::

        reused = cache.begin(input_ids)
        output = model.generate(input_ids, cache=cache)  # past_key_values before Transformers 5.24
        cache.commit(output)

    Parameters
    ----------
    config : PretrainedConfig
        The model's.
    block_size, num_blocks : int
        As for `PagedCache`. A pool of fixed size forgets what is stored before it refuses new tokens.
    max_tokens : int, optional
        How many tokens are stored at most; all by default.

    Attributes
    ----------
    requests, hits, reused_tokens : int
        How often `begin` was called, how often it found something, and how many tokens in all.

    Raises
    ------
    ValueError
        If a number is below 1, or the model has layers with a window or a state instead of all keys and values.

    Notes
    -----
    The tree is that of SGLang (Zheng et al. 2024, RadixAttention), in whole blocks. It compares token ids, never text: the same text
    may be split otherwise when it is encoded again. `fork` serves sequences at a time: the forks store into one tree. A file keeps
    the sequences in the cache, not what is stored. Chapter 09 measures what sharing saves.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if max_tokens is not None:
            whole(max_tokens, "max_tokens", least=1)
        super().__init__(config, block_size=block_size, num_blocks=num_blocks)
        if list(self.tables) != [None] or not all(isinstance(layer, PagedLayer) for layer in self.layers):
            raise ValueError(
                f"config is of type {config.model_type!r} with layers that see only a window or keep a state, whose past cannot be taken "
                "up from a prefix; PagedCache takes such models"
            )
        self.options["max_tokens"] = max_tokens
        pages = self._table.pages
        self.tree = PrefixTree(pages.pool, block_size, max_tokens)
        pages.reclaim = self.tree.evict
        self.requests = self.hits = self.reused_tokens = 0
        self._begun: list[list[int]] | None = []

    @property
    def stored_tokens(self) -> int:
        """Tokens that are stored; what sequences have in common counts once, in whole blocks."""
        return self.tree.stored_tokens

    def begin(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Start sequences with what is stored of their beginning; those that were in the cache before are given up.

        Parameters
        ----------
        input_ids : Tensor
            Integers ``[batch, length]``, all that is known of the new sequences.
        attention_mask : Tensor, optional
            ``[batch, length]``, 0 where a shorter prompt is filled up, on the left.

        Returns
        -------
        int
            Tokens that the cache holds now, of every sequence: at most all but the last, which must run to give logits.

        Raises
        ------
        ValueError
            If a shape does not fit, or there is no token.
        """
        if 0 in input_ids.shape:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; at least one token is needed")
        rows = _ids("input_ids", input_ids)
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                raise ValueError(
                    f"attention_mask has shape {list(attention_mask.shape)} and input_ids {list(input_ids.shape)}; they must be equal"
                )
            rows = _ids("input_ids", input_ids.masked_fill(attention_mask == 0, PADDING))
        found = [self.tree.match(row) for row in rows]
        reused = min(input_ids.shape[1] - 1, *(length for length, _ in found))
        table = self._table
        needed = -(-reused // table.pages.block_size)
        table.take([blocks[:needed] for _, blocks in found], reused)
        for layer in self.layers:
            layer.take(len(rows), reused)
        self._begun = rows
        self.requests += 1
        self.hits += reused > 0
        self.reused_tokens += reused
        return reused

    def commit(self, token_ids: torch.Tensor) -> None:
        """Store the sequences in the cache, which stay in it.

        Parameters
        ----------
        token_ids : Tensor
            Integers ``[batch, length]``, the very ids that the model has read; also those that follow, which are ignored.

        Raises
        ------
        ValueError
            If these cannot be the sequences in the cache: there are more or fewer, they do not begin as `begin` was told, or beam
            search has exchanged those in the cache.
        """
        rows, table = _ids("token_ids", token_ids), self._table
        if self._begun is None:
            raise ValueError(
                "token_ids cannot be told to be those in the cache, whose sequences reorder_cache() has exchanged, as beam search does"
            )
        begun = self._begun or [[]] * len(rows)
        if len(rows) != len(table.rows) or len(rows) != len(begun):
            raise ValueError(f"token_ids has {len(rows)} sequences, and the cache holds {len(table.rows)}")
        for index, (row, start) in enumerate(zip(rows, begun, strict=True)):
            if any(told not in (PADDING, token) for told, token in zip(start, row, strict=False)):
                raise ValueError(f"token_ids does not begin, in row {index}, with the input_ids that begin() was given")
            row[: len(start)] = start[: len(row)]
        held = self.get_seq_length()
        table.changed()  # what only these sequences used is shared from now on
        for row, blocks in zip(rows, table.rows, strict=True):
            self.tree.insert(row[:held], blocks)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._begun = self._begun and [row[: self.get_seq_length()] for row in self._begun]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._begun = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._begun = self._begun and [row for row in self._begun for _ in range(repeats)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        if self._begun:
            self._begun = [self._begun[i] for i in torch.arange(len(self._begun))[indices.cpu()].tolist()]

    def reset(self) -> None:
        """Forget the sequences in the cache and all that is stored; what comes next may be of another dtype or device."""
        self.tree.clear()
        super().reset()
        self._table.pages.drop()
        self._begun = []

    @property
    def used_nbytes(self) -> int:
        """Bytes that the tokens held and those stored need."""
        stored = {block: len(node.tokens) for block, node in self.tree.nodes.items()}
        tokens = sum((Counter(stored) | Counter(self._table.filled(0))).values())
        return tokens * sum(self._table.pages.token_nbytes(layer.index) for layer in self.layers)

    def tensors(self) -> dict[str, torch.Tensor]:
        # Also before the first token of a request, when no layer holds any.
        return {
            f"{i}.{name}": tensor for i, layer in enumerate(self.layers) for name, tensor in layer.tensors().items()
        }

    def _referring(self, table: Tables) -> list[Iterable[int]]:
        return [*super()._referring(table), self.tree.blocks()]


def _ids(name: str, ids: torch.Tensor) -> list[list[int]]:
    if ids.ndim != 2 or ids.is_floating_point():
        raise ValueError(
            f"{name} has shape {list(ids.shape)} and dtype {ids.dtype}; integers [batch, length] are needed"
        )
    rows: list[list[int]] = ids.tolist()
    return rows


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two sequences have in common."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
