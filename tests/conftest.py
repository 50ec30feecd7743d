"""Settings that all tests share."""

import os

# Triton reads this when it is imported: without a card, its kernels run in the interpreter.
if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/kfd"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

# No deadline: a busy machine is not an error. In CI the same examples each time, so that a run judges the change.
settings.register_profile("course", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("course")
