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


#: Bits of exponent and of fraction; a sign stands before them.
FLOAT_FORMATS = {
    "float32": (8, 23),
    "bfloat16": (8, 7),
    "float16": (5, 10),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}


def number_formats(value: float = 0.1, *, largest: float = 1.0) -> None:
    """Show how each format stores a number, bit by bit: two fields with a kernel, a table without.

    Parameters
    ----------
    value : float
        The number that the fields start with, and the table is made for.
    largest : float
        For int8, the largest magnitude among the numbers that share its scale.

    Raises
    ------
    ValueError
        If `value` is not finite, or `largest` not a positive number.
    """
    import math

    for name, number, good in (("value", value, math.isfinite(value)), ("largest", largest, 0 < largest < math.inf)):
        if not good:
            raise ValueError(f"{name} must be a {'finite' if name == 'value' else 'positive'} number, got {number!r}")
    import ipywidgets
    from IPython.display import display

    headers = ["format", "sign, exponent, fraction", "stored value", "relative error"]
    still = forms(
        headers,
        _stored(value, largest),
        caption=f"The number {value:g}; int8 with a scale for magnitudes up to {largest:g}. Run the notebook to type others.",
    )
    wanted = ipywidgets.FloatText(value=value, description="number")
    scale = ipywidgets.BoundedFloatText(value=largest, min=1e-30, max=1e30, description="int8 up to")
    answer = ipywidgets.HTML()

    def recompute(_: Any = None) -> None:
        if math.isfinite(wanted.value):
            answer.value = table(headers, _stored(wanted.value, scale.value))

    for control in (wanted, scale):
        control.observe(recompute, names="value")
    recompute()
    live = ipywidgets.VBox([wanted, scale, answer])
    display({**live._repr_mimebundle_(), **still}, raw=True)


def _stored(value: float, largest: float) -> list[list[str]]:
    """Return, for each format, the bits of a number in groups, the value they stand for, and how far it is off."""
    import torch

    found = []
    for name, (exponent, fraction) in FLOAT_FORMATS.items():
        width = 1 + exponent + fraction
        kept = torch.tensor([value], dtype=torch.float32).to(getattr(torch, name))
        number = int(kept.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[width])) % 2**width
        bits = f"{number:0{width}b}"
        found.append((name, f"{bits[0]} {bits[1 : 1 + exponent]} {bits[1 + exponent :]}", float(kept.float())))
    code = max(-127, min(127, round(value / largest * 127)))
    found.append(("int8", f"{code % 256:08b}", code * largest / 127))
    return [
        [name, bits, f"{stored:.7g}", f"{abs(stored - value) / abs(value):.1e}" if value else "0"]
        for name, bits, stored in found
    ]


TILE_ROWS = (16, 32, 64, 128, 256)


def attention_tiles(*, sequence_length: int = 16384, head_dim: int = 128) -> None:
    """Show what a block of queries saves in traffic and takes on the chip: sliders with a kernel, a table without.

    Parameters
    ----------
    sequence_length, head_dim : int
        Where the sliders start, and what the table is made for.

    Raises
    ------
    ValueError
        If a size is not a whole number of at least 1.
    """
    import ipywidgets
    from IPython.display import display

    names = ("bytes moved, MiB", "FLOP/byte", "shared memory, KiB", "registers, KiB", "too much for")
    tile = {"tokens": sequence_length, "head_dim": head_dim, "block_k": 64, "stages": 2}
    still = forms(
        ["queries in a block", *names],
        [[rows, *_tile(block_q=rows, **tile)] for rows in TILE_ROWS],
        caption=f"One head, {sequence_length:,} tokens, head_dim {head_dim}, 16 bits; blocks of {tile['block_k']} keys, two in flight. "
        "Run the notebook to move the sliders.",
    )
    sizes = {
        "block_q": (128, TILE_ROWS),
        "block_k": (64, (16, 32, 64, 128)),
        "stages": (2, (1, 2, 3, 4)),
        "head_dim": (head_dim, (32, 64, 128, 256)),
        "tokens": (sequence_length, tuple(2**power for power in range(9, 18))),
    }
    controls = {
        name: ipywidgets.SelectionSlider(options=sorted({start, *options}), value=start, description=name)
        for name, (start, options) in sizes.items()
    }
    answer = ipywidgets.HTML()

    def recompute(_: Any = None) -> None:
        found = _tile(**{name: control.value for name, control in controls.items()})
        answer.value = table(["one block of queries", ""], list(zip(names, found, strict=True)))

    for control in controls.values():
        control.observe(recompute, names="value")
    recompute()
    live = ipywidgets.VBox([*controls.values(), answer])
    display({**live._repr_mimebundle_(), **still}, raw=True)


