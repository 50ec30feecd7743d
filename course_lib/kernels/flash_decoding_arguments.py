"""What `course_lib.kernels.flash_decoding` takes: quantised keys and values, the rules of a call, and checks. Needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

#: The most query rows of a call.
MOST_ROWS = 16


@dataclass(frozen=True)
class Codes:
    """Quantised keys or values: ``value = offset + scale * code``.

    Attributes
    ----------
    codes : Tensor
        uint8, ``[..., tokens, head_dim]`` of 8 bits, or ``[..., tokens, head_dim // 2]`` of 4 bits: channel ``2 i`` in the high four
        bits of byte ``i``, channel ``2 i + 1`` in the low four.
    scale, offset : Tensor
        Floating, usually bfloat16. Axis ``"channel"``: ``[..., tokens // group, head_dim]``, one for each channel and group of
        tokens. Axis ``"token"``: ``[..., tokens, head_dim // group]``, one for each token and group of channels.
    bits : int
        8 or 4.
    group : int
        Tokens or channels that share a scale.
    axis : str
        ``"channel"`` or ``"token"``.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    bits: int
    group: int
    axis: Literal["channel", "token"]

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values, ``[..., tokens, head_dim]``, computed in ``dtype``."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2)
        *leading, tokens, head_dim = codes.shape
        if self.axis == "channel":
            grouped, last = codes.view(*leading, tokens // self.group, self.group, head_dim), -2
        else:
            grouped, last = codes.view(*leading, tokens, head_dim // self.group, self.group), -1
        scale, offset = (constant.to(dtype).unsqueeze(last) for constant in (self.scale, self.offset))
        return torch.addcmul(offset, scale, grouped.to(dtype)).reshape(*leading, tokens, head_dim)


Store = torch.Tensor | Codes


class Rules(NamedTuple):
    """What a call asks for besides its tensors; ``slopes`` is float32, ``[1 or batch, query_heads]``."""

    ahead: int
    scale: float
    window: int | None
    sinks: int
    softcap: float | None
    slopes: torch.Tensor | None


def shape(store: Store) -> tuple[int, int, int, int]:
    """Return the shape of keys or values: sequences or blocks, heads, tokens and channels."""
    first, heads, tokens, dim = store.codes.shape if isinstance(store, Codes) else store.shape
    return first, heads, tokens, dim * 2 if isinstance(store, Codes) and store.bits == 4 else dim


def check(
    q: torch.Tensor, k: Store, v: Store, lengths: torch.Tensor | None, table: torch.Tensor | None, rules: Rules
) -> None:
    """Raise a TypeError or ValueError for arguments of `course_lib.kernels.flash_decoding.flash_decoding` that do not fit."""
    device, dtype = q.device, q.dtype
    for name, store in (("k", k), ("v", v)):
        tensor = _check_codes(name, store, device) if isinstance(store, Codes) else store
        if q.ndim != 4 or tensor.ndim != 4:
            raise ValueError(f"q has {q.ndim} axes and {name} {tensor.ndim}; 4 and 4 are accepted")
        if tensor is store and tensor.dtype != dtype:
            raise TypeError(f"q is {dtype} and {name} {tensor.dtype}; they must be equal, or {name} Codes")
        if tensor.device != device:
            raise ValueError(f"q is on {device} and {name} on {tensor.device}; they must be on one device")
    (batch, query_heads, rows, head_dim), keys, values = q.shape, shape(k), shape(v)
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"q has {rows} rows; 1 to {MOST_ROWS} are accepted")
    if keys[:3] != values[:3] or keys[3] != head_dim or not keys[1] or query_heads % keys[1]:
        raise ValueError(
            f"q has shape {list(q.shape)}, k {list(keys)} and v {list(values)}; the heads of q must be a multiple of those of k, their "
            "head_dim one, and the first three axes of k and v equal"
        )
    if table is None and keys[0] != batch:
        raise ValueError(f"q has {batch} sequences and k {keys[0]}; they must be equal without a block_table")
    for name, numbers, axes in (("lengths", lengths, "[batch]"), ("block_table", table, "[batch, blocks]")):
        if numbers is None:
            continue
        if numbers.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} is {numbers.dtype}; torch.int32 and torch.int64 are accepted")
        if numbers.shape[:1] != q.shape[:1] or numbers.ndim != axes.count(",") + 1 or numbers.device != q.device:
            raise ValueError(
                f"{name} has shape {list(numbers.shape)} on {numbers.device}; {axes} with a batch of {batch} on {q.device} is accepted"
            )
    if rules.ahead < 0 or rules.sinks < 0 or (rules.window is not None and rules.window < 1):
        raise ValueError(
            f"ahead is {rules.ahead}, sinks {rules.sinks} and sliding_window {rules.window}; accepted are at least 0, 0 and 1, or no "
            "window"
        )
    if rules.softcap is not None and not rules.softcap > 0:
        raise ValueError(f"softcap is {rules.softcap}; a number above 0 is accepted, or None")
    slopes = rules.slopes
    if slopes is not None and (
        tuple(slopes.shape) not in {(1, query_heads), (batch, query_heads)} or slopes.device != q.device
    ):
        raise ValueError(
            f"alibi_slopes has shape {list(slopes.shape)} on {slopes.device}; [{query_heads}] or [1 or {batch}, {query_heads}] on "
            f"{q.device} is accepted"
        )


def _check_codes(name: str, store: Codes, device: torch.device) -> torch.Tensor:
    """Raise a ValueError for codes that do not fit together; return them."""
    if store.bits not in (4, 8) or store.axis not in ("channel", "token") or store.codes.dtype != torch.uint8:
        raise ValueError(
            f"{name} has bits {store.bits}, axis {store.axis!r} and codes of {store.codes.dtype}; accepted are 4 or 8, 'channel' or "
            "'token', and torch.uint8"
        )
    if store.codes.ndim == 4:
        first, heads, tokens, dim = shape(store)
        along = tokens if store.axis == "channel" else dim
        groups = along // store.group if store.group > 0 else -1
        needed = (first, heads, groups, dim) if store.axis == "channel" else (first, heads, tokens, groups)
        if groups * store.group != along or not tuple(store.scale.shape) == tuple(store.offset.shape) == needed:
            raise ValueError(
                f"{name} has codes of {[first, heads, tokens, dim]} in groups of {store.group} by {store.axis}, a scale of "
                f"{list(store.scale.shape)} and an offset of {list(store.offset.shape)}; groups must divide their axis, and both have "
                "one number for each"
            )
    if not store.scale.device == store.offset.device == device:
        raise ValueError(
            f"{name} has its scale on {store.scale.device} and its offset on {store.offset.device}; q is on {device}"
        )
    return store.codes
