"""The command line: right numbers, scripts can read them, and one clear line for bad input."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from course_lib.memory import advise
from course_lib.memory.config import PUBLISHED_DIR as PUBLISHED

#: Puts the command line's interpreter where torch and transformers are not installed.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "


def course(*arguments: str, prelude: str = "") -> subprocess.CompletedProcess:
    source = f"{prelude}from course_lib.cli import main; import sys; sys.argv = {['course', *arguments]!r}; main()"
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment)


def refused(*arguments: str) -> str:
    """Run a command that must fail with one line and exit status 2, and return the line."""
    done = course(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("course: ")
    return line


@pytest.mark.parametrize(
    ("options", "stated", "tolerance"),
    [
        (["--dtype", "bfloat16"], 29.0260648727417, 0.02),
        (["--quantization", "int8"], 15.219234466552734, 0.05),
        (["--quantization", "fp4"], 9.543574333190918, 0.05),
    ],
)
def test_octocoder_lands_on_the_three_published_peaks(options, stated, tolerance):
    done = course("vram", "octocoder", *options, "--json", prelude=WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["total"] / 2**30 == pytest.approx(stated, rel=tolerance)


def test_table_shows_every_part_and_every_card_without_torch():
    done = course("vram", "OctoCoder", "--context", "4096", "--batch", "4", prelude=WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    for text in ("weights", "KV cache", "activations", "workspace", "total", "A100 80GB SXM", "T4", "closed form"):
        assert text in done.stdout


def test_json_adds_up_and_answers_for_one_card():
    found = json.loads(course("vram", "llama-2-13b", "--context", "2048", "--gpu", "l4", "--json").stdout)
    parts = ("weights", "quantization_constants", "kv_cache", "activations", "workspace")
    assert found["total"] == sum(found[part] for part in parts)
    assert found["fits"] == {"L4": False}  # and no L40S


def test_advice_names_rows_steps_and_arithmetic_without_torch():
    done = course("advise", "octocoder", "--gpu", "A100-40GB", "--context", "16000", prelude=WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    for text in ("flash attention", "8-bit weights (int8)", "12.28", "327,680,000 bytes", "8,192", "lower bounds"):
        assert text in done.stdout


def test_advice_as_json_is_the_librarys():
    options = ("--gpu", "L4", "--context", "4096", "--batch", "8", "--goal", "throughput", "--json")
    found = json.loads(course("advise", "llama-2-7b", *options).stdout)
    advice = advise("llama-2-7b", gpu="L4", context=4096, batch_size=8, goal="throughput")
    assert found == json.loads(json.dumps(asdict(advice) | {"summary": advice.summary}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["advise", "octocoder", "--gpu", "A100", "--context", "9"], ["--gpu", "A100 40GB"]),
        (["advise", "octocoder", "--gpu", "T4", "--context", "1"], ["--context", "at least 2"]),
        (["advise", "octocoder", "--gpu", "T4", "--context", "9", "--goal", "fun"], ["--goal", "latency", "fun"]),
        (["advise", "octocoder", "--gpu", "T4", "--context", "9", "--goal", "gpu"], ["got 'gpu'"]),
        (["advise", "octocoder", "--gpu", "T4"], ["--context"]),
        (["vram", "nonsense"], ["nonsense", "octocoder"]),
        (["vram", "octocoder", "--context", "-1"], ["--context", "-1"]),
        (["vram", "m/[/foo]"], ["m/[/foo]"]),
        (["claims", "--chapter", "99"], ["99", "1 to 12"]),
        (["bench", "--results", f"{__file__}/x"], ["test_cli.py"]),
        (["vram", "octocoder", "--context", "many"], ["--context", "integer"]),
        (["vram", "octocoder", "--batch", "0"], ["--batch", "0"]),
        (["vram", "octocoder", "--dtype", "float17"], ["--dtype must", "float17", "bfloat16", "torch.dtype"]),
        (["vram", "octocoder", "--quantization", "int5"], ["--quantization must", "int5", "int8"]),
        (["vram", "octocoder", "--quantization", "mxfp4"], ["--quantization is 'mxfp4'"]),
        (["vram", "octocoder", "--kv-cache-dtype", "int3"], ["--kv-cache-dtype must", "int3"]),
        (["vram", "octocoder", "--attention", "magic"], ["--attention must", "magic", "flash"]),
        (["vram", "octocoder", "--gpu", "abacus"], ["abacus", "T4"]),
        (["models", "fetch", "nonsense"], ["nonsense", "smollm2-135m"]),
        (["train", "rop"], ["rop", "rope"]),
        (["address", "not-an-address"], ["not-an-address", "owner/name"]),
        (["nonsense"], ["nonsense"]),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_that_names_it_and_what_is_accepted(arguments, words):
    line = refused(*arguments)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["config.json", "empty"]),
        ("not JSON {", ["config.json", "JSON"]),
        ("[1, 2]", ["config.json"]),
        ('{"hidden_size": 64}', ["model_type"]),
        ('{"model_type": "unheard-of", "hidden_size": 64}', ["unheard-of", "num_hidden_layers"]),
    ],
    ids=["empty", "not JSON", "a list", "no type", "unknown type"],
)
def test_bad_configuration_file_is_one_line(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    line = refused("vram", str(path))
    for word in words:
        assert word in line


def test_a_path_that_looks_like_markup_is_shown_as_it_is(tmp_path):
    folder = tmp_path / "[bold]y"
    folder.mkdir()
    (folder / "config.json").write_text((PUBLISHED / "octocoder.json").read_text(encoding="utf-8"), encoding="utf-8")
    assert "[bold]y" in "".join(course("vram", str(folder)).stdout.split())


def test_int4_cache_on_a_model_without_attention_is_one_line(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba"}', encoding="utf-8")
    assert "int4" in refused("vram", str(path), "--context", "10", "--kv-cache-dtype", "int4")


def test_doctor_reports_without_failing():
    done = course("doctor")
    assert done.returncode == 0, done.stderr
    for what in ("Python", "PyTorch", "Triton", "CUDA card", "model, offline", "corpus, offline", "JupyterLab"):
        assert what in done.stdout


def test_claims_are_listed_with_their_verdicts():
    rows = json.loads(course("claims", "--chapter", "1", "--json").stdout)
    assert {row["chapter"] for row in rows} == {1}
    octocoder = next(row for row in rows if row["id"] == "octocoder-bf16")
    assert octocoder["verdict"] == "confirmed"
    assert octocoder["measured"] == pytest.approx(29.03, rel=0.02)


def test_help_without_a_command():
    done = course("models")
    assert done.returncode == 2
    assert "fetch" in done.stdout


def test_exercises_are_released_and_graded(tmp_path):
    released = course("exercises", "release", str(tmp_path / "class" / "ada"))
    assert released.returncode == 0, released.stderr
    for notebook in sorted((tmp_path / "class" / "ada").iterdir())[2:]:  # all are graded elsewhere
        notebook.unlink()
    graded = course("exercises", "grade", str(tmp_path / "class"), "--json", "--feedback", str(tmp_path / "feedback"))
    assert graded.returncode == 0, graded.stderr
    marks = json.loads(graded.stdout)
    assert {mark["student"] for mark in marks} == {"ada"}
    assert len({mark["chapter"] for mark in marks}) == 2
    assert all(mark["points"] == 0 < mark["max_points"] for mark in marks), "stubs earn nothing"
    assert list((tmp_path / "feedback").rglob("*.md"))
    assert "nowhere" in refused("exercises", "grade", str(tmp_path / "nowhere"))
