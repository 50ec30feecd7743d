"""Models of the course: the packaged SmolLM2 and any safetensors model from the hub (`load`, `fetch`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.models.wheels import ModelUnavailableError, cache_dir
    from course_lib.models.zoo import cached, fetch, load

__all__ = ["ModelUnavailableError", "cache_dir", "cached", "fetch", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("course_lib.models.zoo"), name)
