"""The project's public address: set once, in ``_config.yml``, and followed everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

#: The first code cell of every notebook.
FIRST_CELL = """\
# On Colab this installs the course and leaves PyTorch as it is; everywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    import torch

    with open("constraints.txt", "w") as file:
        file.write(f"torch=={{torch.__version__}}")
    %pip install --quiet --constraint constraints.txt "course-lib[notebooks] @ git+{address}\""""

#: Files that name the address. A test proves that no other tracked file does.
FOLLOWERS = ("_config.yml", "pyproject.toml", "CITATION.cff", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FOLDERS = (("book", "*.md"), ("notebooks", "*.ipynb"))


def address(root: Path) -> str:
    """Return the public address that ``_config.yml`` sets as ``repository.url``.

    Raises
    ------
    ValueError
        If the setting is missing.
    """
    import yaml

    try:
        url = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))["repository"]["url"]
    except (KeyError, TypeError, yaml.YAMLError):
        url = None
    if not isinstance(url, str) or url.count("/") != 4:
        raise ValueError("_config.yml has no repository.url of the form https://HOST/OWNER/NAME, the public address")
    return url


def first_cell(root: Path) -> str:
    """Return the source of the first code cell that every notebook has."""
    return FIRST_CELL.format(address=address(root))


def followers(root: Path) -> list[Path]:
    """Return the files that may name the address."""
    files = [root / name for name in FOLLOWERS]
    for folder, pattern in FOLDERS:
        files += sorted(p for p in (root / folder).rglob(pattern) if ".ipynb_checkpoints" not in p.parts)
    return [path for path in files if path.exists()]


def change_address(root: Path, url: str) -> list[Path]:
    """Put a new public address wherever the old one stands.

    Parameters
    ----------
    root : Path
        The checkout.
    url : str
        ``https://HOST/OWNER/NAME``, without ``.git`` or a slash at the end.

    Returns
    -------
    list of Path
        The files that changed.

    Raises
    ------
    ValueError
        If ``url`` has another form.
    """
    part = r"[A-Za-z0-9_][\w.-]*"
    if not re.fullmatch(rf"https://{part}/{part}/{part}", url) or url.endswith(".git"):
        raise ValueError(f"url is {url!r}; a form like https://github.com/owner/name is needed")
    old = address(root)
    # Badges name owner/name alone, after the host of the service that shows them.
    named = re.compile(rf"{re.escape(old)}(?![\w-])|(?<![\w.-]){re.escape(_path(old))}(?![\w-])")

    def renamed(text: str) -> str:
        return named.sub(lambda match: url if match.group() == old else _path(url), text)

    changed: dict[Path, str] = {}
    for path in followers(root):
        before = path.read_text(encoding="utf-8")
        after = _renamed_cells(before, renamed) if path.suffix == ".ipynb" else renamed(before)
        if after != before:
            changed[path] = after
    # The setting comes last: if a file cannot be written, the old address is still known and a second try works.
    for path in sorted(changed, key=lambda path: path.name == "_config.yml"):
        path.write_text(changed[path], encoding="utf-8")
    return list(changed)


def _path(url: str) -> str:
    """Return OWNER/NAME of an address."""
    return url.split("/", 3)[3]


def _renamed_cells(text: str, renamed: Callable[[str], str]) -> str:
    """Change the cells' sources of a notebook; outputs are what was measured, and may hold any bytes."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        cell["source"] = [renamed(line) for line in cell["source"]]
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
