"""Make or repair the course's virtual environment with nothing but the standard library; say what is wrong in one line.

Called by the Makefile with any Python, so annotations that old Pythons cannot evaluate are quoted. The environment is
installed anew only when what it is made from has changed.
"""

import hashlib
import os
import platform
import re
import shlex
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

#: What goes with them: Triton 3.6's interpreter fails with NumPy 2.4.
OF_THEIR_TIME = {"numpy": "2.3.5"}


def fail(message: str) -> None:
    """Leave with one line and exit status 1."""
    sys.exit(f"course: {message}")


def python_of(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if platform.system() == "Windows" else "bin/python")


def run(command: "list[str]") -> "subprocess.CompletedProcess[str]":
    """Run a command, its output captured."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def works(python: Path) -> bool:
    """Tell whether an environment's interpreter starts, is new enough and has pip."""
    try:
        return run([str(python), "-c", f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"]).returncode == 0
    except OSError:
        return False


def installed_torch(python: Path) -> str:
    """Return the version of torch that the environment already has, or an empty string."""
    found = run([str(python), "-c", "from importlib.metadata import version; print(version('torch'))"])
    return found.stdout.strip() if found.returncode == 0 else ""


def create(folder: Path) -> Path:
    """Make the environment where it is missing, and return its interpreter."""
    if folder == ROOT or folder in ROOT.parents:
        fail(f"VENV is {shlex.quote(str(folder))}, which holds the course; name a folder for the environment alone.")
    python = python_of(folder)
    if folder.exists():
        if not (folder / "pyvenv.cfg").exists():
            fail(
                f"{shlex.quote(str(folder))} is there and is no virtual environment; choose another name (make VENV=...)."
            )
        if not works(python):
            fail(
                f"the virtual environment {folder.name} does not start, or lacks pip or Python 3.11: remove it "
                f"(rm -rf {shlex.quote(str(folder))}) and run again."
            )
        return python
    print(f"course: making {folder.name} with Python {platform.python_version()}", flush=True)
    made = run([sys.executable, "-m", "venv", str(folder)])
    if made.returncode:
        shutil.rmtree(str(folder), ignore_errors=True)
        said = (made.stderr + made.stdout).strip()
        advice = " Debian and Ubuntu want the package python3-venv." if "ensurepip" in said else ""
        fail(f"could not make {folder.name}: {said.splitlines()[-1] if said else 'no reason given'}.{advice}")
    return python


def constraints(torch: str, oldest: bool) -> str:
    """Return the constraints to install with: the course's own, less what the user's torch settles."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    if oldest:
        pins = OLDEST_VERSIONS | OF_THEIR_TIME
    elif torch:
        # Each torch needs a Triton of its own, so its requirement decides, not our pin.
        pins = {"torch": torch, "triton": ""}
    kept = [line for line in lines if line.partition("==")[0] not in pins]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in pins.items() if version)]) + "\n"


def install(python: Path, extras: str, oldest: bool) -> None:
    """Install the course with its extras, unless the same was installed before."""
    folder = python.parents[1]
    torch = installed_torch(python)
    made_from = (ROOT / "pyproject.toml").read_bytes() + (ROOT / "constraints.txt").read_bytes()
    key = hashlib.sha256(made_from + f"{extras} {ROOT}".encode()).hexdigest()
    stamp = folder / "course.stamp"
    if torch and stamp.exists() and stamp.read_bytes() == f"{key} {torch}".encode():
        return
    free = shutil.disk_usage(str(ROOT)).free
    if not torch and free < FREE_BYTES:
        fail(f"the disk has {free / 2**30:.2f} GiB free; the environment needs {FREE_BYTES / 2**30:.2f} GiB.")
    if torch and not oldest:
        print(f"course: keeping the torch {torch} that is installed", flush=True)
    elif platform.system() == "Linux" and not shutil.which("nvidia-smi"):
        print("course: no NVIDIA card seen; the README tells how to get torch without CUDA", flush=True)
    chosen = folder / "constraints.txt"
    chosen.write_text(constraints(torch, oldest), encoding="utf-8")
    print("course: installing the packages (minutes the first time)", flush=True)
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    done = run([*command, "--constraint", str(chosen), "--editable", f"{ROOT}[{extras}]"])
    if done.returncode:
        fail(explain((done.stdout + done.stderr).splitlines()))
    stamp.write_bytes(f"{key} {installed_torch(python)}".encode())


def explain(log: "list[str]") -> str:
    """Turn pip's complaint into one line."""
    text = "\n".join(log).lower()
    signs = ("max retries", "newconnectionerror", "name resolution", "failed to establish", "connection refused")
    if "no space left" in text:
        return f"the disk is full ({shutil.disk_usage(str(ROOT)).free / 2**30:.2f} GiB free); free some space and run again."
    # hatchling comes first and runs everywhere: not to find any version of it is not to reach the index.
    if any(sign in text for sign in signs) or re.search(r"hatchling\S* \(from versions: none\)", text):
        return (
            "no network: the Python packages could not be downloaded; connect once and run again, later runs need none."
        )
    errors = [line.strip() for line in log if line.strip().startswith("ERROR")]
    return f"pip could not install the packages: {(errors or log[-1:] or ['no reason given'])[0]}"


def main() -> None:
    """Make the environment that the arguments name: FOLDER EXTRAS [--oldest]."""
    if sys.version_info < OLDEST:
        fail(f"Python {platform.python_version()} is too old; 3.11 or newer is needed (make PYTHON=python3.12 ...).")
    if len(sys.argv) < 3 or not sys.argv[1]:
        fail("name a folder and the extras, as the Makefile does: environment.py .venv all")
    try:
        install(create(Path(os.path.abspath(sys.argv[1]))), sys.argv[2], "--oldest" in sys.argv)
    except OSError as error:
        fail("the disk is full; free some space and run again." if error.errno == 28 else str(error))
    except KeyboardInterrupt:
        fail("stopped; run again to go on.")


if __name__ == "__main__":
    main()
