"""The ledger's promises: rows are well formed, a check accepts what its band allows and nothing else, records survive."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from course_lib import claims
from course_lib.claims import Claim

NUMBERS = st.floats(min_value=-1e12, max_value=1e12)


def make(**fields: Any) -> Claim:
    """Build a claim from the fields that a test is about."""
    return Claim(**{"id": "sample", "chapter": 1, "source": "A1", "kind": "exact", "claim": "A statement.", **fields})


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> dict[str, Claim]:
    """Replace the book's claims by a few of this test's own."""
    rows = [
        make(id="weights", expect=4, unit="bytes"),
        make(id="share", kind="measured", band=(0.95, None), verdict="corrected"),
        make(id="faster", kind="measured", band=(1.0, None), speed=True),
    ]
    book = {row.id: row for row in rows}
    monkeypatch.setattr(claims, "load", lambda: book)
    return book


# The book's own file


def test_every_row_of_the_book_loads() -> None:
    book = claims.load()
    assert book
    for name, claim in book.items():
        assert claim.id == name
        assert claim.claim.strip()
        assert claim.source[0] in "AB"
        assert 1 <= claim.chapter <= 12
        assert claim.band_text()


def test_rows_stand_in_reading_order() -> None:
    chapters = [claim.chapter for claim in claims.load().values()]
    assert chapters == sorted(chapters)


def test_expected_numbers_are_numbers() -> None:
    """YAML reads 1e-5 as text; such a slip would only surface when a reader runs the check."""
    for claim in claims.load().values():
        assert isinstance(claim.tolerance, (int, float)), claim.id
        assert isinstance(claim.absolute, (int, float)), claim.id
        for bound in claim.band or ():
            assert bound is None or isinstance(bound, (int, float)), claim.id
        if claim.expect is not None:
            assert claim.accepts(claim.expect), claim.id


def test_first_chapter_says_what_each_claim_earns() -> None:
    for claim in (claim for claim in claims.load().values() if claim.chapter == 1):
        assert claim.verdict is not None, claim.id
        if claim.unit:
            assert claim.expect is not None or claim.band is not None, f"{claim.id}: a unit needs a value"


def test_corrected_claims_say_what_is_wrong() -> None:
    for claim in claims.load().values():
        if claim.verdict in ("corrected", "dated"):
            assert claim.reading, claim.id


# Reading a file of claims


def test_two_rows_with_one_id_are_refused(tmp_path: Path) -> None:
    row = {"id": "twice", "chapter": 1, "source": "A1", "kind": "exact", "claim": "A statement."}
    path = tmp_path / "claims.yml"
    path.write_text(json.dumps([row, row]), encoding="utf-8")
    with pytest.raises(ValueError, match="'twice' stands twice"):
        claims.load(path)


def test_unknown_key_is_refused_with_the_row_named(tmp_path: Path) -> None:
    row = {"id": "odd", "chapter": 1, "source": "A1", "kind": "exact", "claim": "A statement.", "tol": 0.1}
    path = tmp_path / "claims.yml"
    path.write_text(json.dumps([row]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"'odd'.*tol"):
        claims.load(path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"kind": "guess"}, "kind"), ({"verdict": "true"}, "verdict"), ({"expect": 1, "band": (0, 2)}, "not both")],
)
def test_malformed_claim_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(**fields)


# What a band accepts


@given(expect=NUMBERS, tolerance=st.floats(0.001, 0.5), part=st.floats(-0.99, 0.99))
def test_relative_tolerance_spans_both_sides(expect: float, tolerance: float, part: float) -> None:
    assume(abs(expect) > 1e-6)
    claim = make(expect=expect, tolerance=tolerance)
    assert claim.accepts(expect + part * tolerance * abs(expect))
    assert not claim.accepts(expect + 1.01 * tolerance * abs(expect))
    assert not claim.accepts(expect - 1.01 * tolerance * abs(expect))


@given(absolute=st.floats(1e-6, 1e6), part=st.floats(-0.99, 0.99))
def test_absolute_tolerance_works_around_zero(absolute: float, part: float) -> None:
    claim = make(expect=0, absolute=absolute)
    assert claim.accepts(part * absolute)
    assert not claim.accepts(1.01 * absolute)
    assert not claim.accepts(-1.01 * absolute)


@given(expect=st.integers(-(10**15), 10**15))
def test_without_tolerance_only_the_value_itself_passes(expect: int) -> None:
    claim = make(expect=expect)
    assert claim.accepts(expect)
    assert claim.accepts(float(expect))
    assert not claim.accepts(expect + 1)


@given(low=NUMBERS, width=st.floats(1e-3, 1e6), value=NUMBERS)
def test_band_accepts_what_lies_between_its_ends(low: float, width: float, value: float) -> None:
    high = low + width
    assert make(band=(low, high)).accepts(value) == (low <= value <= high)
    assert make(band=(low, None)).accepts(value) == (low <= value)
    assert make(band=(None, high)).accepts(value) == (value <= high)
    assert make(band=(low, high)).accepts(low)
    assert make(band=(low, high)).accepts(high)


def test_nested_values_are_compared_number_by_number() -> None:
    claim = make(expect={"inputs": [[1, 20], [1, 1]], "sizes": {"a": 100, "b": 200}}, tolerance=0.05)
    assert claim.accepts({"inputs": [(1, 20), (1, 1)], "sizes": {"b": 191, "a": 104}})
    assert not claim.accepts({"inputs": [[1, 20], [1, 1]], "sizes": {"a": 100, "b": 189}})
    assert not claim.accepts({"inputs": [[1, 20]], "sizes": {"a": 100, "b": 200}})
    assert not claim.accepts({"inputs": [[1, 20], [1, 1]], "sizes": {"a": 100}})
    assert not claim.accepts({"inputs": [[1, 20], [1, 1]], "sizes": {"a": 100, "b": 200}, "more": 1})
    assert not claim.accepts([1, 2])


def test_true_and_one_are_different_answers() -> None:
    assert make().accepts(True)
    assert not make().accepts(False)
    assert not make().accepts(1)
    assert not make(expect=1).accepts(True)
    assert make(expect={"fits": True}).accepts({"fits": True})
    assert not make(expect={"fits": True}).accepts({"fits": 1})
    assert not make(expect="nf4").accepts("fp4")


# Checking


def test_check_returns_value_verdict_and_origin(ledger: dict[str, Claim]) -> None:
    record = claims.check("weights", 4, unit="bytes")
    assert (record.measured, record.unit, record.verdict) == (4, "bytes", "confirmed")
    assert record.machine["cores"]
    assert record.versions["course-lib"]
    assert record.date
    assert claims.check("share", 0.97).verdict == "corrected"


def test_check_outside_the_band_raises(ledger: dict[str, Claim]) -> None:
    with pytest.raises(AssertionError, match=r"measured 5, expected 4 bytes"):
        claims.check("weights", 5)
    with pytest.raises(AssertionError, match=r"at least 0\.95"):
        claims.check("share", 0.94)


def test_speed_outside_the_band_is_recorded_not_raised(ledger: dict[str, Claim]) -> None:
    assert claims.check("faster", 2.0).verdict == "confirmed"
    assert claims.check("faster", 0.5).verdict == "not confirmed here"


def test_check_refuses_an_unknown_claim(ledger: dict[str, Claim]) -> None:
    with pytest.raises(KeyError, match="wieghts"):
        claims.check("wieghts", 4)


def test_check_refuses_another_unit(ledger: dict[str, Claim]) -> None:
    with pytest.raises(ValueError, match="keeps it in 'bytes'"):
        claims.check("weights", 4, unit="bits")


@pytest.mark.parametrize("claim_id", ["weights", "faster"])
@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": [1.0, math.nan]}])
def test_check_refuses_what_is_not_finite_even_for_speed(
    ledger: dict[str, Claim], claim_id: str, value: object
) -> None:
    with pytest.raises(ValueError, match="finite"):
        claims.check(claim_id, value)


@pytest.mark.parametrize("measured", [4, 4.0])
def test_records_survive_a_notebook(ledger: dict[str, Claim], tmp_path: Path, measured: float) -> None:
    record = claims.check("weights", measured)
    bundle = record.mime_bundle()
    assert "weights" in bundle["text/plain"]
    other = {"output_type": "stream", "name": "stdout", "text": "unrelated"}
    shown = {"output_type": "display_data", "data": bundle, "metadata": {}}
    cells = [{"cell_type": "markdown", "source": ""}, {"cell_type": "code", "outputs": [other, shown]}]
    notebook = tmp_path / "chapter.ipynb"
    notebook.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert list(claims.records(notebook)) == [record]


def test_library_scalars_are_recorded_as_plain_numbers(ledger: dict[str, Claim]) -> None:
    assert type(claims.check("weights", np.int64(4)).measured) is int
    json.dumps(claims.check("share", np.float32(0.97)).measured)


def test_memory_is_shown_with_two_decimals() -> None:
    assert claims.show(28.9082, claims.decimals("GiB")) == "28.91"
    assert claims.show({"a": 28.9082, "b": 3}, claims.decimals("GiB")) == "a 28.91, b 3"
    assert claims.show(1.0691987, claims.decimals("GB per GiB")) == "1.0692"


def test_record_is_displayed_once_even_as_the_last_value_of_a_cell(ledger: dict[str, Claim]) -> None:
    from IPython.testing.globalipapp import start_ipython
    from IPython.utils.capture import capture_output

    start_ipython()
    shell = get_ipython()  # noqa: F821, which start_ipython defines
    with capture_output() as captured:
        shell.run_cell("from course_lib import claims\nclaims.check('weights', 4)")
    assert len(captured.outputs) == 1


@pytest.mark.parametrize("value", [None, "4", "x", [4], True, {"a": 4}])
@pytest.mark.parametrize("claim_id", ["weights", "share"])
def test_what_is_no_number_does_not_pass_for_one(ledger: dict[str, Claim], claim_id: str, value: object) -> None:
    with pytest.raises(AssertionError, match="expected"):
        claims.check(claim_id, value)


def test_an_array_is_compared_value_by_value() -> None:
    claim = make(expect=[1, 2])
    assert claim.accepts(claims._plain(np.array([1, 2])))
    assert not claim.accepts(claims._plain(np.array([1, 3])))


@pytest.mark.parametrize("text", ["a: [", "- 1", "3", "- {id: x}", "- {id: x, colour: red}"])
def test_a_file_of_claims_that_is_none_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "claims.yml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"claims\.yml"):
        claims.load(path)
