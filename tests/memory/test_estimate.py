"""The estimator: published totals, the source's measured peaks, storage as bitsandbytes has it, errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.memory import (
    bytes_to_giga_bytes,
    count_parameters,
    estimate,
    kv_cache_bytes,
    published_config,
    published_names,
)
from course_lib.memory.counting import Model

# Parameter totals as the checkpoints' publishers, or the classes themselves, state them.
PUBLISHED = {
    "octocoder": 15_517_456_384,
    "starcoder": 15_517_456_384,
    "bloom": 176_247_271_424,
    "gpt-3": 174_604_259_328,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "mpt-7b": 6_649_286_656,
    "smollm2-135m": 134_515_008,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b-v0.3": 7_248_023_552,
    "gemma-3-27b": 27_009_346_304,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_404_352,
    "phi-4": 14_659_507_200,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_totals(name: str, parameters: int) -> None:
    assert count_parameters(name) == count_parameters(name.upper()) == parameters


def test_a_published_model_goes_by_its_repository_s_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert estimate("meta-llama/Llama-3.1-8B") == estimate("llama-3.1-8b")
    for name in published_names():
        assert count_parameters(published_config(name)["origin"].upper()) == count_parameters(name)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "meta-llama" / "Llama-3.1-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published_config("llama-2-7b")), encoding="utf-8")
    assert estimate("meta-llama/Llama-3.1-8B") == estimate("llama-2-7b")  # a folder of that name comes first


@pytest.mark.parametrize("name", published_names())
def test_published_configurations_equal_their_real_class(name: str, real_class: Any) -> None:
    from transformers import CONFIG_MAPPING

    path = Path(sys.modules["course_lib.memory"].__file__ or "").parent / "published" / f"{name}.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    assert values["origin"]
    assert values["basis"]
    config_class = CONFIG_MAPPING[values["model_type"]]
    assert Model(name).method == "closed form"
    assert count_parameters(name) == real_class(config_class.from_dict(dict(values)), ()).parameters
    # The cache of six layers: a run on the meta device takes as long as it has layers.
    layers = next(key for key in ("num_hidden_layers", "n_layer", "n_layers") if key in values)
    values |= {layers: 6} | ({"layer_types": values["layer_types"][:6]} if "layer_types" in values else {})
    held = real_class(config_class.from_dict(dict(values)), (7, 1_100)).cache_bytes
    assert {length: kv_cache_bytes(values, length) for length in held} == held


def test_shipped_names_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None)\n"
        "from course_lib.memory import *\n"
        "for name in published_names():\n"
        "    found = estimate(name, prompt_tokens=100, new_tokens=10, quantization='nf4-double', kv_cache_dtype='int4')\n"
        "    print(name, count_parameters(name), found.method)\n"
        "try:\n    count_parameters({'model_type': 'llama'})\nexcept ValueError as error:\n    print(error)\n"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == published_names()
    assert all(line.endswith("closed form") for line in lines[:-1])
    assert "leaves out" in lines[-1]
    assert "transformers is not installed" in lines[-1]


@pytest.mark.parametrize(
    ("quantization", "peak", "tolerance"),
    [(None, 29.0260648727417, 0.02), ("int8", 15.219234466552734, 0.05), ("fp4", 9.543574333190918, 0.05)],
)
def test_octocoder_lands_on_the_peaks_that_the_guide_measured(
    quantization: str | None, peak: float, tolerance: float
) -> None:
    found = estimate("octocoder", dtype="bfloat16", quantization=quantization, prompt_tokens=20, new_tokens=60)
    assert bytes_to_giga_bytes(found.total) == pytest.approx(peak, rel=tolerance)


def test_parts_add_up_and_decide_what_fits() -> None:
    found = estimate("llama-3.1-8b", prompt_tokens=2_000, new_tokens=48, batch_size=3)
    assert found.total == found.weights + found.kv_cache + found.activations
    assert (found.quantization_constants, found.workspace) == (0, 0)
    assert found.weights == 2 * 8_030_261_248
    assert found.kv_cache == 3 * 2_048 * 32 * 2 * 8 * 128 * 2 == kv_cache_bytes("llama-3.1-8b", 2_048, 3)
    assert found.fits(found.total)
    assert not found.fits(found.total - 1)
    assert "14.96 GiB" in str(found)


def test_the_configuration_names_the_default_data_type() -> None:
    tiny = {"model_type": "llama", "num_hidden_layers": 1, "torch_dtype": "float32"}
    assert estimate(tiny).weights == 4 * count_parameters(tiny)
    assert estimate({**tiny, "torch_dtype": "float16"}).weights == 2 * count_parameters(tiny)
    del tiny["torch_dtype"]
    assert estimate(tiny).weights == 2 * count_parameters(tiny)


def test_eager_attention_adds_the_square_of_the_prompt() -> None:
    plain, eager = (
        estimate("llama-2-7b", prompt_tokens=4_096, attention=kind).activations for kind in ("flash", "eager")
    )
    assert eager - plain == 32 * 4_096**2 * (2 * 2 + 4)


@pytest.mark.parametrize("quantization", ["int8", "fp4", "nf4", "nf4-double", "fp4-double"])
def test_quantised_storage_is_what_bitsandbytes_allocates(quantization: str) -> None:
    import torch
    from torch import nn

    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes has no macOS build", exc_type=ImportError)
    rows, columns = 192, 320
    tiny = {"model_type": "llama", "hidden_size": columns, "intermediate_size": rows, "num_hidden_layers": 1,
            "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 7}  # fmt: skip
    found, plain = estimate(tiny, quantization=quantization), estimate(tiny)
    stored = constants = matrices = 0
    for shape in [(columns, columns)] * 4 + [(rows, columns)] * 2 + [(columns, rows)]:
        weight = torch.randn(shape)
        matrices += 2 * weight.numel()
        if quantization == "int8":
            codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half())
            stored, constants = stored + codes.nbytes, constants + scales.nbytes
            continue
        layer = bnb.nn.Params4bit(
            nn.Parameter(weight, requires_grad=False),
            requires_grad=False,
            quant_type=quantization.removesuffix("-double"),
            compress_statistics=quantization.endswith("-double"),
            blocksize=64,
        ).to("cpu")
        state = layer.quant_state
        stored, constants = stored + layer.data.nbytes, constants + state.absmax.nbytes
        if state.nested:
            constants += state.state2.absmax.nbytes + state.offset.nbytes
    assert found.weights == plain.weights - matrices + stored
    assert found.quantization_constants == constants


SCHEMES = ["int8", "llm-int8", "bfloat16", "int4", "int3", "int2", "nf4", "nf4-double", "fp4", "fp4-double"]


def _stored(config: Any, quantization: str, dtype: str = "float32") -> int:
    found = estimate(config, dtype=dtype, quantization=quantization.removeprefix("llm-"))
    return found.weights + found.quantization_constants


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_storage_is_what_quantize_model_keeps(scheme: str) -> None:
    from course_lib.models import DecoderConfig, DecoderLM
    from course_lib.quantization import model_bytes, quantize_model

    # Rows that are no whole number of blocks, nor codes of bytes.
    shape = {"hidden_size": 76, "intermediate_size": 133, "num_hidden_layers": 2, "vocab_size": 50, "head_dim": 14,
             "num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}  # fmt: skip
    model = DecoderLM(DecoderConfig(**shape))
    quantize_model(model, scheme.removesuffix("-double"), double_quant=scheme.endswith("-double"))
    assert model_bytes(model) == _stored({"model_type": "llama", **shape}, scheme)


@pytest.mark.parametrize(
    ("library", "scheme"),
    [("ours", scheme) for scheme in SCHEMES] + [("bitsandbytes", scheme) for scheme in ("int8", *SCHEMES[6:])],
)
def test_trained_models_take_what_was_predicted(library: str, scheme: str) -> None:
    import torch

    from course_lib.models import load
    from course_lib.quantization import model_bytes, quantize_model

    name, options = scheme.removesuffix("-double"), {"double_quant": scheme.endswith("-double")}
    if library == "bitsandbytes":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes has no macOS build", exc_type=ImportError)
    large = (library, scheme) in [("ours", "int4"), ("ours", "nf4-double"), ("bitsandbytes", "nf4")]
    for checkpoint in ["course/native"] + ["smollm2-135m"] * large:
        model, _ = load(checkpoint, dtype="float32", device="cpu")
        config = model.config.to_dict() | {"model_type": "llama"}
        for own in ("position", "qkv_bias", "qk_norm"):  # what `DecoderConfig` has besides, at Llama's values
            config.pop(own, None)
        if library == "ours":
            found = model_bytes(quantize_model(model, name, **options))
        else:
            from course_lib.integrations.bitsandbytes import bitsandbytes_model_bytes, quantize_with_bitsandbytes

            with torch.compiler.set_stance("force_eager"):
                found = bitsandbytes_model_bytes(quantize_with_bitsandbytes(model, name, **options))
        # Buffers of angles, and the tables of levels that bitsandbytes keeps with each matrix, are not in the estimate.
        assert found * (0.999 if library == "ours" else 0.98) < _stored(config, scheme) <= found


def test_the_smallest_form_of_a_model_is_predicted() -> None:
    from course_lib.models import load
    from course_lib.quantization import model_bytes, quantize_model

    model, _ = load("smollm2-135m", dtype="float32", device="cpu")
    before = model_bytes(model)
    found = model_bytes(quantize_model(model, "int4", embedding="bfloat16"))
    predicted = _stored(model.config, "int4", dtype="bfloat16")
    assert found == pytest.approx(predicted, rel=0.002)  # its norms are still float32
    assert max(found, predicted) <= 0.25 * before


@pytest.mark.parametrize("scheme", ["bfloat16", "int4", "int3", "int2"])
def test_dequantising_takes_no_more_than_its_workspace(scheme: str) -> None:
    import torch
    from torch import nn

    from course_lib.memory import peak_memory
    from course_lib.quantization import quantize_model

    layer, inputs = quantize_model(nn.Sequential(nn.Linear(1024, 512)), scheme), torch.randn(300, 1024)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 7, "head_dim": 64,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    allowed = estimate({"model_type": "llama", **shape}, quantization=scheme, prompt_tokens=300).workspace
    with torch.no_grad(), peak_memory("cpu") as peak:
        layer(inputs)
    assert 0.1 * allowed < peak.bytes <= allowed + 4 * 300 * 512


def test_four_bit_works_on_copies_of_the_largest_matrix() -> None:
    assert estimate("octocoder", quantization="nf4", prompt_tokens=1).workspace == 6 * 6_144 * 24_576
    assert estimate("octocoder", quantization="nf4").workspace == 0


def test_an_int4_cache_is_a_quarter_and_its_constants() -> None:
    full, small = (kv_cache_bytes("llama-2-7b", 640, dtype=dtype) for dtype in ("bfloat16", "int4"))
    assert small == full // 4 + 4 * (full // 2) // 64
    assert kv_cache_bytes("llama-2-7b", 640, dtype="float32") == 2 * full


@given(st.integers(0, 5_000), st.integers(1, 4))
@settings(max_examples=30)
def test_a_sliding_window_keeps_all_but_one_of_its_tokens(length: int, batch: int) -> None:
    sliding, full = 52 * min(length, 1_023), 10 * length
    assert kv_cache_bytes("gemma-3-27b", length, batch) == batch * (sliding + full) * 2 * 16 * 128 * 2


def test_octocoder_caches_one_head_and_a_state_does_not_grow() -> None:
    assert kv_cache_bytes("octocoder", 16_000) == 327_680_000
    mamba = {"model_type": "mamba"}
    assert kv_cache_bytes(mamba, 1) == kv_cache_bytes(mamba, 10_000) > 0 == kv_cache_bytes(mamba, 0)


def test_a_path_a_folder_and_a_dictionary_say_the_same(tmp_path: Path) -> None:
    values = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    folder, file = count_parameters(tmp_path), count_parameters(str(tmp_path / "config.json"))
    assert folder == file == count_parameters(values)


def test_a_nested_language_model_is_followed() -> None:
    inner = {"model_type": "llama", "num_hidden_layers": 2}
    for outer in ({"model_type": "llava", "text_config": inner}, {"model_type": "of_tomorrow", "text_config": inner}):
        assert count_parameters(outer) == count_parameters(inner)


def test_a_field_that_no_formula_covers_goes_to_the_real_class(real_class: Any) -> None:
    from transformers import GPT2Config

    config = GPT2Config(n_layer=2, add_cross_attention=True)
    assert Model(config).method == "meta device"
    assert count_parameters(config) == real_class(config, ()).parameters != count_parameters(GPT2Config(n_layer=2))


def test_the_real_class_finds_the_same_matrices_as_the_formula() -> None:
    from transformers import GPT2Config, Phi3Config, Qwen3MoeConfig

    from course_lib.memory import meta

    for config in (GPT2Config(n_layer=2), Phi3Config(num_hidden_layers=2), Qwen3MoeConfig(num_hidden_layers=2)):
        model = Model(config)
        ours = {w: n for w, n in model.weights.items() if w.kind in ("linear", "head", "embedding")}
        real = meta.weights(meta.build(model.fields))
        assert {w: n for w, n in real.items() if w.kind in ("linear", "head", "embedding")} == ours


PLAIN = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}  # fmt: skip


def test_an_unknown_type_counts_only_if_it_names_everything() -> None:
    assert count_parameters(PLAIN) == 11 * 8 + 2 * (8 * 8 * 2 + 2 * 8 * 4 + 3 * 8 * 12 + 2 * 8) + 8
    assert count_parameters({**PLAIN, "model_type": "of_tomorrow"}) == count_parameters(PLAIN)
    with pytest.raises(ValueError, match="does not cover num_experts"):
        count_parameters({**PLAIN, "num_experts": 4})


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("octocodr", "published names close to it: octocoder"),
        ({}, "empty dictionary"),
        (
            {"model_type": "of_tomorrow", "hidden_size": 8},
            "of_tomorrow.*leaves out vocab_size, intermediate_size, num_hidden",
        ),
        ({"hidden_size": 8}, "no model_type.*leaves out vocab_size"),
        ({**PLAIN, "hidden_size": "wide"}, "hidden_size must be a whole number"),
        ({**PLAIN, "num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "t5"}, "no causal language model"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused_in_one_line(model: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refusal:
        count_parameters(model)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "says"), [("", "is empty"), ("{half", "is not JSON"), ("[1]", "JSON object, not a list")]
)
def test_a_broken_file_is_refused_in_one_line(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=says) as refusal:
        estimate(path)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_and_a_wrong_type_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no configuration file"):
        count_parameters(tmp_path)
    with pytest.raises(FileNotFoundError, match="no configuration file"):
        count_parameters(str(tmp_path / "config.json"))
    with pytest.raises(TypeError, match="got int"):
        count_parameters(7)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "bf17"}, "dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": "int32"}, "dtype"),
        ({"quantization": "int5"}, "quantization"),
        ({"attention": "sdpa"}, "attention"),
        ({"attention": None}, "attention"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"batch_size": 0}, "batch_size"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"new_tokens": 1.0}, "new_tokens"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named} must be [^\n]*$"):
        estimate("llama-2-7b", **options)


@pytest.mark.parametrize("tokens", [0, 10])
def test_a_quantised_cache_of_a_model_without_attention_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=r"^kv_cache_dtype='int4' stores keys and values [^\n]*'mamba'[^\n]*$"):
        estimate({"model_type": "mamba"}, prompt_tokens=tokens, kv_cache_dtype="int4")