def _tile(*, tokens: int, head_dim: int, block_q: int, block_k: int, stages: int) -> list[str]:
    """Return traffic, intensity, room on the chip and the NVIDIA cards whose shared memory is too small, as text."""
    from course_lib.attention.cost import flash_cost, on_chip_bytes
    from course_lib.kernels._targets import TARGETS

    cost = flash_cost(tokens, tokens, head_dim, block_q=block_q, block_k=block_k)
    shared, registers = on_chip_bytes(head_dim, block_q=block_q, block_k=block_k, stages=stages)
    cards = [target for target in TARGETS.values() if target.backend == "cuda"]
    small = [target.cards for target in cards if target.shared_per_block < shared]
    return [
        f"{cost.bytes / 2**20:,.0f}",
        f"{cost.intensity:.0f}",
        f"{shared / 2**10:.0f}",
        f"{registers / 2**10:.0f}",
        ", ".join(small) or "none of them",
    ]


def attention_masks(*, query_len: int = 4, kv_len: int = 7, sliding_window: int = 3) -> None:
    """Show which keys each query sees: sliders and a picture with a kernel, a table of the usual masks without.

    Parameters
    ----------
    query_len, kv_len, sliding_window : int
        Where the sliders start, and what the table is made for; each from 1 to 12.

    Raises
    ------
    ValueError
        If a size is not a whole number from 1 to 12.
    """
    sizes = {"query_len": query_len, "kv_len": kv_len, "sliding_window": sliding_window}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 12:
            raise ValueError(f"{name} must be a whole number from 1 to 12, got {value!r}")
    import ipywidgets
    from IPython.display import display

    usual: dict[str, dict[str, Any]] = {
        "nothing hidden": {},
        "causal": {"causal": True},
        f"causal, window of {sliding_window}": {"causal": True, "sliding_window": sliding_window},
        f"window of {sliding_window}": {"sliding_window": sliding_window},
        "causal, two keys padded on the left": {"causal": True, "padded": 2},
    }
    rows = []
    for name, options in usual.items():
        counts = [sum(row) for row in _seen(query_len, kv_len, **options)]
        rows.append([name, ", ".join(map(str, counts)), f"{sum(counts)} of {query_len * kv_len}"])
    still = forms(
        ["mask", "keys that each query sees", "pairs computed"],
        rows,
        caption=f"The last {query_len} of {kv_len} positions ask. Run the notebook to draw masks with sliders.",
    )
    controls: dict[str, Any] = {
        name: ipywidgets.IntSlider(value=value, min=1, max=12, description=name.removeprefix("sliding_"))
        for name, value in sizes.items()
    }
    controls["padded"] = ipywidgets.IntSlider(value=0, min=0, max=12, description="padded")
    controls["causal"] = ipywidgets.Checkbox(value=True, description="causal")
    windowed = ipywidgets.Checkbox(value=False, description="use the window")
    answer = ipywidgets.HTML()

    def redraw(_: Any = None) -> None:
        options = {name: control.value for name, control in controls.items()}
        if not windowed.value:
            options["sliding_window"] = None
        seen = _seen(**options)
        first = options["kv_len"] - options["query_len"]
        lines = [[f"query at {first + row}", *("●" if key else "" for key in keys)] for row, keys in enumerate(seen)]
        answer.value = table(["key at", *range(options["kv_len"])], lines)

    for control in (*controls.values(), windowed):
        control.observe(redraw, names="value")
    redraw()
    live = ipywidgets.VBox([*controls.values(), windowed, answer])
    display({**live._repr_mimebundle_(), **still}, raw=True)


def _seen(query_len: int, kv_len: int, *, padded: int = 0, **rules: Any) -> list[list[bool]]:
    """Return which keys each query sees, as :func:`course_lib.attention.attention` has it; `padded` keys on the left are hidden."""
    import torch

    from course_lib.attention import attention

    # All scores are equal and the values are the identity, so a row of the output is the row of weights.
    q, k = torch.zeros(1, 1, query_len, 1), torch.zeros(1, 1, kv_len, 1)
    real = (torch.arange(kv_len) >= padded)[None, None, None]
    weights = attention(q, k, torch.eye(kv_len)[None, None], attention_mask=real, backend="reference", **rules)
    return [[weight > 0 for weight in row] for row in weights[0, 0].tolist()]
