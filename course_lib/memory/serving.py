"""A simulator of one card that serves chats: which plan keeps how many users within a bound on latency.

The capstone (notebooks/exercises/13-capstone.ipynb) chooses plans with it. How long a step takes follows from what it reads and
computes (`step_cost`) and from the machine's rates (`calibrate`, `datasheet`).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from course_lib.memory.capacity import card_memory
from course_lib.memory.cards import Card
from course_lib.memory.chats import Chat
from course_lib.memory.plans import Costs, Plan
from course_lib.memory.rates import Calibration


@dataclass(frozen=True)
class Bound:
    """What users are promised.

    Attributes
    ----------
    first_token, per_token : float
        Most seconds from a question to the first token of its answer, and for each token after it, on the mean of an answer.
    share : float
        Share of the users for whom every answer has to keep both.
    """

    first_token: float
    per_token: float
    share: float = 0.95

    def __post_init__(self) -> None:
        for name in ("first_token", "per_token"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be a number of seconds, at least 0, got {getattr(self, name)!r}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be a number from 0 to 1, got {self.share!r}")


@dataclass
class Answer:
    """One turn as it went; times are in seconds from the start."""

    chat: int
    turn: int
    asked: float
    output: int
    context: int  # tokens before the one to be written next: earlier turns, prompt, and what has been written
    cached: int = 0  # tokens of these whose keys and values are in the cache
    slots: int = 0
    written: int = 0
    computed: int = 0  # tokens that passed through the model for it
    first: float = math.nan
    done: float = math.nan

    @property
    def first_token(self) -> float:
        """Seconds until the first token."""
        return self.first - self.asked

    @property
    def per_token(self) -> float:
        """Mean seconds of a token after the first; 0 if there is none."""
        return (self.done - self.first) / max(1, self.output - 1)

    def misses(self, bound: Bound) -> bool:
        """Return whether it came later than promised."""
        return self.first_token > bound.first_token or self.per_token > bound.per_token


@dataclass
class Served:
    """What a simulation saw.

    Attributes
    ----------
    answers : list of Answer
        All turns, in the order in which they were done.
    capacity, fixed : int
        Bytes of the card, and of weights and working memory.
    memory : list of (float, int, int)
        Time, and bytes of the cache that requests hold and that idle chats hold, after each change.
    steps, preemptions : int
        Passes of the model, and how often a request had to give its memory back, to be computed again.
    seconds : dict
        Where the time went: reading weights, reading the cache, arithmetic, overhead, idle. Where reading and arithmetic overlap,
        a step's time belongs to the longer of the two.
    """

    capacity: int
    fixed: int
    answers: list[Answer] = field(default_factory=list)
    memory: list[tuple[float, int, int]] = field(default_factory=list)
    steps: int = 0
    preemptions: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("weights", "cache", "arithmetic", "overhead", "idle"), 0.0)
    )

    @property
    def peak(self) -> int:
        """Most bytes in use at one time."""
        return self.fixed + max((held + idle for _, held, idle in self.memory), default=0)

    def percentile(self, name: str, percent: float) -> float:
        """Return a percentile of ``"first_token"`` or ``"per_token"`` over all answers: the smallest value not below that share."""
        if name not in ("first_token", "per_token"):
            raise ValueError(f"name must be 'first_token' or 'per_token', got {name!r}")
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be a number from 0 to 100, got {percent!r}")
        values = sorted(getattr(answer, name) for answer in self.answers)
        return values[max(0, math.ceil(percent / 100 * len(values)) - 1)] if values else math.nan

    def users_within(self, bound: Bound) -> int:
        """Return for how many users every answer kept the bound."""
        return len({a.chat for a in self.answers} - {a.chat for a in self.answers if a.misses(bound)})


def simulate(
    model: Any, plan: Plan, chats: Sequence[Chat], *, memory: str | int | Card, rates: Calibration, max_tokens: int
) -> Served:
    """Serve chats with continuous batching on one card, and say how it went.

    Parameters
    ----------
    model : str, path, dict or transformers.PretrainedConfig
        See `count_parameters`.
    plan : Plan
        How to serve it.
    chats : sequence of Chat
        Who comes when.
    memory : str, Card or int
        The card, or bytes.
    rates : Calibration
        How fast it reads and computes: `datasheet` for a card, `calibrate` for a machine that was measured.
    max_tokens : int
        Most tokens of a chat, for which a contiguous cache reserves.

    Returns
    -------
    Served

    Raises
    ------
    FileNotFoundError, TypeError
        As for `estimate`.
    ValueError
        As for `estimate`; if the plan does not fit on the card with one chat of `max_tokens`; if a chat is longer.

    Notes
    -----
    A step runs one token of every request that is writing, and prompts in chunks, first come, first served, up to the plan's
    budget (Sarathi-Serve, Agrawal et al., 2024). A page is taken when a token needs it. If there is none, idle chats lose
    theirs, those that have been idle longest first; then the request that entered last gives its own back and waits in front, to be
    computed again (vLLM, Kwon et al., 2023). A step's time is that of `step_cost` for everything in it; the work of
    dequantising is left out, and so is the time between steps but for the calibrated overhead.
    """
    return _Server(Costs(model, plan, max_tokens), chats, card_memory(memory), rates).run()


def most_users(
    model: Any,
    plan: Plan,
    chats: Sequence[Chat],
    bound: Bound,
    *,
    memory: str | int | Card,
    rates: Calibration,
    max_tokens: int,
) -> int:
    """Find how many of the chats, in their order, can be served together within a bound.

    Parameters
    ----------
    model, plan, chats, memory, rates, max_tokens
        As for `simulate`.
    bound : Bound
        What users are promised.

    Returns
    -------
    int
        The largest number found, by doubling and then by halves, for which the first so many chats keep the bound. That takes for
        granted that fewer can be served if more can, which is nearly always so.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        As for `simulate`.
    """
    costs, room = Costs(model, plan, max_tokens), card_memory(memory)

    def misses(users: int) -> bool:
        server, most_late = (
            _Server(costs, chats[:users], room, rates, bound),
            math.floor((1 - bound.share) * users + 1e-9),
        )
        server.run(lambda: len(server.late) > most_late)
        return len(server.late) > most_late

    above = 1
    while above <= len(chats) and not misses(above):
        above *= 2
    low = above // 2
    candidates = range(low + 1, min(above, len(chats) + 1))
    return low + bisect_left(candidates, True, key=misses)


class _Server:
    """One run: requests wait, run in the order in which they entered, and leave; idle chats may keep their pages."""

    def __init__(
        self, costs: Costs, chats: Sequence[Chat], capacity: int, rates: Calibration, bound: Bound | None = None
    ) -> None:
        self.costs, self.chats, self.rates, self.bound = costs, chats, rates, bound
        self.late = set[int]()  # chats that missed the bound
        self.free = capacity - costs.fixed
        one = costs.cache[costs.slots(costs.max_tokens)]
        if self.free < one:
            raise ValueError(
                f"memory is {capacity:,} bytes, and plan needs {costs.fixed:,} before the first chat and {one:,} for a chat of "
                f"{costs.max_tokens} tokens: choose fewer bits, fewer heads or a larger card"
            )
        longest = max((chat.tokens for chat in chats), default=0)
        if longest > costs.max_tokens:
            raise ValueError(
                f"chats holds one of {longest} tokens; max_tokens, {costs.max_tokens}, is the most accepted"
            )
        self.now = 0.0
        self.served = Served(capacity, costs.fixed)
        self.coming = [(chat.arrival, number, 0) for number, chat in enumerate(chats) if chat.turns]
        heapq.heapify(self.coming)
        self.waiting, self.running = deque[Answer](), list[Answer]()
        self.idle: OrderedDict[int, Answer] = OrderedDict()  # by chat, longest idle first
        self.held = [0, 0]  # bytes of running requests and of idle chats

    def run(self, stop: Callable[[], bool] = lambda: False) -> Served:
        while (self.coming or self.waiting or self.running) and not stop():
            self._arrive()
            self._admit()
            if not self.running:
                self.served.seconds["idle"] += self.coming[0][0] - self.now
                self.now = self.coming[0][0]
                continue
            if all(answer.context - answer.cached == 1 for answer in self.running):
                self._decode()
            else:
                self._mixed()
            self._leave()
        return self.served

    def _arrive(self) -> None:
        while self.coming and self.coming[0][0] <= self.now:
            asked, number, turn = heapq.heappop(self.coming)
            turns = self.chats[number].turns
            context = sum(past.prompt + past.output for past in turns[:turn]) + turns[turn].prompt
            self.waiting.append(Answer(number, turn, asked, turns[turn].output, context))

    def _admit(self) -> None:
        cache, plan = self.costs.cache, self.costs.plan
        while self.waiting and len(self.running) < plan.max_batch:
            head = self.waiting[0]
            kept = self.idle.get(head.chat)
            slots = self.costs.slots(head.context + 1)
            need = cache[slots] - (cache[kept.slots] if kept else 0)
            others = self.held[1] - (cache[kept.slots] if kept else 0)
            if need > self.free + others:
                return
            if kept:
                del self.idle[head.chat]
                self._move(kept, idle=-1)
                head.cached = kept.cached
                need = cache[slots]
            self._evict(need)
            self.running.append(self.waiting.popleft())
            self._resize(head, slots)

    def _evict(self, need: int) -> None:
        """Take pages from idle chats until so many bytes are free or none is idle."""
        while need > self.free and self.idle:
            self._move(self.idle.popitem(last=False)[1], idle=-1)

    def _move(self, answer: Answer, idle: int) -> None:
        size = idle * self.costs.cache[answer.slots]
        self.held[1] += size
        self.free -= size

    def _resize(self, answer: Answer, slots: int) -> None:
        size = self.costs.cache[slots] - self.costs.cache[answer.slots]
        answer.slots = slots
        self.held[0] += size
        self.free -= size

    def _growth(self, tokens: int) -> int:
        """Return the bytes that so many more tokens of every running request take."""
        cache, slots = self.costs.cache, self.costs.slots
        return sum(cache[max(a.slots, slots(a.context + tokens))] - cache[a.slots] for a in self.running)

    def _make_room(self) -> None:
        """Get every running request a slot for its next token."""
        while (need := self._growth(1)) > self.free:
            self._evict(need)
            if self._growth(1) > self.free:
                last = self.running.pop()
                self._resize(last, 0)
                last.cached = 0
                self.waiting.appendleft(last)
                self.served.preemptions += 1
        for answer in self.running:
            self._resize(answer, max(answer.slots, self.costs.slots(answer.context + 1)))

    def _decode(self) -> None:
        """Run steps in which every request writes a token, until one is done, memory is short or somebody comes."""
        costs, count = self.costs, len(self.running)
        steps = min(answer.output - answer.written for answer in self.running)
        if (
            count * costs.cache[costs.slots(min(steps, costs.max_tokens))] > self.free
            and self._growth(steps) > self.free
        ):
            steps = min(steps, *(answer.slots - answer.context for answer in self.running))
            if steps < 1:
                self._make_room()
                count, steps = len(self.running), 1
        before = [answer.context for answer in self.running]
        after = [context + steps - 1 for context in before]
        lines = []
        for table in (costs.cache, costs.attention):  # straight enough between the first step and the last
            first, last = (sum(map(table.__getitem__, contexts)) for contexts in (before, after))
            lines.append((first, (last - first) / max(1, steps - 1)))
        (cache, more_cache), (attention, more_attention) = lines
        flops = count * (costs.token + costs.head) + attention

        def spent(number: int) -> tuple[float, float, float, float]:
            return _seconds(self.rates, number, costs.weights[count], (cache, more_cache), (flops, more_attention))

        if self.coming and self.now + sum(spent(steps)) > self.coming[0][0]:
            until = self.coming[0][0] - self.now
            steps = 1 + bisect_left(range(1, steps), until, key=lambda number: sum(spent(number)))
        first_done = self.now + sum(spent(1))
        self._spend(steps, spent(steps))
        for answer in self.running:
            self._write(answer, steps, first_done)
            answer.cached += steps
            answer.computed += steps

    def _mixed(self) -> None:
        """Run one step in which at least one request reads its prompt."""
        self._make_room()
        costs = self.costs
        left = costs.plan.token_budget - sum(a.context - a.cached == 1 for a in self.running)
        cache = flops = 0.0
        chunks = []
        for answer in self.running:
            missing = answer.context - answer.cached
            chunk = 1 if missing == 1 else min(missing, left)
            if not chunk:
                continue
            left -= chunk if missing > 1 else 0
            end = answer.cached + chunk
            middle = answer.cached + (chunk + 1) / 2  # an attention's work rises with the place: this one's is the mean
            work = (costs.attention[math.floor(middle)] + costs.attention[math.ceil(middle)]) / 2
            cache += costs.cache[end]
            flops += chunk * (costs.token + work) + (costs.head if chunk == missing else 0)
            chunks.append((answer, chunk))
        weights = costs.weights[sum(chunk for _, chunk in chunks)]
        self._spend(1, _seconds(self.rates, 1, weights, (cache, 0.0), (flops, 0.0)))
        for answer, chunk in chunks:
            answer.cached += chunk
            answer.computed += chunk
            if answer.cached == answer.context:
                self._write(answer, 1, self.now)

    def _write(self, answer: Answer, tokens: int, first: float) -> None:
        if not answer.written:
            answer.first = first
        answer.written += tokens
        answer.context += tokens
        self._resize(answer, max(answer.slots, self.costs.slots(answer.context)))

    def _spend(self, steps: int, seconds: tuple[float, float, float, float]) -> None:
        """Let the time of some steps pass."""
        for name, part in zip(self.served.seconds, seconds, strict=False):
            self.served.seconds[name] += part
        self.now += sum(seconds)
        self.served.steps += steps

    def _leave(self) -> None:
        for answer in [answer for answer in self.running if answer.written == answer.output]:
            self.running.remove(answer)
            answer.done = self.now
            if self.bound and answer.misses(self.bound):
                self.late.add(answer.chat)
            self.served.answers.append(answer)
            turns = self.chats[answer.chat].turns
            kept, held = self.costs.plan.prefix_reuse and answer.turn + 1 < len(turns), answer.slots
            self._resize(answer, 0)
            if kept:
                answer.slots = held
                self.idle[answer.chat] = answer
                self._move(answer, idle=1)
            if answer.turn + 1 < len(turns):
                think = turns[answer.turn + 1].think
                heapq.heappush(self.coming, (self.now + think, answer.chat, answer.turn + 1))
        self.served.memory.append((self.now, self.held[0], self.held[1]))


def _seconds(
    rates: Calibration, steps: int, weights: float, cache: tuple[float, float], flops: tuple[float, float]
) -> tuple[float, float, float, float]:
    """Return the seconds of some steps for weights, cache, arithmetic and overhead; `cache` and `flops` are of the first, and more each."""

    def total(line: tuple[float, float], low: int, high: int) -> float:
        return (high - low) * (line[0] + line[1] * (low + high - 1) / 2)

    cut, reads_first = steps, True
    if rates.overlap:  # the longer of two straight lines counts, which may change once
        ahead = (weights + cache[0]) / rates.bandwidth - flops[0] / rates.flops_per_second
        gain = cache[1] / rates.bandwidth - flops[1] / rates.flops_per_second
        reads_first = (ahead or gain) >= 0
        if ahead * gain < 0:
            cut = min(steps, math.ceil(-ahead / gain))
    reads = (0, cut) if reads_first else (cut, steps)
    computes = (0, steps) if not rates.overlap else (cut, steps) if reads_first else (0, cut)
    return (
        (reads[1] - reads[0]) * weights / rates.bandwidth,
        total(cache, *reads) / rates.bandwidth,
        total(flops, *computes) / rates.flops_per_second,
        steps * rates.overhead,
    )
