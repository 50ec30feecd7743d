"""A cache that grows with its text: room is made ahead, so that a token costs its own bytes rather than a copy of all."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from course_lib.kv_cache.base import CacheLayer, KVCache, Pair

#: Room is made for an eighth more than is needed, in whole steps: memory is lost to at most that, and a token moves about eight times.
GROWTH, STEP = 9 / 8, 64


def _room(tokens: int) -> int:
    return -(-max(int(tokens * GROWTH), 1) // STEP) * STEP


class GrowingLayer(CacheLayer):
    """Keys and values in a buffer that is replaced by a larger one when it is full; a window moves along it."""

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._start = 0
        self._keys, self._values = keys.detach()[:, :, :0], values.detach()[:, :, :0]

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        start, end = self._start + self.held, self._start + self.held + keys.shape[2]
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad or self._keys.requires_grad):
            # Gradients flow through a copy, not through a buffer that changes.
            held = self._read()
            self._start = 0
            self._keys, self._values = (torch.cat(pair, 2) for pair in zip(held, (keys, values), strict=True))
            return
        if end > self._keys.shape[2] or (self._keys.is_inference() and not torch.is_inference_mode_enabled()):
            self._move(self._read(), _room(end - self._start))
            start, end = self.held, self.held + keys.shape[2]
        self._keys[:, :, start:end] = keys
        self._values[:, :, start:end] = values

    def _move(self, held: Pair, room: int) -> None:
        """Continue in buffers with so much room, which begin with the tokens held."""
        self._start = 0
        self._keys, self._values = (tensor.new_empty(*tensor.shape[:2], room, tensor.shape[3]) for tensor in held)
        for buffer, tensor in zip((self._keys, self._values), held, strict=True):
            buffer[:, :, : tensor.shape[2]] = tensor

    def _read(self) -> Pair:
        start, end = self._start, self._start + self.held
        return self._keys[:, :, start:end], self._values[:, :, start:end]

    def _drop_first(self, count: int) -> None:
        room = _room(self.held - count)
        if self._keys.shape[2] > 2 * room and not self._keys.requires_grad:
            # A prompt much longer than the window has passed.
            keys, values = self._read()
            self._move((keys[:, :, count:], values[:, :, count:]), room)
        else:
            self._start += count

    def _drop_last(self, count: int) -> None:
        pass

    def _select(self, rows: torch.Tensor) -> None:
        self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)

    def _forget(self) -> None:
        del self._keys, self._values

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"keys": self._keys, "values": self._values}


class DynamicCache(KVCache):
    """Keys and values of all tokens, or of those in a model's window, in buffers that grow by an eighth.

    Parameters
    ----------
    config : PretrainedConfig
        The model's.

    Notes
    -----
    Transformers' cache of this name copies all it holds at each token. Chapter 08 measures what that costs.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config, GrowingLayer)
