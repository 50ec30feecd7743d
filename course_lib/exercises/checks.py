"""The one comparison that the exercises' tests use: it rejects a wrong answer and says which mistake gives that answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Rational, Real
from typing import Any

CASE_YOU_CANNOT_SEE = "an input that you cannot see"
FORGOTTEN_RETURN = "Does it end with `return`?"
INT_NEEDED = "A whole number (int) is needed; `//` gives one, `/` a float, which cannot hold every large number."
FLOAT_NEEDED = "A number (float) is needed, of a size that a float can hold."
UNKNOWN = "No mistake known to this test gives that value: work the example by hand first."


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
        If the answer is no int or float (a bool and a Fraction are neither), not of the right kind, or not the expected one.
    """
    where = case or CASE_YOU_CANNOT_SEE
    if answer is None:
        raise WrongAnswer(f"For {where} your function returns None. {FORGOTTEN_RETURN}")
    needed = INT_NEEDED if isinstance(expected, int) else FLOAT_NEEDED
    number = _number(answer)
    if number is None:
        raise WrongAnswer(f"For {where} your function returns a {type(answer).__name__}. {needed}")
    right_kind = isinstance(number, int) if isinstance(expected, int) else _fits_float(number)
    if right_kind and _same(number, expected):
        return
    known = mistakes(*inputs) if mistakes else {}
    leading_astray = {reason: value for reason, value in known.items() if not _same(expected, value)}
    reason = " Or: ".join(reason for reason, value in leading_astray.items() if _same(number, value))
    reason = reason or (UNKNOWN if right_kind else needed)
    found = f"your function returns {_show(number)}; right is {expected:,}" if case else "your function is wrong"
    raise WrongAnswer(f"For {where} {found}. {reason}")


def _number(answer: object) -> int | float | None:
    """Turn NumPy's numbers, and what students derive from int and float, into Python's; None where it is neither kind."""
    if isinstance(answer, Integral) and not isinstance(answer, bool):
        return int(answer)
    return float(answer) if isinstance(answer, Real) and not isinstance(answer, Rational) else None


def _fits_float(number: int | float) -> bool:
    return isinstance(number, float) or abs(number) < 2**1023


def _same(one: int | float, other: int | float) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    if not (_fits_float(one) and _fits_float(other)):
        return False
    both_undefined = math.isnan(one) and math.isnan(other)  # a mistake may lead to NaN, and NaN to its explanation
    return both_undefined or math.isclose(one, other, rel_tol=1e-9)


def _show(number: int | float) -> str:
    if isinstance(number, float) or abs(number) < 10**40:
        return f"{number:,}"
    return f"{'minus ' * (number < 0)}about 10**{round(math.log10(abs(number)))}"
