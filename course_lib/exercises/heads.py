"""Exercises of chapter 10: projections, layouts and losses to test with, right answers, and what common mistakes lead to."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Config = dict[str, Any]


def _draw(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


# ---- pooling heads ------------------------------------------------------------------------------------------------


def random_projection(rng: Random) -> tuple[torch.Tensor, int, int]:
    """Draw the weight of a key projection ``[heads * head_dim, hidden]`` in float64, its heads, and how many groups they make."""
    groups = rng.randint(2, 5)
    size = rng.choice([size for size in range(2, 6) if size != groups])
    rows = groups * size * rng.choice([4, 6])
    return torch.randn(rows, rng.randint(5, 9), generator=_draw(rng), dtype=torch.float64), groups * size, groups


def pooled(weight: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """Return the projection to one head a group, the mean of its heads', ``[groups * head_dim, hidden]``."""
    return weight.view(groups, heads // groups, -1, weight.shape[1]).mean(1).flatten(0, 1)


def pool_mistakes(weight: torch.Tensor, heads: int, groups: int) -> dict[str, torch.Tensor]:
    """Return what mistakes in pooling heads lead to."""
    size, hidden = heads // groups, weight.shape[1]
    each = weight.view(heads, -1, hidden)
    grouped, apart = each.view(groups, size, -1, hidden), each.view(size, groups, -1, hidden)
    mean, rows = grouped.mean(1), weight.view(-1, size, hidden)
    return {
        "The heads of a group are taken at equal distances: they are neighbours, as the query heads that read them are.": (
            apart.mean(0).flatten(0, 1)
        ),
        "The heads of a group are added up: their mean keeps the size of a key.": grouped.sum(1).flatten(0, 1),
        "The sum is divided by the number of groups: divide by the heads in one.": grouped.sum(1).flatten(0, 1) / groups,
        "The first head of each group is taken, and the others are thrown away.": grouped[:, 0].flatten(0, 1),
        "Every group has the mean of all heads: each has that of its own.": each.mean(0).repeat(groups, 1),
        "`groups` heads make a group here: it is the number of groups that the task gives.": apart.mean(1).flatten(0, 1),
        "Neighbouring rows are pooled: a head is `head_dim` rows, and its first row meets the first rows of the others.": (
            rows.mean(1)
        ),
        "Each query head has a copy of its own again: one head a group is stored.": (
            mean.repeat_interleave(size, 0).flatten(0, 1)
        ),
        "Heads have an axis of their own: a projection's rows stand under one another, head after head.": mean,
    }  # fmt: skip


# ---- the heads that fit -------------------------------------------------------------------------------------------


def random_room(rng: Random, fits: Literal["some", "edge", "all", "nothing"]) -> tuple[Config, int, int, int, int]:
    """Draw a configuration, bytes for a cache, tokens, batch size and bytes of a value.

    What fits is some heads and part of another, heads that fill the room to its last byte, all of them, or not even one.
    """
    heads, head_dim = rng.choice([12, 24, 36, 48, 60]), rng.choice([32, 48, 64, 96])
    config = {
        "hidden_size": heads * head_dim // 2,
        "num_hidden_layers": rng.randint(8, 40),
        "num_attention_heads": heads,
        "head_dim": head_dim,
    }
    tokens, batch, value_bytes = rng.randint(500, 9_000), rng.randint(2, 30), rng.choice([2, 4])
    sizes = _divisors(heads)
    between = [size for size, larger in pairwise(sizes) if larger - size > 1]
    count = {"edge": rng.choice(sizes[1:-1]), "all": 3 * heads, "nothing": 0}.get(fits, rng.choice(between) + 1)
    cost = _bytes(config, tokens, batch, value_bytes)
    return config, cost(count) + (0 if fits == "edge" else rng.randrange(cost(1))), tokens, batch, value_bytes


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _bytes(config: Config, tokens: int, batch_size: int, value_bytes: int) -> Callable[[int], int]:
    """Return a function from key-value heads to the bytes of a cache."""
    per_head = 2 * config["num_hidden_layers"] * config["head_dim"] * tokens * batch_size * value_bytes
    return lambda heads: heads * per_head


def most_heads(config: Config, room: int, tokens: int, batch_size: int, value_bytes: int) -> int:
    """Return the most key-value heads of which a cache fits, among those that divide the query heads; 0 if not one does."""
    cost = _bytes(config, tokens, batch_size, value_bytes)
    return max((size for size in _divisors(config["num_attention_heads"]) if cost(size) <= room), default=0)


def room_mistakes(config: Config, room: int, tokens: int, batch_size: int, value_bytes: int) -> dict[str, float]:
    """Return what mistakes about the heads that fit lead to."""
    inputs, heads = (tokens, batch_size, value_bytes), config["num_attention_heads"]
    cost, right = _bytes(config, *inputs)(1), most_heads(config, room, *inputs)
    narrow = config | {"head_dim": config["hidden_size"] // heads}
    halved = [heads >> step for step in range(heads.bit_length()) if heads % (1 << step) == 0]
    return {
        "Groups would be of different sizes: the key-value heads must divide the query heads.": min(
            heads, room // cost
        ),
        "More key-value heads than query heads, or groups of different sizes: they must divide the query heads.": room
        // cost,
        "Keys and values are both kept; one of the two is counted.": most_heads(config, 2 * room, *inputs),
        "The batch is forgotten: every sequence has a cache of its own.": most_heads(
            config, room, tokens, 1, value_bytes
        ),
        "One layer is counted: each has a cache of its own.": most_heads(
            config | {"num_hidden_layers": 1}, room, *inputs
        ),
        "These are values, not bytes: each takes value_bytes.": most_heads(config, room, tokens, batch_size, 1),
        "head_dim is taken as hidden_size / num_attention_heads, but this configuration states another.": most_heads(
            narrow, room, *inputs
        ),
        "A cache that fills the room to its last byte fits too.": most_heads(config, room - 1, *inputs),
        "Heads are only halved: any divisor of the query heads makes equal groups.": max(
            (size for size in halved if size * cost <= room), default=0
        ),
        "One head is stored here where not even that fits: then the answer is 0.": max(1, right),
        "The fewest heads that fit: the task wants the most.": min(1, right),
        "These are the query heads of a group; the task wants the key-value heads.": heads // max(1, right),
    }


# ---- attention in groups ------------------------------------------------------------------------------------------


def random_grouped(rng: Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw queries ``[batch, query_heads, query_len, head_dim]`` and fewer heads of keys and values, more tokens of them."""
    batch, groups, size = rng.randint(1, 3), rng.randint(2, 4), rng.randint(2, 4)
    query_len, head_dim, draw = rng.randint(2, 4), rng.choice([8, 12]), _draw(rng)
    q = torch.randn(batch, groups * size, query_len, head_dim, generator=draw, dtype=torch.float64)
    kv_len = query_len + rng.randint(3, 8)
    k, v = (torch.randn(batch, groups, kv_len, head_dim, generator=draw, dtype=torch.float64) for _ in range(2))
    return q, k, v


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices tensors with as many numbers of their own as keys of every query head would have; views have none."""

    def __init__(self, numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers, self.found = numbers, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch loads its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = func(*args, **(kwargs or {}))
        for tensor in written if isinstance(written, (tuple, list)) else (written,):
            if isinstance(tensor, torch.Tensor):
                self.found |= tensor.untyped_storage().nbytes() >= self.numbers * tensor.element_size()
        return written


def watched(attend: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, int]:
    """Return what a function under test makes of queries, keys and values, and 1 if it wrote a tensor with keys for every query head."""
    with _Written(k.numel() // k.shape[1] * q.shape[1]) as mode:
        output = attend(q, k, v)
    return output, int(mode.found)


AttendFault = Literal[
    "", "apart", "first", "scale", "top", "open", "mean", "queries", "mixed", "stretched", "tiled"
]  # fmt: skip
ATTEND_FAULTS: dict[str, AttendFault] = {
    "Query heads go round the key-value heads in turn: neighbouring query heads share one.": "apart",
    "All query heads read the first key-value head: each group has its own.": "first",
    "Scores are not divided by the root of head_dim.": "scale",
    "Queries are aligned with the first keys: they are the last tokens, so the last query sees all keys.": "top",
    "A query sees keys that stand behind it.": "open",
    "The query heads of a group are averaged: each asks for itself, and gives an output of its own.": "mean",
    "Weights are normalised over the queries: those of one query sum to 1 over its keys.": "queries",
    "The outputs of the groups are interleaved: a head's output stands where its query did.": "mixed",
    "The mask is repeated in the wrong order: where rows stand head after head, repeat the whole mask (`repeat`), not each of its "
    "rows (`repeat_interleave`).": "stretched",
    "The mask is repeated in the wrong order: where rows stand token after token, repeat each of the mask's rows "
    "(`repeat_interleave`), not the whole (`repeat`).": "tiled",
}


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fault: AttendFault = "") -> torch.Tensor:
    """Return causal attention with grouped heads, ``[batch, query_heads, query_len, head_dim]``, as it should be or with a fault."""
    (_, heads, query_len, head_dim), groups, kv_len = q.shape, k.shape[1], k.shape[2]

    def in_groups(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], groups, heads // groups, query_len, head_dim)

    served = torch.arange(heads)
    served = {"apart": served % groups, "first": 0 * served}.get(fault, served // (heads // groups))
    if fault == "mean":
        q = in_groups(q).mean(2).repeat_interleave(heads // groups, 1)
    scores = q @ k[:, served].mT * (1.0 if fault == "scale" else head_dim**-0.5)
    sees = torch.ones(query_len, kv_len, dtype=torch.bool).tril(0 if fault == "top" else kv_len - query_len)
    if fault in ("stretched", "tiled"):
        size = heads // groups
        after_head = sees.repeat_interleave(size, 0).view(size, query_len, kv_len)
        after_token = sees.repeat(size, 1).view(query_len, size, kv_len).transpose(0, 1)
        sees = (after_head if fault == "stretched" else after_token).repeat(groups, 1, 1)
    if fault != "open":
        scores = scores.masked_fill(~sees, -torch.inf)
    output = scores.softmax(2 if fault == "queries" else -1) @ v[:, served]
    return in_groups(output).transpose(1, 2).flatten(1, 2) if fault == "mixed" else output


def attend_mistakes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what mistakes in attention with grouped heads lead to."""
    return {why: attended(q, k, v, fault) for why, fault in ATTEND_FAULTS.items()}


def copy_mistakes(copied: int) -> dict[str, float]:
    """Return why a right output may still be made the wrong way."""
    return {
        "The output is right, but a tensor as large as keys for every query head is written, by `repeat_interleave`, `repeat`, or "
        "`@` between heads that it has to expand: let the queries of a group stand as rows of one product.": copied
    }


# ---- the time of a step -------------------------------------------------------------------------------------------

Step = tuple[Config, int, int, int, int, float, float]


def random_step(rng: Random, *, bound_by: Literal["bytes", "operations"]) -> Step:
    """Draw a configuration, weights, tokens, batch size, bytes of a value, GB/s and TFLOP/s; one of the two takes clearly longer."""
    kv_heads, head_dim = rng.randint(1, 4), rng.choice([48, 64, 96, 128])
    config = {
        "num_hidden_layers": rng.randint(10, 60),
        "num_attention_heads": kv_heads * rng.randint(3, 9),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    shared = (
        config,
        rng.randint(100, 9_000) * 10**6,
        rng.randint(1_000, 30_000),
        rng.randint(2, 40),
        rng.choice([2, 4]),
    )
    bandwidth = float(rng.randint(20, 3_000))
    read, done = _read(*shared), _done(*shared)
    share = rng.uniform(0.3, 0.8)  # what the shorter of the two takes of the longer
    seconds = read / (bandwidth * 1e9) * (share if bound_by == "bytes" else 1 / share)
    return *shared, bandwidth, done / seconds / 1e12


def _read(
    config: Config, weights: int, tokens: int, batch: int, value_bytes: int, *, kv: int | None = None, each: int = 1
) -> int:
    numbers: int = 2 * config["num_hidden_layers"] * (kv or config["num_key_value_heads"]) * config["head_dim"]
    return (each * weights + numbers * tokens * batch) * value_bytes


def _done(config: Config, weights: int, tokens: int, batch: int, value_bytes: int, *, heads: int | None = None) -> int:
    scores: int = config["num_hidden_layers"] * (heads or config["num_attention_heads"]) * config["head_dim"] * tokens
    return 2 * batch * (weights + 2 * scores)


def step_seconds(
    config: Config, weights: int, tokens: int, batch_size: int, value_bytes: int, bandwidth: float, arithmetic: float
) -> float:
    """Return the seconds of a decode step by the roofline."""
    shared = (config, weights, tokens, batch_size, value_bytes)
    return max(_read(*shared) / (bandwidth * 1e9), _done(*shared) / (arithmetic * 1e12))


def step_mistakes(
    config: Config, weights: int, tokens: int, batch_size: int, value_bytes: int, bandwidth: float, arithmetic: float
) -> dict[str, float]:
    """Return what mistakes about the time of a decode step lead to."""
    shared = (config, weights, tokens, batch_size, value_bytes)
    one_cache = (config, weights, tokens, 1, value_bytes)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    read, done = _read(*shared), _done(*shared)

    def roof(read: float, done: float, gb: float = 1e9, tflop: float = 1e12) -> float:
        return max(read / (bandwidth * gb), done / (arithmetic * tflop))

    only_bytes, only_operations = read / (bandwidth * 1e9), done / (arithmetic * 1e12)
    return {
        "The two times are added: reading and arithmetic go on at once, so the longer decides.": only_bytes + only_operations,
        "The shorter of the two times: the longer one decides.": min(only_bytes, only_operations),
        "Only bytes are counted: with many query heads or sequences, arithmetic may take longer.": only_bytes,
        "Only operations are counted: reading weights and cache may take longer.": only_operations,
        "GB are taken for GiB, 1024**3 bytes: data sheets count in 10**9.": roof(read, done, 1024**3),
        "The cache is counted with query heads: it holds num_key_value_heads.": roof(_read(*shared, kv=heads), done),
        "Attention's operations are counted with key-value heads: every query head computes its own scores.": roof(
            read, _done(*shared, heads=kv_heads)
        ),
        "The weights are read once for each sequence: one reading serves the batch.": roof(
            _read(*shared, each=batch_size), done
        ),
        "The cache of one sequence is read: each sequence of the batch has its own.": roof(_read(*one_cache), done),
        "The operations of one sequence are counted: each does its own.": roof(read, _done(*one_cache)),
        "A multiplication with its addition counts as two operations.": roof(read, done / 2),
        "Keys and values are both read; one of the two is counted.": roof(
            (read + weights * value_bytes) / 2, done
        ),
        "Attention has two products, scores and the sum of values; one of them is counted.": roof(
            read, done / 2 + batch_size * weights
        ),
        "The weights are missing among the bytes.": roof(_read(config, 0, *shared[2:]), done),
        "The cache is missing among the bytes.": roof(_read(config, weights, 0, *shared[3:]), done),
        "Attention is missing among the operations.": roof(read, 2 * batch_size * weights),
    }  # fmt: skip


# ---- the fewest heads within a budget -----------------------------------------------------------------------------

Losses = dict[int, torch.Tensor]
# The mean rise of a layout's loss and its interval's half width, as shares of the budget.
RISES = {"sure": (0.5, 0.2), "unsure": (0.8, 0.5), "worse": (1.2, 0.5), "far": (2.0, 0.5)}


def random_losses(rng: Random, *, passes: bool = True) -> tuple[Losses, float]:
    """Draw bits per byte of texts for several numbers of key-value heads, float64 ``[texts]``, and a budget.

    No interval ends near the budget. Texts differ far more than layouts do. Unless some layout `passes`, only the model with all
    of its heads does.
    """
    heads, texts, budget = rng.choice([12, 16, 24, 30, 36]), rng.randint(60, 140), rng.uniform(0.01, 0.05)
    fewer = _divisors(heads)[:-1]
    place = rng.randrange(2, len(fewer) - 1) if passes else len(fewer)
    kinds = [rng.choice(["unsure", "worse", "far"]) for _ in fewer]
    kinds[0], kinds[1] = rng.choice([("unsure", "worse"), ("worse", "unsure")])
    if passes:
        kinds[place], kinds[-1] = "sure", rng.choice(["unsure", "worse", "far"])
    draw = _draw(rng)
    losses = {heads: 1.5 + torch.rand(texts, generator=draw, dtype=torch.float64)}
    for count, kind in zip(fewer, kinds, strict=True):
        mean, half = (budget * share for share in RISES[kind])
        noise = torch.randn(texts, generator=draw, dtype=torch.float64)
        noise = (noise - noise.mean()) / noise.std()
        losses[count] = losses[heads] + mean + half / 1.96 * texts**0.5 * noise
    counts = list(losses)
    rng.shuffle(counts)
    return {count: losses[count] for count in counts}, budget


def fewest_heads(losses: Losses, budget: float) -> int:
    """Return the fewest heads whose loss surely rises by no more than the budget."""
    return min(_within(losses, budget))


def _within(losses: Losses, budget: float, *, ends: float = 1.0, paired: bool = True, root: bool = True) -> list[int]:
    most = max(losses)
    found = [most]
    for count, values in losses.items():
        rise = values - losses[most]
        spread = rise.std() if paired else (values.var() + losses[most].var()).sqrt()
        half = 1.96 * spread / (len(values) ** 0.5 if root else 1)
        if count != most and rise.mean() + ends * half <= budget:
            found.append(count)
    return found


def budget_mistakes(losses: Losses, budget: float) -> dict[str, float]:
    """Return what mistakes about the fewest heads within a budget lead to."""
    within, downwards = _within(losses, budget), max(losses)
    for count in sorted(losses, reverse=True):
        if count not in within:
            break
        downwards = count
    return {
        "Only the mean is compared with the budget: with so few texts it may be luck, so let the interval's upper end decide.": min(
            _within(losses, budget, ends=0.0)
        ),
        "The interval's lower end is compared with the budget: that says that it may hold, not that it does.": min(
            _within(losses, budget, ends=-1.0)
        ),
        "The two layouts' intervals are compared: texts differ far more than layouts, so take the differences text by text.": min(
            _within(losses, budget, paired=False)
        ),
        "The spread of single texts is taken: that of their mean is smaller by the root of their number.": min(
            _within(losses, budget, root=False)
        ),
        "The search went down from all heads and stopped at the first number that fails: one below it may still hold.": downwards,
        "The most heads that hold, all of them; the task wants the fewest.": max(losses),
        "The losses themselves are compared with the budget: it is for their rise over the model with all heads.": min(
            (count for count, values in losses.items() if values.mean() <= budget), default=max(losses)
        ),
        "The fewest heads of all, whatever they cost.": min(losses),
    }  # fmt: skip
