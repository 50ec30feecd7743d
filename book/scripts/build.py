"""Execute the notebooks that need it, and build the book.

``python book/scripts/build.py book`` executes into ``_build/executed`` and builds ``_build/html`` from there;
``... notebooks`` writes the outputs back into the notebooks, cleaned of what differs from run to run.

An executed notebook carries the key of what it was made from: its code cells, the rooms of ``course_lib`` that it
loaded, the claims, what it reads from the workbench and the installed versions. As long as the key holds, it is not executed again.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import yaml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from course_lib import claims, machine

ROOT = Path(__file__).resolve().parents[2]
EXECUTED = ROOT / "_build" / "executed"
CELL_SECONDS = 600
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

#: Runs last in each kernel: which rooms of the library the notebook loaded, and the most memory it held.
PROBE = """
import json as _json, sys as _sys
def _peak():
    try:
        import resource
    except ImportError:
        import psutil
        return psutil.Process().memory_info().peak_wset
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if _sys.platform == "darwin" else 1024)
print(_json.dumps({"rooms": sorted({n.split(".")[1] for n in _sys.modules if n.startswith("course_lib.")}),
                   "peak_memory_bytes": _peak()}))
"""


def notebooks() -> list[Path]:
    """Return the notebooks of the book, in the order of its contents.

    Raises
    ------
    ValueError
        If the contents name no notebook.
    """
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    names = [name for name in _files(toc) if "notebooks" in Path(name).parts]
    if not names:
        raise ValueError("_toc.yml names no notebook")
    return [(ROOT / name).with_suffix(".ipynb") for name in names]


def _files(entry: Any) -> Iterator[str]:
    if isinstance(entry, list):
        for item in entry:
            yield from _files(item)
    elif isinstance(entry, dict):
        if "file" in entry:
            yield str(entry["file"])
        for value in entry.values():
            yield from _files(value)


def read(path: Path) -> Any:
    """Read a notebook.

    Raises
    ------
    ValueError
        If the file is missing or is no notebook.
    """
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # nbformat lets errors of JSON, of the schema and of missing keys through
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{path.relative_to(ROOT)} cannot be read as a notebook: {reason}") from error
    return notebook


def code_of(notebook: Any) -> list[str]:
    """Return the sources of a notebook's code cells."""
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def key_of(notebook: Any, rooms: list[str]) -> str:
    """Return the hash of everything that a notebook's outputs depend on: its code, the rooms, and the data that it names."""
    code = "\0".join(code_of(notebook))
    digest = hashlib.sha256(code.encode())
    library = ROOT / "course_lib"
    files = [library / "__init__.py", ROOT / "constraints.txt", ROOT / "book" / "claims.yml"]
    for room in rooms:
        folder = library / room
        inside = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        files += sorted(inside) if folder.is_dir() else [folder.with_suffix(".py")]
    files += sorted(study for study in (ROOT / "kernels").glob("*.py") if study.name in code)
    files += sorted((ROOT / "kernels" / "results").glob("*.json"))
    if "kernels" in rooms:
        files.append(ROOT / "book" / "compile_report.json")
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode())
        digest.update(file.read_bytes() if file.exists() else b"")
    digest.update(json.dumps([machine.versions(), sys.version]).encode())
    return digest.hexdigest()


def executed_path(path: Path) -> Path:
    """Return where a notebook's executed copy lies."""
    return EXECUTED / path.relative_to(ROOT)


def is_current(path: Path) -> bool:
    """Tell whether a notebook's executed copy was made from what is here now; a damaged copy was not."""
    try:
        record = read(executed_path(path)).metadata["course"]
        return bool(record["key"] == key_of(read(path), record["rooms"]))
    except (ValueError, KeyError, TypeError):
        return False


def execute(path: Path, progress: Progress) -> None:
    """Execute a notebook in a fresh kernel and write the executed copy in one step.

    Raises
    ------
    CellExecutionError
        If a cell fails; nothing is written then.
    """
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    task = progress.add_task(path.stem, total=len(notebook.cells))
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    started = time.perf_counter()
    with client.setup_kernel(env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}):
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
            progress.advance(task)
        seconds = time.perf_counter() - started
        notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
        client.execute_cell(notebook.cells[-1], len(notebook.cells) - 1)
    probe = json.loads(notebook.cells.pop().outputs[0]["text"])
    make_static(notebook)
    notebook.metadata["course"] = {
        "key": key_of(notebook, probe["rooms"]),
        **probe,
        "seconds": seconds,
        "date": datetime.date.today().isoformat(),
        "machine": machine.describe(),
        "versions": machine.versions(),
    }
    done = executed_path(path)
    done.parent.mkdir(parents=True, exist_ok=True)
    fresh = done.with_suffix(".new")
    nbformat.write(notebook, fresh)
    os.replace(fresh, done)


