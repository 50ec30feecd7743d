"""The claims ledger: every statement of the sources has an id, and a cell of the book settles it.

``book/claims.yml`` lists the claims. A notebook calls :func:`check` with the value it computed; the value is compared
with the claim's band and shown, and the record travels inside the notebook's output, so the ledger page of the book is made
from the very outputs it reports on.
"""

from __future__ import annotations

import datetime
import html
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from course_lib import machine

MIME = "application/vnd.course.claim+json"
KINDS = ("exact", "measured", "concept", "survey")
VERDICTS = ("confirmed", "corrected", "dated", "not confirmed here", "not yet measured")


@dataclass(frozen=True)
class Claim:
    """One statement of a source document.

    Attributes
    ----------
    id, claim, source : str
        Name, the statement in our words, and the source's letter and section.
    chapter : int
        The chapter that settles it.
    kind : str
        ``exact``, ``measured``, ``concept`` or ``survey``.
    states : str, optional
        The value as the source prints it.
    expect : object, optional
        The value that a check must reach: a number, text, or a list or mapping of such. A concept expects True.
    tolerance, absolute : float
        Accepted relative and absolute deviation of each number from ``expect``.
    band : (float, float), optional
        Lowest and highest accepted value, instead of ``expect``; None leaves a side open.
    unit : str
        The unit of ``expect`` and of the measured value.
    speed : bool
        A statement about speed: a value outside the band is recorded, never an error.
    verdict : str, optional
        What the ledger says once the check has passed: ``confirmed``, ``corrected`` or ``dated``.
    reading : str
        What is known about the statement beyond the source.
    """

    id: str
    chapter: int
    source: str
    kind: str
    claim: str
    states: str | None = None
    expect: Any = None
    tolerance: float = 0.0
    absolute: float = 0.0
    band: tuple[float | None, float | None] | None = None
    unit: str = ""
    speed: bool = False
    verdict: str | None = None
    reading: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"claim {self.id!r}: kind is {self.kind!r}; accepted are {', '.join(KINDS)}")
        if self.verdict not in (None, "confirmed", "corrected", "dated"):
            raise ValueError(
                f"claim {self.id!r}: verdict is {self.verdict!r}; accepted are confirmed, corrected, dated"
            )
        if self.expect is not None and self.band is not None:
            raise ValueError(f"claim {self.id!r}: give expect or band, not both")

    def accepts(self, measured: Any) -> bool:
        """Tell whether a measured value lies within this claim's band."""
        if self.band is not None:
            low, high = self.band
            return _is_number(measured) and (low is None or measured >= low) and (high is None or measured <= high)
        return self._close(True if self.expect is None else self.expect, measured)

    def _close(self, expect: Any, measured: Any) -> bool:
        if isinstance(expect, Mapping):
            return (
                isinstance(measured, Mapping)
                and expect.keys() == measured.keys()
                and all(self._close(expect[key], measured[key]) for key in expect)
            )
        if isinstance(expect, Sequence) and not isinstance(expect, str):
            return (
                isinstance(measured, Sequence)
                and not isinstance(measured, str)
                and len(expect) == len(measured)
                and all(map(self._close, expect, measured))
            )
        if not _is_number(expect):
            return type(expect) is type(measured) and bool(expect == measured)
        return _is_number(measured) and abs(measured - expect) <= max(self.tolerance * abs(expect), self.absolute)

    def band_text(self) -> str:
        """Return the accepted values as text for people."""
        unit = f" {self.unit}" if self.unit else ""
        if self.band is not None:
            low, high = self.band
            if low is None or high is None:
                return f"at most {show(high)}{unit}" if low is None else f"at least {show(low)}{unit}"
            return f"{show(low)} to {show(high)}{unit}"
        if self.expect is None:
            return "holds"
        around = ""
        if self.tolerance:
            around = f" ± {show(100 * self.tolerance)} %"
        elif self.absolute:
            around = f" ± {show(self.absolute)}"
        return f"{show(self.expect)}{around}{unit}"


