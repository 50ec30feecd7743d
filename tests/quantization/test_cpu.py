"""Products with quantised weights on a CPU: few rows by the codes themselves, many in float32."""

import copy
import platform

import pytest
import torch
from torch.nn import functional

from course_lib.generation import generate
from course_lib.models.decoder import DecoderConfig, DecoderLM
from course_lib.quantization import (
    QuantizedLinear,
    cpu,
    load_quantized,
    model_bytes,
    quantize,
    quantize_model,
    save_quantized,
)
from course_lib.quantization.linear import together
from course_lib.quantization.tensor import QuantizedTensor

FUSED = ("int8", "int4", "bfloat16")
OTHERS = ("nf4", "fp4", "int3", "int2", "llm-int8")


def stored(weight: torch.Tensor, scheme: str) -> QuantizedTensor:
    if scheme == "bfloat16":
        return QuantizedTensor.in_bfloat16(weight)
    return quantize(weight, scheme, block_size="row" if scheme == "int8" else 64)


def decoder(**options: object) -> DecoderLM:
    torch.manual_seed(1)
    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    # Weights far from 0, so that the choice of a token is never a tie.
    return DecoderLM(
        DecoderConfig(**sizes | heads | {"tie_word_embeddings": True, "initializer_range": 0.2} | options)
    ).eval()


