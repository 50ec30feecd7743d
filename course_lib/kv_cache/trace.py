"""A trace of requests replayed against a pool of cache memory: who gets in, and how much of what is held for them holds a token."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from course_lib.memory.units import whole

Numbers = npt.NDArray[np.int64]
POLICIES = ("maximum", "power of two", "exact", "paged")


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they arrive.

    Attributes
    ----------
    arrival : array of int64, ``[requests]``
        The step at which each arrives; they do not fall. In a step every running request writes one token.
    prompt, output : array of int64, ``[requests]``
        Tokens of each prompt, and of what the model writes after it, at least one each.
    """

    arrival: Numbers
    prompt: Numbers
    output: Numbers

    @property
    def total(self) -> Numbers:
        """Tokens of each request once it is done."""
        return self.prompt + self.output


def draw_trace(
    requests: int, *, mean_prompt: float, mean_output: float, max_tokens: int, interval: float = 0.0, seed: int
) -> Trace:
    """Draw requests with geometric lengths, which are what a mean alone suggests (of all distributions the most random with it).

    Parameters
    ----------
    requests : int
        How many.
    mean_prompt, mean_output : float
        Mean tokens, at least 1, before lengths are cut.
    max_tokens : int
        The model's context: prompts are cut to all but one token of it, outputs to the rest.
    interval : float
        Mean steps between arrivals, which are a Poisson process; with 0 all wait at the start.
    seed : int
        The same seed draws the same trace on every machine.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    count, most = whole(requests, "requests", least=1), whole(max_tokens, "max_tokens", least=2)
    for name, value, least in (
        ("mean_prompt", mean_prompt, 1),
        ("mean_output", mean_output, 1),
        ("interval", interval, 0),
    ):
        if not value >= least:
            raise ValueError(f"{name} must be a number of at least {least}, got {value!r}")
    # By inversion of uniform draws, whose stream NumPy keeps across versions.
    waits, prompts, outputs = np.random.Generator(np.random.PCG64(seed)).random((3, count))
    prompt = np.minimum(_geometric(prompts, mean_prompt), most - 1)
    output = np.minimum(_geometric(outputs, mean_output), most - prompt)
    return Trace(np.floor(np.cumsum(-interval * np.log1p(-waits))).astype(np.int64), prompt, output)


def _geometric(uniform: npt.NDArray[np.float64], mean: float) -> Numbers:
    if mean == 1:
        return np.ones(len(uniform), dtype=np.int64)
    drawn: Numbers = np.maximum(np.ceil(np.log1p(-uniform) / np.log1p(-1 / mean)), 1).astype(np.int64)
    return drawn


@dataclass(frozen=True)
class Replay:
    """What a pool went through, by step: the memory after every running request wrote its token.

    Attributes
    ----------
    stored, later, never : array of int64, ``[steps]``
        Token slots that hold a token; that are held for a request which will use them later; and that are held for one which never
        will. The rest of the `capacity` is free.
    running, waiting : array of int64, ``[steps]``
        Requests that run, and that have arrived and do not.
    capacity : int
        Token slots of the pool.
    most_unused : int
        Most slots that one request held at one time without a token in them.
    preemptions : int
        How often a running request had to give its pages back, to be computed again later.
    """

    stored: Numbers
    later: Numbers
    never: Numbers
    running: Numbers
    waiting: Numbers
    capacity: int
    most_unused: int
    preemptions: int

    @property
    def steps(self) -> int:
        """Steps until the last request was done."""
        return len(self.stored)

    @property
    def waste(self) -> float:
        """Share of the slots held that had no token in them, over all steps."""
        held = self.stored + self.later + self.never
        return 1 - float(self.stored.sum()) / max(float(held.sum()), 1.0)

    def when_full(self, numbers: Numbers) -> float:
        """Return the mean of one of the arrays over the steps in which a request had to wait for memory; NaN if none had."""
        return float(numbers[self.waiting > 0].mean()) if (self.waiting > 0).any() else float("nan")


def replay(trace: Trace, capacity: int, policy: str, *, max_tokens: int, block_size: int = 16) -> Replay:
    """Replay a trace, first come, first served, with continuous batching.

    Parameters
    ----------
    trace : Trace
        The requests.
    capacity : int
        Token slots of the pool, at least `max_tokens`.
    policy : {"maximum", "power of two", "exact", "paged"}
        What a request gets when it enters. The first three reserve one contiguous range, the first that is large enough: for
        `max_tokens`; for the request's length, known beforehand, rounded up to a power of two; for exactly that length. Pages come one
        at a time as they fill. When none is left, the request that entered last gives its own back and waits in front.
    max_tokens : int
        Most tokens of a request.
    block_size : int
        Token slots of a page.

    Returns
    -------
    Replay

    Raises
    ------
    ValueError
        If an argument is out of range, a request is longer than `max_tokens`, or the pool is too small for one of that length.

    Notes
    -----
    Time counts in steps, and a prompt is read within one: the replay is about memory, and says nothing of how long a step takes.
    Chapter 09 (notebooks/09-cache-memory.ipynb) draws it. The contiguous policies are those with which the PagedAttention paper compares
    (Kwon et al., 2023, section 6.1), which places ranges with a buddy allocator and not by first fit.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; accepted are {', '.join(POLICIES)}")
    most, block = whole(max_tokens, "max_tokens", least=2), whole(block_size, "block_size", least=1)
    if len(trace.total) and trace.total.max() > most:
        raise ValueError(
            f"trace holds a request of {trace.total.max()} tokens; max_tokens, {most}, is the most that is accepted"
        )
    if policy == "paged":
        capacity = whole(capacity, "capacity", least=-(-most // block) * block) // block * block
        return _Paged(trace, capacity, block).run()
    capacity = whole(capacity, "capacity", least=most)
    sizes = np.full(len(trace.total), most)
    if policy == "power of two":
        sizes = np.minimum(2 ** np.ceil(np.log2(trace.total)).astype(np.int64), most)
    return _Contiguous(trace, capacity, trace.total if policy == "exact" else sizes).run()


@dataclass
class _Pool:
    """The loop that both kinds of pool share; each says who gets in, and what a step's new tokens take."""

    trace: Trace
    capacity: int
    running: list[int] = field(default_factory=list, init=False)  # in the order in which they entered
    queue: deque[int] = field(default_factory=deque, init=False)
    preemptions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.length = self.trace.prompt.copy()  # tokens stored, or to be stored on entry
        self.slots = np.zeros_like(self.length)

    def enter(self, request: int) -> bool:
        raise NotImplementedError

    def make_room(self) -> None:
        """Get slots for one more token of every running request."""

    def leave(self, request: int) -> None:
        raise NotImplementedError

    def run(self) -> Replay:
        trace, rows, most_unused = self.trace, [], 0
        arrived = done = step = 0
        while done < len(trace.total):
            while arrived < len(trace.total) and trace.arrival[arrived] <= step:
                self.queue.append(arrived)
                arrived += 1
            if not self.running and not self.queue:
                step = int(trace.arrival[arrived])  # idle steps are not recorded
                continue
            while self.queue and self.enter(self.queue[0]):
                self.running.append(self.queue.popleft())
            self.make_room()
            now = np.array(self.running)
            self.length[now] += 1
            unused = self.slots[now] - self.length[now]
            later = np.minimum(unused, trace.total[now] - self.length[now])
            most_unused = max(most_unused, int(unused.max()))
            rows.append(
                (self.length[now].sum(), later.sum(), (unused - later).sum(), len(self.running), len(self.queue))
            )
            for request in now[self.length[now] == trace.total[now]]:
                self.leave(int(request))
                self.running.remove(int(request))
                done += 1
            step += 1
        stored, later, never, running, waiting = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        return Replay(stored, later, never, running, waiting, self.capacity, most_unused, self.preemptions)


@dataclass
class _Contiguous(_Pool):
    sizes: Numbers

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gaps = [(0, self.capacity)]  # start and end, in order
        self.start = np.zeros_like(self.length)

    def enter(self, request: int) -> bool:
        size = int(self.sizes[request])
        for index, (start, end) in enumerate(self.gaps):
            if end - start >= size:
                self.gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
                self.start[request], self.slots[request] = start, size
                return True
        return False

    def leave(self, request: int) -> None:
        start = int(self.start[request])
        insort(self.gaps, (start, start + int(self.slots[request])))
        joined: list[tuple[int, int]] = []
        for begin, end in self.gaps:
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        self.gaps = joined


@dataclass
class _Paged(_Pool):
    block: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.free = self.capacity // self.block

    def enter(self, request: int) -> bool:
        pages = -(-(int(self.length[request]) + 1) // self.block)
        if pages > self.free:
            return False
        self.free -= pages
        self.slots[request] = pages * self.block
        return True

    def make_room(self) -> None:
        while True:
            now = np.array(self.running)
            full = now[self.length[now] == self.slots[now]]
            if len(full) <= self.free:
                break
            last = self.running.pop()
            self.leave(last)
            self.queue.appendleft(last)
            self.preemptions += 1
        self.slots[full] += self.block
        self.free -= len(full)

    def leave(self, request: int) -> None:
        self.free += int(self.slots[request]) // self.block
        self.slots[request] = 0
