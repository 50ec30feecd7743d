"""The comparison of :mod:`course_lib.exercises.checks` for answers that are tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from course_lib.exercises import checks

if TYPE_CHECKING:
    import torch

TENSOR_NEEDED = "A torch.Tensor is needed."
SHAPE_NEEDED = "The shape is not the one that the task states."
BOOL_NEEDED = "A boolean tensor is needed: True or False for each pair of query and key."
NUMBERS_NEEDED = "A tensor of floating-point numbers is needed."
INTEGERS_NEEDED = "A tensor of whole numbers is needed, in an integer dtype."
UNKNOWN = "No mistake known to this test gives these values: work the example by hand first."
SENTENCES = (TENSOR_NEEDED, SHAPE_NEEDED, BOOL_NEEDED, NUMBERS_NEEDED, INTEGERS_NEEDED, UNKNOWN)
SMALL = 24  # elements that a message still shows


def check(
    answer: object,
    expected: torch.Tensor,
    mistakes: Callable[..., Mapping[str, torch.Tensor]] | None = None,
    *inputs: Any,
    case: str | None = None,
) -> None:
    """Accept a tensor that equals the expected one; reject any other with the reason, where the reason is known.

    Parameters
    ----------
    answer : object
        What the function under test returned.
    expected : Tensor
        The right answer. A boolean tensor wants equality, one of integers too, in any integer dtype; a floating one four equal
        digits, in any floating dtype.
    mistakes, inputs, case
        As for :func:`course_lib.exercises.checks.check`, with tensors for values.

    Raises
    ------
    WrongAnswer
        If the answer is no tensor, has another shape or kind, or other values.
    """
    import torch

    where = case or checks.CASE_YOU_CANNOT_SEE
    if answer is None:
        raise checks.WrongAnswer(f"For {where} your function returns None. {checks.FORGOTTEN_RETURN}")
    if not isinstance(answer, torch.Tensor):
        raise checks.WrongAnswer(f"For {where} your function returns a {type(answer).__name__}. {TENSOR_NEEDED}")
    if _same(answer, expected):
        return
    known = mistakes(*inputs) if mistakes else {}
    leading_astray = {reason: value for reason, value in known.items() if not _same(expected, value)}
    reason = " Or: ".join(reason for reason, value in leading_astray.items() if _same(answer, value))
    if not reason and answer.shape != expected.shape:
        reason = SHAPE_NEEDED
    elif not reason and expected.dtype == torch.bool and answer.dtype != torch.bool:
        reason = BOOL_NEEDED
    elif not reason and expected.is_floating_point() and not answer.is_floating_point():
        reason = NUMBERS_NEEDED
    elif not reason and _whole(expected) and not _whole(answer):
        reason = INTEGERS_NEEDED
    found = f"your function returns {_show(answer)}; right is {_show(expected)}" if case else "your function is wrong"
    raise checks.WrongAnswer(f"For {where} {found}. {reason or UNKNOWN}")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    if one.shape != other.shape or torch.bool in (one.dtype, other.dtype):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if _whole(one) and _whole(other):
        return torch.equal(one.long(), other.long())
    if not (one.is_floating_point() and other.is_floating_point()):
        return False
    # A mistake may lead to NaN, and NaN to its explanation.
    return torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _whole(tensor: torch.Tensor) -> bool:
    import torch

    return not (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex())


def _show(tensor: torch.Tensor) -> str:
    if tensor.numel() > SMALL:
        return f"a tensor of shape {list(tensor.shape)}"
    values = tensor.detach()
    return str((values.double().mul(1e4).round().div(1e4) if values.is_floating_point() else values).tolist())
