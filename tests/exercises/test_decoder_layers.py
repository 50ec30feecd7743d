"""The layers that the exercises of chapter 11 compare answers with are those of the course's decoder."""

from random import Random
from typing import Any

import pytest
import torch

from course_lib.exercises import decoder as hooks
from course_lib.kv_cache import DynamicCache
from course_lib.models import DecoderConfig, DecoderLM


def model_of(weights: hooks.Weights, sizes: hooks.Sizes) -> DecoderLM:
    """Return a decoder of one layer with these weights, as far as they go."""
    architecture = {name: size for name, size in sizes.items() if name != "rope_theta"}
    config = DecoderConfig(
        vocab_size=30,
        hidden_size=len(weights["self_attn.o_proj.weight"]),
        intermediate_size=len(weights.get("mlp.gate_proj.weight", "one")),
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        **architecture,
    )
    model = DecoderLM(config).double().requires_grad_(False)
    layer: Any = model.layers[0]
    assert not layer.load_state_dict(weights, strict=False).unexpected_keys
    return model


def through(model: DecoderLM, module: Any, ids: torch.Tensor, cache: DynamicCache | None = None) -> Any:
    """Run tokens, and return what a module is given and what it makes of it."""
    seen = []
    hook = module.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    model(ids, cache=cache)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_exercises_layer_is_the_decoder_s(seed: int) -> None:
    _, weights, sizes = hooks.random_pass(Random(seed))
    model = model_of(weights, sizes)
    x, made = through(model, model.layers[0], torch.randint(30, (2, 7)))
    torch.testing.assert_close(hooks.layer(x, weights, sizes), made, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_the_exercises_attention_with_a_cache_is_the_decoder_s(seed: int) -> None:
    _, weights, _, _, sizes = hooks.random_decode(Random(seed))
    model, ids = model_of(weights, sizes), torch.randint(30, (2, 7))
    cache, layer = DynamicCache(model.config), model.layers[0]
    model(ids[:, :-1], cache=cache)
    keys, values = (part.clone() for part in (cache.layers[0].keys, cache.layers[0].values))
    x, made = through(model, layer.self_attn, ids[:, -1:], cache)
    torch.testing.assert_close(hooks.decoded(x, weights, keys, values, sizes), made, rtol=1e-5, atol=1e-6)
