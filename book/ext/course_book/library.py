"""Links from a chapter into the library's source, which is read, never imported."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent
from typing import Any

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import ReferenceRole, SphinxDirective

from .pieces import collapsed

LOGGER = logging.getLogger(__name__)


def find(root: Path, name: str) -> tuple[Path, int, int]:
    """Find where the library defines a dotted name, without importing it.

    Returns
    -------
    path, first, last
        The file and the lines of the definition, decorators included; for a module, line 1 to its end.

    Raises
    ------
    LookupError
        If no module of the library, or no definition in it, has the name.
    """
    parts = name.split(".")
    count = next((count for count in range(len(parts), 0, -1) if module_path(root, parts[:count])), 0)
    path = module_path(root, parts[:count])
    if path is None:
        raise LookupError(f"{name!r} names no module of the repository")
    # `package.thing` may be a module and, as in Python, the object of that name that the package imports from it.
    package = module_path(root, parts[: count - 1]) if count == len(parts) else None
    origin = imported_from(package, parts[-1]) if package else None
    if origin and origin != name:
        return find(root, origin)
    text = path.read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    if count == len(parts):
        return path, 1, len(text.splitlines())
    for part in parts[count:]:
        child = next((child for child in getattr(node, "body", []) if part in defined(child)), None)
        origin = imported_from(path, part) if child is None and isinstance(node, ast.Module) else None
        if origin:
            return find(root, ".".join([origin, *parts[count + 1 :]]))
        if child is None:
            raise LookupError(f"{name!r}: {path.relative_to(root).as_posix()} does not define {part!r}")
        node = child
    return path, min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", []))]), node.end_lineno


def module_path(root: Path, parts: list[str]) -> Path | None:
    """Return a module's file, or None if there is no such module."""
    stem = root.joinpath(*parts)
    files = (stem.with_name(f"{stem.name}.py"), stem / "__init__.py") if parts else ()
    return next((path for path in files if path.is_file()), None)


def imported_from(path: Path, name: str) -> str | None:
    """Return the dotted name under which a module gets a name from another by ``from module import name``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return f"{node.module}.{alias.name}"
    return None


def defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def source_link(env: BuildEnvironment, name: str, content: nodes.Node) -> tuple[nodes.reference, str]:
    """Return a link to a definition on the repository's site, and the definition's text."""
    path, first, last = find(Path(env.srcdir), name)
    env.note_dependency(str(path))
    options = env.config.html_theme_options
    place = f"{path.relative_to(env.srcdir).as_posix()}#L{first}-L{last}"
    uri = f"{options['repository_url'].rstrip('/')}/blob/{options['repository_branch']}/{place}"
    lines = path.read_text(encoding="utf-8").splitlines()[first - 1 : last]
    return nodes.reference("", "", content, refuri=uri, classes=["course-source"]), dedent("\n".join(lines))


class CourseSource(ReferenceRole):  # type: ignore[misc]
    """``{course-source}`course_lib.memory.estimate.estimate```: a link to the definition; ``~`` shows the last name."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the link, or a warning where the library has no such name."""
        name = self.target.lstrip("~")
        shown = name.rpartition(".")[2] if self.target.startswith("~") else self.title
        try:
            return [source_link(self.env, name, nodes.literal(text=shown))[0]], []
        except LookupError as error:
            LOGGER.warning("course-source: %s", error, location=self.get_location(), type="course")
            return [nodes.literal(text=shown)], []


class CourseCode(SphinxDirective):  # type: ignore[misc]
    """``{course-code} course_lib.memory.estimate.estimate``: the definition's text, collapsed, with a link to it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the collapsed box."""
        name = self.arguments[0]
        try:
            link, text = source_link(self.env, name, nodes.Text("View in the repository"))
        except LookupError as error:
            raise self.error(f"course-code: {error}") from None
        code = nodes.literal_block(text, text, language="python")
        return collapsed(f"Source of {name}", code, nodes.paragraph("", "", link))
