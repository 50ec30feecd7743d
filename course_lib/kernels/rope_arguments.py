"""What rotations accept, whoever computes them: the kernel here or `course_lib.positions.apply_rope`. Needs no Triton."""

from __future__ import annotations

from typing import Literal

import torch

Layout = Literal["half", "interleaved"]
LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")


def check_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout, name: str = "x") -> None:
    """Raise a ValueError if a layout is unknown, or if tables do not fit the tensor that the caller calls ``name``."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; accepted are {', '.join(LAYOUTS)}")
    pairs = cos.shape[-1]
    if cos.shape != sin.shape:
        raise ValueError(f"cos has shape {list(cos.shape)} and sin {list(sin.shape)}; they must be equal")
    if 2 * pairs > x.shape[-1]:
        raise ValueError(
            f"cos has {pairs} columns and {name} a head_dim of {x.shape[-1]}; one column for each pair, at most "
            f"{x.shape[-1] // 2}, is accepted"
        )
    if cos.shape[-2] != x.shape[-2]:
        raise ValueError(f"cos has {cos.shape[-2]} positions and {name} {x.shape[-2]}; they must be equal")
