"""Quantising models in place: what changes, what is left alone, what it saves."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from course_lib.generation import generate
from course_lib.quantization import QuantizedLinear, model_bytes, quantize, quantize_model
from course_lib.quantization.calibration import calibrate

SCHEMES = ("int8", "llm-int8", "int4", "int3", "int2", "nf4", "fp4")


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=96,
            n_embd=32,
            n_layer=3,
            n_head=2,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            initializer_range=0.1,
        )
    ).eval()


def llama():
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def gemma3():
    config = Gemma3TextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return Gemma3ForCausalLM(config).eval()


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def tokens(rows=4, length=12):
    return torch.randint(0, 96, (rows, length))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_model_computes_with_the_dequantised_weights(decoder, scheme):
    model, ids = decoder(), tokens()
    expected = copy.deepcopy(model)
    stored = "int8" if scheme == "llm-int8" else scheme
    block_size = "row" if stored == "int8" else 64
    with torch.no_grad():
        for name, module in expected.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.weight.copy_(quantize(module.weight, stored, block_size=block_size).dequantize())
    assert quantize_model(model, scheme) is model
    before, after = logits(expected, ids), logits(model, ids)
    assert (after - before).norm() < (0.03 if scheme == "llm-int8" else 1e-6) * before.norm()


@pytest.mark.parametrize("build", [gpt2, llama, gemma3])
def test_transformers_models_keep_their_logits_nearly(build):
    model, ids = build(), tokens()
    before = logits(model, ids)
    layers = 3 * (4 if build is gpt2 else 7)
    report = quantize_model(model, "int8").quantization_report
    assert len(report.layers) == layers == sum(isinstance(module, QuantizedLinear) for module in model.modules())
    assert (logits(model, ids) - before).norm() < 0.03 * before.norm()
    assert model.generate(tokens(1, 5), max_new_tokens=3, do_sample=False).shape[1] > 5


def test_report_counts_every_byte_and_says_what_was_left_alone(decoder):
    model = decoder(qkv_bias=True)
    size = model_bytes(model)
    layers = {name: m.weight for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    report = quantize_model(model, "nf4", double_quant=True).quantization_report
    assert [layer.name for layer in report.layers] == list(layers)
    for layer in report.layers:
        quantised = model.get_submodule(layer.name).weight
        assert layer.bytes_before == layers[layer.name].nbytes
        assert layer.bytes_after == quantised.nbytes == quantize(layers[layer.name], "nf4", double_quant=True).nbytes
        assert 18 < layer.error.snr_db < 24
    assert report.bytes_before == size
    assert report.bytes_after == model_bytes(model)
    assert size - report.bytes_after == sum(layer.bytes_before - layer.bytes_after for layer in report.layers)
    assert report.left_alone == {"embed_tokens": "Embedding, not a linear layer", "lm_head": "in skip"}
    assert "21 layers quantised" in str(report)
    assert f"{size:,} bytes before, {report.bytes_after:,} after" in str(report)


def test_tied_head_stays_unless_asked_for(decoder):
    for options, quantised in (({}, False), ({"skip": ()}, False), ({"skip": (), "tied": True}, True)):
        model = decoder(tie_word_embeddings=True)
        embedding = model.embed_tokens.weight
        quantize_model(model, "int8", **options)
        assert isinstance(model.lm_head, QuantizedLinear) == quantised
        assert model.embed_tokens.weight is embedding
        if not quantised:
            assert model.lm_head.weight is embedding
    model = decoder(tie_word_embeddings=True)
    left = quantize_model(model, "int8", skip="no such name").quantization_report.left_alone
    assert left["lm_head"] == "shares its weight with embed_tokens"


def test_untied_head_goes_too_if_not_skipped(decoder):
    model = quantize_model(decoder(), "int8", skip=())
    assert isinstance(model.lm_head, QuantizedLinear)


def test_skip_takes_whole_names_or_runs_of_their_parts(decoder):
    model = quantize_model(decoder(), "int4", skip=("layers.1", "down_proj", "proj", "head"))
    kept = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert kept == {name for name in kept if name.startswith("layers.1.") or name.endswith("down_proj")}
    assert len(kept) == 7 + 2


def test_modules_that_are_no_plain_linear_layers_are_left_alone():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "own": Own(8, 8), "plain": nn.Linear(8, 8)})
    report = quantize_model(model, "int8").quantization_report
    assert [layer.name for layer in report.layers] == ["plain"]
    assert report.left_alone["own"] == "Own, not a linear layer"
    assert set(report.left_alone) == {"attention", "attention.out_proj", "own"}


def test_a_module_in_two_places_is_replaced_in_both():
    shared = nn.Linear(6, 6)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    quantize_model(model, "int8")
    assert isinstance(model["a"], QuantizedLinear)
    assert model["b"][0] is model["a"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scheme", "option"), [("nf4", "double_quant"), ("int4", "zero_point")])
def test_a_cast_keeps_codes_and_scales(decoder, scheme, option, dtype):
    model = quantize_model(decoder(qkv_bias=True), scheme, **{option: True})
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype)
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == before[name].dtype for name in before)
    projection = model.layers[0].self_attn.q_proj
    assert projection.weight.dtype == projection.bias.dtype == dtype
    assert projection.weight.dequantize().dtype == dtype
    assert logits(model, tokens()).dtype == dtype


def test_state_dict_round_trip_gives_the_same_logits(decoder):
    ids, first, second = tokens(), *(quantize_model(decoder(), "int4", zero_point=True) for _ in range(2))
    assert not torch.equal(logits(first, ids), logits(second, ids))
    second.load_state_dict(first.state_dict())
    assert torch.equal(logits(first, ids), logits(second, ids))


def test_inputs_and_bias_get_gradients():
    model = quantize_model(nn.Sequential(nn.Linear(20, 5), nn.Tanh()), "nf4")
    inputs = torch.randn(3, 20, requires_grad=True)
    model(inputs).sum().backward()
    assert inputs.grad.abs().sum() > 0
    assert model[0].bias.grad.abs().sum() > 0


def test_a_quantised_decoder_generates(decoder):
    model = decoder()
    prompt = tokens(2, 6)
    options = {"max_new_tokens": 5, "cache": "dynamic"}
    before = generate(model, prompt, **options).sequences
    quantised = generate(quantize_model(model, "int8"), prompt, **options).sequences
    assert quantised.shape == before.shape == (2, 11)


@pytest.mark.parametrize("build", ["decoder", gpt2, llama, gemma3])
def test_calibration_brings_outputs_nearer(decoder, build):
    model = decoder() if build == "decoder" else build()
    ids = tokens(48, 16)
    before = logits(model, ids)
    plain, calibrated = copy.deepcopy(model), copy.deepcopy(model).train()
    quantize_model(plain, "int4")
    batches = ({"input_ids": batch} for batch in ids.split(16))
    quantize_model(calibrated, "int4", calibration=batches)
    assert calibrated.training
    assert all(module.training for module in calibrated.modules())
    calibrated.eval()
    assert (logits(calibrated, ids) - before).norm() < 0.9 * (logits(plain, ids) - before).norm()
    assert calibrated.quantization_report.bytes_after == plain.quantization_report.bytes_after


def test_calibration_gives_each_layer_what_the_quantised_ones_before_it_give(decoder):
    """The Hessians of the chain, against those of whole passes over a model whose earlier layers are already replaced."""
    model, batches = decoder(), [tokens(), tokens(2, 7)]
    targets = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    seen = []

    def zero(name, hessian):
        index = int(name.split(".")[1])
        if index != zero.layer:
            zero.layer, zero.reference = index, copy.deepcopy(model)
        inputs = []
        handle = zero.reference.get_submodule(name).register_forward_pre_hook(
            lambda module, args: inputs.append(args[0])
        )
        for batch in batches:
            logits(zero.reference, batch)
        handle.remove()
        rows = torch.cat([part.flatten(0, 1) for part in inputs]).double()
        torch.testing.assert_close(hessian, rows.T @ rows, rtol=1e-4, atol=1e-4)
        seen.append(name)
        with torch.no_grad():
            model.get_submodule(name).weight.zero_()

    zero.layer, zero.reference = -1, None
    calibrate(model, targets, iter(batches), zero)
    assert seen == list(targets)


def test_models_without_a_chain_of_layers_calibrate_too():
    model, inputs = (
        nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 24)),
        torch.randn(500, 4) @ torch.randn(4, 32),
    )
    before = model(inputs)
    plain = quantize_model(copy.deepcopy(model), "int3")(inputs)
    calibrated = quantize_model(model, "int3", calibration=inputs.split(100))(inputs)
    assert (calibrated - before).norm() < 0.5 * (plain - before).norm()


def unchanged(model, change, error, message):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        change(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before if not before[name].isnan().any())


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("int5", {}, "scheme is 'int5'; accepted are int8, .*llm-int8"),
        ("int8", {"block_size": 0}, "block_size must be a whole number of at least 1"),
        ("llm-int8", {"block_size": 64}, "scheme 'llm-int8' has one symmetric scale a row"),
        ("nf4", {"calibration": [torch.zeros(1, 3).long()]}, "calibration is for integer schemes; nf4"),
        ("int4", {"calibration": []}, "calibration has no batch"),
        ("int4", {"skip": ("layers", "lm_head")}, "model has nothing to quantise .*lm_head: in skip"),
    ],
)
def test_what_is_not_accepted_leaves_the_model_as_it_was(decoder, scheme, options, message):
    unchanged(decoder(), lambda model: quantize_model(model, scheme, **options), ValueError, message)


def test_weights_that_are_not_finite_leave_the_model_as_it_was(decoder):
    model = decoder()
    model.layers[2].mlp.up_proj.weight.data[3, 4] = math.nan
    message = r"layers.2.mlp.up_proj.weight has 1 of \d+ values that are NaN or infinite"
    unchanged(model, lambda model: quantize_model(model, "nf4"), ValueError, message)


def test_calibration_that_fails_half_way_leaves_the_model_as_it_was(decoder):
    model = decoder()
    model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] * math.nan,))
    ids = tokens()
    unchanged(
        model, lambda m: quantize_model(m, "int4", calibration=[ids]), ValueError, "inputs has .* NaN or infinite"
    )
