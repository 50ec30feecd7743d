"""Studies of the workbench as modules, and what tests of all of them do."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def load(name: str) -> Any:
    """Import ``kernels/<name>.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"workbench_{name}", KERNELS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(study: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a study with these arguments, and return what it records under `folder`: strict JSON without the folder's name."""
    results = folder / "results"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [study.__name__, "--json", str(results), *arguments])
    study.main()
    (path,) = results.iterdir()
    text = path.read_text(encoding="utf-8")
    assert str(folder) not in text
    runs: list[dict[str, Any]] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))[
        "runs"
    ]
    return runs


def refuses(
    study: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> None:
    """Assert that arguments end a study with a line that names the first."""
    monkeypatch.setattr(sys, "argv", [study.__name__, *arguments])
    with pytest.raises(SystemExit) as stopped:
        study.main()
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def succeeds_without_triton(name: str) -> None:
    """Assert that where Triton is not installed a study says so, and is no failure."""
    hide = (
        "import importlib.util as u, runpy; real = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'triton' else real(name, *rest); "
        f"runpy.run_path({str(KERNELS / f'{name}.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed" in done.stdout
