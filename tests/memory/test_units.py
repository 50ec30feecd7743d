"""Sizes of numbers: exact bytes, one unit for people, clear refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.memory import attention_scores_bytes, bytes_to_giga_bytes, cards, format_gib, weight_bytes
from course_lib.memory.units import DTYPE_BITS, dtype_name

TORCH_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_a_parameter_takes_its_torch_item_size(dtype: torch.dtype) -> None:
    assert weight_bytes(1, dtype) == dtype.itemsize == weight_bytes(1, str(dtype).removeprefix("torch."))


@given(st.integers(0, 10**13))
def test_billions_of_parameters_take_four_and_two_gigabytes_each(count: int) -> None:
    assert weight_bytes(count, "float32") == 4 * count
    assert weight_bytes(count, "bf16") == weight_bytes(count, "fp16") == 2 * count
    assert 2 * weight_bytes(count, "int4") in (count, count + 1)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(sorted(DTYPE_BITS)))
def test_weight_bytes_never_undercounts_a_sum(first: int, second: int, dtype: str) -> None:
    assert 0 <= weight_bytes(first, dtype) + weight_bytes(second, dtype) - weight_bytes(first + second, dtype) <= 1


@given(st.integers(0, 128), st.integers(0, 4096), st.integers(0, 8))
def test_scores_grow_with_the_square_of_the_length(heads: int, length: int, batch: int) -> None:
    once = attention_scores_bytes(heads, length, "float16", batch)
    assert once == batch * heads * length**2 * 2
    assert attention_scores_bytes(heads, 2 * length, "float16", batch) == 4 * once


def test_forty_heads_at_sixteen_thousand_tokens() -> None:
    assert bytes_to_giga_bytes(attention_scores_bytes(40, 16_000)) == pytest.approx(19.07, abs=0.01)


def test_giga_bytes_are_powers_of_two_and_texts_have_two_decimals() -> None:
    assert bytes_to_giga_bytes(2**30) == 1.0
    assert format_gib(31_034_912_768) == "28.90 GiB"
    assert format_gib(3 * 2**40) == "3,072.00 GiB"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: weight_bytes(1, "float33"), "dtype"),
        (lambda: weight_bytes(1, torch.complex64), "dtype"),
        (lambda: weight_bytes(-1, "float32"), "num_parameters"),
        (lambda: weight_bytes(1.5, "float32"), "num_parameters"),  # type: ignore[arg-type]
        (lambda: weight_bytes(True, "float32"), "num_parameters"),
        (lambda: attention_scores_bytes(-1, 4), "num_heads"),
        (lambda: attention_scores_bytes(1, -4), "sequence_length"),
        (lambda: attention_scores_bytes(1, 4, batch_size=-2), "batch_size"),
        (lambda: dtype_name("no", argument="kv_cache_dtype"), "kv_cache_dtype"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named} must be [^\n]*, got [^\n]*$"):
        call()  # type: ignore[operator]


def test_cards_are_sorted_cited_and_fresh() -> None:
    found = cards()
    assert [card.memory_bytes for card in found] == sorted(card.memory_bytes for card in found)
    assert len({card.name for card in found}) == len(found) >= 15
    assert all(card.source and card.bandwidth_bytes_per_second > 10**11 for card in found)
    found.clear()
    by_name = {card.name: card for card in cards()}
    assert by_name["T4"].memory_bytes == 16 * 10**9
    assert by_name["H100 SXM"].bandwidth_bytes_per_second == 3_350 * 10**9


def test_importing_memory_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, course_lib.memory; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
