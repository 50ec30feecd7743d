"""From many key-value heads to few: grouped-query and multi-query models out of a multi-head one."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from course_lib.memory.units import seed_number, whole
from course_lib.models.decoder import DecoderLM
from course_lib.models.layout import forget_plans

Model = TypeVar("Model", DecoderLM, PreTrainedModel)
INITS = ("mean", "first", "random")


@torch.no_grad()
def mha_to_gqa(model: Model, num_kv_heads: int, *, init: str = "mean", seed: int = 0) -> Model:
    """Return a copy of a model with fewer key-value heads; every query head stays.

    Parameters
    ----------
    model : DecoderLM or PreTrainedModel
        A decoder whose attention layers have ``k_proj`` and ``v_proj``, as Llama, Mistral, Qwen2 and Qwen3 have. One that has
        grouped heads already can be grouped further.
    num_kv_heads : int
        How many key-value heads are left; must divide the number that the model has.
    init : str
        What a group's key and value projections become: ``"mean"`` of its heads', those of its ``"first"`` head, or ``"random"`` ones,
        from the distribution that the model was initialised with.
    seed : int
        Of the random ones.

    Returns
    -------
    DecoderLM or PreTrainedModel
        Of the same class, dtype, device and mode; nothing is shared with the original.

    Raises
    ------
    TypeError
        If the projections are not plain ``nn.Linear``, as in a quantised model or one with fused projections, or the keys of different
        heads are normalised by different weights, as in OLMo 2.
    ValueError
        If an argument is out of range.

    Notes
    -----
    Ainslie et al. 2023, "GQA: Training generalized multi-query transformer models from multi-head checkpoints", section 2. Chapter 10
    (notebooks/10-grouped-heads.ipynb) measures the three, before and after uptraining. Heads whose queries meet the same key are
    neighbours, as everywhere in the Llama family.
    """
    if init not in INITS:
        raise ValueError(f"init is {init!r}; accepted are {', '.join(INITS)}")
    config = getattr(model, "config", None)
    heads = getattr(config, "num_key_value_heads", None)
    parts = model.modules() if isinstance(model, nn.Module) else ()
    layers: list[Any] = [layer for layer in parts if hasattr(layer, "k_proj") and hasattr(layer, "v_proj")]
    if config is None or not isinstance(heads, int) or len(layers) != config.num_hidden_layers:
        raise TypeError(
            f"model is a {type(model).__name__}; a decoder with num_key_value_heads in its configuration, and k_proj and v_proj in each "
            "layer, is needed"
        )
    num_kv_heads = whole(num_kv_heads, "num_kv_heads", least=1)
    if heads % num_kv_heads:
        fits = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise ValueError(
            f"num_kv_heads is {num_kv_heads}; the model has {heads} key-value heads, so accepted are {fits}"
        )
    for layer in layers:
        for name in ("k_proj", "v_proj"):
            projection: Any = getattr(layer, name)
            if type(projection) is not nn.Linear or projection.out_features % heads:
                raise TypeError(
                    f"{name} is a {type(projection).__name__}; a plain nn.Linear of {heads} heads is needed"
                )
        head_dim = layer.k_proj.out_features // heads
        for name in ("k_norm", "k_layernorm"):
            norm = dict(layer.named_children()).get(name, nn.Identity())
            weights = sum(one.numel() for part, one in norm.named_parameters() if part.endswith("weight"))
            if weights > head_dim:
                raise TypeError(f"{name} has {weights} weights; {head_dim}, which all key heads share, are needed")

    generator = torch.Generator().manual_seed(seed_number(seed))
    converted = copy.deepcopy(model)
    forget_plans(converted)
    module: Any
    for module in converted.modules():
        for name in ("k_proj", "v_proj"):
            if hasattr(module, name):
                projection = getattr(module, name)
                setattr(
                    module, name, _grouped(projection, heads, num_kv_heads, init, generator, config.initializer_range)
                )
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = config.num_attention_heads // num_kv_heads
        if hasattr(module, "num_key_value_heads"):
            module.num_key_value_heads = num_kv_heads
    converted.config.num_key_value_heads = num_kv_heads
    return converted


def _grouped(
    projection: nn.Linear, heads: int, kept: int, init: str, generator: torch.Generator, spread: float
) -> nn.Linear:
    """Return a projection to so many heads, made of one to more."""
    rows = projection.out_features // heads * kept
    bias = projection.bias is not None
    # On the meta device first: PyTorch would draw weights only to have them replaced.
    fewer = nn.Linear(projection.in_features, rows, bias=bias, device="meta")
    for name, old in projection.named_parameters():
        groups = old.view(kept, heads // kept, -1, *old.shape[1:])
        if init == "random":
            drawn = (
                torch.zeros(rows) if name == "bias" else torch.randn(rows, old.shape[1], generator=generator) * spread
            )
            new = drawn.to(old)
        else:
            # The mean of 16-bit numbers is taken in float32.
            exact = torch.promote_types(old.dtype, torch.float32)
            new = groups.mean(1, dtype=exact).to(old.dtype) if init == "mean" else groups[:, 0].clone()
            new = new.reshape(rows, *old.shape[1:])
        setattr(fewer, name, nn.Parameter(new, requires_grad=old.requires_grad))
    return fewer.train(projection.training)
