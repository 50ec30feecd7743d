"""What notebooks show: figures, tables, glued numbers, the calculator, and the line that says what runs where."""

import re
from html.parser import HTMLParser

import pytest
from IPython.testing.globalipapp import start_ipython

from course_lib import display, machine, plotting, widgets


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


def test_ragged_table_is_refused():
    with pytest.raises(ValueError, match="2 columns"):
        display.table(["a", "b"], [["only one"]])


def test_glued_number_is_found_by_the_book_and_shown_by_nothing(shown):
    from myst_nb.core.variables import format_plain_text

    display.glue(peak="28.95 GiB", tokens=f"{1480:,}", count=7)
    for (data, metadata), name, text in zip(
        shown, ("peak", "tokens", "count"), ("28.95 GiB", "1,480", "7"), strict=True
    ):
        ((mime, value),) = data.items()
        assert mime == "application/papermill.record/text/plain"
        assert format_plain_text(value, "s") == text
        assert metadata["scrapbook"]["name"] == name


def test_calculator_moves_with_a_kernel_and_teaches_without(shown):
    from course_lib.memory import bytes_to_giga_bytes, estimate

    widgets.memory_calculator(["octocoder", "llama-2-7b"], context=2048)
    ((data, _),) = shown
    assert "application/vnd.jupyter.widget-view+json" in data
    for model in ("octocoder", "llama-2-7b"):
        total = estimate(model, quantization="nf4", prompt_tokens=2048).total
        assert f"{bytes_to_giga_bytes(total):.2f}" in data["text/html"]


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
