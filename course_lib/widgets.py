"""Widgets that move where there is a kernel and still teach where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_lib.display import forms, table

CALCULATOR_DTYPES = ("float32", "bfloat16", "int8", "nf4")


def _precision(name: str) -> dict[str, Any]:
    return {"quantization": name} if name in ("int8", "fp4", "nf4") else {"dtype": name}


def memory_calculator(models: Sequence[str], *, context: int = 4096, batch_size: int = 1) -> None:
    """Show the memory of a model at a precision, context and batch size: sliders with a kernel, a table without.

    Parameters
    ----------
    models : sequence of str
        Published names, as :func:`course_lib.memory.estimate` takes them.
    context, batch_size : int
        Where the sliders start, and what the table is made for; the sliders move in powers of two besides.

    Raises
    ------
    ValueError
        If a model is not a published name, or there is none, or `context` or `batch_size` is not a whole number of at least 1.
    """
    if isinstance(models, str) or not models:
        raise ValueError(f"models must be a list of at least one name, got {models!r}")
    for name, value in (("context", context), ("batch_size", batch_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    import ipywidgets
    from IPython.display import display

    from course_lib.memory import bytes_to_giga_bytes, estimate

    rows = []
    for model in models:
        found = [
            estimate(model, **_precision(p), prompt_tokens=context, batch_size=batch_size) for p in CALCULATOR_DTYPES
        ]
        rows.append([model, *(f"{bytes_to_giga_bytes(one.total):.2f}" for one in found)])
    still = forms(
        ["model", *CALCULATOR_DTYPES],
        rows,
        caption=f"Total in GiB at {context:,} tokens of context, batch size {batch_size}. Run the notebook to move the sliders.",
    )
    pick = ipywidgets.Dropdown(options=list(models), description="model")
    precision = ipywidgets.Dropdown(options=CALCULATOR_DTYPES, value="bfloat16", description="weights")

    def slider(start: int, powers: range, description: str) -> Any:
        options = sorted({start, *(2**power for power in powers)})
        return ipywidgets.SelectionSlider(options=options, value=start, description=description)

    tokens, batch = slider(context, range(7, 18), "context"), slider(batch_size, range(9), "batch")
    answer = ipywidgets.HTML()

    def recompute(_: Any = None) -> None:
        found = estimate(pick.value, **_precision(precision.value), prompt_tokens=tokens.value, batch_size=batch.value)
        cells = [[name, f"{bytes_to_giga_bytes(size):.2f}"] for name, size in found.parts.items()]
        answer.value = table(["part", "GiB"], cells)

    for control in (pick, precision, tokens, batch):
        control.observe(recompute, names="value")
    recompute()
    live = ipywidgets.VBox([pick, precision, tokens, batch, answer])
    display({**live._repr_mimebundle_(), **still}, raw=True)
