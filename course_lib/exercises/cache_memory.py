"""Exercises of chapter 09: configurations, chunks and pools to test with, right answers, and what common mistakes lead to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any, Literal

import torch

from course_lib import memory
from course_lib.memory.units import GIB

Config = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


# ---- layers of two kinds ------------------------------------------------------------------------------------------


def random_mixed_decoder(rng: Random) -> Config:
    """Draw a configuration in which some layers see everything and others a window; ``head_dim`` is stated."""
    kv_heads, sliding, full = rng.randint(1, 4), rng.randint(2, 9), rng.randint(2, 9)
    types = [SLIDING] * sliding + [FULL] * full
    rng.shuffle(types)
    return mixed_decoder(
        kv_heads * rng.randint(2, 5), kv_heads, rng.choice([48, 64, 80, 96]), rng.randint(100, 4_000), types
    )


def mixed_decoder(heads: int, kv_heads: int, head_dim: int, window: int, layer_types: list[str]) -> Config:
    """Return a configuration that states what a cache depends on, and what a model of its type must state."""
    return {
        "model_type": "gemma3_text",
        "vocab_size": 1000,
        "hidden_size": heads * (head_dim - 16),
        "intermediate_size": 1000,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "sliding_window": window,
        "layer_types": layer_types,
    }


def cache_size(config: Config, tokens: int, batch_size: int, value_bytes: int) -> int:
    """Return the bytes of a cache, by the library's count."""
    return memory.kv_cache_bytes(
        config, tokens, batch_size, {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}[value_bytes]
    )


def _size(
    config: Config,
    tokens: int,
    batch_size: int,
    value_bytes: int,
    *,
    types: Sequence[str] | None = None,
    beyond: int = -1,
    per_token: int | None = None,
    whole: bool = False,
) -> int:
    window, types = config["sliding_window"] + beyond, types or config["layer_types"]
    sliding = window if whole else min(tokens, window)
    kept = sum(sliding if kind == SLIDING else tokens for kind in types)
    per_token = per_token or config["num_key_value_heads"] * config["head_dim"]
    return 2 * kept * per_token * batch_size * value_bytes