@dataclass(frozen=True)
class Record:
    """What one check found: the value, its verdict, and where and when it was measured."""

    claim: str
    measured: Any
    unit: str
    verdict: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]

    def mime_bundle(self) -> dict[str, Any]:
        """Return what a notebook stores: text, a line of HTML that links to the ledger, and the record itself."""
        text = str(self)
        name, _, rest = text.partition(": ")
        anchor = f'<a href="../book/ledger.html#{html.escape(self.claim)}">{html.escape(name)}</a>'
        shown = f'<p class="course-claim course-claim-{self.verdict.split()[0]}">{anchor}: {html.escape(rest)}</p>'
        return {"text/plain": text, "text/html": shown, MIME: asdict(self)}

    def _ipython_display_(self) -> None:
        """Show nothing: `check` has shown the record, and as a cell's last value it would stand there twice."""

    def __str__(self) -> str:
        claim = load().get(self.claim)
        value = "holds" if self.measured is True else show(self.measured, decimals(self.unit))
        beside = f" (the source: {claim.states})" if claim and claim.states and self.measured is not True else ""
        unit = f" {self.unit}" if self.unit and self.measured is not True else ""
        return f"Claim {self.claim}: {value}{unit}{beside}; {self.verdict}."


def claims_path() -> Path:
    """Return the file of claims: ``book/claims.yml`` in a checkout, the packaged copy elsewhere."""
    here = Path(__file__).resolve().parent
    checkout = here.parent / "book" / "claims.yml"
    return checkout if checkout.exists() else here / "claims.yml"


@cache
def load(path: Path | None = None) -> dict[str, Claim]:
    """Read the claims, by id.

    Raises
    ------
    ValueError
        If two claims share an id, or a row has an unknown key, kind or verdict.
    """
    import yaml

    path = path or claims_path()
    claims: dict[str, Claim] = {}
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from None
    for row in rows if isinstance(rows, list) else [rows]:
        try:
            claim = Claim(**row)
        except TypeError as error:
            raise ValueError(f"{path.name} holds a row that is no claim, {row!r:.80}: {error}") from None
        if claim.id in claims:
            raise ValueError(f"claim {claim.id!r} stands twice in {path.name}")
        claims[claim.id] = claim
    return claims


def check(claim_id: str, measured: Any, *, unit: str | None = None) -> Record:
    """Compare a computed value with a claim's band, show the outcome and record it for the ledger.

    Parameters
    ----------
    claim_id : str
        An id of ``book/claims.yml``.
    measured : number, bool, str, list or dict
        What the cell computed, in the claim's unit.
    unit : str, optional
        The unit of ``measured``; if given it must be the claim's.

    Returns
    -------
    Record
        The value with verdict, machine, versions and date.

    Raises
    ------
    KeyError
        If no claim has this id.
    ValueError
        If the unit is not the claim's, or the value is not finite.
    AssertionError
        If the value lies outside the claim's band and the claim is not about speed.
    """
    try:
        claim = load()[claim_id]
    except KeyError:
        raise KeyError(f"claim_id is {claim_id!r}, which is not in {claims_path().name}") from None
    if unit is not None and unit != claim.unit:
        raise ValueError(f"claim {claim_id!r}: unit is {unit!r}; the ledger keeps it in {claim.unit!r}")
    measured = _plain(measured)
    for number in _numbers(measured):
        if not math.isfinite(number):
            raise ValueError(f"claim {claim_id!r}: measured is {number}; a finite value is needed")
    accepted = claim.accepts(measured)
    if not accepted and not claim.speed:
        raise AssertionError(f"claim {claim_id!r}: measured {show(measured)}, expected {claim.band_text()}")
    record = Record(
        claim=claim_id,
        measured=measured,
        unit=claim.unit,
        verdict=(claim.verdict or "confirmed") if accepted else "not confirmed here",
        date=datetime.date.today().isoformat(),
        machine=machine.describe(),
        versions=machine.versions(),
    )
    if "IPython" in sys.modules:
        from IPython import get_ipython
        from IPython.display import display

        if get_ipython() is not None:
            display(record.mime_bundle(), raw=True)
    return record


def records(notebook: Path) -> Iterator[Record]:
    """Yield the records stored in a notebook's outputs, in order."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            if MIME in output.get("data", {}):
                yield Record(**output["data"][MIME])


def show(value: Any, decimals: int | None = None) -> str:
    """Format a value for people.

    Parameters
    ----------
    value : number, bool, str, sequence or mapping
        What to show. Whole numbers get thousands separators.
    decimals : int, optional
        Decimals of a fraction; by default it gets five significant digits.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(item, decimals)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(show(item, decimals) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:.5g}" if decimals is None else f"{value:,.{decimals}f}"
    return str(value)


def decimals(unit: str) -> int | None:
    """Return the decimals that values of a unit are shown with: memory has two, everything else what it needs."""
    return 2 if unit.startswith("GiB") else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Turn NumPy and torch scalars and arrays, tuples and the like into what JSON keeps."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, range)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif _is_number(value):
        yield value
