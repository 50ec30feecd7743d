"""Models of the course: the packaged SmolLM2, any safetensors model from the hub, and a decoder small enough to read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.models.byte_tokenizer import ByteTokenizer
    from course_lib.models.conversion import mha_to_gqa
    from course_lib.models.decoder import DecoderConfig, DecoderLM
    from course_lib.models.tracing import Step, Trace, trace
    from course_lib.models.wheels import ModelUnavailableError, cache_dir
    from course_lib.models.zoo import cached, fetch, load

# Where each name stands; it is imported when it is asked for, because the decoder needs torch and the rest does not.
_PLACES = {
    "ByteTokenizer": "byte_tokenizer",
    "DecoderConfig": "decoder",
    "DecoderLM": "decoder",
    "ModelUnavailableError": "wheels",
    "Step": "tracing",
    "Trace": "tracing",
    "cache_dir": "wheels",
    "cached": "zoo",
    "fetch": "zoo",
    "load": "zoo",
    "mha_to_gqa": "conversion",
    "trace": "tracing",
}

__all__ = [
    "ByteTokenizer",
    "DecoderConfig",
    "DecoderLM",
    "ModelUnavailableError",
    "Step",
    "Trace",
    "cache_dir",
    "cached",
    "fetch",
    "load",
    "mha_to_gqa",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"course_lib.models.{_PLACES[name]}"), name)
