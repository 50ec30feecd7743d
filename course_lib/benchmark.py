"""What chapters and workbench share to measure: times that can be compared, how a quantity grows, and the card that it is."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from course_lib import machine
from course_lib.memory import Card, cards

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
Name = TypeVar("Name")


def card_of(device_name: str) -> Card | None:
    """Return the card of the table that PyTorch's name of a device means, or None.

    Parameters
    ----------
    device_name : str
        As ``torch.cuda.get_device_name()`` gives it: ``"NVIDIA A100-SXM4-80GB"`` is the ``"A100 80GB SXM"``.

    Notes
    -----
    A name with more in it, such as a laptop's variant or a slice of a card, means none of the table.
    """
    for said, meant in (("-", " "), ("SXM4", "SXM"), ("SXM2", "SXM"), ("PCIE", "PCIe"), ("80GB HBM3", "SXM")):
        device_name = device_name.replace(said, meant)
    words = set(device_name.split()) - {"NVIDIA", "Tesla", "GeForce", "AMD", "Instinct", "Generation"}
    for card in cards():
        named = set(card.name.split())
        if named == words or named == words - {"SXM", "PCIe"}:
            return card
    return None


class Terms(NamedTuple):
    """A quantity at the greatest size that was measured, as the sum of a constant, a linear and a quadratic part."""

    constant: float
    linear: float
    quadratic: float

    @property
    def quadratic_share(self) -> float:
        """The quadratic part of the whole."""
        return self.quadratic / sum(self)


def terms(measured: Mapping[int, float]) -> Terms:
    """Fit ``a + b N + c N**2`` by least squares.

    Parameters
    ----------
    measured : mapping of int to float
        What was measured at each of at least three sizes. An exponent would mislead where a constant is a large part.
    """
    import numpy as np

    sizes = np.array(list(measured), dtype=float)
    quadratic, linear, constant = np.polyfit(sizes / sizes.max(), list(measured.values()), 2)
    return Terms(float(constant), float(linear), float(quadratic))


def exponent(measured: Mapping[int, float]) -> float:
    """Return the power of the size with which a quantity grows: the slope of a line through the logarithms.

    Parameters
    ----------
    measured : mapping of int to float
        What was measured at each of at least two sizes, greater than 0.
    """
    logarithms = ([math.log(number) for number in numbers] for numbers in (measured.keys(), measured.values()))
    return statistics.linear_regression(*logarithms).slope


def fastest(call: Callable[[], Any], rounds: int = 4) -> float:
    """Return the fastest of several calls in seconds, by the clock, after one call to warm up.

    What disturbs a machine makes calls slower and never faster. On a CUDA card a call lasts until the card is done with it; for
    calls of less than a tenth of a millisecond use :func:`medians`, which leaves the launching out.

    Parameters
    ----------
    call : callable
        What to time.
    rounds : int
        How often it is timed.
    """
    import torch

    def finish() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    call()
    found = []
    for _ in range(rounds):
        finish()
        start = time.perf_counter()
        call()
        finish()
        found.append(time.perf_counter() - start)
    return min(found)


def medians(calls: dict[str, Callable[[], Any]], rounds: int = 15) -> dict[str, float]:
    """Time calls on a CUDA card.

    Parameters
    ----------
    calls : dict of str to callable
        Each has run before, so that nothing is compiled now. They take turns, so that a card that warms up or slows down favours
        none, and each finds the card's cache empty.
    rounds : int
        How often each is called.

    Returns
    -------
    dict of str to float
        Median seconds on the card; the time to launch is not part of them.
    """
    import torch

    emptied = torch.empty(2**29, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            emptied.zero_()  # takes so long that the call is queued before its turn comes
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairs) for name, pairs in events.items()}


def in_turns(calls: Mapping[Name, Callable[[], Any]], rounds: int = 5) -> dict[Name, float]:
    """Time calls on a CPU.

    Parameters
    ----------
    calls : mapping to callable
        They take turns, so that a busy moment of the machine favours none.
    rounds : int
        How often each is called.

    Returns
    -------
    dict to float
        Median seconds of each.
    """
    taken: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


# ---- what the studies of the workbench share


def numbers(text: str) -> list[int]:
    """Return numbers of at least 1 that are separated by commas: the type of a command line's option.

    Raises
    ------
    ValueError
        If there is anything else in the text.
    """
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


class Numbered(Protocol):
    """A version of a study."""

    @property
    def number(self) -> int: ...

    @property
    def name(self) -> str: ...


def study_options(documentation: str, versions: Sequence[Numbered]) -> argparse.ArgumentParser:
    """Return the options that every study of numbered versions takes: a folder for raw results, and which versions run.

    Parameters
    ----------
    documentation : str
        The study's own, whose first line says what it is.
    versions : sequence
        All there are. The parsed option ``versions`` is a list of those that were asked for, by default of all.
    """

    def chosen(text: str) -> list[Numbered]:
        wanted = numbers(text)
        found = [version for version in versions if version.number in wanted]
        if len(found) < len(set(wanted)):
            raise argparse.ArgumentTypeError(f"{text} names more than there are: 1 to {len(versions)}")
        return found

    parser = argparse.ArgumentParser(description=documentation.split("\n")[0])
    parser.add_argument("--json", type=Path, help="folder that gets the raw results")
    parser.add_argument("--versions", type=chosen, default=list(versions), metavar="1,2,...")
    return parser


def compare(
    calls: Mapping[str, Callable[[], Result]],
    error: Callable[[Result], float],
    limit: float,
    ours: Collection[str],
    on_card: bool,
) -> dict[str, dict[str, Any]]:
    """Check what calls return, then time those that are right.

    Parameters
    ----------
    calls : mapping of str to callable
        By name.
    error : callable
        Returns the error of a result.
    limit : float
        The largest error that is accepted.
    ours : collection of str
        Calls that must be right; the others may fail, and are then listed with the reason.
    on_card : bool
        Whether a CUDA card runs them. Only then they are timed.

    Returns
    -------
    dict of str to dict
        ``error``, ``seconds`` and ``reason`` of each; what was not measured is None.

    Raises
    ------
    ArithmeticError
        If one of ours is wrong; then nothing is timed.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        entry = found[name] = {"error": None, "seconds": None, "reason": None}
        try:
            entry["error"] = error(call())
        except Exception as problem:
            if name in ours:
                raise
            entry["reason"] = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            continue
        if not entry["error"] <= limit:
            entry["reason"] = f"its error is {entry['error']:.1e}, and {limit:.1e} is accepted"
            if name in ours:
                raise ArithmeticError(f"{name}: {entry['reason']}; nothing was timed")
    if on_card:
        right = {name: call for name, call in calls.items() if not found[name]["reason"]}
        for name, seconds in medians(right).items():
            found[name]["seconds"] = seconds
    return found


