"""The checks behind every attention call: one sentence for each argument that does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch

from course_lib.attention.rules import Rules


def check_rules(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    attention_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Rules:
    """Check the arguments of :func:`course_lib.attention.attention`; errors as there. Return its rules in normal form."""
    _check_tensors(q, k, v, axes=4)
    batch, query_heads, query_len, head_dim = q.shape
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ValueError(f"q has batch size {batch}, k {k.shape[0]} and v {v.shape[0]}; they must be equal")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k has length {k.shape[2]} and v {v.shape[2]}; they must be equal")
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; True or False is needed")
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    elif not _is_real(scale):
        raise ValueError(f"scale is {scale!r}; a finite number is needed")
    if softcap is not None and not (_is_real(softcap) and softcap > 0):
        raise ValueError(f"softcap is {softcap!r}; a positive number, or None for no cap, is needed")
    if sliding_window is not None and not (_is_whole(sliding_window) and sliding_window >= 1):
        raise ValueError(f"sliding_window is {sliding_window!r}; a whole number of at least 1, or None, is needed")
    return Rules(
        scale=float(scale),
        causal=causal,
        sliding_window=sliding_window,
        softcap=None if softcap is None else float(softcap),
        alibi_slopes=_check_slopes(alibi_slopes, batch, query_heads, q.device),
        attention_mask=_check_mask(attention_mask, (batch, query_heads, query_len, k.shape[2]), q.device),
    )


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: int) -> None:
    """Check kinds, dtypes, devices, heads and head sizes of q, k and v, heads being axis 1 and sizes the last."""
    layout = "[batch, heads, length, head_dim]" if axes == 4 else "[total_tokens, heads, head_dim]"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is of type {type(tensor).__name__}; a torch.Tensor is needed")
        if tensor.ndim != axes:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; {axes} axes {layout} are needed")
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise TypeError(f"{name} is {_name(tensor.dtype)}; float16, bfloat16, float32 or float64 is needed")
        if tensor.dtype != q.dtype:
            raise TypeError(f"q is {_name(q.dtype)} and {name} {_name(tensor.dtype)}; they must be equal")
        if tensor.device != q.device:
            raise TypeError(f"q is on {q.device} and {name} on {tensor.device}; they must be on one device")
        if not 1 <= tensor.shape[-1] <= 256:
            raise ValueError(f"{name} has head_dim {tensor.shape[-1]}; 1 to 256 is accepted")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]} and k {k.shape[-1]}; they must be equal")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads and v {v.shape[1]}; they must be equal")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which k's {k.shape[1]} heads do not divide; a multiple is needed")


def check_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    causal: bool,
    scale: float | None,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Rules:
    """Check the arguments of :func:`course_lib.attention.attention_varlen`, all but the values of the cumulative lengths."""
    _check_tensors(q, k, v, axes=3)
    for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(lengths, torch.Tensor) or lengths.dtype not in (torch.int32, torch.int64):
            kind = _name(lengths.dtype) if isinstance(lengths, torch.Tensor) else type(lengths).__name__
            raise TypeError(f"{name} is {kind}; an int32 or int64 tensor is needed")
        if lengths.ndim != 1 or len(lengths) == 0:
            raise ValueError(f"{name} has shape {list(lengths.shape)}; [sequences + 1] is needed")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_q has {len(cu_seqlens_q)} entries and cu_seqlens_k {len(cu_seqlens_k)}; they must be equal"
        )
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    rules = check_rules(q, k, v, causal, scale, None, None, sliding_window, softcap)
    slopes = _check_slopes(alibi_slopes, len(cu_seqlens_q) - 1, q.shape[1], q.device)
    return replace(rules, alibi_slopes=slopes)


def check_starts(name: str, cu_seqlens: torch.Tensor, total: int, longest: int | None) -> list[int]:
    """Check the values of cumulative lengths, waiting for the device if they are on one, and return them.

    Parameters
    ----------
    name : str
        ``"q"`` or ``"k"``.
    cu_seqlens : Tensor
        Cumulative lengths.
    total : int
        Tokens in the packed tensor.
    longest : int, optional
        The ``max_seqlen`` that the caller gave.

    Raises
    ------
    ValueError
        If they do not run from 0 to the total without falling, or a sequence is longer than ``longest``.
    """
    starts: list[int] = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    if starts[0] != 0 or starts[-1] != total or any(length < 0 for length in lengths):
        raise ValueError(f"cu_seqlens_{name} is {starts!r:.80}; it must start at 0, never fall and end at {total}")
    if longest is not None and longest < max(lengths, default=0):
        raise ValueError(f"max_seqlen_{name} is {longest}; the longest sequence has {max(lengths)} tokens")
    return starts


def _check_slopes(
    slopes: torch.Tensor | None, batch: int, query_heads: int, device: torch.device
) -> torch.Tensor | None:
    """Return slopes as float32 ``[1 or batch, query_heads]`` on the device."""
    if slopes is None:
        return None
    if not isinstance(slopes, torch.Tensor) or not slopes.is_floating_point():
        raise TypeError(f"alibi_slopes is {slopes!r:.60}; a floating tensor is needed, see positions.alibi_slopes")
    if slopes.shape not in ((query_heads,), (1, query_heads), (batch, query_heads)):
        raise ValueError(
            f"alibi_slopes has shape {list(slopes.shape)}; [{query_heads}] (query heads) or [{batch}, {query_heads}] is needed"
        )
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires a gradient; slopes are constants, detach() them")
    slopes = slopes.to(device=device, dtype=torch.float32)
    return slopes if slopes.ndim == 2 else slopes[None]


def _check_mask(
    mask: torch.Tensor | None, shape: tuple[int, int, int, int], device: torch.device
) -> torch.Tensor | None:
    """Return a mask with four axes."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = _name(mask.dtype) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(
            f"attention_mask is {kind}; a boolean tensor (True attends) or a floating one (added) is needed, "
            "such as mask.bool()"
        )
    if mask.device != device:
        raise TypeError(f"q is on {device} and attention_mask on {mask.device}; they must be on one device")
    sizes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if mask.ndim > 4 or any(size not in (1, full) for size, full in zip(sizes, shape, strict=True)):
        hint = ""
        if mask.ndim == 2 and tuple(mask.shape) == (shape[0], shape[3]):
            hint = "; a padding mask is given as mask[:, None, None, :]"
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, which does not broadcast to "
            f"[batch, query_heads, query_len, kv_len] = {list(shape)}{hint}"
        )
    return mask.view(sizes)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
