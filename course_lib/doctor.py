"""What this machine can run, and why not the rest: behind ``course doctor``."""

from __future__ import annotations

import importlib
import logging
import platform
import shutil
from dataclasses import dataclass

from course_lib import machine

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
    free = shutil.disk_usage(".").free
    return [
        Finding("Python 3.11 or newer", True, platform.python_version()),
        Finding(
            "memory for every chapter",
            memory is None or memory >= MEMORY_BYTES,
            "the system does not tell" if memory is None else f"{memory / 2**30:.2f} GiB",
        ),
        Finding("disk for the model", free >= DISK_BYTES, f"{free / 2**30:.2f} GiB free here"),
        *_packages(),
        *_card(),
        _model(),
        *_notebook_tools(),
    ]


def _version(package: str) -> str | None:
    """Return a package's version if it imports; importing is the only proof that it works here."""
    logging.disable(logging.WARNING)  # bitsandbytes logs a missing optional package on import
    try:
        module = importlib.import_module(package)
    except Exception:
        return None
    finally:
        logging.disable(logging.NOTSET)
    return str(getattr(module, "__version__", "")) or None


def _packages() -> list[Finding]:
    system = platform.system()
    torch, transformers = _version("torch"), _version("transformers")
    detail = f"torch {torch}, transformers {transformers}" if torch and transformers else "make book installs them"
    findings = [Finding("PyTorch and Transformers", bool(torch and transformers), detail)]
    for package, purpose, absent in (
        ("triton", "Triton kernels", "no Triton wheels for this system: kernel cells show the recorded result"),
        ("bitsandbytes", "bitsandbytes", "not available here: the course's own quantisation runs instead"),
    ):
        version = _version(package)
        missing = absent if system != "Linux" else f"not installed: pip install {package}"
        findings.append(Finding(purpose, bool(version), f"{package} {version}" if version else missing))
    return findings


def _card() -> list[Finding]:
    if not _version("torch"):
        return [Finding("CUDA card", False, "PyTorch is missing")]
    import torch

    if not torch.cuda.is_available():
        built = (
            "this PyTorch is a CPU build" if torch.version.cuda is None else "PyTorch sees no card (nvidia-smi tells)"
        )
        return [Finding("CUDA card", False, f"{built}; everything runs on the CPU, GPU figures are recorded ones")]
    capability = torch.cuda.get_device_capability(0)
    free, total = torch.cuda.mem_get_info(0)
    card = f"{torch.cuda.get_device_name(0)}, {free / 2**30:.2f} of {total / 2**30:.2f} GiB free"
    old = f"compute capability {capability[0]}.{capability[1]} is below 8.0: float16 is used"
    return [
        Finding("CUDA card", True, card),
        Finding("bfloat16 arithmetic", capability >= (8, 0), "" if capability >= (8, 0) else old),
    ]


def _model() -> Finding:
    from course_lib.models import cached

    folder = cached("smollm2-135m")
    return Finding(
        "the model, offline", folder is not None, str(folder or "course models fetch downloads it once (98 MB)")
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
