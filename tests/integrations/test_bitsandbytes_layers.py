"""bitsandbytes' layers and ours hold the same weights, and say the same."""

import logging
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from course_lib.integrations.bitsandbytes import (
    bitsandbytes_model_bytes,
    from_bitsandbytes,
    load_with_bitsandbytes,
    quantize_with_bitsandbytes,
    replace_bitsandbytes,
    silence_cast_warning,
    to_bitsandbytes,
)
from course_lib.models import DecoderConfig, DecoderLM
from course_lib.quantization import QuantizedLinear, load_quantized, model_bytes, quantize, save_quantized

WAYS = [("int8", False), ("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True)]


@pytest.fixture(scope="module")
def bnb():
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes has no macOS build", exc_type=ImportError)


@pytest.fixture(autouse=True)
def uncompiled():
    """Without the seconds that bitsandbytes' torch.compile takes for each shape; what it computes is the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


def ours(weight, scheme, double_quant=False):
    """Quantise as bitsandbytes does; it rounds to float16 before int8."""
    if scheme == "int8":
        return quantize(weight.half(), "int8", block_size="row")
    return quantize(weight, scheme, double_quant=double_quant)


def same(one, other):
    assert (one.scheme, one.shape, one.dtype, one.block_size) == (
        other.scheme,
        other.shape,
        other.dtype,
        other.block_size,
    )
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name]), name


def agree(found, expected, scheme):
    """Compare logits; in int8 a rounding of one layer's output may turn a code of the next layer's inputs."""
    assert (found - expected).norm() < (0.02 if scheme == "int8" else 1e-5) * expected.norm()


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features != 96]


def in_float32(model):
    """Let four-bit layers multiply in the inputs' dtype on any CPU; with AVX512-BF16 they would take bfloat16."""
    for module in linears(model):
        module.support_avx512bf16_for_cpu = False
    return model


def decoder(**options):
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return DecoderLM(DecoderConfig(**shape | heads | options)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("models") / "tiny"
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    config = LlamaConfig(
        num_attention_heads=2, num_key_value_heads=1, attention_bias=True, tie_word_embeddings=True, **shape
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    assert AutoTokenizer.from_pretrained(path)("w5")["input_ids"] == [5]
    return path


@pytest.mark.parametrize(("scheme", "double_quant"), WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_their_weights_are_ours_and_come_back(bnb, scheme, double_quant, dtype):
    weight = torch.randn(96, 192).mul(0.05).to(dtype)
    model = nn.Sequential(nn.Linear(192, 96, dtype=dtype))
    model[0].weight.data.copy_(weight)
    layer = quantize_with_bitsandbytes(model, scheme, double_quant=double_quant)[0]
    assert type(layer) is (bnb.nn.Linear8bitLt if scheme == "int8" else bnb.nn.Linear4bit)
    found = from_bitsandbytes(layer)
    same(found, ours(weight, scheme, double_quant))
    again = to_bitsandbytes(found, layer.bias)
    if scheme == "int8":
        assert torch.equal(again.weight.SCB, layer.weight.SCB)
        assert torch.equal(again.weight.CB, layer.weight.CB)
    else:
        assert torch.equal(again.weight.data, layer.weight.data)
        assert again.weight.quant_state == layer.weight.quant_state
        assert torch.equal(again.weight.quant_state.absmax, layer.weight.quant_state.absmax)
    inputs = torch.randn(5, 192, dtype=dtype)
    assert torch.equal(again(inputs), layer.eval()(inputs))


@given(data=st.data())
@settings(max_examples=40)
def test_our_weights_come_back_whatever_they_are(bnb, data):
    scheme, double_quant = data.draw(st.sampled_from(WAYS))
    rows, columns = 32 * data.draw(st.integers(1, 4)), 64 * data.draw(st.integers(1, 5))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    weight = torch.randn(rows, columns) * torch.logspace(-6, 4, rows)[:, None]
    weight[data.draw(st.integers(0, rows - 1))] = 0
    options = {"block_size": "row"} if scheme == "int8" else {"double_quant": double_quant}
    kept = quantize(weight.to(dtype), scheme, **options)
    found = from_bitsandbytes(to_bitsandbytes(kept))
    for name, tensor in kept.tensors.items():
        assert torch.equal(tensor, found.tensors[name])
    assert found.dtype == (torch.float16 if scheme == "int8" else dtype)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_codes_packed_in_another_dtype_are_found(bnb, storage):
    weight = torch.randn(64, 128)
    packed = bnb.nn.Params4bit(
        weight, requires_grad=False, quant_type="nf4", compress_statistics=False, quant_storage=storage
    )
    layer = bnb.nn.Linear4bit(128, 64, bias=False)
    layer.weight = packed.to("cpu")
    same(from_bitsandbytes(layer), quantize(weight, "nf4"))


@pytest.mark.parametrize(("scheme", "double_quant"), WAYS)
def test_a_layer_that_has_run_is_converted_as_it_multiplies(bnb, scheme, double_quant):
    weight = torch.randn(96, 192) * 0.05
    model = nn.Sequential(nn.Linear(192, 96, bias=False)).eval()
    model[0].weight.data.copy_(weight)
    quantize_with_bitsandbytes(model, scheme, double_quant=double_quant)
    inputs = torch.randn(7, 192)
    inputs[:, 5] *= 20
    with torch.no_grad():
        expected = model(inputs)
        found = from_bitsandbytes(model[0])
        assert torch.equal(found.codes, ours(weight, scheme, double_quant).codes)
        error = replace_bitsandbytes(model)(inputs) - expected
    # They round int8 products to float16, and on some CPUs multiply four bits in bfloat16.
    assert error.norm() < (0.0005 if scheme == "int8" else 0.01) * expected.norm()


@pytest.mark.parametrize(("scheme", "double_quant"), WAYS[1:])
def test_the_layout_of_cpus_with_bfloat16_is_undone(bnb, scheme, double_quant):
    kept = quantize(torch.randn(96, 192), scheme, double_quant=double_quant)
    layer = to_bitsandbytes(kept)
    layer.weight.data, _ = bnb.functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    assert layer.weight.shape == (96, 96)
    found = from_bitsandbytes(layer)
    assert torch.equal(found.codes, kept.codes)
    torch.testing.assert_close(found.dequantize(), kept.dequantize(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("scheme", "double_quant"), WAYS)
def test_a_loaded_model_says_the_same_with_our_layers(bnb, folder, scheme, double_quant):
    model, tokenizer = load_with_bitsandbytes(
        str(folder), scheme, double_quant=double_quant, dtype="float32", device="cpu"
    )
    plain = sum(parameter.nbytes for parameter in model.parameters())
    ids = tokenizer("w3 w14 w15 w92 w65 w35", return_tensors="pt").input_ids
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[1].mlp.up_proj).__module__.startswith("bitsandbytes")
    assert bitsandbytes_model_bytes(model) > plain
    with torch.no_grad():
        expected = in_float32(model)(ids).logits
        assert replace_bitsandbytes(model) is model
        assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14
        found = model(ids).logits
    agree(found, expected, scheme)
    assert not getattr(model, "is_quantized", False)
    model.to(torch.bfloat16)  # which Transformers refuses while bitsandbytes' layers are there


@pytest.mark.parametrize(("scheme", "double_quant"), WAYS)
def test_a_decoder_is_quantised_in_memory_and_saved_with_our_layers(bnb, scheme, double_quant, tmp_path):
    model = decoder(qkv_bias=True, tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantize_with_bitsandbytes(model, scheme, double_quant=double_quant, threshold=0.0)
    assert model.lm_head.weight is model.embed_tokens.weight
    same(
        from_bitsandbytes(model.layers[1].mlp.down_proj),
        ours(before["layers.1.mlp.down_proj.weight"], scheme, double_quant),
    )
    ids = torch.randint(96, (2, 9))
    with torch.no_grad():
        expected = in_float32(model)(ids).logits
        found = replace_bitsandbytes(model)(ids).logits
        agree(found, expected, scheme)
        save_quantized(model, tmp_path / "model.safetensors")
        again = load_quantized(decoder(qkv_bias=True, tie_word_embeddings=True), tmp_path / "model.safetensors")
        assert torch.equal(again(ids).logits, found)


def test_bytes_count_what_lies_beside_the_parameters(bnb):
    for scheme, double_quant in WAYS:
        model = quantize_with_bitsandbytes(decoder(), scheme, double_quant=double_quant)
        counted = bitsandbytes_model_bytes(model)
        table = 0 if scheme == "int8" else 14 * 4 * 16
        beside = counted - model_bytes(replace_bitsandbytes(model)) - table
        assert 4 * 256 * double_quant <= beside <= 14 * 4 * 256 * double_quant  # layers may share the scales' table
        assert bitsandbytes_model_bytes(model) == model_bytes(model)


def test_gpt2_layers_are_transposed(bnb):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_head=2, n_layer=1, vocab_size=96, n_positions=16)).eval()
    weight, ids = model.transformer.h[0].attn.c_attn.weight.detach().clone(), torch.arange(8)[None]
    with torch.no_grad():
        plain = model(ids).logits
        quantize_with_bitsandbytes(model, "int8")
        same(from_bitsandbytes(model.transformer.h[0].attn.c_attn), ours(weight.T, "int8"))
        assert (model(ids).logits - plain).norm() < 0.05 * plain.norm()


def test_only_the_cast_warning_is_dropped(bnb, caplog):
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    quantize_with_bitsandbytes(model := decoder(), "int8")
    silence_cast_warning()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        model(torch.arange(4)[None])
        assert not caplog.records
        logger.warning("MatMul8bitLt: something else")
    assert [record.message for record in caplog.records] == ["MatMul8bitLt: something else"]
    for kept in list(logger.filters):
        logger.removeFilter(kept)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        model(torch.arange(4)[None])
    assert "inputs will be cast" in caplog.text


def test_what_bitsandbytes_would_get_wrong_is_refused_and_the_model_kept(bnb):
    for model, wrong in (
        (decoder(intermediate_size=100), "gate_proj"),
        (decoder(hidden_size=72, head_dim=32), "q_proj"),
    ):
        with pytest.raises(ValueError, match=rf"layers\.0\.\w+\.{wrong} has shape .* multiple of 32 .* block size, 64"):
            quantize_with_bitsandbytes(model, "nf4")
        assert all(type(module) is nn.Linear for module in linears(model))
        quantize_with_bitsandbytes(model, "int8")
    with pytest.raises(ValueError, match="in_features of the block size, 256"):
        to_bitsandbytes(quantize(torch.randn(64, 128), "nf4", block_size=256))


def test_errors_name_what_is_accepted(bnb, folder):
    model = decoder()
    for name, run in {
        "load": lambda **options: load_with_bitsandbytes(str(folder), **options),
        "quantize": lambda **options: quantize_with_bitsandbytes(model, **options),
    }.items():
        with pytest.raises(ValueError, match="scheme is 'int4'; accepted are int8, nf4, fp4"):
            run(scheme="int4")
        with pytest.raises(ValueError, match="double_quant=True is for nf4 and fp4"):
            run(scheme="int8", double_quant=True)
        with pytest.raises(ValueError, match="compute_dtype is 'float8'; accepted are float32"):
            run(scheme="nf4", compute_dtype="float8")
        if name == "load":
            with pytest.raises(ValueError, match=r"dtype is torch\.int8; accepted are float32"):
                run(scheme="nf4", dtype=torch.int8)
    with pytest.raises(ValueError, match="nothing to quantise"):
        quantize_with_bitsandbytes(nn.ReLU(), "nf4")
    with pytest.raises(TypeError, match=r"up_proj\.weight is torch\.float64"):
        quantize_with_bitsandbytes(decoder().double(), "nf4", skip=["self_attn", "gate_proj", "lm_head"])
    with pytest.raises(TypeError, match="layer is Linear; a quantised Linear4bit or Linear8bitLt"):
        from_bitsandbytes(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="layer is Linear4bit; a quantised"):
        from_bitsandbytes(bnb.nn.Linear4bit(64, 64))
    with pytest.raises(ValueError, match="no layer of bitsandbytes"):
        replace_bitsandbytes(decoder())
    weight = torch.randn(32, 64)
    for wrong in (
        quantize(weight, "int4"),
        quantize(weight, "int8"),
        quantize(weight, "int8", block_size="tensor"),
        quantize(weight, "int8", block_size="row", zero_point=True),
        quantize(weight, "nf4", block_size=16),
        quantize(weight[0], "nf4"),
    ):
        if wrong.block_size == 64 and wrong.scheme == "int8":
            continue  # a row of 64 is one block of 64
        with pytest.raises(ValueError, match="is what bitsandbytes holds"):
            to_bitsandbytes(wrong)


def test_without_bitsandbytes_one_sentence_says_so(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for run in (
        lambda: load_with_bitsandbytes(str(folder), "nf4"),
        lambda: quantize_with_bitsandbytes(decoder(), "nf4"),
        lambda: to_bitsandbytes(quantize(torch.randn(64, 64), "nf4")),
        lambda: replace_bitsandbytes(decoder()),
    ):
        with pytest.raises(ImportError, match="not installed; it comes with course_lib except on macOS"):
            run()
