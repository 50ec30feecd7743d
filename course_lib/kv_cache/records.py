"""Where an offloaded cache keeps a layer: one record for each token, in CPU memory or in a file."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from course_lib.kv_cache.dynamic import GROWTH, STEP


class Folder:
    """A folder of its own for one cache's files, gone when the cache is; a deep copy is another folder with the same files."""

    def __init__(self, parent: str | os.PathLike[str] | None) -> None:
        if parent is not None and not Path(parent).is_dir():
            raise FileNotFoundError(f"folder is {os.fspath(parent)!r}, which is no folder")
        self.parent = None if parent is None else Path(parent).resolve()
        self._made = Path(tempfile.mkdtemp(prefix="kv-cache-", dir=self.parent))
        weakref.finalize(self, shutil.rmtree, self._made, ignore_errors=True)
        self._numbers = itertools.count()

    def file(self) -> str:
        """Return a name for another file."""
        return f"layer-{next(self._numbers)}.bin"

    def path(self, name: str) -> Path:
        return self._made / name

    def __deepcopy__(self, memo: dict[int, Any]) -> Folder:
        fresh = Folder(self.parent)
        fresh._numbers = itertools.count(next(self._numbers))
        shutil.copytree(self._made, fresh._made, dirs_exist_ok=True)
        return fresh


class Memory:
    """One record for each token, ``[batch, kv_heads, head_dim + value_dim]``, in CPU memory that a card can reach."""

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        self._device = device
        self.records = self._room(like, 0)

    def _room(self, like: torch.Tensor, length: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(length, *like.shape[1:], dtype=like.dtype, pin_memory=self._device.type == "cuda")

    def write(self, at: int, records: torch.Tensor) -> None:
        end = at + records.shape[0]
        if end > self.records.shape[0]:
            held = self.read(0, at)
            self.records = self._room(records, -(-int(end * GROWTH) // STEP) * STEP)
            self.records[:at] = held
        if records.device.type != "cuda":
            self.records[at:end] = records
            return
        stream = _side_stream(records.device)
        stream.wait_stream(torch.cuda.current_stream(records.device))
        with torch.cuda.stream(stream):
            self.records[at:end].copy_(records, non_blocking=True)
        records.record_stream(stream)

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return records on the CPU, once those that are on their way have come."""
        if self._device.type == "cuda":
            _side_stream(self._device).synchronize()
        return self.records[start:end]

    def replace(self, records: torch.Tensor) -> None:
        """Hold these records and no others."""
        self.records = self._room(records, len(records))
        self.records.copy_(records)

    def bring(self, start: int, end: int) -> Callable[[], torch.Tensor]:
        """Begin to copy records to the model's device, and return what waits for them and hands them over."""
        if self._device.type != "cuda":
            return lambda: self.records[start:end].to(self._device)
        stream = _side_stream(self._device)  # behind what is still being written
        with torch.cuda.stream(stream):
            brought = self.records[start:end].to(self._device, non_blocking=True)
            arrived = stream.record_event()

        def hand_over() -> torch.Tensor:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(arrived)
            brought.record_stream(now)
            return brought

        return hand_over

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        fresh = Memory(self.records, self._device)
        fresh.replace(self.read(0, len(self.records)))
        return fresh

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"records": self.records}


class File:
    """One record for each token, ``[batch, kv_heads, head_dim + value_dim]``, in a file that is open only while it is used."""

    def __init__(self, like: torch.Tensor, device: torch.device, folder: Folder) -> None:
        self._shape, self._dtype, self._device = like.shape[1:], like.dtype, device
        self._folder, self._name = folder, folder.file()
        self._try(self._make)

    @property
    def path(self) -> Path:
        return self._folder.path(self._name)

    @property
    def record(self) -> int:
        """Bytes of a record."""
        return self._shape.numel() * self._dtype.itemsize

    def _make(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.touch()

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except OSError as error:
            raise OSError(
                error.errno,
                f"the cache's file {str(self.path)!r} cannot be used ({error.strerror or error}); "
                "once there is room, reset() the cache and begin again",
            ) from error

    def write(self, at: int, records: torch.Tensor) -> None:
        data = records.cpu().contiguous()

        def put() -> None:
            with open(self.path, "r+b") as file:
                file.seek(at * self.record)
                file.write(_bytes(data))

        if data.numel():
            self._try(put)

    def read(self, start: int, end: int) -> torch.Tensor:
        records = torch.empty(end - start, *self._shape, dtype=self._dtype, pin_memory=self._device.type == "cuda")

        def get() -> None:
            with open(self.path, "rb") as file:
                file.seek(start * self.record)
                if file.readinto(_bytes(records)) != records.nbytes:
                    raise OSError(errno.EIO, "it has become shorter")

        if records.numel():
            self._try(get)
        return records

    def bring(self, start: int, end: int) -> Callable[[], torch.Tensor]:
        """Begin to read records, and return what waits for them and hands them over on the model's device."""
        brought: Future[torch.Tensor] = Future()

        def run() -> None:
            try:
                brought.set_result(self.read(start, end))
            except BaseException as error:
                brought.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return lambda: brought.result().to(self._device, non_blocking=True)

    def replace(self, records: torch.Tensor) -> None:
        """Hold these records and no others."""
        self._shape = records.shape[1:]
        self._try(lambda: os.truncate(self.path, 0))
        self.write(0, records)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def close(self) -> None:
        self.path.unlink(missing_ok=True)

    @property
    def nbytes(self) -> int:
        return int(self._try(lambda: self.path.stat().st_size))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which copies run beside the work on a card."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
