"""What this machine can run, and why not the rest: behind ``course doctor``."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from course_lib import machine
from course_lib.models import cache_dir, cached
from course_lib.models.wheels import CORPUS, wheel_place

#: What a chapter's experiments need at most, and what the model takes on disk while it is converted.
MEMORY_BYTES = 4 * 2**30
DISK_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report: what was looked at, whether it is there, and the detail or the remedy."""

    what: str
    ok: bool
    detail: str


def examine() -> list[Finding]:
    """Look at this machine.

    Returns
    -------
    list of Finding
        In the order in which a reader would meet the need.
    """
    memory = machine.memory_bytes()
    place = cache_dir().absolute()
    free = shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.is_dir())).free
    return [
        Finding("Python 3.11 or newer", True, platform.python_version()),
        Finding(
            "memory for every chapter",
            memory is None or memory >= MEMORY_BYTES,
            "the system does not tell" if memory is None else f"{memory / 2**30:.2f} GiB",
        ),
        Finding("disk for the model", free >= DISK_BYTES, f"{free / 2**30:.2f} GiB free for {place}"),
        *_packages(),
        *_card(),
        _kernels(),
        _model(),
        _corpus(),
        *_notebook_tools(),
    ]


def _version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not there; importing them all would take ten seconds."""
    try:
        return metadata.version(package) if find_spec(package) else None
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _packages() -> list[Finding]:
    system = platform.system()
    torch, transformers = _version("torch"), _version("transformers")
    detail = f"torch {torch}, transformers {transformers}" if torch and transformers else "make book installs them"
    findings = [Finding("PyTorch and Transformers", bool(torch and transformers), detail)]
    for package, purpose, absent in (
        ("triton", "Triton", "no Triton wheels for this system: kernel cells show the recorded result"),
        ("bitsandbytes", "bitsandbytes", "not available here: the course's own quantisation runs instead"),
    ):
        version = _version(package)
        missing = absent if system != "Linux" else f"not installed: pip install {package}"
        findings.append(Finding(purpose, bool(version), f"{package} {version}" if version else missing))
    return findings


def _card() -> list[Finding]:
    try:
        import torch
    except Exception as error:  # missing, or libraries that do not load
        reason = " ".join(str(error).split())
        return [Finding("CUDA card", False, f"PyTorch does not import: {reason}")]
    if not torch.cuda.is_available():
        built = (
            "this PyTorch is a CPU build" if torch.version.cuda is None else "PyTorch sees no card (nvidia-smi tells)"
        )
        return [
            Finding(
                "CUDA card",
                False,
                f"{built}; everything runs on the CPU, and what needs a card shows recorded results or says that there are none",
            )
        ]
    capability = torch.cuda.get_device_capability(0)
    free, total = torch.cuda.mem_get_info(0)
    card = f"{torch.cuda.get_device_name(0)}, {free / 2**30:.2f} of {total / 2**30:.2f} GiB free"
    old = f"compute capability {capability[0]}.{capability[1]} is below 8.0: float16 is used"
    return [
        Finding("CUDA card", True, card),
        Finding("bfloat16 arithmetic", capability >= (8, 0), "" if capability >= (8, 0) else old),
    ]


def _kernels() -> Finding:
    """Say whether the course's Triton kernels run here as compiled code; book/compiled-kernels.md shows what they become."""
    what = "our Triton kernels"
    if not _version("triton"):
        return Finding(what, False, "they need Triton; attention runs in PyTorch instead")
    try:
        import torch
    except Exception:  # the line on the card says why
        return Finding(what, False, "they need PyTorch")
    if not torch.cuda.is_available():
        return Finding(what, False, "no card: they run in Triton's interpreter, to be checked, not to be fast")
    major, minor = torch.cuda.get_device_capability(0)
    if torch.version.hip is None and major < 8:
        reason = f"Triton emits no tensor-core instructions for compute capability {major}.{minor}"
        return Finding(what, False, f"{reason}: attention runs in PyTorch, by SDPA where that can do it")
    return Finding(what, True, f"compiled for {torch.cuda.get_device_name(0)} when first used")


def _model() -> Finding:
    folder = cached("smollm2-135m")
    return Finding(
        "the model, offline", folder is not None, str(folder or "course models fetch downloads it once (98 MB)")
    )


def _corpus() -> Finding:
    place = wheel_place(CORPUS)
    found = place.exists() and place.stat().st_size == CORPUS.size
    return Finding(
        f"{CORPUS.what}, offline",
        found,
        str(place) if found else f"course models fetch downloads it once ({CORPUS.size / 1e6:.0f} MB)",
    )


def _notebook_tools() -> list[Finding]:
    findings = []
    for package, purpose, extra in (
        ("jupyterlab", "JupyterLab", "notebooks"),
        ("jupyter_book", "building the book", "book"),
    ):
        version = _version(package)
        detail = f"{package} {version}" if version else f"pip install 'course-lib[{extra}]'"
        findings.append(Finding(purpose, bool(version), detail))
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    findings.append(
        Finding("browser tests of the book", bool(browser), browser or "no Chromium: make test leaves them out")
    )
    return findings
