"""Settings that all tests share."""

import os

from hypothesis import settings

# No deadline: a busy machine is not an error. In CI the same examples each time, so that a run judges the change.
settings.register_profile("course", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("course")
