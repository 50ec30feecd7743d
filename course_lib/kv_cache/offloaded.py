"""A cache that lives elsewhere, in CPU memory or in files, and brings back one layer ahead of the one at work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from course_lib.kv_cache.base import CacheLayer, KVCache, Pair
from course_lib.kv_cache.dynamic import STEP
from course_lib.kv_cache.records import File, Folder, Memory

PLACES = ("cpu", "disk")


class OffloadedLayer(CacheLayer):
    """Keys and values of one layer as one record for each token, elsewhere; a window moves along them."""

    def __init__(self, window: int | None, folder: Folder | None) -> None:
        super().__init__(window)
        self._folder = folder
        self._ahead: Callable[[], torch.Tensor] | None = None

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        like = _pack(keys[:, :, :0], values[:, :, :0])
        self._start = 0
        self._home: Memory | File = (
            Memory(like, self.device) if self._folder is None else File(like, self.device, self._folder)
        )

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._forget_ahead()
        if self._start > max(self.held, STEP):
            # More has been dropped than is held: what is held moves to the beginning.
            self._home.replace(self._home.read(self._start, self._start + self.held))
            self._start = 0
        self._home.write(self._start + self.held, _pack(keys.detach(), values.detach()))

    def _read(self) -> Pair:
        brought = self._ahead or self._home.bring(self._start, self._start + self.held)
        self._ahead = None
        return _unpack(brought(), self.head_dim)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        self.check(key_states, value_states)
        if self._folder is None and key_states.device.type == "cpu":
            return super().update(key_states, value_states)
        visible = self.kept()
        past = [tensor[:, :, self.held - visible :] for tensor in self._read()] if visible else []
        self.store(key_states, value_states)
        self.trim()
        if not past:
            return key_states, value_states
        # What is returned is nobody else's memory: whatever is brought next cannot overwrite it.
        return torch.cat((past[0], key_states), 2), torch.cat((past[1], value_states), 2)

    def prefetch(self) -> None:
        """Begin to bring back what the next call needs, while other layers work."""
        if self._ahead is None and self.held and (self._folder is not None or self.device.type != "cpu"):
            self._ahead = self._home.bring(self._start, self._start + self.held)

    def _forget_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with contextlib.suppress(OSError):  # whoever needs these records meets the error when it reads them
                ahead()

    def _drop_first(self, count: int) -> None:
        self._forget_ahead()
        self._start += count

    def _drop_last(self, count: int) -> None:
        self._forget_ahead()

    def _select(self, rows: torch.Tensor) -> None:
        self._forget_ahead()
        self._home.replace(self._home.read(self._start, self._start + self.held)[:, rows.cpu()])
        self._start = 0

    def _forget(self) -> None:
        self._forget_ahead()
        if isinstance(self._home, File):
            self._home.close()
        del self._home

    def __getstate__(self) -> dict[str, Any]:
        self._forget_ahead()
        return self.__dict__

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._home.tensors | ({} if self._ahead is None else {"ahead": self._ahead()})

    @property
    def disk_nbytes(self) -> int:
        """Bytes of the layer's file."""
        return self._home.nbytes if self.is_initialized and isinstance(self._home, File) else 0


class OffloadedCache(KVCache):
    """Keys and values in CPU memory or on disk, of which the model's device holds one or two layers at a time.

    Parameters
    ----------
    config : PretrainedConfig
        The model's.
    to : str
        ``"cpu"``, where a card copies while it computes; without a card, this is where keys and values are anyway. ``"disk"``, where
        a thread reads a layer while the one before it works.
    folder : path, optional
        Where to put files: a folder of their own is made in it, and removed with the cache. The system's for temporary files by
        default, which may itself be in memory.

    Raises
    ------
    ValueError
        If `to` is neither, or a folder is given for ``"cpu"``.
    FileNotFoundError
        If there is no such folder.
    OSError
        Later, if the disk is full or the files are gone. Layers may then hold different tokens; `reset` makes the cache good again.

    Notes
    -----
    `nbytes` counts memory, not files; `places` counts both. Keys and values are stored without gradients.
    """

    def __init__(
        self, config: PretrainedConfig, *, to: str = "cpu", folder: str | os.PathLike[str] | None = None
    ) -> None:
        if to not in PLACES:
            raise ValueError(f"to is {to!r}; accepted are {', '.join(PLACES)}")
        if to == "cpu" and folder is not None:
            raise ValueError(f"folder is {os.fspath(folder)!r}, but to is 'cpu'; to='disk' takes one")
        own = Folder(folder) if to == "disk" else None
        super().__init__(config, lambda window: OffloadedLayer(window, own), to=to)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        pair: Pair = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        after = self.layers[(layer_idx + 1) % len(self.layers)]
        if isinstance(after, OffloadedLayer):
            after.prefetch()
        return pair

    @property
    def places(self) -> dict[str, int]:
        """Bytes by the place where they are: ``"cpu"``, ``"cuda:0"``, ``"disk"``."""
        found = {"disk": sum(layer.disk_nbytes for layer in self.layers if isinstance(layer, OffloadedLayer))}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.tensors().values()}
        for storage in storages.values():
            found[str(storage.device)] = found.get(str(storage.device), 0) + storage.nbytes()
        return {place: count for place, count in found.items() if count}


def _pack(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``[length, batch, kv_heads, head_dim + value_dim]``."""
    return torch.cat((keys, values), -1).permute(2, 0, 1, 3).contiguous()


def _unpack(records: torch.Tensor, head_dim: int) -> Pair:
    both = records.permute(1, 2, 0, 3)
    return both[..., :head_dim], both[..., head_dim:]