@pytest.mark.parametrize("scheme", FUSED)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 17, 32, 33, 40])
def test_a_product_is_as_exact_as_pytorch_in_bfloat16(scheme: str, rows: int) -> None:
    weight, inputs = torch.randn(192, 256), torch.randn(rows, 256)
    layer = QuantizedLinear(stored(weight, scheme))
    exact = inputs.double() @ layer.weight.dequantize(torch.float64).T
    plain = functional.linear(inputs.bfloat16(), layer.weight.dequantize(torch.bfloat16)).double()
    found = layer(inputs)
    assert found.dtype == torch.float32
    assert (found - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.parametrize("scheme", FUSED)
@pytest.mark.parametrize(("outputs", "columns"), [(1, 64), (7, 64), (64, 96), (65, 100), (128, 31), (96, 128)])
def test_any_size_is_multiplied_rightly(scheme: str, outputs: int, columns: int) -> None:
    layer = QuantizedLinear(stored(torch.randn(outputs, columns), scheme), torch.randn(outputs))
    for shape in ((columns,), (1, columns), (2, 3, columns), (0, columns)):
        inputs = torch.randn(shape)
        exact = inputs.double() @ layer.weight.dequantize(torch.float64).T + layer.bias.double()
        assert layer(inputs).shape == exact.shape
        torch.testing.assert_close(layer(inputs).double(), exact, rtol=0.03, atol=0.03 * columns**0.5)


@pytest.mark.parametrize("scheme", FUSED)
def test_inputs_in_any_strides_give_what_contiguous_ones_give(scheme: str) -> None:
    layer = QuantizedLinear(stored(torch.randn(128, 128), scheme))
    inputs = torch.randn(128, 3).T
    assert not inputs.is_contiguous()
    assert torch.equal(layer(inputs), layer(inputs.contiguous()))


def test_packing_loses_nothing() -> None:
    weight = quantize(torch.randn(192, 256), "int4", block_size=32)
    assert torch.equal(QuantizedLinear(weight).weight.codes, weight.codes)
    assert torch.equal(QuantizedLinear(weight).weight.scale, weight.scale)
    assert QuantizedLinear(weight).weight.nbytes == weight.nbytes


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors may have no fused products")
@pytest.mark.parametrize("scheme", FUSED)
def test_few_rows_are_multiplied_by_the_codes_and_many_in_float32(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = QuantizedLinear(stored(torch.randn(128, 128), scheme))
    taken = []
    for name in ("fused", "dense"):
        product = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *inputs, n=name, p=product: (taken.append(n), p(*inputs))[1])
    for rows in (1, cpu.FEW_ROWS[scheme], cpu.FEW_ROWS[scheme] + 1):
        layer(torch.randn(rows, 128))
    assert taken == ["fused", "fused", "dense"]


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize(
    ("scheme", "double_quant"), [("int8", False), ("int4", False), ("nf4", False), ("fp4", False), ("nf4", True)]
)
def test_the_kernel_for_cards_gets_what_it_needs(scheme: str, double_quant: bool, zero_point: bool) -> None:
    kernel = pytest.importorskip("course_lib.kernels.quantized_matmul", reason="there is no Triton for this system")
    inputs = torch.randn(3, 96)
    if kernel.machine_refusal(inputs, "x"):
        pytest.skip("needs Triton's interpreter: a card runs on tensors of its own")
    options = {"zero_point": zero_point} if scheme.startswith("int") else {"double_quant": double_quant}
    layer = QuantizedLinear(quantize(torch.randn(64, 96), scheme, block_size=32, **options), torch.randn(64))
    with torch.no_grad():
        found = layer._on_card(inputs)
    exact = inputs.double() @ layer.weight.dequantize(torch.float64).T + layer.bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


def test_a_scheme_without_a_kernel_for_cards_has_no_product_there() -> None:
    pytest.importorskip("triton", reason="there is no Triton for this system")
    assert QuantizedLinear(quantize(torch.randn(64, 96), "int3"))._on_card(torch.randn(3, 96)) is None


@pytest.mark.parametrize("scheme", FUSED)
def test_a_gradient_reaches_the_inputs(scheme: str) -> None:
    layer = QuantizedLinear(stored(torch.randn(128, 128), scheme))
    inputs = torch.randn(2, 128, requires_grad=True)
    layer(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, layer.weight.dequantize().sum(0).expand(2, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", FUSED)
def test_layers_multiplied_together_give_what_each_gives(scheme: str) -> None:
    layers = [QuantizedLinear(stored(torch.randn(size, 128), scheme), torch.randn(size)) for size in (128, 64, 64)]
    before = [copy.deepcopy(layer) for layer in layers]
    for rows in (1, 3, 50):
        inputs = torch.randn(rows, 128)
        for one, other in zip(together(inputs, *layers), before, strict=True):
            torch.testing.assert_close(one, other(inputs), rtol=1e-2, atol=1e-2)
    for layer, other in zip(layers, before, strict=True):
        assert torch.equal(layer.weight.dequantize(), other.weight.dequantize())


@pytest.mark.parametrize("embedding", [None, "bfloat16"])
@pytest.mark.parametrize("scheme", FUSED + OTHERS)
def test_a_saved_model_writes_the_same_tokens(scheme: str, embedding: str | None, tmp_path) -> None:
    model = quantize_model(decoder(), scheme, embedding=embedding)
    prompt = torch.randint(96, (2, 9))
    first = generate(model, prompt, max_new_tokens=12).sequences
    save_quantized(model, tmp_path / "model.safetensors")
    again = load_quantized(decoder(initializer_range=0.1), tmp_path / "model.safetensors")
    assert torch.equal(generate(again, prompt, max_new_tokens=12).sequences, first)
    assert torch.equal(generate(copy.deepcopy(model), prompt, max_new_tokens=12).sequences, first)
    assert model_bytes(again) == model_bytes(model)


def test_a_table_in_bfloat16_is_stored_once() -> None:
    plain, model = decoder(), decoder()
    quantize_model(model, "int4", embedding="bfloat16")
    assert model.lm_head.codes is model.embed_tokens.codes
    assert torch.equal(model.embed_tokens(torch.arange(96)), plain.embed_tokens.weight.bfloat16().float())
    linear = sum(layer.bytes_after for layer in model.quantization_report.layers)
    norms = sum(p.nbytes for p in plain.parameters() if p.ndim == 1)
    assert model_bytes(model) == linear + norms
    assert "lm_head" in model.quantization_report.left_alone


def test_weights_in_bfloat16_change_predictions_little() -> None:
    plain = decoder(initializer_range=0.02)
    model = quantize_model(copy.deepcopy(plain), "bfloat16")
    ids = torch.randint(96, (1, 40))
    with torch.no_grad():
        for length in (1, 40):
            exact, found = plain(ids[:, :length]).logits, model(ids[:, :length]).logits
            assert found.dtype == torch.float32
            assert (found - exact).norm() < 0.02 * exact.norm()


def test_options_that_bfloat16_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="'bfloat16' takes no block_size"):
        quantize_model(decoder(), "bfloat16", block_size=64)
    with pytest.raises(ValueError, match="embedding is 'int8'"):
        quantize_model(decoder(), "int4", embedding="int8")