def cache_mistakes(config: Config, tokens: int, batch_size: int, value_bytes: int) -> dict[str, float]:
    """Return what mistakes about the bytes of a cache with layers of two kinds lead to."""
    inputs, layers = (config, tokens, batch_size, value_bytes), config["num_hidden_layers"]
    right, hidden, heads = _size(*inputs), config["hidden_size"], config["num_attention_heads"]
    return {
        "Keys and values are both kept; one of the two is counted.": right // 2,
        "Query heads are counted: the cache holds num_key_value_heads.": _size(
            *inputs, per_token=heads * config["head_dim"]
        ),
        "hidden_size is what the layers hand on; a token leaves num_key_value_heads * head_dim keys.": _size(
            *inputs, per_token=hidden
        ),
        "head_dim is taken as hidden_size / num_attention_heads, but this configuration states another.": _size(
            *inputs, per_token=config["num_key_value_heads"] * (hidden // heads)
        ),
        "The window is applied to all layers: only those of type sliding_attention have it.": _size(
            *inputs, types=[SLIDING] * layers
        ),
        "The window is ignored: layers of type sliding_attention keep no more than they can still see.": _size(
            *inputs, types=[FULL] * layers
        ),
        "The two types of layers are the other way round.": _size(
            *inputs, types=[FULL if kind == SLIDING else SLIDING for kind in config["layer_types"]]
        ),
        "The window is off by one: it includes the token being computed, which brings its own key and value.": _size(
            *inputs, beyond=0
        ),
        "Sliding layers are charged for their whole window, however few the tokens.": _size(*inputs, whole=True),
        "The batch is forgotten: every sequence has a cache of its own.": _size(config, tokens, 1, value_bytes),
        "These are values, not bytes: each takes value_bytes.": right // value_bytes,
        "Two bytes for every value: each takes value_bytes.": _size(config, tokens, batch_size, 2),
    }


# ---- the largest context ------------------------------------------------------------------------------------------


def random_card(rng: Random, fits: Literal["long", "short", "edge", "nothing"]) -> tuple[Config, float, int, int, int]:
    """Draw a configuration, a card's GiB, bytes of weights, batch size and bytes of a value.

    What fits beside the weights is a context longer than the window, one shorter, one that just fills it, or nothing, because
    the weights do not.
    """
    config, batch, value_bytes = random_mixed_decoder(rng), rng.randint(2, 9), rng.choice([1, 2, 4])
    window = config["sliding_window"]
    tokens = {"short": rng.randint(5, window - 5), "edge": window}.get(fits, rng.randint(2 * window, 30 * window))
    needed, more = (_size(config, count, batch, value_bytes) for count in (tokens, tokens + 1))
    card = math.ceil(needed / GIB) + rng.choice([1.5, 4.0, 6.5, 14.0])
    room = -rng.randint(1, GIB) if fits == "nothing" else rng.randrange(needed, more)
    return config, card, int(card * GIB) - room, batch, value_bytes


def largest_context(config: Config, card_gib: float, weight_bytes: int, batch_size: int, value_bytes: int) -> int:
    """Return the most tokens that each sequence can have beside the weights."""
    return _largest(int(card_gib * GIB) - weight_bytes, lambda n: _size(config, n, batch_size, value_bytes))


def _largest(room: int, cost: Callable[[int], int]) -> int:
    """Return the largest number from 0 on whose cost is within `room`, 0 where even 0 costs more; costs rise."""
    above = 1
    while cost(above) <= room:
        above *= 2
    fits = 0
    while above - fits > 1:
        middle = (fits + above) // 2
        fits, above = (middle, above) if cost(middle) <= room else (fits, middle)
    return fits


def context_mistakes(
    config: Config, card_gib: float, weight_bytes: int, batch_size: int, value_bytes: int
) -> dict[str, float]:
    """Return what mistakes about the largest context lead to."""
    room, types, window = int(card_gib * GIB) - weight_bytes, config["layer_types"], config["sliding_window"]
    full = [kind for kind in types if kind == FULL]
    all_grow = room // _size(config, 1, batch_size, value_bytes)
    windows = _size(config, window - 1, batch_size, value_bytes, types=[SLIDING] * (len(types) - len(full)))

    def cost(types: list[str], batch: int = batch_size, **changed: Any) -> Callable[[int], int]:
        return lambda tokens: _size(config, tokens, batch, value_bytes, types=types, **changed)

    right = _largest(room, cost(types))
    return {
        "The card's GiB are read as GB: a GiB is 1024**3 bytes.": _largest(
            int(card_gib * 1000**3) - weight_bytes, cost(types)
        ),
        "One token too many: a token that fits in part does not fit, so round down.": right + 1,
        "The weights are forgotten: they lie on the card beside the cache.": _largest(room + weight_bytes, cost(types)),
        "The batch is forgotten: every sequence has a cache of its own.": _largest(room, cost(types, batch=1)),
        "Sliding layers are charged for the whole context: they stop at window - 1 tokens.": _largest(
            room, cost([FULL] * len(types))
        ),
        "The two types of layers are the other way round.": _largest(
            room, cost([FULL if kind == SLIDING else SLIDING for kind in types])
        ),
        "Sliding layers are left out: up to window - 1 tokens they grow too, and what they hold then stays.": _largest(
            room, cost(full)
        ),
        "Sliding layers are charged for their whole window, however short the context.": _largest(
            room, cost(types, whole=True)
        ),
        "A negative context: where weights, or weights and whole windows, are too large, look again.": (room - windows)
        // cost(full)(1),
        "Where the windows are just full, the room that is left is for full layers alone, and may hold another token.": (
            all_grow if 0 <= all_grow <= window - 1 else right
        ),
        "The window is off by one: a sliding layer keeps window - 1 tokens.": _largest(room, cost(types, beyond=0)),
        "Keys and values are both kept; one of the two is counted.": _largest(2 * room, cost(types)),
    }  # fmt: skip


# ---- a window with sinks ------------------------------------------------------------------------------------------


def visible(seen: int, window: int, sinks: int) -> torch.Tensor:
    """Return what token `seen` sees, int64 ``[2, visible]``: numbers of tokens, and their places in the cache."""
    tokens = _tokens(seen, window, sinks)
    return torch.stack((tokens, torch.arange(len(tokens))))


def _tokens(seen: int, window: int, sinks: int) -> torch.Tensor:
    every = torch.arange(seen + 1)
    return every[(every < sinks) | (every > seen - window)]


def sink_mistakes(seen: int, window: int, sinks: int) -> dict[str, torch.Tensor]:
    """Return what mistakes about a window with sinks lead to."""

    def placed(tokens: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        return torch.stack((tokens, torch.arange(len(tokens)) if places is None else places))

    right = _tokens(seen, window, sinks)
    first = torch.arange(min(sinks, seen + 1))
    recent = torch.arange(max(0, seen - window + 1), seen + 1)
    return {
        "The sinks are dropped: the first tokens stay for good.": placed(recent),
        "Tokens come twice: while the text is short, the window still holds the sinks.": placed(torch.cat((first, recent))),
        "The places are the tokens' numbers in the text: in the cache, a token stands right behind the one before it.": placed(
            right, right
        ),
        "Places count from the end: the first token that is kept stands at 0.": placed(right, torch.arange(len(right)).flip(0)),
        "The new token is missing: it sees itself.": placed(right[:-1]),
        "The window is one token too wide: the new token is one of its tokens.": placed(_tokens(seen, window + 1, sinks)),
        "The sinks are taken out of the window: they come on top of it.": placed(_tokens(seen, max(1, window - sinks), sinks)),
        "The window begins behind the sinks, at a fixed place: it moves with the text.": placed(
            torch.arange(min(sinks + window, seen + 1))
        ),
        "The rows have changed places: numbers of tokens come first.": placed(right).flip(0),
    }  # fmt: skip


# ---- groups that are quantised once -------------------------------------------------------------------------------


def random_stream(rng: Random) -> tuple[list[torch.Tensor], int, int]:
    """Draw chunks of keys ``[tokens, head_dim]`` in float64, the group and the residual.

    No value lies near the middle between two codes, so that all right solutions round alike; in one group a channel is constant.
    """
    group, dim, groups = rng.choice([4, 6, 8]), rng.randint(3, 5), rng.randint(3, 5)
    residual = rng.randint(group - 1, 2 * group)
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    offset, scale = (torch.rand(groups, 1, dim, generator=draw, dtype=torch.float64) for _ in range(2))
    codes = torch.randint(1, 255, (groups, group, dim), generator=draw) + 0.6 * (
        torch.rand(groups, group, dim, generator=draw, dtype=torch.float64) - 0.5
    )
    ends = torch.rand(groups, group, dim, generator=draw).argsort(1)
    codes.scatter_(1, ends[:, :1], 0.0).scatter_(1, ends[:, 1:2], 255.0)
    codes[rng.randrange(groups), :, rng.randrange(dim)] = 0.0
    keys = (4 * offset - 3 + (0.01 + 0.04 * scale) * codes).flatten(0, 1)
    rest = torch.rand(residual + rng.randrange(group), dim, generator=draw, dtype=torch.float64)
    keys = torch.cat((keys, rest))
    cuts = sorted(rng.sample(range(1, len(keys)), len(keys) // 3))
    return [keys[start:end] for start, end in pairwise([0, *cuts, len(keys)])], group, residual


def read_back(chunks: Sequence[torch.Tensor], group: int, residual: int, fault: str = "") -> torch.Tensor:
    """Return all keys as an append-only cache gives them back, ``[tokens, head_dim]``, or as one with a fault does."""
    cache = chunks[0][:0]
    for chunk in chunks if fault == "again" else [torch.cat(list(chunks))]:
        cache = torch.cat((cache, chunk))
        kept = 0 if fault in ("no residual", "all") else residual
        whole = len(cache) if fault == "all" else group * max(0, (len(cache) - kept) // group)
        size = max(1, whole) if fault in ("again", "one range") else group
        ends = [*range(0, whole, size), whole]
        cache = torch.cat([*(_rounded(cache[start:end], fault) for start, end in pairwise(ends)), cache[whole:]])
    return cache


def _rounded(keys: torch.Tensor, fault: str) -> torch.Tensor:
    if fault == "never":
        return keys
    axis = {"token": (1,), "tensor": (0, 1)}.get(fault, (0,))
    lowest, highest = keys.amin(axis, keepdim=True), keys.amax(axis, keepdim=True)
    if fault == "symmetric":
        step = torch.maximum(highest, -lowest) / 127
        return (keys / step).round() * step
    step = (highest - lowest) / (15 if fault == "four" else 255)
    codes = torch.nan_to_num((keys - lowest) / step, nan=math.nan if fault == "zero" else 0.0)
    codes = codes.floor() if fault == "floor" else codes.round()
    if fault == "wrap":
        codes = torch.where(codes > 127, codes - 256, codes)
    return codes * step if fault == "offset" else lowest + codes * step


STREAM_FAULTS = {
    "What is stored is quantised again with each chunk, with one range for all: groups are quantised once, with their own.": "again",
    "One range serves all groups of a channel: each group has its own, so that it never needs the others.": "one range",
    "The range is taken along each token: keys have a few large channels, so each channel of a group needs its own.": "token",
    "One range serves all channels of a group: each channel has its own.": "tensor",
    "The codes are symmetric about 0: the lowest value is code 0, the highest 255, wherever 0 may lie.": "symmetric",
    "The residual is quantised as soon as it makes a group: `residual` tokens at least stay as they are.": "no residual",
    "Everything is quantised, a last short group too: the residual stays as it is.": "all",
    "Nothing is quantised.": "never",
    "Codes are cut off; round to the nearest.": "floor",
    "Codes above 127 have wrapped around: they need an unsigned byte.": "wrap",
    "The lowest value is not added back.": "offset",
    "Codes run to 15, which is int4; a byte holds 255.": "four",
    "Not a number: where a channel of a group is constant, its step is 0, and nothing may be divided by it.": "zero",
}


def stream_mistakes(chunks: Sequence[torch.Tensor], group: int, residual: int) -> dict[str, torch.Tensor]:
    """Return what mistakes in an append-only quantised cache lead to."""
    return {why: read_back(chunks, group, residual, fault) for why, fault in STREAM_FAULTS.items()}


# ---- a pool of blocks ---------------------------------------------------------------------------------------------


def random_pool(rng: Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a pool ``[num_blocks, kv_heads, block_size, head_dim]``, tables ``[batch, blocks]`` and positions ``[batch, n]``."""
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    batch, blocks, size, n = rng.randint(2, 3), rng.randint(5, 7), rng.choice([2, 3, 4]), rng.randint(3, 5)
    pool = torch.rand(batch * blocks + 3, rng.randint(2, 3), size, 3, generator=draw)
    tables = torch.randperm(len(pool), generator=draw)[: batch * blocks].view(batch, blocks)
    return pool, tables, torch.tensor([rng.sample(range(size, blocks * size), n) for _ in range(batch)])


def read_pool(pool: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return what the pool holds of each row's tokens, ``[batch, kv_heads, n, head_dim]``."""
    size = pool.shape[2]
    return _gathered(pool, tables.gather(1, positions // size), positions % size)


def _gathered(pool: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return pool[blocks % len(pool), :, offsets].transpose(1, 2)


def pool_mistakes(pool: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what mistakes in reading a pool lead to."""
    size, columns = pool.shape[2], tables.shape[1]
    logical, offsets = positions // size, positions % size
    slots = tables.gather(1, logical) * size + offsets
    by_slot = pool.reshape(-1, pool.shape[1], pool.shape[3])
    return {
        "The table is ignored: a row's blocks lie anywhere in the pool.": _gathered(pool, logical, offsets),
        "The first row's table serves all rows: each has its own.": _gathered(pool, tables[0][logical], offsets),
        "Division and remainder have changed places: `//` finds the block, `%` the place in it.": _gathered(
            pool, tables.gather(1, offsets), logical % size
        ),
        "The block is right, but the first of its places is read: take the remainder.": _gathered(
            pool, tables.gather(1, logical), torch.zeros_like(offsets)
        ),
        "The block is one too far: the first `block_size` tokens are in the table's first block.": _gathered(
            pool, tables.gather(1, (logical + 1) % columns), offsets
        ),
        "The block is one too early: the first `block_size` tokens are in the table's first block.": _gathered(
            pool, tables.gather(1, (logical - 1) % columns), offsets
        ),
        "Heads and places are mixed: in a block, the places stand behind the heads, so a reshape does not line them up.": by_slot[
            slots
        ].transpose(1, 2),
        "The axes stand as the index leaves them: the task wants heads in front of tokens.": pool[
            tables.gather(1, logical), :, offsets
        ],
    }


# ---- copy on write ------------------------------------------------------------------------------------------------

Event = tuple[str, str, Any]


def random_events(rng: Random) -> tuple[list[Event], int, int]:
    """Draw what happens to a few sequences, with the number of blocks, enough for all, and their size."""
    size, events, living = rng.choice([3, 4, 5]), list[Event](), ["a"]
    events.append(("append", "a", size + rng.randint(1, size - 1)))  # so that a fork shares a block with free places
    for name in "bcdefg"[: rng.randint(4, 6)]:
        parent = rng.choice(living)
        events += [("fork", parent, name), ("append", rng.choice([parent, name]), rng.randint(1, size + 1))]
        living.append(name)
        if rng.random() < 0.4 or name == "c":
            gone = rng.choice(living[:-1])
            living.remove(gone)
            events.append(("free", gone, None))
        events.append(("append", rng.choice(living), rng.randint(1, size)))
    return [*events, ("fork", rng.choice(living), "z")], 60, size


def reference_counts(events: Sequence[Event], num_blocks: int, block_size: int, fault: str = "") -> torch.Tensor:
    """Return how many sequences hold each block in the end, int64 ``[num_blocks]``, right or with a fault."""
    counts, tables, lengths = [0] * num_blocks, dict[str, list[int]](), dict[str, int]()

    def take() -> int:
        block = counts.index(0)
        counts[block] = 1
        return block

    for kind, name, more in events:
        if kind == "append":
            table = tables.setdefault(name, [])
            for _ in range(more):
                length = lengths[name] = lengths.get(name, 0) + 1
                opens = length % block_size == 0 if fault == "late" else (length - 1) % block_size == 0
                if opens or not table:
                    table.append(take())
                elif counts[table[-1]] > 1 and fault != "shared":
                    old, table[-1] = table[-1], take()
                    counts[old] -= fault != "still counted"
        elif kind == "fork":
            held = tables[name]
            copied = held if fault == "deep" else held[-1:] if fault == "eager" and lengths[name] % block_size else []
            tables[more], lengths[more] = held[: len(held) - len(copied)], lengths[name]
            for block in tables[more] if fault != "uncounted" else ():
                counts[block] += 1
            tables[more] = tables[more] + [take() for _ in copied]
        elif fault != "leak":
            for block in tables.pop(name):
                counts[block] = 0 if fault == "freed" else max(0, counts[block] - 1)
    return torch.tensor(counts)


COUNT_FAULTS = {
    "A shared block was written to: where another sequence holds it too, the token goes into a copy.": "shared",
    "The block that was copied from is still counted: the sequence has let it go.": "still counted",
    "A fork copies every block: it shares them all, and counts each once more.": "deep",
    "A fork copies the last block at once: that waits for the first token that is written to it.": "eager",
    "A fork does not count: each block that it shares has one holder more.": "uncounted",
    "A block was freed that another sequence still holds: lower its count by one.": "freed",
    "Nothing is freed: a sequence that ends lets go of all of its blocks.": "leak",
    "The next block is opened by the token that fills the last one: wait for one that has no place.": "late",
}


def count_mistakes(events: Sequence[Event], num_blocks: int, block_size: int) -> dict[str, torch.Tensor]:
    """Return what mistakes with shared blocks lead to."""
    return {why: reference_counts(events, num_blocks, block_size, fault) for why, fault in COUNT_FAULTS.items()}
