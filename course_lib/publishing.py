"""The project's public address: set once, in ``_config.yml``, and followed everywhere."""

from __future__ import annotations

import re
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

    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    try:
        return str(config["repository"]["url"])
    except KeyError:
        raise ValueError("_config.yml has no repository.url, the project's public address") from None


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
        ``https://HOST/OWNER/NAME``, without a slash at the end.

    Returns
    -------
    list of Path
        The files that changed.

    Raises
    ------
    ValueError
        If ``url`` has another form.
    """
    if not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]+", url):
        raise ValueError(f"url is {url!r}; a form like https://github.com/owner/name is needed")
    old, changed = address(root), []
    # Badges name owner/name alone, after the host of the service that shows them.
    pairs = [(old, url), (old.split("/", 3)[3], url.split("/", 3)[3])]
    for path in followers(root):
        before = path.read_text(encoding="utf-8")
        after = before
        for was, now in pairs:
            after = after.replace(was, now)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed
