"""Widgets that move where there is a kernel and still teach where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_lib.display import table

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
        Where the sliders start, and what the table is made for.
    """
    import ipywidgets
    from IPython.display import display

    from course_lib.memory import bytes_to_giga_bytes, estimate

    rows = []
    for model in models:
        found = [
            estimate(model, **_precision(p), prompt_tokens=context, batch_size=batch_size) for p in CALCULATOR_DTYPES
        ]
        rows.append([model, *(f"{bytes_to_giga_bytes(one.total):.2f}" for one in found)])
    still = table(
        ["model", *CALCULATOR_DTYPES],
        rows,
        caption=f"Total in GiB at {context:,} tokens of context, batch size {batch_size}. Run the notebook to move the sliders.",
    )
    pick = ipywidgets.Dropdown(options=list(models), description="model")
    precision = ipywidgets.Dropdown(options=CALCULATOR_DTYPES, value="bfloat16", description="weights")
    tokens = ipywidgets.SelectionSlider(
        options=[2**power for power in range(7, 18)], value=context, description="context"
    )
    batch = ipywidgets.SelectionSlider(options=[2**power for power in range(9)], value=batch_size, description="batch")
    answer = ipywidgets.HTML()

    def recompute(_: Any = None) -> None:
        found = estimate(pick.value, **_precision(precision.value), prompt_tokens=tokens.value, batch_size=batch.value)
        parts = ("weights", "quantization_constants", "kv_cache", "activations", "workspace", "total")
        cells = [[part.replace("_", " "), f"{bytes_to_giga_bytes(getattr(found, part)):.2f}"] for part in parts]
        answer.value = table(["part", "GiB"], cells)

    for control in (pick, precision, tokens, batch):
        control.observe(recompute, names="value")
    recompute()
    live = ipywidgets.VBox([pick, precision, tokens, batch, answer])
    display({**live._repr_mimebundle_(), "text/html": still, "text/plain": still}, raw=True)
