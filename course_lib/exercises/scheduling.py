"""Exercises of chapter 11 about a scheduler: queues and pools to test with, right answers, and what common mistakes lead to."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

import torch

# ---- one step of a scheduler --------------------------------------------------------------------------------------

Queue = tuple[list[tuple[int, int]], int, int, int]


def random_queue(rng: Random, short: Literal["budget", "blocks", "neither"]) -> Queue:
    """Draw requests ``(tokens, cached)`` in order of arrival, a budget of tokens, free blocks and their size.

    All that decode have room. What prompts want is more than the budget, or than the blocks, or there is enough of both.
    """
    size, requests = rng.choice([4, 8]), list[tuple[int, int]]()
    kinds = ["decode"] * rng.randint(2, 4) + ["prompt"] * rng.randint(3, 4)
    rng.shuffle(kinds)
    for kind in ("prompt", *kinds, "decode"):
        if kind == "decode":
            held = rng.randint(5, 40)
            requests.append((held + 1, held))
        else:
            begun = rng.choice([0, size * rng.randint(1, 3) + rng.randint(1, size - 1)])
            requests.append((begun + rng.randint(3 * size, 9 * size), begun))
    served = [request for request in requests if request[0] - request[1] == 1] + requests[:1]
    budget, free = _wanted(requests, size)
    if short == "budget":
        budget = _wanted(served, size)[0] + rng.randint(2, size)
    elif short == "blocks":
        free = _wanted(served, size)[1] + rng.randint(1, 2)
    return (
        requests,
        budget + (short != "budget") * rng.randint(0, 9),
        free + (short != "blocks") * rng.randint(0, 5),
        size,
    )


def _wanted(requests: Sequence[tuple[int, int]], size: int) -> tuple[int, int]:
    """Return the tokens that all requests want to run, and the blocks that these need."""
    tokens = sum(tokens - cached for tokens, cached in requests)
    return tokens, sum(_blocks(tokens, size) - _blocks(cached, size) for tokens, cached in requests)


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def tokens_to_run(requests: Sequence[tuple[int, int]], budget: int, free_blocks: int, block_size: int) -> torch.Tensor:
    """Return how many tokens each request runs in the next step, int64 ``[requests]``."""
    return _planned(requests, budget, free_blocks, block_size)


def _planned(requests: Sequence[tuple[int, int]], budget: int, free: int, size: int, fault: str = "") -> torch.Tensor:
    planned, left = [0] * len(requests), budget

    def decodes(number: int) -> bool:
        tokens, cached = requests[number]
        return tokens - cached == 1

    order = sorted(range(len(requests)), key=lambda number: not decodes(number))
    if fault in ("arrival", "prompts first"):
        order = sorted(order) if fault == "arrival" else sorted(order, key=decodes)
    elif fault == "shortest":
        order = sorted(order, key=lambda number: requests[number][0] - requests[number][1])
    elif fault == "latest":
        order = sorted(range(len(requests)), key=lambda number: (not decodes(number), -number))
    for number in order:
        tokens, cached = requests[number]
        wanted = tokens if fault == "again" else tokens - cached
        places = 0 if fault == "places" else -cached % size
        most = min(left, wanted) if fault != "budget" else wanted
        run = most if fault == "blocks" else min(most, places + free * size)
        if fault == "whole" and run < wanted:
            run = 0
        if fault == "one chunk" and not decodes(number):
            run = min(run, size)
        planned[number] = run
        if not (fault == "uncounted" and decodes(number)):
            left -= min(left, 1 if fault == "requests" else run)
        if fault != "not taken":
            free = max(
                0,
                free
                - (_blocks(run, size) if fault == "places" else _blocks(cached + run, size) - _blocks(cached, size)),
            )
        if run < wanted and not decodes(number) and fault not in ("overtake", "one chunk"):
            break
    return torch.tensor(planned)


PLAN_FAULTS = {
    "Requests are served in order of arrival, whatever they do: a long prompt must not hold up those that decode.": "arrival",
    "Prompts are served first: those that decode come before them.": "prompts first",
    "The shortest prompt is served first: among prompts, the one that came first goes first.": "shortest",
    "The latest prompt is served first: among prompts, the one that came first goes first.": "latest",
    "The budget is forgotten: no more tokens run in a step than it allows.": "budget",
    "Blocks are forgotten: no more tokens run than there are places for.": "blocks",
    "A later prompt overtakes one that did not get all that it wants: then nobody behind it gets anything.": "overtake",
    "A prompt waits until all of it fits: as much of it runs as fits now.": "whole",
    "A prompt runs one block at a time: it runs all that budget and blocks allow.": "one chunk",
    "The budget counts requests here: it counts tokens.": "requests",
    "The tokens that decode are not counted: they use up the budget too.": "uncounted",
    "What is cached already runs again: only tokens behind it run.": "again",
    "Free places in a request's last block are not used: they need no new block.": "places",
    "Blocks that one request takes are still free for the next.": "not taken",
}


def plan_mistakes(
    requests: Sequence[tuple[int, int]], budget: int, free_blocks: int, block_size: int
) -> dict[str, torch.Tensor]:
    """Return what mistakes in planning a step lead to."""
    return {why: _planned(requests, budget, free_blocks, block_size, fault) for why, fault in PLAN_FAULTS.items()}


# ---- who is preempted ---------------------------------------------------------------------------------------------

Pool = tuple[list[int], list[int], int, int]


def random_pool(rng: Random, *, full: bool) -> Pool:
    """Draw when requests came, how many tokens each has in the cache, free blocks and their size. If `full`, some must go."""
    while True:
        size, count = rng.choice([4, 8]), rng.randint(6, 10)
        arrived = rng.sample(range(100), count)
        cached = [
            size * rng.randint(1, 8) - (0 if rng.random() < 0.6 else rng.randint(1, size - 1)) for _ in range(count)
        ]
        free = rng.randint(0, 1) if full else rng.randint(count, 2 * count)
        runs = stays(arrived, cached, free, size)
        if bool(runs.all()) != full:
            return arrived, cached, free, size


def stays(arrived: Sequence[int], cached: Sequence[int], free_blocks: int, block_size: int) -> torch.Tensor:
    """Return which requests run their next token, bool ``[requests]``; the others are preempted."""
    return _stays(arrived, cached, free_blocks, block_size)


def _stays(arrived: Sequence[int], cached: Sequence[int], free: int, size: int, fault: str = "") -> torch.Tensor:
    order = sorted(range(len(arrived)), key=lambda number: arrived[number])
    if fault == "place":
        order.sort()
    last = {"first": order[::-1], "largest": sorted(order, key=lambda number: (cached[number], arrived[number]))}
    leaving = last.get(fault, order)[::-1]
    runs, served = set(order), set[int]()
    for number in order:
        if number not in runs:
            continue
        needs = 1 if fault == "each" or cached[number] % size == 0 else 0
        needs = 1 - needs if fault == "late" else needs
        while needs > free:
            victim = number if fault == "itself" else next(other for other in leaving if other in runs)
            runs.discard(victim)
            held = _blocks(cached[victim] + (victim in served), size)
            free += {"one": 1, "nothing": 0}.get(fault, held)
            if victim == number:
                break
        if number in runs:
            free -= needs
            served.add(number)
    if fault == "all":
        gone = {number for number in order if number not in runs}
        runs = runs if not gone else {number for number in runs if cached[number] % size}
    return torch.tensor([number in runs for number in range(len(arrived))])


STAY_FAULTS = {
    "The last in the list goes: the last to come goes, wherever it stands.": "place",
    "The first to come goes: then nobody's answer is sure ever to end.": "first",
    "The request with the most tokens goes: the last to come goes, though it may free less.": "largest",
    "The request that finds no block goes: it may be the oldest, so the last to come goes in its stead.": "itself",
    "A block is counted for every request: one with a free place in its last block needs none.": "each",
    "Blocks are counted for those that have a free place: a request needs one when its last block is full.": "late",
    "One block is freed for each that goes: it lets go of all of its blocks.": "one",
    "Nothing is freed by those that go: they let go of all of their blocks.": "nothing",
    "All that need a block go as soon as one is missing: who came first is served, and only as many go as must.": "all",
}


def stay_mistakes(
    arrived: Sequence[int], cached: Sequence[int], free_blocks: int, block_size: int
) -> dict[str, torch.Tensor]:
    """Return what mistakes about preemption lead to."""
    faulty = {why: _stays(arrived, cached, free_blocks, block_size, fault) for why, fault in STAY_FAULTS.items()}
    return faulty | {
        "These are the requests that go; the task wants those that run.": ~stays(arrived, cached, free_blocks, block_size),
        "Nobody goes, though there are not blocks enough.": torch.ones(len(arrived), dtype=torch.bool),
    }  # fmt: skip
