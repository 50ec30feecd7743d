"""The comparison of tensors accepts right answers alone, and names the mistake where it is known."""

import re

import pytest
import torch

from course_lib.exercises import WrongAnswer, results, tensors

RIGHT = torch.tensor([[0.25, 0.5], [1.0, 3.0]])


def mistakes(right: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"Twice.": 2 * right, "Not a number.": right * torch.nan, "Harmless.": right, "A row.": right[0]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_right_answer_may_have_any_floating_dtype(dtype: torch.dtype) -> None:
    tensors.check(RIGHT.to(dtype), RIGHT)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "return"),
        (RIGHT.tolist(), tensors.TENSOR_NEEDED),
        (RIGHT[:, :1], tensors.SHAPE_NEEDED),
        (RIGHT.long(), tensors.NUMBERS_NEEDED),
        (2 * RIGHT, "Twice."),
        (RIGHT * torch.nan, "Not a number."),
        (RIGHT[0], "A row."),
        (RIGHT + 0.01, tensors.UNKNOWN),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["f(3)", None])
def test_a_wrong_answer_is_told_why(answer: object, says: str, case: str | None) -> None:
    with pytest.raises(WrongAnswer, match=re.escape(says)) as caught:
        tensors.check(answer, RIGHT, mistakes, RIGHT, case=case)
    assert "Harmless" not in str(caught.value)
    assert ("f(3)" in str(caught.value)) == (case is not None)
    if case is None:
        assert not re.search(r"\d", str(caught.value))


def test_a_mask_wants_truth_values_and_all_of_them() -> None:
    mask = torch.tensor([True, False])
    tensors.check(mask.clone(), mask)
    with pytest.raises(WrongAnswer, match="boolean"):
        tensors.check(mask.float(), mask)
    with pytest.raises(WrongAnswer, match="upside down"):
        tensors.check(~mask, mask, lambda: {"upside down": ~mask})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_whole_numbers_want_equality_in_any_integer_dtype(dtype: torch.dtype) -> None:
    right = torch.tensor([7, 0, 3])
    tensors.check(right.to(dtype), right)
    with pytest.raises(WrongAnswer, match=re.escape("one too many")):
        tensors.check((right + 1).to(dtype), right, lambda: {"one too many": right + 1})
    for answer in (right.float(), right.bool()):
        with pytest.raises(WrongAnswer, match=re.escape(tensors.INTEGERS_NEEDED)):
            tensors.check(answer, right)


def test_a_large_tensor_is_not_printed() -> None:
    with pytest.raises(WrongAnswer, match=re.escape("a tensor of shape [100]")):
        tensors.check(torch.ones(100), torch.zeros(100), case="f(3)")


def test_feedback_may_quote_every_sentence_of_the_comparison() -> None:
    assert set(tensors.SENTENCES) <= set(results._explanations())
