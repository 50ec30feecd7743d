"""Quantised models as files: safetensors, with what each quantised layer is in the header."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from course_lib.quantization.linear import QuantizedEmbedding, QuantizedLinear
from course_lib.quantization.model import is_linear, replace_module
from course_lib.quantization.tensor import SCHEMES, TENSORS, QuantizedTensor

FORMAT = "course_lib.quantization"
VERSION = "1"
M = TypeVar("M", bound=nn.Module)


def save_quantized(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write all weights of a model, quantised layers as they are stored, whole or not at all.

    Parameters
    ----------
    model : nn.Module
        As `quantize_model` leaves it.
    path : path
        A safetensors file; one that is there is replaced.

    Raises
    ------
    FileNotFoundError
        If there is no such folder.
    ValueError
        If the model has no quantised layer.
    """
    layers = {
        name: _describe(module)
        for name, module in model.named_modules()
        if isinstance(module, (QuantizedLinear, QuantizedEmbedding))
    }
    if not layers:
        raise ValueError("model has no quantised layer; quantize_model makes them")
    state: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if tensor.numel() and key in first:
            shared[name] = first[key]
            continue
        first[key] = name
        # safetensors refuses a tensor that is part of a larger storage.
        part = tensor.untyped_storage().nbytes() != tensor.nbytes
        state[name] = tensor.clone(memory_format=torch.contiguous_format) if part else tensor.contiguous()
    write(path, state, format=FORMAT, version=VERSION, layers=json.dumps(layers), shared=json.dumps(shared))


def load_quantized(model: M, path: str | os.PathLike[str]) -> M:
    """Give a model the weights of a file that `save_quantized` wrote, in place.

    Parameters
    ----------
    model : nn.Module
        Of the architecture that was saved, quantised or not, with any weights, on any device, or with parameters on the meta
        device. Layers that are quantised in the file are replaced.
    path : path
        The file.

    Returns
    -------
    nn.Module
        `model`, in the file's dtypes.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is damaged, of another format or version, or of another architecture; the model is then as it was.
    """
    path = Path(path)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    with damage_named(path):
        state, metadata = read(path, "save_quantized", device, format=FORMAT, version=VERSION)
        layers, shared = json.loads(metadata["layers"]), json.loads(metadata["shared"])
        whole = state | {name: state[source] for name, source in shared.items()}
        built = {name: _build(model, name, spec, whole) for name, spec in layers.items()}
    _check_rest(model, layers, state, shared, path.name)
    for name, layer in built.items():
        replace_module(model, model.get_submodule(name), layer)
    model.load_state_dict(state, strict=False, assign=True)
    for name, source in shared.items():
        _set(model, name, _get(model, source))
    return model


# ---- files with a header of ours, whatever they hold


def write(path: str | os.PathLike[str], tensors: dict[str, torch.Tensor], **header: str) -> None:
    """Write contiguous tensors with a header to a safetensors file, whole or not at all.

    Raises
    ------
    FileNotFoundError
        If there is no such folder.
    """
    from safetensors.torch import save_file

    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path {str(path)!r} is in no folder that there is")
    fresh = path.with_name(path.name + ".part")
    try:
        save_file(tensors, fresh, metadata=header)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def read(
    path: Path, writer: str, device: torch.device, **header: str
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the header of a file that `write` wrote.

    Raises
    ------
    FileNotFoundError
        If there is no file; it names the function that writes one.
    ValueError
        If the file's header says other than this one where both say something.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise FileNotFoundError(f"path {str(path)!r} is no file; {writer} writes one")
    with safe_open(path, framework="pt", device=str(device)) as file:
        metadata = file.metadata() or {}
        if any(metadata.get(key) != value for key, value in header.items()):
            found = " ".join(str(metadata.get(key, f"no {key}")) for key in header)
            raise ValueError(f"path {path.name!r} has {found}; {' '.join(header.values())} is needed")
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file, or one for another model, leads to into one ValueError."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, KeyError, TypeError, AttributeError, RuntimeError, json.JSONDecodeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(f"path {path.name!r} is damaged or of another model ({reason})") from error


def _describe(module: QuantizedLinear | QuantizedEmbedding) -> dict[str, Any]:
    weight = module.weight
    return {
        "scheme": weight.scheme,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "block_size": weight.block_size,
        "threshold": getattr(module, "threshold", None),
    }


def _build(
    model: nn.Module, name: str, spec: Mapping[str, Any], state: Mapping[str, torch.Tensor]
) -> QuantizedLinear | QuantizedEmbedding:
    """Return a layer of the file, once it is sure that it can take its place and that its tensors fit each other."""
    module: Any = model.get_submodule(name)
    table = type(module) in (nn.Embedding, QuantizedEmbedding)
    if not table and not isinstance(module, QuantizedLinear) and not is_linear(module):
        raise TypeError(f"{name} is quantised there and {type(module).__name__} in the model")
    accepted = ("bfloat16",) if table else (*SCHEMES, "bfloat16")
    if spec["scheme"] not in accepted:
        raise TypeError(f"{name} has scheme {spec['scheme']!r}, and known are {', '.join(accepted)}")
    transposed = not table and not isinstance(module, (nn.Linear, QuantizedLinear))
    shape = list(module.weight.shape)[:: -1 if transposed else 1]
    if shape != spec["shape"]:
        raise TypeError(f"{name} has shape {spec['shape']} there and {shape} in the model")
    tensors = {key: state[f"{name}.{key}"] for key in TENSORS if f"{name}.{key}" in state}
    weight = QuantizedTensor(
        spec["scheme"], torch.Size(spec["shape"]), getattr(torch, spec["dtype"]), spec["block_size"], **tensors
    )
    weight.to("meta").dequantize()
    if table:
        return QuantizedEmbedding(weight)
    bias = state.get(f"{name}.bias")
    if (bias is None) != (module.bias is None):
        raise TypeError(f"{name} has {'no ' * (bias is None)}bias there, unlike in the model")
    if bias is not None:
        bias = nn.Parameter(bias, requires_grad=module.bias.requires_grad)
    return QuantizedLinear(weight, bias, threshold=spec["threshold"])


def _check_rest(
    model: nn.Module,
    layers: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    shared: Mapping[str, str],
    file: str,
) -> None:
    """Raise a ValueError unless all that is not in a quantised layer is in the model as in the file."""

    def outside(names: Mapping[str, Any]) -> set[str]:
        return {name for name in names if name.rpartition(".")[0] not in layers}

    own = model.state_dict()
    wanted, there = outside(own), outside(state) | outside(shared)
    if wanted != there or not set(shared.values()) <= set(state):
        unlike = ", ".join(sorted(wanted ^ there)[:3])
        raise ValueError(f"path {file!r} is of another model: {unlike} is only in one of the two")
    for name in wanted:
        shape = list(state[shared.get(name, name)].shape)
        if shape != list(own[name].shape):
            raise ValueError(
                f"path {file!r} is of another model: {name} has shape {shape}, not {list(own[name].shape)}"
            )
    kept = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta" and name not in own]
    if kept:
        raise ValueError(f"model has {kept[0]} on the meta device, which no file holds; build the model off it")


def _get(model: nn.Module, name: str) -> Any:
    parent, _, last = name.rpartition(".")
    return getattr(model.get_submodule(parent), last)


def _set(model: nn.Module, name: str, value: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)
