"""Quantised models on disk: back exactly, or one clear error and nothing changed."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from course_lib.generation import generate
from course_lib.models import DecoderLM
from course_lib.quantization import QuantizedLinear, load_quantized, model_bytes, quantize_model, save_quantized

OPTIONS = [
    ("int8", {}),
    ("llm-int8", {}),
    ("int4", {"zero_point": True}),
    ("int4", {"block_size": "tensor"}),
    ("int3", {}),
    ("int2", {"block_size": 24}),
    ("nf4", {"double_quant": True}),
    ("fp4", {"block_size": 128}),
]


@pytest.mark.parametrize(("scheme", "options"), OPTIONS)
def test_save_load_generate_gives_identical_tokens(decoder, tmp_path, scheme, options):
    saved = quantize_model(decoder(qkv_bias=True), scheme, **options)
    save_quantized(saved, tmp_path / "model.safetensors")
    loaded = load_quantized(decoder(qkv_bias=True), tmp_path / "model.safetensors")
    prompt = torch.randint(0, 96, (2, 9))
    first, second = (generate(model, prompt, max_new_tokens=12) for model in (saved, loaded))
    assert torch.equal(first.sequences, second.sequences)
    with torch.no_grad():
        assert torch.equal(saved(prompt).logits, loaded(prompt).logits)
    assert model_bytes(loaded) == model_bytes(saved)
    assert not any(module.training for module in loaded.modules())


def test_file_is_as_small_as_the_model_and_ties_stay_tied(decoder, tmp_path):
    saved = quantize_model(decoder(tie_word_embeddings=True).bfloat16(), "int4")
    save_quantized(saved, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert sum(file.get_tensor(name).nbytes for name in file.keys()) == model_bytes(saved)  # noqa: SIM118
    loaded = load_quantized(decoder(tie_word_embeddings=True), tmp_path / "model.safetensors")
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    assert loaded.dtype == loaded.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_model_on_the_meta_device_is_filled(decoder, tmp_path):
    saved = quantize_model(decoder(), "nf4")
    save_quantized(saved, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = DecoderLM(saved.config).eval()
    ids = torch.randint(0, 96, (1, 9))
    with torch.no_grad():
        assert torch.equal(load_quantized(empty, tmp_path / "model.safetensors")(ids).logits, saved(ids).logits)


def test_transposed_layers_of_gpt2_come_back(tmp_path):
    def build():
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        ).eval()

    saved, ids = quantize_model(build(), "int4"), torch.randint(0, 50, (2, 7))
    save_quantized(saved, tmp_path / "model.safetensors")
    loaded = load_quantized(build(), tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, saved(ids).logits)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_another_quantised_model_may_take_the_file(decoder, tmp_path):
    save_quantized(quantize_model(decoder(), "nf4", double_quant=True), tmp_path / "model.safetensors")
    loaded = load_quantized(quantize_model(decoder(), "int8"), tmp_path / "model.safetensors")
    assert {module.scheme for module in loaded.modules() if isinstance(module, QuantizedLinear)} == {"nf4"}


@pytest.fixture
def written(decoder, tmp_path):
    path = tmp_path / "model.safetensors"
    save_quantized(quantize_model(decoder(), "int4"), path)
    return path


def rewrite(path, change):
    """Change the tensors or metadata of a file in place."""
    with safe_open(path, framework="pt") as file:
        metadata, state = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    layers = json.loads(metadata["layers"])
    change(metadata, layers, state)
    if "layers" in metadata:
        metadata["layers"] = json.dumps(layers)
    save_file(state, path, metadata=metadata)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def no_metadata(path):
    save_file({"weight": torch.zeros(1)}, path)


Q = "layers.0.self_attn.q_proj"
DAMAGES = [
    (cut, "is damaged"),
    (lambda path: path.write_bytes(b""), "is damaged"),
    (no_metadata, "has no format no version; course_lib.quantization 1 is needed"),
    (
        lambda path: rewrite(path, lambda meta, layers, state: meta.update(version="2")),
        "has course_lib.quantization 2; course_lib",
    ),
    (lambda path: rewrite(path, lambda meta, layers, state: meta.pop("layers")), "is damaged"),
    (lambda path: rewrite(path, lambda meta, layers, state: layers[Q].update(scheme="int5")), "has scheme 'int5'"),
    (
        lambda path: rewrite(path, lambda meta, layers, state: layers[Q].update(shape=[40, 41])),
        r"has shape \[40, 41\] there",
    ),
    (lambda path: rewrite(path, lambda meta, layers, state: layers.update(nowhere=layers[Q])), "nowhere"),
    (lambda path: rewrite(path, lambda meta, layers, state: layers.update(norm=layers[Q])), "norm is quantised there"),
    (lambda path: rewrite(path, lambda meta, layers, state: state.pop(Q + ".codes")), "is damaged"),
    (
        lambda path: rewrite(path, lambda meta, layers, state: state.update({Q + ".codes": torch.zeros(3, 3).byte()})),
        "is damaged",
    ),
    (
        lambda path: rewrite(path, lambda meta, layers, state: state.update({Q + ".scale": torch.zeros(40, 7)})),
        "is damaged",
    ),
    (
        lambda path: rewrite(path, lambda meta, layers, state: state.pop("norm.weight")),
        "another model: norm.weight is only in one",
    ),
    (
        lambda path: rewrite(path, lambda meta, layers, state: state.update(more=torch.ones(1))),
        "another model: more is only in one",
    ),
    (
        lambda path: rewrite(path, lambda meta, layers, state: state.update({"norm.weight": torch.ones(3)})),
        "norm.weight has shape",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_file_that_is_not_understood_is_one_error_and_changes_nothing(decoder, written, damage, message):
    damage(written)
    model = decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as caught:
        load_quantized(model, written)
    assert "\n" not in str(caught.value)
    assert "model.safetensors" in str(caught.value)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_another_architecture_is_refused(decoder, written):
    for options in ({"num_hidden_layers": 2}, {"hidden_size": 48}, {"qkv_bias": True}, {"vocab_size": 97}):
        with pytest.raises(ValueError, match=r"path 'model.safetensors' is"):
            load_quantized(decoder(**options), written)


def test_no_file_and_no_quantised_layer_are_named(decoder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"path '.*nothing' is no file"):
        load_quantized(decoder(), tmp_path / "nothing")
    with pytest.raises(ValueError, match="model has no quantised layer"):
        save_quantized(decoder(), tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(decoder, written, monkeypatch):
    old = written.read_bytes()

    def fail(state, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        save_quantized(quantize_model(decoder(), "int8"), written)
    assert written.read_bytes() == old
    assert [path.name for path in written.parent.iterdir()] == [written.name]
