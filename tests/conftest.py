"""Settings that all tests share."""

import os
import random

import pytest

# Triton reads this when it is imported: without a card, its kernels run in the interpreter.
if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/kfd"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

# No deadline: a busy machine is not an error. In CI the same examples each time, so that a run judges the change.
settings.register_profile("course", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("course")


class _Repeatable(random.Random):
    """A generator that without a seed of its own takes one from the module's."""

    def __init__(self, seed: int | str | None = None) -> None:
        super().__init__(random.getrandbits(64) if seed is None else seed)


@pytest.fixture(autouse=True)
def same_draws_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, inputs are fresh at every run."""
    if os.environ.get("CI"):
        random.seed(0)
        monkeypatch.setattr(random, "Random", _Repeatable)