def make_static(notebook: Any) -> None:
    """Drop what needs a kernel or differs from run to run: widget views and state, time stamps, what went to stderr."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            # A view's plain text is the widget's repr, which says nothing; a form of its own is kept.
            if output.get("data", {}).pop(WIDGET_VIEW, None) and output.data.keys() <= {"text/plain"}:
                output.data.clear()
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr" and o.get("data") != {}]


def execute_stale(console: Console) -> int:
    """Execute every notebook whose copy is missing or stale, and return how many those were."""
    stale = [path for path in notebooks() if not is_current(path)]
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for path in stale:
            try:
                execute(path, progress)
            except DeadKernelError:
                raise RuntimeError(
                    f"{path.relative_to(ROOT)}: the kernel died; a machine short of memory does that"
                ) from None
    total = len(notebooks())
    console.print(f"executed {len(stale)} of {total} notebooks; the others were up to date")
    return len(stale)


def build(output: Path, console: Console, outputs: str = "executed") -> Path:
    """Build the book with every warning an error.

    Parameters
    ----------
    output : Path
        The folder that gets ``html``.
    outputs : str
        ``executed`` to show the executed copies, ``stored`` to show what the notebooks themselves hold.

    Returns
    -------
    Path
        The book's first page.
    """
    console.print("building the book ...")
    start = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()"]
    command = [*start, "build", "-W", "--keep-going", "--path-output", str(output)]
    made = subprocess.run(
        [*command, str(ROOT)],
        env={**os.environ, "COURSE_OUTPUTS": outputs},
        capture_output=True,
        text=True,
        check=False,
    )
    page = output / "_build" / "html" / "index.html"
    if made.returncode or not page.exists():
        lines = (made.stdout + made.stderr).splitlines()
        wanted = [line for line in lines if "WARNING" in line or "ERROR" in line or "rror:" in line]
        raise RuntimeError("the book did not build:\n" + "\n".join((wanted or lines)[-20:]))
    return page


def store(console: Console) -> None:
    """Write the executed outputs into the notebooks, leaving alone what changed in nothing but date and machine."""
    for path in notebooks():
        old, new = read(path), read(executed_path(path))
        new.metadata.pop("course", None)
        new.cells = [
            before if steady(before) == steady(after) else after
            for before, after in zip(old.cells, new.cells, strict=True)
        ]
        for count, cell in enumerate((c for c in new.cells if c.cell_type == "code"), 1):
            cell.execution_count = count
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = count
        nbformat.write(new, path)
    console.print("stored the outputs in the notebooks")


def steady(cell: Any) -> Any:
    """Return a cell without what differs between two equal runs: counters, and where and when claims were checked."""
    kept = deepcopy(cell)
    kept.pop("execution_count", None)
    for output in kept.get("outputs", []):
        output.pop("execution_count", None)
        for name in ("date", "machine", "versions"):
            output.get("data", {}).get(claims.MIME, {}).pop(name, None)
    return kept


def main() -> int:
    """Run the command named on the command line: book or notebooks."""
    console = Console()
    command = sys.argv[1] if len(sys.argv) > 1 else "book"
    try:
        if command == "book":
            execute_stale(console)
            page = build(ROOT, console)
            console.print(f"\nThe book: {page}", soft_wrap=True)
            served = page.parent.relative_to(ROOT)
            console.print("Open it in a browser, or serve it:")
            console.print(f"  python3 -m http.server --directory {served} 8000")
        elif command == "notebooks":
            execute_stale(console)
            store(console)
        else:
            raise ValueError(f"command is {command!r}; accepted are book and notebooks")
    except CellExecutionError as error:
        console.print(Text.from_ansi(str(error)))
        console.print("course: a notebook failed; the cell and its error stand above.", style="red")
        return 1
    except KeyboardInterrupt:
        console.print("course: stopped; what was executed is kept.")
        return 1
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            error = RuntimeError(f"the disk is full ({shutil.disk_usage(ROOT).free / 2**30:.2f} GiB free)")
        console.print(f"course: {error}", markup=False, highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
