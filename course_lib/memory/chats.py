"""Chat users: when they ask, how much, and how long they think; drawn from means, or written down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from course_lib.memory.units import whole


@dataclass(frozen=True)
class Turn:
    """One question and its answer: tokens of both, and the seconds between the answer before and this question."""

    prompt: int
    output: int
    think: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            object.__setattr__(self, name, whole(getattr(self, name), name, least=1))
        _seconds(self.think, "think")


@dataclass(frozen=True)
class Chat:
    """One user: when the first question comes, in seconds, and all turns. Each turn's context holds the turns before."""

    arrival: float
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        _seconds(self.arrival, "arrival")

    @property
    def tokens(self) -> int:
        """Tokens of the whole chat."""
        return sum(turn.prompt + turn.output for turn in self.turns)


@dataclass(frozen=True)
class Statistics:
    """What is known of users before they come: means, of geometric and exponential distributions.

    Attributes
    ----------
    turns, prompt, output : float
        Mean turns of a chat, and tokens of a question and of an answer, at least 1 each.
    think : float
        Mean seconds between an answer and the next question.
    max_tokens : int
        Where a chat ends: tokens of all its turns together.
    """

    turns: float
    prompt: float
    output: float
    think: float
    max_tokens: int

    def draw(self, users: int, seed: int) -> list[Chat]:
        """Draw chats that begin at random moments of one mean turn; the first users are the same however many there are."""
        most = whole(self.max_tokens, "max_tokens", least=2)
        for name in ("turns", "prompt", "output"):
            if not 1 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 1, got {getattr(self, name)!r}")
        _seconds(self.think, "think")
        return [self._chat(Random(f"{seed} {user}"), most) for user in range(whole(users, "users"))]

    def _chat(self, rng: Random, most: int) -> Chat:
        arrival, turns, left = rng.random() * self.think, list[Turn](), most
        for number in range(_geometric(rng, self.turns)):
            think = -self.think * math.log1p(-rng.random()) if number else 0.0
            prompt = min(_geometric(rng, self.prompt), left - 1)
            if prompt < 1:
                break
            output = min(_geometric(rng, self.output), left - prompt)
            turns.append(Turn(prompt, output, think))
            left -= prompt + output
        return Chat(arrival, tuple(turns))


def _seconds(value: float, argument: str) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{argument} must be a number of seconds, at least 0, got {value!r}")


def _geometric(rng: Random, mean: float) -> int:
    uniform = rng.random()
    return 1 if mean == 1 else max(1, math.ceil(math.log1p(-uniform) / math.log1p(-1 / mean)))
