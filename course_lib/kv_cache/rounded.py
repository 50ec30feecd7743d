"""Caches that round as codes would, but keep all in full: what each way of quantising loses can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from course_lib.kv_cache.base import KVCache
from course_lib.kv_cache.codes import Axis, channel_group, check_options, decode, encode
from course_lib.kv_cache.dynamic import GrowingLayer


class RoundedLayer(GrowingLayer):
    """A growing layer whose older tokens are rounded as codes would round them, but kept in full.

    Parameters
    ----------
    window : int, optional
        How many tokens a query sees, itself included.
    bits, group_size, residual_length, keys, values, again
        See :class:`RoundedCache`.
    """

    def __init__(
        self,
        window: int | None = None,
        *,
        bits: int,
        group_size: int,
        residual_length: int,
        keys: str,
        values: str,
        again: bool,
    ) -> None:
        super().__init__(window)
        self.bits, self.group_size, self.residual_length = bits, group_size, residual_length
        self.kinds, self.again = (keys, values), again

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super()._begin(keys, values)
        # Of the tokens held the first are rounded; groups began so many tokens before these.
        self._rounded = self._dropped = 0

    def trim(self) -> None:
        super().trim()
        count = (self.held - self._rounded - self.residual_length) // self.group_size * self.group_size
        if count <= 0:
            return
        start, end = 0 if self.again else self._rounded, self._rounded + count
        self._keys, self._values = self._keys.clone(), self._values.clone()  # `update` returned a part of the old ones
        for tensor, kind in zip(self._read(), self.kinds, strict=True):
            tensor[:, :, start:end] = rounded(tensor[:, :, start:end], self.bits, kind, self.group_size)
        self._rounded = end

    def _drop_first(self, count: int) -> None:
        super()._drop_first(count)
        self._rounded, self._dropped = max(self._rounded - count, 0), self._dropped + count
        if not self._rounded:
            self._dropped = 0

    def _drop_last(self, count: int) -> None:
        super()._drop_last(count)
        if self.held - count < self._rounded:
            groups = (self._dropped + self.held - count) // self.group_size
            self._rounded = max(groups * self.group_size - self._dropped, 0)
            if not self._rounded:
                self._dropped = 0

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, plain = super().state()
        return tensors, plain | {"rounded": self._rounded, "dropped": self._dropped}

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
        super().restore(tensors, plain)
        self._rounded, self._dropped = int(plain["rounded"]), int(plain["dropped"])


def rounded(tensor: torch.Tensor, bits: int, kind: str, group_size: int) -> torch.Tensor:
    """Return ``[batch, kv_heads, tokens, head_dim]`` rounded in groups of one channel, of one token, or of the whole tensor."""
    if kind == "tensor":
        flat = tensor.reshape(1, -1)
        codes = encode(flat, bits, flat.shape[1] + (flat.shape[1] % 2 if bits == 4 else 0), "token")
        return decode(codes, torch.empty_like(flat)).view_as(tensor)
    axis: Axis = "channel" if kind == "channel" else "token"
    size = group_size if kind == "channel" else channel_group(tensor.shape[3], bits, group_size)
    return decode(encode(tensor, bits, size, axis), torch.empty_like(tensor))


class RoundedCache(KVCache):
    """The damage of quantising without its saving: every value is what codes would make of it, but is kept in the model's dtype.

    With its default options it holds, to the last bit, what `QuantizedCache` holds. The others are ways that lose more, for chapter 09 to
    compare.

    Parameters
    ----------
    config : PretrainedConfig
        The model's.
    scheme, group_size, residual_length
        As for `QuantizedCache`.
    keys, values : {"channel", "token", "tensor"}
        What shares a grid: a channel of `group_size` tokens, channels of one token, or all values that are rounded together.
    again : bool
        Whether all that is stored is rounded anew with each new group, as Transformers' own `QuantizedLayer` does, instead of once.
        For models without windows.

    Raises
    ------
    ValueError
        If an option is not accepted.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        scheme: str = "int4",
        group_size: int = 64,
        residual_length: int = 32,
        keys: str = "channel",
        values: str = "token",
        again: bool = False,
    ) -> None:
        options: dict[str, Any] = {"group_size": group_size, "residual_length": residual_length}
        bits = check_options(scheme, **options)
        for name, kind in (("keys", keys), ("values", values)):
            if kind not in ("channel", "token", "tensor"):
                raise ValueError(f"{name} is {kind!r}; accepted are channel, token and tensor")
        options |= {"keys": keys, "values": values, "again": again}

        def layer(window: int | None) -> RoundedLayer:
            if again and window is not None:
                raise ValueError(
                    f"again is True, but the model has a window of {window}; only models without are accepted"
                )
            return RoundedLayer(window, bits=bits, **options)

        super().__init__(config, layer, scheme=scheme, **options)
