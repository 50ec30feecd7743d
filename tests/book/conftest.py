"""The book, built once a session from the outputs stored in the notebooks, every warning an error."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "_build" / "test"


def digest() -> str:
    """Hash everything that the book is made of."""
    files = [ROOT / "_config.yml", ROOT / "_toc.yml", Path(__file__)]
    for folder in ("book", "notebooks", "course_lib"):
        files += (file for file in (ROOT / folder).rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    found = hashlib.sha256(sys.version.encode())
    for file in sorted(files):
        found.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


@pytest.fixture(scope="session")
def book() -> Path:
    """Return the folder of the built book; an earlier build of the very same files serves again."""
    stamp, html = BUILD / "digest", BUILD / "_build" / "html"
    now = digest()
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != now:
        shutil.rmtree(BUILD, ignore_errors=True)
        command = "from jupyter_book.cli.main import main; main()"
        arguments = ["build", str(ROOT), "--path-output", str(BUILD), "-W", "--keep-going"]
        built = subprocess.run(
            [sys.executable, "-c", command, *arguments],
            env=os.environ | {"COURSE_OUTPUTS": "stored", "PYTHONUTF8": "1"},
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        assert built.returncode == 0, f"the book does not build:\n{built.stderr[-4000:]}"
        stamp.write_text(now, encoding="utf-8")
    return html
