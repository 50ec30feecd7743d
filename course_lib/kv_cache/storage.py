"""Caches as files: safetensors, with what a cache was built with in the header."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PretrainedConfig

from course_lib.kv_cache.base import CacheLayer
from course_lib.quantization.storage import damage_named, read, write

if TYPE_CHECKING:
    from course_lib.kv_cache.base import KVCache

FORMAT, VERSION = "course_lib.kv_cache", "1"
Kind = TypeVar("Kind", bound="KVCache")


def save(cache: KVCache, path: str | os.PathLike[str]) -> None:
    """Write a cache, see :meth:`course_lib.kv_cache.base.KVCache.save`."""
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
    header = {"format": FORMAT, "version": VERSION, "kind": type(cache).__name__}
    write(path, tensors, **header, options=json.dumps(cache.options), layers=json.dumps(plain))


def load(kind: type[Kind], path: str | os.PathLike[str], config: PretrainedConfig) -> Kind:
    """Read a cache, see :meth:`course_lib.kv_cache.base.KVCache.load`."""
    path = Path(path)
    with damage_named(path):
        header = {"format": FORMAT, "version": VERSION, "kind": kind.__name__}
        tensors, metadata = read(path, "save() of a cache", torch.device("cpu"), **header)
        cache = kind(config, **json.loads(metadata["options"]))
        layers = json.loads(metadata["layers"])
        if len(layers) != len(cache.layers):
            raise ValueError(f"path {path.name!r} has {len(layers)} layers and the model {len(cache.layers)}")
        for index, (layer, plain) in enumerate(zip(cache.layers, layers, strict=True)):
            if plain is not None:
                prefix = f"{index}."
                layer.restore({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, plain)
    return cache