def entries(
    found: Mapping[str, Mapping[str, Any]],
    versions: Sequence[Numbered],
    case: Mapping[str, Any],
    moved: Callable[[Any], int],
    share: Callable[[float], float | None],
) -> list[dict[str, Any]]:
    """Return what `compare` found for one case as records.

    Parameters
    ----------
    found : mapping of str to dict
        By the name of a version, or of a call of others.
    versions : sequence
        Those of the study; what is not known of the others is None.
    case : mapping
        What all records say: sizes, ``dtype``, ``flop``, ``least_bytes``, ``limit``.
    moved : callable
        Returns the bytes that a version asks for.
    share : callable
        Returns, of the seconds that a call took, the share of what the card allows, if that is known.
    """
    known = {one.name: one for one in versions}
    return [
        {
            "name": name,
            "version": known[name].number if name in known else None,
            **case,
            "bytes_moved": moved(known[name]) if name in known else None,
            **result,
            "share_of_bound": share(result["seconds"]) if result["seconds"] else None,
        }
        for name, result in found.items()
    ]


def run_study(
    name: str,
    cases: Sequence[dict[str, Any]],
    run: Callable[[dict[str, Any], Any], list[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], str],
    *,
    on_card: bool,
    folder: Path | None,
) -> None:
    """Run a study of kernels over its cases, print a table of each, and record all.

    Parameters
    ----------
    name : str
        Of the study.
    cases : sequence of dict
        Sizes, by name.
    run : callable
        Takes a case and a dtype, and returns records.
    table : callable
        Returns records as text.
    on_card : bool
        Whether a CUDA card runs the kernels, in the dtype that suits it. Elsewhere Triton's interpreter does, in float32 and float16.
    folder : Path, optional
        Gets the raw results.
    """
    import torch

    chosen, found = machine.choose(), []
    print(chosen)
    if not on_card:
        print("Triton's interpreter checks the kernels. Its times would say nothing about their speed: none are shown.")
    for dtype in [chosen.dtype] if on_card else [torch.float32, torch.float16]:
        for case in cases:
            print(f"\n{dtype}, " + ", ".join(f"{key} {value}" for key, value in case.items()))
            records = run(case, dtype)
            print(table(records), flush=True)
            found += records
    if folder:
        print(machine.record(name, found, folder))


def traffic_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return what `compare` found for one shape as text, for work that is bound by memory.

    Parameters
    ----------
    records : sequence of dict
        As `entries` returns them.
    """
    flop, least = records[0]["flop"], records[0]["least_bytes"]
    lines = [
        f"{flop / least:.3g} operations a byte at best: {flop / 1e6:.3g} MFLOP, {least / 1e6:.3g} MB",
        f"{'':26}{'error':>9}{'limit':>9}{'MB asked for':>13}{'of least':>10}",
    ]
    if any(entry["seconds"] for entry in records):
        lines[1] += f"{'ms':>10}{'GB/s':>9}{'of bound':>9}"
    for entry in records:
        line = f"{entry['version'] or '':>2} {entry['name']:23}"
        if entry["reason"]:
            lines.append(f"{line} not timed: {entry['reason']}")
            continue
        moved, seconds, share = entry["bytes_moved"], entry["seconds"], entry["share_of_bound"]
        line += f"{entry['error']:9.1e}{entry['limit']:9.1e}"
        line += f"{moved / 1e6:13.3g}{moved / least:10.3g}" if moved else f"{'':23}"
        if seconds:
            line += f"{seconds * 1e3:10.4f}{least / seconds / 1e9:9.0f}{f'{share:.0%}' if share else '':>9}"
        lines.append(line)
    return "\n".join(lines)


def eager_bytes(call: Callable[[], object]) -> int:
    """Return the bytes that PyTorch's operations read and write during a call, each from memory and to it; views move nothing.

    Parameters
    ----------
    call : callable
        It may work on tensors without memory (``device="meta"``).
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Traffic(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if not function.is_view:
                touched = tree_leaves((args, kwargs, result))  # type: ignore[no-untyped-call]
                self.bytes += sum(one.nbytes for one in touched if isinstance(one, torch.Tensor))
            return result

    with Traffic() as traffic:  # type: ignore[no-untyped-call]
        call()
    return int(traffic.bytes)
