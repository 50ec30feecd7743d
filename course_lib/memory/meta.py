"""The real class on the meta device: exact shapes of weights and cache without a byte of storage.

Used where no formula covers a configuration, and by the tests as the truth that every formula must equal. Imports
torch and transformers, and only when called.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from typing import Any, NamedTuple

from course_lib.memory.architecture import Kind, Weight
from course_lib.memory.config import MOST_LAYERS, Fields, quiet


class StoredTensor(NamedTuple):
    """One tensor of a cache: its number of elements, whether it is float32, whether it holds keys or values."""

    elements: int
    float32: bool
    attention: bool


def build(fields: Fields) -> Any:
    """Build the causal language model that a configuration describes on the meta device, in bfloat16.

    Parameters
    ----------
    fields : Fields
        A completed configuration.

    Returns
    -------
    transformers.PreTrainedModel
        The model in evaluation mode; all its tensors are on the meta device.

    Raises
    ------
    ValueError
        If Transformers has no causal language model for the configuration or cannot build it.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = fields.source
    text = fields.nested() or fields
    if text.get("num_hidden_layers") is not None:
        text.whole("num_hidden_layers", most=MOST_LAYERS)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{fields.label}: Transformers has no causal language model for model_type {fields.model_type!r}"
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    try:
        with torch.device("meta"), quiet():
            return model_class._from_config(config, dtype=torch.bfloat16).eval()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{fields.label}: {model_class.__name__} cannot be built from this configuration: {reason}"
        ) from error


def weights(model: Any) -> Counter[Weight]:
    """Count a model's parameters by shape and kind, tied ones once.

    Parameters
    ----------
    model : torch.nn.Module
        Any model, on any device.

    Returns
    -------
    Counter of Weight
        A tensor of stacked experts is one weight for each expert; any other parameter of more than two dimensions keeps
        its first as rows.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found: Counter[Weight] = Counter()
    seen: set[int] = set()
    for module in model.modules():
        transposed = _stacks_inputs_first(module)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if parameter.ndim == 3 and _holds_experts(module):
                count, rows, columns = parameter.shape
                found[Weight(*((columns, rows) if transposed else (rows, columns)), "experts")] += count
                continue
            kind: Kind = "other"
            if name == "weight" and parameter.ndim == 2:
                if isinstance(module, nn.Linear | Conv1D):
                    kind = "head" if module is head else "linear"
                elif isinstance(module, nn.Embedding):
                    kind = "embedding"
            shape = tuple(parameter.shape)
            if isinstance(module, Conv1D):
                shape = shape[::-1]
            rows = shape[0] if shape else 1
            found[Weight(rows, parameter.numel() // max(rows, 1), kind)] += 1
    return found


def _holds_experts(module: Any) -> bool:
    return "experts" in type(module).__name__.lower()


def _stacks_inputs_first(module: Any) -> bool:
    """Whether stacked experts are ``[expert, inputs, outputs]``: then what goes up does not begin where down ends."""
    stacked = {name: p for name, p in module.named_parameters(recurse=False) if p.ndim == 3}
    down = stacked.pop("down_proj", None)
    return down is not None and any(up.shape[2] != down.shape[1] for up in stacked.values())


def first_tokens(model: Any) -> tuple[list[StoredTensor], Any]:
    """Run a model forward over two tokens and list what its dynamic cache then holds.

    A model that keeps its state elsewhere shows it here, where many tokens may take minutes. Two, because a model may
    take one for the continuation of a text.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model on the meta device.

    Returns
    -------
    list of StoredTensor
        The tensors of all layers, for a batch of one.
    context manager
        Sets the default device under which the model runs.

    Raises
    ------
    ValueError
        If the model cannot run forward with a layered cache, or keeps nothing in it.
    """
    import torch

    error: Exception | None = None
    # Some models make tensors while they run and need the default device to be meta; some read values and must not have it.
    for device in (torch.device("meta"), contextlib.nullcontext()):
        try:
            found = _run(model, 2, device)
        except Exception as reason:
            error = reason
            continue
        if not found:
            raise ValueError(f"{type(model).__name__} keeps nothing in a layered cache, and only that can be counted")
        return found, device
    raise _does_not_run(model, error)


def cached_tensors(model: Any, sequence_length: int, device: Any) -> list[StoredTensor]:
    """Run a model forward over `sequence_length` tokens under the default device that `first_tokens` found."""
    try:
        return _run(model, sequence_length, device)
    except Exception as error:
        raise _does_not_run(model, error) from error


def _does_not_run(model: Any, error: Exception | None) -> ValueError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"{type(model).__name__} does not run on the meta device with a layered cache: {reason}")


def cache_argument(model: Any) -> str:
    """Return what the forward pass of a Transformers model calls its cache: ``cache``, or before 5.24 ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _run(model: Any, tokens: int, device: Any) -> list[StoredTensor]:
    import torch
    from transformers import DynamicCache

    with torch.no_grad(), device, quiet():
        cache = DynamicCache(config=model.config)
        inputs = torch.zeros((1, tokens), dtype=torch.long, device="meta")
        model(input_ids=inputs, use_cache=True, **{cache_argument(model): cache})
    return _tensors(cache)


def _tensors(cache: Any) -> list[StoredTensor]:
    import torch

    found = []
    for layer in cache.layers:
        for name, value in vars(layer).items():
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if isinstance(tensor, torch.Tensor) and name != "_sliding_window_tensor" and tensor.numel():
                    found.append(
                        StoredTensor(tensor.numel(), tensor.dtype == torch.float32, name in ("keys", "values"))
                    )
    return found
