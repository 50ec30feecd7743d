"""The one comparison that the exercises' tests use: it rejects a wrong answer and says which mistake gives that answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

CASE_YOU_CANNOT_SEE = "an input that you cannot see"


class WrongAnswer(AssertionError):
    """An answer that a test rejects; its text is written for the person who gave it."""


def check(
    answer: object,
    expected: int | float,
    mistakes: Callable[..., Mapping[str, float]] | None = None,
    *inputs: Any,
    case: str | None = None,
) -> None:
    """Accept an answer that equals the expected one; reject any other with the reason, where the reason is known.

    Parameters
    ----------
    answer : object
        What the function under test returned.
    expected : int or float
        The right answer. An int wants an int and equality, a float wants nine equal digits.
    mistakes : callable, optional
        Called with `inputs` if the answer is wrong. Returns for each explanation the answer that this mistake gives; those
        that give the right answer here are passed over.
    *inputs : object
        What `mistakes` needs to know, usually the arguments of the function under test.
    case : str, optional
        The call, as text. A visible test names it, and its message tells both values. A hidden test leaves it out, and then
        the message holds neither inputs nor values, so that feedback gives away no answer.

    Raises
    ------
    WrongAnswer
        If the answer is no number of the right kind, or not the expected one.
    """
    where = case or CASE_YOU_CANNOT_SEE
    if answer is None:
        raise WrongAnswer(f"For {where} your function returns None. Does it end with `return`?")
    if isinstance(answer, bool) or not isinstance(answer, Real):
        raise WrongAnswer(f"For {where} your function returns a {type(answer).__name__}; a number is needed.")
    right_kind = isinstance(answer, Integral) or not isinstance(expected, int)
    if right_kind and _same(answer, expected):
        return
    known = mistakes(*inputs) if mistakes else {}
    leading_astray = {reason: value for reason, value in known.items() if not _same(expected, value)}
    reason = " Or: ".join(reason for reason, value in leading_astray.items() if _same(answer, value))
    if not reason and not right_kind:
        reason = "A whole number (int) is needed; `//` gives one, `/` a float, which cannot hold every large number."
    elif not reason:
        reason = "No mistake known to this test gives that value: work the example by hand first."
    found = f"your function returns {answer:,}; right is {expected:,}" if case else "your function is wrong"
    raise WrongAnswer(f"For {where} {found}. {reason}")


def _same(one: Real | float, other: Real | float) -> bool:
    if isinstance(one, Integral) and isinstance(other, Integral):
        return one == other
    return math.isclose(one, other, rel_tol=1e-9)
