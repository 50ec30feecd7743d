"""What this machine is, and which device and precision the course uses on it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("course-lib", "torch", "transformers", "triton", "bitsandbytes", "numpy", "jupyter-book")


@dataclass(frozen=True)
class Choice:
    """The device and precision that a notebook runs on, with the reason.

    Attributes
    ----------
    device : torch.device
        ``cuda`` where PyTorch sees a card, else ``cpu``.
    dtype : torch.dtype
        float32 on a CPU, float16 on cards older than compute capability 8.0, bfloat16 on newer ones.
    reason : str
        One sentence for people.
    """

    device: torch.device
    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"Running on {self.device} in {str(self.dtype).removeprefix('torch.')}: {self.reason}"


def choose() -> Choice:
    """Choose device and precision for this machine: the one rule that every notebook follows.

    Returns
    -------
    Choice
        Printing it gives the line that stands at the top of each chapter.
    """
    import torch

    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        return Choice(torch.device("cpu"), torch.float32, f"{cpu_name()}, {threads} threads, no CUDA card seen.")
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    # bfloat16 arithmetic needs Ampere (8.0); PyTorch emulates it on a T4, slowly, and calls it supported.
    if capability >= (8, 0):
        return Choice(torch.device("cuda"), torch.bfloat16, f"{name} has bfloat16 arithmetic.")
    version = ".".join(map(str, capability))
    return Choice(
        torch.device("cuda"), torch.float16, f"{name} (compute capability {version}) has no bfloat16 arithmetic."
    )


def cpu_name() -> str:
    """Return the processor's marketing name, or its architecture where the system does not tell."""
    if platform.system() == "Darwin":
        shown = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        if shown.stdout.strip():
            return shown.stdout.strip()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Return the machine's physical memory in bytes, or None where the system does not tell (Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def describe() -> dict[str, str | int | None]:
    """Describe this machine for a record: processor, cores, memory in bytes, card, driver, system and Python version."""
    gpu = None
    if _installed("torch"):
        import torch

        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "gpu": gpu,
        "driver": _driver() if gpu else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, or None where nvidia-smi does not tell (ROCm)."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that numbers depend on."""
    found = {name: _installed(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version}


RESULTS = Path(__file__).resolve().parents[1] / "kernels" / "results"


def record(name: str, runs: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write the raw results of a benchmark, with machine, versions, date and command.

    Parameters
    ----------
    name : str
        The study, for example ``"memory_peak"``.
    runs : list of dict
        One entry a run, sizes in bytes and times in seconds, in keys that say so.
    folder : Path
        Where the file goes: ``NAME-CARD-DATE.json``.
    """
    where, today = describe(), datetime.date.today().isoformat()
    card = str(where["gpu"] or "cpu").lower().replace(" ", "-")
    command = " ".join(["python", *(os.path.relpath(part) if os.path.isabs(part) else part for part in sys.argv)])
    content = {"name": name, "date": today, "machine": where, "versions": versions(), "command": command, "runs": runs}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{card}-{today}.json"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def recordings(name: str) -> list[dict[str, Any]]:
    """Return the recorded results of a study on GPUs, oldest first; an empty list where none was recorded."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(f"{name}-*.json"))]
    return sorted((one for one in found if one["machine"]["gpu"]), key=lambda one: str(one["date"]))


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
