"""Caches as files: safetensors, with what a cache was built with in the header."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PretrainedConfig

from course_lib.kv_cache.base import CacheLayer

if TYPE_CHECKING:
    from course_lib.kv_cache.base import KVCache

FORMAT, VERSION = "course_lib.kv_cache", "1"
Kind = TypeVar("Kind", bound="KVCache")


def save(cache: KVCache, path: str | os.PathLike[str]) -> None:
    """Write a cache, see :meth:`course_lib.kv_cache.base.KVCache.save`."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    plain: list[dict[str, Any] | None] = []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, CacheLayer):
            raise ValueError(f"layer {index} is a {type(layer).__name__} of Transformers, which this file cannot hold")
        if not layer.is_initialized:
            plain.append(None)
            continue
        own, values = layer.state()
        tensors |= {
            f"{index}.{name}": tensor.clone(memory_format=torch.contiguous_format) for name, tensor in own.items()
        }
        plain.append(values)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "kind": type(cache).__name__,
        "options": json.dumps(cache.options),
        "layers": json.dumps(plain),
    }
    path = Path(path)
    fresh = path.with_name(path.name + ".part")
    try:
        save_file(tensors, fresh, metadata=metadata)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def load(kind: type[Kind], path: str | os.PathLike[str], config: PretrainedConfig) -> Kind:
    """Read a cache, see :meth:`course_lib.kv_cache.base.KVCache.load`."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path {str(path)!r} is no file; save() of a cache writes one")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            found = [str(metadata.get(key, f"no {key}")) for key in ("format", "version", "kind")]
            if found != [FORMAT, VERSION, kind.__name__]:
                raise ValueError(
                    f"path {path.name!r} has {' '.join(found)}; {FORMAT} {VERSION} {kind.__name__} is needed"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        cache = kind(config, **json.loads(metadata["options"]))
        layers = json.loads(metadata["layers"])
        if len(layers) != len(cache.layers):
            raise ValueError(f"path {path.name!r} has {len(layers)} layers and the model {len(cache.layers)}")
        for index, (layer, plain) in enumerate(zip(cache.layers, layers, strict=True)):
            if plain is not None:
                prefix = f"{index}."
                layer.restore({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, plain)
    except (SafetensorError, KeyError, TypeError, AttributeError, RuntimeError, json.JSONDecodeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(f"path {path.name!r} is damaged or of another model ({reason})") from error
    return cache
