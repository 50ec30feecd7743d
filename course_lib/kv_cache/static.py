"""A cache whose tensors never move or grow: room for all tokens from the start, as compiled models and recorded graphs need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from course_lib.kv_cache.base import CacheLayer, KVCache, Pair
from course_lib.memory.units import whole


class StaticLayer(CacheLayer):
    """Keys and values in tensors of fixed size, which `update` returns whole, unfilled slots included.

    A layer without a window, or with one that nothing will leave, has a slot for each position. Another has as many slots as its
    window is long, holds the last tokens in order, and moves them up when the slots are full. While the past is recorded, it too has a
    slot for each position, and returns what its window shows.
    """

    is_compileable = True

    def __init__(self, window: int | None, max_cache_len: int) -> None:
        super().__init__(window)
        self.max_cache_len = max_cache_len
        self._slots = max_cache_len if window is None else min(window, max_cache_len)
        self._start = 0  # the slot of the first token held

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        with torch.inference_mode(False):  # a tensor born in inference mode could not be changed outside
            self._keys, self._values = (
                torch.zeros(*tensor.shape[:2], self._slots, tensor.shape[3], dtype=tensor.dtype, device=tensor.device)
                for tensor in (keys, values)
            )
            # The next slot. Compiled code reads it here: a number in Python would be compiled in.
            self._next = torch.zeros((), dtype=torch.long, device=keys.device)
        self._start = 0
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            for tensor in (self._keys, self._values, self._next):
                torch._dynamo.mark_static_address(tensor)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        slots = torch.arange(keys.shape[2], device=self.device) + self._next
        self._keys.index_copy_(2, slots, keys)
        self._values.index_copy_(2, slots, values)
        self._next.add_(keys.shape[2])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store the keys and values of new tokens, and return as many slots as `get_mask_sizes` says, unfilled ones included.

        Raises
        ------
        TypeError
            If the dtype or the device is not that of the tokens held.
        ValueError
            If shapes do not fit each other, or those of the tokens held, or if the tokens would not fit into the cache.
        """
        if self.record_past:
            return super().update(key_states, value_states)
        self.check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[2]
        if self._start + self.held + length <= self._slots:
            self._append(key_states, value_states)
            self.held += length
            keys, values = self._keys, self._values
            if self._start:  # no token came, and the slot before the first is not the window's
                keys, values = self._read()
        else:
            keys, values = (torch.cat(pair, 2) for pair in zip(self._read(), (key_states, value_states), strict=True))
            self._keys.copy_(keys[:, :, -self._slots :])
            self._values.copy_(values[:, :, -self._slots :])
            self._next.fill_(self._slots)
            self._start, self.held = 0, self._slots
            if length == 1:  # compiled code wants the tensors whose place it knows
                keys, values = self._keys, self._values
        self.seen += length
        self.trim()
        return keys, values

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if (
            self.is_initialized
            and not self.seen
            and not (_alike(key_states, self._keys) and _alike(value_states, self._values))
        ):
            super().reset()
        super().check(key_states, value_states)
        if self.seen + key_states.shape[2] > self.max_cache_len:
            raise ValueError(
                f"key_states adds {key_states.shape[2]} tokens to {self.seen}, but max_cache_len is {self.max_cache_len}; "
                "build a longer cache, or crop or reset this one"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        visible, offset = super().get_mask_sizes(query_length)
        return (visible if self.record_past else max(visible, self._slots - self._start)), offset

    def get_seq_length(self) -> int:
        if self.window is None and self.is_initialized and torch.compiler.is_compiling():
            return self._next  # type: ignore[return-value]
        return self.seen

    def get_max_length(self) -> int:
        return self.max_cache_len

    def activate_past_recording(self) -> None:
        if self._slots < self.max_cache_len:
            self._slots = self.max_cache_len
            if self.is_initialized:
                held = self._read()
                self._begin(*held)
                self._append(*held)
        # Without a window nothing is ever dropped, and tensors are returned whole as before.
        self.record_past = self.window is not None

    def _read(self) -> Pair:
        held = slice(self._start, self._start + self.held)
        return self._keys[:, :, held], self._values[:, :, held]

    def _drop_first(self, count: int) -> None:
        self._start += count

    def _drop_last(self, count: int) -> None:
        self._next.sub_(count)

    def _select(self, rows: torch.Tensor) -> None:
        with torch.inference_mode(False):
            keys, values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
        if len(rows) == self.batch:
            self._keys.copy_(keys)
            self._values.copy_(values)
        else:
            self._keys, self._values = keys, values

    def _forget(self) -> None:
        del self._keys, self._values, self._next

    def reset(self) -> None:
        """Forget all tokens. The tensors stay where they are, for others of the same batch and dtype; any may come next."""
        if self.is_initialized:
            for tensor in (self._keys, self._values, self._next):
                tensor.zero_()
        self.seen = self.held = self._start = 0

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
        if tensors["keys"].shape[2] > self._slots:
            raise ValueError(f"keys holds {tensors['keys'].shape[2]} tokens; at most {self._slots} are accepted")
        super().restore(tensors, plain)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"keys": self._keys, "values": self._values, "next": self._next}


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors differ in the number of tokens at most."""
    return (one.shape[:2], one.shape[3:], one.dtype, one.device) == (
        other.shape[:2],
        other.shape[3:],
        other.dtype,
        other.device,
    )


class StaticCache(KVCache):
    """Keys and values in tensors that are made once, for compiled models.

    Parameters
    ----------
    config : PretrainedConfig
        The model's.
    max_cache_len : int
        How many tokens there is room for, prompt and answer together. A layer whose window is shorter takes only the window's room.

    Raises
    ------
    ValueError
        If `max_cache_len` is not a whole number of at least 1; later, at the first token beyond it, with the cache unchanged.

    Notes
    -----
    `update` returns all slots, also those that are not filled yet, and a mask has to hide these; Transformers' models and
    `course_lib.models.DecoderLM` do so.
    """

    def __init__(self, config: PretrainedConfig, max_cache_len: int) -> None:
        whole(max_cache_len, "max_cache_len", least=1)
        super().__init__(config, lambda window: StaticLayer(window, max_cache_len), max_cache_len=max_cache_len)
