"""The truth that formulas are held to: the real class, built and run on the meta device by these tests themselves."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from typing import Any, NamedTuple

import pytest


class Truth(NamedTuple):
    """What a real class has and leaves in its cache, by number of tokens."""

    parameters: int
    cache_bytes: dict[int, int]


def _held(cache: Any) -> int:
    import torch

    total = 0
    for layer in cache.layers:
        for name, value in vars(layer).items():
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if isinstance(tensor, torch.Tensor) and name != "_sliding_window_tensor":
                    total += tensor.numel() * tensor.element_size()
    return total


def run_real_class(config: Any, lengths: tuple[int, ...]) -> Truth:
    """Build a configuration's causal language model on the meta device and run it forward with a dynamic cache."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache

    config = copy.deepcopy(config)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class._from_config(config, dtype=torch.bfloat16).eval()
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    held: dict[int, int] = {}
    for length in lengths:
        tokens = torch.zeros((1, length), dtype=torch.long, device="meta")
        for attempt, device in enumerate((torch.device("meta"), contextlib.nullcontext())):
            cache = DynamicCache(config=model.config)
            try:
                with torch.no_grad(), device, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model(input_ids=tokens, use_cache=True, **{argument: cache})
                break
            except Exception:
                if attempt:
                    raise
        held[length] = _held(cache)
    return Truth(sum(parameter.numel() for parameter in model.parameters()), held)


@pytest.fixture(scope="session")
def real_class() -> Any:
    """`run_real_class`, with Transformers' remarks about default configurations silenced."""
    import transformers

    transformers.logging.set_verbosity_error()
    return run_real_class
