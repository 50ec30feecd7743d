"""What PyTorch really allocates: the peak of a block of code, and the reset before the next one."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Freeing what was allocated before a measurement makes PyTorch warn from C++, which only this silences. It is read when
# torch is first imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

_measuring = threading.Lock()


class peak_memory:
    """Measure the most memory that PyTorch holds for a block of code, beyond what it held on entry.

    ``with peak_memory() as peak: ...``, then ``peak.bytes``. Load the model inside the block to count its weights, outside
    to see activations and cache alone. What the block allocates and keeps is in the peak; so is what it frees again,
    if it was alive at the worst moment.

    Parameters
    ----------
    device : str or torch.device, optional
        ``"cpu"``, or a CUDA device; default: the current CUDA device where there is one, else the CPU.

    Attributes
    ----------
    bytes : int
        The peak in bytes, once the block is left (by an exception too).

    Raises
    ------
    ValueError
        If `device` is neither a CPU nor a CUDA device that PyTorch sees.
    RuntimeError
        If a `peak_memory` block is open already (they do not nest), if a PyTorch profiler runs or was started inside
        the block (CPU), or if `bytes` is read before the block is left.

    Notes
    -----
    Chapter 01 (notebooks/01-memory.ipynb) compares this with `course_lib.memory.estimate`.

    On CUDA it is the allocator's ``max_memory_allocated``, reset on entry, less ``memory_allocated`` on entry. Each block
    is rounded up to 512 bytes there.

    On a CPU it is the highest running sum over the profiler's memory events, to the byte: every allocation
    by the thread that runs the block, temporary buffers inside operators included, and each release of such a block.
    Releases of what was allocated before are not counted. Not seen: other threads, memory-mapped files and shared memory
    (`load` of `course_lib.models` copies weights out of their file for this reason), NumPy, and scratch
    space of oneDNN and MKL. Leaving the block takes some ten microseconds for each allocation and release in it.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        import torch

        try:
            default = "cuda" if torch.cuda.is_available() else "cpu"
            self._device = torch.device(default if device is None else device)
        except (RuntimeError, TypeError):
            self._device = torch.device("meta")
        if self._device.type != "cpu" and not (self._device.type == "cuda" and torch.cuda.is_available()):
            raise ValueError(f"device must be 'cpu' or a CUDA device that PyTorch sees here, got {device!r}.")
        self._bytes: int | None = None

    @property
    def bytes(self) -> int:
        """The peak, in bytes, beyond what was allocated on entry."""
        if self._bytes is None:
            raise RuntimeError("peak_memory().bytes is known once its `with` block is left.")
        return self._bytes

    def __enter__(self) -> peak_memory:
        if not _measuring.acquire(blocking=False):
            raise RuntimeError("peak_memory blocks do not nest, and one is open: leave it before you open the next.")
        self._bytes = None
        try:
            if self._device.type == "cuda":
                self._allocated = _reset_cuda_peak(self._device)
            else:
                _start_recording()
        except BaseException:
            _measuring.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch

        try:
            if self._device.type == "cuda":
                self._bytes = torch.cuda.max_memory_allocated(self._device) - self._allocated
            else:
                self._bytes = _stop_recording()
                if self._bytes is None and kind is None:
                    raise RuntimeError(
                        "A PyTorch profiler was started inside this peak_memory block, which ended the measurement: "
                        "profile outside of it."
                    )
        finally:
            _measuring.release()


def flush() -> None:
    """Release what nobody holds any more, so that the next measurement starts clean: chapter 01's habit.

    Collects garbage; with CUDA in use also gives the allocator's cached blocks back and resets its peak. Variables that
    still name a model keep it alive: ``del`` them first.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _reset_cuda_peak(device: torch.device) -> int:
    import torch

    torch.empty(0, device=device)  # brings CUDA up: there are no statistics to reset before
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _start_recording() -> None:
    """Start PyTorch's profiler for memory events alone.

    The public `torch.profiler.profile` also records every operator: 0.4 GB and several seconds more for a
    generation of 60 tokens, which a scope that no eager code enters avoids. The events are the same.
    """
    import torch
    from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig

    autograd: Any = torch.autograd
    if autograd._profiler_enabled():
        raise RuntimeError("peak_memory uses PyTorch's profiler on a CPU, and one is running: stop it first.")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports each start and stop on stderr otherwise
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    autograd._prepare_profiler(config, {ProfilerActivity.CPU})
    autograd._enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.STATIC_RUNTIME_MODEL})


def _stop_recording() -> int | None:
    """Stop it and return the peak, in bytes, of the blocks allocated since the start; None if another took its place."""
    import torch
    from torch._C._profiler import _EventType

    autograd: Any = torch.autograd
    # PyTorch has one profiler. A second start replaces ours without a word; only the public classes set the flag.
    if autograd.profiler._is_profiler_enabled or not autograd._profiler_enabled():
        return None
    events = autograd._disable_profiler().experimental_event_tree()
    alive: dict[int, int] = {}
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        tag, fields = event.typed
        if tag != _EventType.Allocation or fields.device.type != "cpu":
            continue
        if fields.alloc_size > 0:
            if fields.total_reserved:  # a mapped file, the only CPU event that reserves: not memory of the process
                continue
            alive[fields.ptr] = fields.alloc_size
            total += fields.alloc_size
            peak = max(peak, total)
        else:
            # By address: PyTorch may also report the release of a block that an earlier measurement saw allocated.
            total -= alive.pop(fields.ptr, 0)
    return peak
