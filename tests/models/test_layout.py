"""Weights in the order for single tokens: the same parameters, the same results, whatever happens to the model afterwards."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache

from course_lib.models import layout
from course_lib.models.decoder import DecoderConfig, DecoderLM
from course_lib.models.layout import lay_out, product
from course_lib.quantization import model_bytes, quantize_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(params=[{}, {"tie_word_embeddings": True, "qkv_bias": True, "mlp_bias": True, "attention_bias": True}])
def models(request) -> tuple[DecoderLM, DecoderLM]:
    """Return a decoder and its optimised copy."""
    plain = DecoderLM(DecoderConfig(**SIZES, initializer_range=0.2, **request.param)).eval()
    for weight in plain.parameters():
        if weight.ndim == 1:
            nn.init.normal_(weight, mean=1.0, std=0.2)
    return plain, copy.deepcopy(plain).optimize_for_decoding()


def steps(model: DecoderLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits after a prompt and after each of the other tokens, one at a time."""
    cache = DynamicCache()
    with torch.no_grad():
        found = [model(tokens[:, :4], cache=cache).logits]
        found += [model(tokens[:, i : i + 1], cache=cache).logits for i in range(4, tokens.shape[1])]
    return torch.cat(found, 1)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_are_the_same_for_every_number_of_rows_and_cores(models, batch, threads):
    plain, fast = models
    tokens = torch.randint(0, SIZES["vocab_size"], (batch, 9))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        torch.testing.assert_close(steps(fast, tokens), steps(plain, tokens), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_parameters_are_the_same_and_take_hardly_more_memory(models):
    plain, fast = models
    assert list(fast.state_dict()) == list(plain.state_dict())
    for name, weight in plain.state_dict().items():
        assert torch.equal(fast.state_dict()[name], weight)
    assert model_bytes(fast) == model_bytes(plain)
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in fast.parameters()}
    assert sum(storages.values()) < 1.1 * model_bytes(
        plain
    )  # wide rows end with an unused line of the processor's cache
    assert (fast.lm_head.weight is fast.embed_tokens.weight) == plain.config.tie_word_embeddings
    fresh = DecoderLM(plain.config).eval()
    fresh.load_state_dict(fast.state_dict())
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 6))
    assert torch.equal(fresh(tokens).logits, plain(tokens).logits)


def test_a_single_token_takes_one_product_for_layers_with_the_same_inputs(models, monkeypatch):
    _, fast = models
    monkeypatch.setattr(layout, "together", lambda *arguments: pytest.fail("layers were computed one by one"))
    monkeypatch.setattr(nn.Linear, "forward", lambda *arguments: pytest.fail("a layer was computed by itself"))
    with torch.no_grad():
        assert fast(torch.tensor([[1]])).logits.isfinite().all()


@pytest.mark.parametrize("sizes", [(192, 96, 96), (100, 30), (384,), (40,)])
@pytest.mark.parametrize("rows", [0, 2, 24, layout.FEW_ROWS, layout.FEW_ROWS + 1])
@torch.no_grad()
def test_products_of_several_rows_are_those_of_each_layer(sizes, rows):
    layers = [nn.Linear(80, size, bias=size != 384) for size in sizes]
    for shape in ((rows, 80), (1, rows, 80), (2, rows, 80)):
        inputs = torch.randn(shape)
        expected = [layer(inputs) for layer in layers]
        lay_out(*layers)
        for found, right in zip(product(inputs, *layers), expected, strict=True):
            assert found.shape == right.shape
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_few_rows_are_multiplied_once_for_layers_with_the_same_inputs(models, monkeypatch):
    _, fast = models
    calls, real = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *tensors: calls.append(tensors[0].shape) or real(*tensors))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    fast(torch.randint(0, SIZES["vocab_size"], (1, 5)))
    # Queries, keys and values; output; gates and values of the feed-forward network, and what follows; the head.
    assert len(calls) == SIZES["num_hidden_layers"] * 4 + 1


def test_training_goes_on_and_decoding_follows_it(models):
    plain, fast = models
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 8))
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], weight, rtol=1e-3, atol=1e-4)
    one = tokens[:1, :1]
    with torch.no_grad():
        torch.testing.assert_close(fast(one).logits, plain(one).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda model: model.double(),
        lambda model: model.double().float(),
        lambda model: torch.load(_saved(model), weights_only=False),
        lambda model: (
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True) and model
        ),
    ],
    ids=["copied", "double", "double and back", "pickled", "loaded"],
)
def test_a_model_that_is_changed_computes_with_what_it_has_now(models, change):
    plain, fast = models
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 7))
    expected = steps(plain, tokens)
    steps(fast, tokens)
    changed = change(fast)
    with torch.no_grad():
        for weight in fast.parameters() if changed is not fast else ():
            weight.zero_()
    torch.testing.assert_close(steps(changed, tokens).float(), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        changed.layers[0].mlp.up_proj.weight.zero_()
        changed.layers[0].self_attn.v_proj.weight.mul_(2)
        plain.layers[0].mlp.up_proj.weight.zero_()
        plain.layers[0].self_attn.v_proj.weight.mul_(2)
    torch.testing.assert_close(steps(changed, tokens).float(), steps(plain, tokens), rtol=1e-4, atol=1e-4)


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("scheme", ["int8", "int4", "bfloat16"])
def test_quantising_is_the_same_in_any_order(models, scheme):
    plain, fast = (quantize_model(model, scheme, embedding="bfloat16") for model in models)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(fast.state_dict()[name], tensor)
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 7))
    # The head may be left in float32.
    torch.testing.assert_close(steps(fast, tokens), steps(plain, tokens), rtol=1e-4, atol=1e-4)


def test_a_hook_still_sees_its_layer(models):
    _, fast = models
    seen = []
    fast.layers[1].self_attn.k_proj.register_forward_hook(lambda layer, inputs, output: seen.append(output.shape))
    fast.layers[1].mlp.down_proj.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].shape))
    with torch.no_grad():
        fast(torch.tensor([[1]]))
    assert seen == [(1, 1, 32), (1, 1, 128)]


def test_a_single_token_has_gradients(models):
    plain, fast = models
    for model in models:
        model(torch.tensor([[3]])).logits.square().sum().backward()
    for (name, one), two in zip(fast.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-4, msg=name)


@torch.no_grad()
def test_layers_whose_weights_do_not_lie_together_are_multiplied_all_the_same():
    layers = [nn.Linear(24, outputs, bias=False) for outputs in (40, 8)]
    inputs = torch.randn(1, 1, 24)
    expected = [layer(inputs) for layer in layers]
    lay_out(*layers)
    for weight, found in zip(expected, product(inputs, *layers), strict=True):
        torch.testing.assert_close(found, weight)
    for weight, found in zip(expected[::-1], product(inputs, *layers[::-1]), strict=True):
        torch.testing.assert_close(found, weight)
    layers[1].weight.data = layers[1].weight.data.clone()
    for weight, found in zip(expected, product(inputs, *layers), strict=True):
        torch.testing.assert_close(found, weight)


def test_other_types_and_devices_are_left_alone():
    model = DecoderLM(DecoderConfig(**SIZES)).bfloat16()
    strides = [weight.stride() for weight in model.parameters()]
    assert [weight.stride() for weight in model.optimize_for_decoding().parameters()] == strides
    meta = DecoderLM(DecoderConfig(**SIZES)).to("meta").optimize_for_decoding()
    assert meta(torch.ones(1, 1, dtype=torch.long, device="meta")).logits.shape == (1, 1, 96)
