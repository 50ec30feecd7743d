"""Make or repair the course's virtual environment with nothing but the standard library; say what is wrong in one line.

Called by the Makefile with any Python. The environment is installed anew only when what it is made from has changed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST = (3, 11)
FREE_BYTES = 6 * 2**30

#: The oldest versions the library supports, for `make compat`; an empty one is left to what the others require.
OLDEST_VERSIONS = {
    "torch": "2.11.0",
    "transformers": "5.17.0",
    "triton": "3.6.0",
    "huggingface_hub": "",
    "tokenizers": "",
}


def fail(message: str) -> None:
    """Leave with one line and exit status 1."""
    sys.exit(f"course: {message}")


def python_of(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if platform.system() == "Windows" else "bin/python")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command, its output captured."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def works(python: Path) -> bool:
    """Tell whether an environment's interpreter starts, is new enough and has pip."""
    try:
        version = f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"
        return run([str(python), "-c", version]).returncode == 0
    except OSError:
        return False


def installed_torch(python: Path) -> str | None:
    """Return the version of torch that the environment already has."""
    found = run([str(python), "-c", "from importlib.metadata import version; print(version('torch'))"])
    return found.stdout.strip() if found.returncode == 0 else None


def create(folder: Path) -> Path:
    """Make the environment where it is missing, and return its interpreter."""
    python = python_of(folder)
    if folder.exists():
        if not works(python):
            fail(
                f"the virtual environment {folder.name} does not start or has no pip with Python 3.11 or newer; "
                f"remove it (rm -rf {folder.name}) and run again."
            )
        return python
    print(f"course: making {folder.name} with Python {platform.python_version()}", flush=True)
    made = run([sys.executable, "-m", "venv", str(folder)])
    if made.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        reason = (made.stderr or made.stdout).strip().split("\n")[-1]
        fail(f"could not make {folder.name}: {reason} (on Debian and Ubuntu the package python3-venv is needed).")
    return python


def constraints(python: Path, oldest: bool) -> str:
    """Return the constraints to install with: the course's own, less what the user's torch settles."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if oldest:
        pins = OLDEST_VERSIONS
    elif torch := installed_torch(python):
        # Each torch needs a Triton of its own, so its requirement decides, not our pin.
        pins = {"torch": torch, "triton": ""}
        print(f"course: keeping the torch {torch} that is installed", flush=True)
    else:
        pins = {}
        if platform.system() == "Linux" and not shutil.which("nvidia-smi"):
            print("course: no NVIDIA card seen; the README tells how to avoid gigabytes of CUDA with torch", flush=True)
    kept = [line for line in lines if line.partition("==")[0] not in pins]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in pins.items() if version)]) + "\n"


def install(python: Path, extras: str, oldest: bool) -> None:
    """Install the course with its extras, unless the same was installed before."""
    folder = python.parents[1]
    made_from = (ROOT / "pyproject.toml").read_bytes() + (ROOT / "constraints.txt").read_bytes()
    torch = installed_torch(python)
    stamp = folder / "course.stamp"
    key = hashlib.sha256(made_from + f"{extras} {ROOT}".encode()).hexdigest()
    if torch and stamp.exists() and stamp.read_text(encoding="utf-8") == f"{key} {torch}":
        return
    free = shutil.disk_usage(ROOT).free
    if not torch and free < FREE_BYTES:
        fail(f"the disk has {free / 2**30:.2f} GiB free; the environment needs {FREE_BYTES / 2**30:.2f} GiB.")
    chosen = folder / "constraints.txt"
    chosen.write_text(constraints(python, oldest), encoding="utf-8")
    print("course: installing the packages (minutes the first time)", flush=True)
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--quiet",
        "--constraint",
        str(chosen),
    ]
    process = subprocess.Popen(
        [*command, "--editable", f"{ROOT}[{extras}]"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = []
    for line in process.stdout or ():
        log.append(line.rstrip())
    if process.wait():
        fail(explain(log))
    stamp.write_text(f"{key} {installed_torch(python)}", encoding="utf-8")


def explain(log: list[str]) -> str:
    """Turn pip's complaint into one line."""
    text = "\n".join(log).lower()
    signs = ("max retries", "newconnectionerror", "name resolution", "failed to establish", "connection refused")
    if "no space left" in text:
        return f"the disk is full ({shutil.disk_usage(ROOT).free / 2**30:.2f} GiB free); free some space and run again."
    if any(sign in text for sign in signs) or "from versions: none" in text:
        return (
            "no network: the Python packages could not be downloaded; connect once and run again, later runs need none."
        )
    errors = [line for line in log if line.lower().startswith("error")]
    return f"pip could not install the packages: {(errors or log[-1:] or ['no reason given'])[0]}"


def main() -> None:
    """Make the environment named by the arguments: FOLDER EXTRAS [--oldest]."""
    if sys.version_info < OLDEST:
        fail(
            f"Python {platform.python_version()} is too old; Python 3.11 or newer is needed (make PYTHON=python3.12 ...)."
        )
    folder = Path(os.path.abspath(sys.argv[1]))
    try:
        install(create(folder), sys.argv[2], "--oldest" in sys.argv)
    except OSError as error:
        if error.errno == 28:
            fail("the disk is full; free some space and run again.")
        raise
    except KeyboardInterrupt:
        fail("stopped; run again to go on.")


if __name__ == "__main__":
    main()
