"""What notebooks show: figures, tables, glued numbers, the calculator, and the line that says what runs where."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest
from IPython.testing.globalipapp import start_ipython

from course_lib import display, doctor, machine, plotting, widgets


@pytest.fixture
def shown(monkeypatch):
    """Everything that was displayed, as (data, metadata)."""
    import IPython.display

    start_ipython()
    outputs = []

    def catch(data, raw=False, metadata=None, **_):
        outputs.append((data if raw else data._repr_html_(), metadata or {}))

    monkeypatch.setattr(IPython.display, "display", catch)
    return outputs


def test_figure_has_alt_text_and_caption(shown):
    fig, ax = plotting.figure()
    ax.plot([1, 2], [3, 4])
    plotting.show(fig, alt='A line that rises from 3 to 4 & says "so"', caption="Up.")
    ((page, _),) = shown
    assert 'alt="A line that rises from 3 to 4 &amp; says &quot;so&quot;"' in page
    assert "<figcaption>Up.</figcaption>" in page


def test_figure_without_a_useful_description_is_refused(shown):
    fig, _ = plotting.figure()
    with pytest.raises(ValueError, match="a sentence"):
        plotting.show(fig, alt="plot")
    assert shown == []


@pytest.mark.parametrize("alt", ["plot", None])
def test_a_refused_figure_is_closed_and_does_not_appear_after_all(shown, alt):
    import matplotlib.pyplot as plt

    fig, _ = plotting.figure()
    with pytest.raises(ValueError, match="a sentence"):
        plotting.show(fig, alt=alt)
    assert not plt.fignum_exists(fig.number)


def test_figures_are_the_same_bytes_each_time(shown):
    for _ in range(2):
        fig, ax = plotting.figure()
        ax.bar(["a", "b"], [1, 2])
        plotting.show(fig, alt="Two bars, the second twice as high")
    assert shown[0] == shown[1]


def test_colours_differ_in_lightness_or_hue_for_every_reader():
    assert len(set(plotting.COLOURS)) == len(plotting.COLOURS)
    assert all(re.fullmatch("#[0-9A-F]{6}", colour) for colour in plotting.COLOURS)


def test_table_escapes_and_heads_rows_and_columns():
    page = display.table(["a<b", "c"], [["x&y", "1"]], caption="<cap>")
    assert '<th scope="col">a&lt;b</th>' in page
    assert '<th scope="row">x&amp;y</th><td>1</td>' in page
    assert "<caption>&lt;cap&gt;</caption>" in page
    HTMLParser().feed(page)


def test_cells_may_be_anything_and_have_a_plain_form(shown):
    display.show_table(["name", 3], [["b", 1], [None, "<2>"]], caption="What it is")
    ((data, _),) = shown
    assert "<td>1</td>" in data["text/html"]
    assert data["text/plain"] == "What it is\nname | 3\nb | 1\nNone | <2>"


def test_ragged_table_is_refused():
    with pytest.raises(ValueError, match="2 columns"):
        display.table(["a", "b"], [["only one"]])


def test_a_column_that_holds_a_sentence_is_set_apart_from_numbers():
    page = display.table(["call", "time", "because"], [["a", "1.5", "it can do all that is asked"], ["b", "2.0", "no"]])
    assert page.count('class="words"') == 3
    assert '<th scope="col" class="words">because</th>' in page
    assert "<td>1.5</td>" in page
    assert display.table(["a", "b"], []).count("<th") == 2 + 1  # and the head itself


def test_glued_numbers_are_found_by_the_book_and_shown_by_a_notebook_alone(shown):
    from myst_nb.core.variables import format_plain_text

    display.glue(peak="28.95 GiB", tokens=f"{1480:,}", count=7)
    for (data, metadata), name, text in zip(
        shown, ("peak", "tokens", "count"), ("28.95 GiB", "1,480", "7"), strict=True
    ):
        assert format_plain_text(data["application/papermill.record/text/plain"], "s") == text
        assert metadata["scrapbook"]["name"] == name
        assert metadata["scrapbook"]["mime_prefix"]  # by which the book drops the output itself
    assert shown[0][0]["text/plain"] == "peak = 28.95 GiB\ntokens = 1,480\ncount = 7"
    assert not any("text/plain" in data for data, _ in shown[1:])


def test_calculator_moves_with_a_kernel_and_teaches_without(shown):
    from course_lib.memory import bytes_to_giga_bytes, estimate

    widgets.memory_calculator(["octocoder", "llama-2-7b"], context=2048)
    ((data, _),) = shown
    assert "application/vnd.jupyter.widget-view+json" in data
    for model in ("octocoder", "llama-2-7b"):
        total = estimate(model, quantization="nf4", prompt_tokens=2048).total
        assert f"{bytes_to_giga_bytes(total):.2f}" in data["text/html"]
        assert f"{bytes_to_giga_bytes(total):.2f}" in data["text/plain"]
    assert "<" not in data["text/plain"]


@pytest.mark.parametrize("start", [{"context": 5000}, {"batch_size": 3}, {"context": 262_144, "batch_size": 1000}])
def test_calculator_starts_at_any_whole_number(shown, start):
    from course_lib.memory import bytes_to_giga_bytes, estimate

    widgets.memory_calculator(["llama-2-7b"], **start)
    ((data, _),) = shown
    sizes = {"prompt_tokens": start.get("context", 4096), "batch_size": start.get("batch_size", 1)}
    assert f"{bytes_to_giga_bytes(estimate('llama-2-7b', dtype='bfloat16', **sizes).total):.2f}" in data["text/html"]


@pytest.mark.parametrize(
    ("models", "start", "says"),
    [
        (["llama-2-7b"], {"context": 0}, "context must be a whole number"),
        (["llama-2-7b"], {"batch_size": 2.5}, "batch_size must be a whole number"),
        ([], {}, "models must be a list"),
        ("llama-2-7b", {}, "models must be a list"),
    ],
)
def test_calculator_refuses_what_it_cannot_show_in_one_sentence(shown, models, start, says):
    with pytest.raises(ValueError, match=says):
        widgets.memory_calculator(models, **start)
    assert shown == []


def test_calculator_follows_its_controls():
    import ipywidgets

    start_ipython()
    boxes = []
    original = ipywidgets.VBox.__init__

    def keep(self, children=(), **kwargs):
        boxes.append(self)
        original(self, children, **kwargs)

    ipywidgets.VBox.__init__ = keep
    try:
        widgets.memory_calculator(["octocoder", "llama-2-7b"])
    finally:
        ipywidgets.VBox.__init__ = original
    _, precision, tokens, _, answer = boxes[0].children
    before = answer.value
    precision.value = "int8"
    assert answer.value != before
    before = answer.value
    tokens.value = 128
    assert answer.value != before


def test_choice_on_a_cpu_is_float32(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    choice = machine.choose()
    assert (choice.device.type, choice.dtype) == ("cpu", torch.float32)
    assert "float32" in str(choice)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_choice_on_a_card_follows_its_capability(monkeypatch, capability, dtype):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert machine.choose().dtype == getattr(torch, dtype)


def test_description_of_this_machine_is_complete():
    found = machine.describe()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert {"torch", "transformers"} <= set(machine.versions())


def test_recording_keeps_what_was_measured_and_where(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    monkeypatch.setattr(machine, "describe", lambda: {"gpu": "Card X", "cpu": "y"})
    path = machine.record("study", [{"seconds": 1.5}], tmp_path)
    assert path.name.startswith("study-card-x-")
    (back,) = machine.recordings("study")
    assert back["runs"] == [{"seconds": 1.5}]
    assert {"date", "versions", "command", "machine"} <= set(back)
    assert machine.recordings("other") == []


def test_the_doctor_looks_at_the_disk_that_will_hold_the_model(tmp_path, monkeypatch):
    looked = []
    usage = shutil.disk_usage

    def spy(path):
        looked.append(Path(path))
        return usage(path)

    monkeypatch.setattr(doctor.shutil, "disk_usage", spy)
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "not" / "made" / "yet"))
    (disk,) = [finding for finding in doctor.examine() if finding.what == "disk for the model"]
    assert looked == [tmp_path]
    assert str(tmp_path / "not" / "made" / "yet") in disk.detail


def test_the_doctor_imports_no_package_but_torch_to_see_what_is_installed():
    code = (
        "import sys\nfrom course_lib.doctor import examine\nfound = {f.what: f for f in examine()}\n"
        "print({'transformers', 'bitsandbytes', 'jupyterlab', 'jupyter_book'} & {*sys.modules})\n"
        "print(found['PyTorch and Transformers'].detail)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, versions = shown.stdout.splitlines()
    assert imported == "set()"
    assert versions == f"torch {version('torch')}, transformers {version('transformers')}"


def test_the_doctor_tells_what_is_not_installed(monkeypatch):
    for package in ("torch", "transformers", "jupyterlab"):
        monkeypatch.setitem(sys.modules, package, None)
    found = {finding.what: finding for finding in doctor.examine()}
    assert not any(found[what].ok for what in ("PyTorch and Transformers", "CUDA card", "JupyterLab"))
    assert "does not import" in found["CUDA card"].detail


@pytest.mark.parametrize(
    ("capability", "hip", "runs", "words"),
    [
        (None, None, False, "interpreter"),
        ((7, 5), None, False, "no tensor-core instructions for compute capability 7.5: attention runs in PyTorch"),
        ((8, 0), None, True, "Card X"),
        ((9, 0), None, True, "Card X"),
        ((9, 4), "7.0", True, "Card X"),
    ],
    ids=["no card", "T4", "A100", "H100", "MI300X"],
)
def test_the_doctor_says_whether_our_kernels_run_here(monkeypatch, capability, hip, runs, words):
    import torch

    monkeypatch.setattr(doctor, "_version", lambda package: "3.7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card X")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**33, 2**34))
    monkeypatch.setattr(torch.version, "hip", hip)
    (kernels,) = (finding for finding in doctor.examine() if finding.what == "our Triton kernels")
    assert kernels.ok is runs
    assert words in kernels.detail


def test_the_doctor_says_that_our_kernels_need_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    (kernels,) = (finding for finding in doctor.examine() if finding.what == "our Triton kernels")
    assert not kernels.ok
    assert "need Triton" in kernels.detail


def test_a_chapter_shows_the_lines_that_run():
    from course_lib.attention.cost import Cost

    text = display.excerpt(Cost.seconds, "return")
    assert text == "return max(self.flops / flops_per_second, self.bytes / bytes_per_second)"
    assert display.excerpt(Cost, "def intensity", "return").splitlines()[0] == "def intensity(self) -> float:"
    assert display.excerpt(Cost.seconds) == display.excerpt(Cost.seconds, "def seconds")


@pytest.mark.parametrize("lines", [("nowhere", ""), ("def seconds", "nowhere")])
def test_lines_that_are_not_there_are_an_error(lines):
    from course_lib.attention.cost import Cost

    with pytest.raises(ValueError, match="'nowhere', which no line"):
        display.excerpt(Cost.seconds, *lines)


def test_shown_source_is_code_in_the_book_and_text_in_a_terminal(shown):
    from course_lib.attention.cost import Cost

    display.show_source(Cost.seconds, "return")
    ((data, _),) = shown
    assert data["text/markdown"] == f"```python\n{data['text/plain']}\n```"
    assert data["text/plain"].startswith("return max(")


def test_number_formats_move_with_a_kernel_and_teach_without(shown):
    import struct

    import torch

    widgets.number_formats(0.1, largest=0.4)
    ((data, _),) = shown
    assert "application/vnd.jupyter.widget-view+json" in data
    rows = {line.split(" | ")[0]: line.split(" | ") for line in data["text/plain"].splitlines()[2:]}
    (bits,) = struct.unpack(">I", struct.pack(">f", 0.1))
    assert rows["float32"][1].replace(" ", "") == f"{bits:032b}"
    assert rows["bfloat16"][1].replace(" ", "") == rows["float32"][1].replace(" ", "")[:15] + "1"  # rounded up
    assert rows["int8"][1] == f"{32:08b}"
    for name in widgets.FLOAT_FORMATS:
        assert float(rows[name][2]) == pytest.approx(
            float(torch.tensor(0.1).to(getattr(torch, name)).float()), rel=1e-6
        )
        assert [len(part) for part in rows[name][1].split()] == [1, *widgets.FLOAT_FORMATS[name]]


@pytest.mark.parametrize("number", [0.0, -3.5, 1e-9, 1e9])
def test_number_formats_take_any_finite_number(shown, number):
    widgets.number_formats(number)
    ((data, _),) = shown
    rows = dict(line.split(" | ")[0:3:2] for line in data["text/plain"].splitlines()[2:])
    assert float(rows["float32"]) == pytest.approx(number, rel=1e-6)
    assert abs(float(rows["int8"])) <= 1


def test_number_formats_follow_their_fields(shown, monkeypatch):
    import ipywidgets

    boxes = []
    original = ipywidgets.VBox.__init__
    monkeypatch.setattr(
        ipywidgets.VBox,
        "__init__",
        lambda self, children=(), **k: (boxes.append(self), original(self, children, **k))[1],
    )
    widgets.number_formats()
    number, largest, answer = boxes[0].children
    for control, value in ((number, 0.3), (largest, 2.0)):
        before = answer.value
        control.value = value
        assert answer.value != before
    before = answer.value
    number.value = float("nan")  # shows what it showed before
    assert answer.value == before


@pytest.mark.parametrize(
    ("number", "largest", "says"), [(float("inf"), 1.0, "value must be"), (0.1, 0.0, "largest must be")]
)
def test_number_formats_refuse_what_they_cannot_show(shown, number, largest, says):
    with pytest.raises(ValueError, match=says):
        widgets.number_formats(number, largest=largest)
    assert shown == []


def test_tiles_move_with_a_kernel_and_teach_without(shown):
    from course_lib.attention.cost import flash_cost

    widgets.attention_tiles(sequence_length=4096, head_dim=128)
    ((data, _),) = shown
    assert "application/vnd.jupyter.widget-view+json" in data
    for rows in widgets.TILE_ROWS:
        assert f"{flash_cost(4096, 4096, 128, block_q=rows).bytes / 2**20:,.0f}" in data["text/html"]
    assert "T4" in data["text/plain"]


def test_tiles_follow_their_controls(shown, monkeypatch):
    import ipywidgets

    from course_lib.attention.cost import flash_cost

    boxes = []
    original = ipywidgets.VBox.__init__
    monkeypatch.setattr(
        ipywidgets.VBox,
        "__init__",
        lambda self, children=(), **k: (boxes.append(self), original(self, children, **k))[1],
    )
    widgets.attention_tiles()
    *controls, answer = boxes[0].children
    before = answer.value
    next(control for control in controls if control.description == "block_q").value = 32
    assert answer.value != before
    assert f"{flash_cost(16384, 16384, 128, block_q=32).bytes / 2**20:,.0f}" in answer.value


def test_tiles_refuse_a_size_that_is_none(shown):
    with pytest.raises(ValueError, match="head_dim must be a whole number"):
        widgets.attention_tiles(head_dim=0)
    assert shown == []


def test_masks_are_drawn_with_a_kernel_and_counted_without(shown):
    widgets.attention_masks(query_len=3, kv_len=6, sliding_window=2)
    ((data, _),) = shown
    assert "application/vnd.jupyter.widget-view+json" in data
    lines = dict(line.split(" | ", 1) for line in data["text/plain"].splitlines() if " | " in line)
    assert lines["nothing hidden"] == "6, 6, 6 | 18 of 18"
    assert lines["causal"] == "4, 5, 6 | 15 of 18"
    assert lines["causal, window of 2"] == "2, 2, 2 | 6 of 18"
    assert lines["causal, two keys padded on the left"] == "2, 3, 4 | 9 of 18"


def test_masks_follow_their_controls(shown, monkeypatch):
    import ipywidgets

    boxes = []
    original = ipywidgets.VBox.__init__
    monkeypatch.setattr(
        ipywidgets.VBox,
        "__init__",
        lambda self, children=(), **k: (boxes.append(self), original(self, children, **k))[1],
    )
    widgets.attention_masks(query_len=2, kv_len=5, sliding_window=2)
    *controls, answer = boxes[0].children
    by_name = {control.description: control for control in controls}
    assert answer.value.count("●") == 4 + 5
    by_name["use the window"].value = True
    assert answer.value.count("●") == 2 + 2
    by_name["padded"].value = 4
    assert answer.value.count("●") == 0 + 1
    by_name["query_len"].value = 7  # two of the queries stand before the first key
    assert "query at -2" in answer.value


@pytest.mark.parametrize("size", [0, 13, True, 2.0])
def test_masks_refuse_a_size_that_cannot_be_drawn(shown, size):
    with pytest.raises(ValueError, match="kv_len must be a whole number from 1 to 12"):
        widgets.attention_masks(kv_len=size)
    assert shown == []


def test_the_fastest_call_counts_and_the_first_is_only_a_warm_up(monkeypatch):
    from course_lib import benchmark

    clock, calls = iter([10.0, 15.0, 20.0, 22.0, 30.0, 39.0]), []
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(clock))
    assert benchmark.fastest(lambda: calls.append(1), rounds=3) == 2.0
    assert len(calls) == 4


def test_growth_is_told_by_its_parts_and_by_its_exponent():
    from course_lib import benchmark

    parts = benchmark.terms({n: 7 + 3 * n + 2 * n**2 for n in (10, 20, 50, 100)})
    assert parts == pytest.approx((7, 300, 20_000))
    assert parts.quadratic_share == pytest.approx(20_000 / 20_307)
    assert benchmark.exponent({n: 5 * n**1.5 for n in (3, 8, 90)}) == pytest.approx(1.5)
