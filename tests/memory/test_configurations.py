"""What a configuration may hold: files, whole numbers, data types, quantised checkpoints, language models inside others."""

from __future__ import annotations

import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.memory import (
    bytes_to_giga_bytes,
    count_parameters,
    counting,
    estimate,
    format_gib,
    kv_cache_bytes,
    meta,
)
from course_lib.memory.architecture import Weight
from course_lib.memory.counting import Model

LLAMA = {"model_type": "llama", "num_hidden_layers": 2}


# ---- Files ----


def test_a_byte_order_mark_is_no_part_of_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert count_parameters(path) == count_parameters(LLAMA)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5_000 + "}", "not JSON that can be read"),
        (
            '{"model_type": "llama", "hidden_size": ' + "9" * 4_000 + "}",
            "hidden_size must be a whole number of at most",
        ),
    ],
    ids=["depth", "digits", "size"],
)
def test_an_absurd_file_is_refused_by_name_in_one_short_line(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=says) as refusal:
        count_parameters(path)
    assert "config.json" in str(refusal.value) or len(str(path)) > 60
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_no_name_is_not_the_folder_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="got an empty text"):
        count_parameters("")
    assert count_parameters(".") == count_parameters(LLAMA)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_or_a_device_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="not a regular file"):
            count_parameters(path)


def test_a_class_is_not_a_configuration() -> None:
    from transformers import LlamaConfig

    with pytest.raises(TypeError, match="got the class LlamaConfig itself"):
        count_parameters(LlamaConfig)


# ---- Whole numbers ----


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"intermediate_size": -1}, "intermediate_size must be a whole number of at least 0, got -1"),
        ({"model_type": "gpt2", "n_inner": -4}, "n_inner must be a whole number of at least 0, got -4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a whole number of at least 1, got 0"),
        ({"num_key_value_heads": 64}, r"num_attention_heads \(32\) must be a multiple of num_key_value_heads \(64\)"),
        ({"num_key_value_heads": 5}, r"num_attention_heads \(32\) must be a multiple of num_key_value_heads \(5\)"),
        ({"head_dim": 0}, "head_dim must be a whole number of at least 1, got 0"),
        ({"head_dim": -1}, "head_dim must be a whole number of at least 1, got -1"),
        ({"hidden_size": [4_096]}, r"hidden_size must be a whole number of at least 1, got \[4096\]"),
        ({"num_key_value_heads": [8]}, r"num_key_value_heads.*\[8\].*int"),
        ({"vocab_size": 10**5_000}, "vocab_size must be a whole number of at most .*, got a longer number"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be a whole number of at most 10000"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**12}, "num_hidden_layers must be .* at most 10000"),
        ({"model_type": "minimax", "num_hidden_layers": 10**5}, "num_hidden_layers must be .* at most 10000"),
        ({"model_type": "llava", "text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers must be .* 10000"),
        ({"attention_bias": "false"}, "attention_bias.*false"),
        ({"layer_types": 5}, "llama"),
        ({"model_type": "mixtral", "num_experts_per_tok": -3}, "num_experts_per_tok must be .* at least 1, got -3"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "goes to 9 experts, and there are 8"),
    ],
)
def test_a_number_that_no_model_can_have_is_named_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refusal:
        estimate(LLAMA | changes, prompt_tokens=3)
    assert "\n" not in str(refusal.value)


def test_ten_thousand_layers_of_a_kind_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from course_lib.memory import blocks

    described = []
    layer = blocks.layer
    monkeypatch.setattr(blocks, "layer", lambda f, c, d, i: described.append(i) or layer(f, c, d, i))
    one, many = (count_parameters(LLAMA | {"num_hidden_layers": n}) for n in (1, 10_000))
    nothing = count_parameters(LLAMA | {"num_hidden_layers": 0})
    assert many - nothing == 10_000 * (one - nothing)
    assert described == [0, 0]


def test_numpy_integers_are_whole_numbers_and_bools_are_not() -> None:
    assert kv_cache_bytes("llama-2-7b", np.int64(5), np.uint8(2)) == kv_cache_bytes("llama-2-7b", 5, 2)
    assert count_parameters(LLAMA | {"hidden_size": np.int32(1_024)}) == count_parameters(
        LLAMA | {"hidden_size": 1_024}
    )
    for value in (True, np.True_, 5.0, np.float32(5), "5"):
        with pytest.raises(ValueError, match=r"^sequence_length must be a whole number"):
            kv_cache_bytes("llama-2-7b", value)  # type: ignore[arg-type]


@given(st.sampled_from(["prompt_tokens", "new_tokens", "batch_size"]), st.integers(1, 6_000))
@settings(max_examples=40)
def test_a_number_of_any_length_is_counted_or_refused_in_one_short_line(name: str, digits: int) -> None:
    options: dict[str, Any] = {"prompt_tokens": 8, "attention": "eager", name: 10**digits}
    try:
        text = str(estimate("octocoder", **options))
    except ValueError as refusal:
        text = str(refusal)
        assert text.startswith(f"{name} must be a whole number of at most")
        assert "\n" not in text
    assert "inf" not in text
    assert len(text) < 800


def test_bytes_beyond_any_float_are_infinite() -> None:
    assert bytes_to_giga_bytes(10**400) == float("inf")
    assert format_gib(10**400) == "inf GiB"


# ---- Data types ----


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"torch_dtype": "auto"}, 2),
        ({"torch_dtype": "torch.bfloat16"}, 2),
        ({"dtype": "torch.float32"}, 4),
        ({"model_type": "llava", "torch_dtype": "float32", "text_config": LLAMA}, 4),
        ({"model_type": "llava", "text_config": LLAMA | {"torch_dtype": "float32"}}, 4),
        ({"model_type": "llava", "text_config": LLAMA | {"torch_dtype": "auto"}}, 2),
        ({"model_type": "of_tomorrow", "torch_dtype": "float32", "text_config": LLAMA}, 4),
    ],
)
def test_a_configuration_states_its_data_type_outside_or_inside(changes: dict[str, Any], size: int) -> None:
    assert estimate(LLAMA | changes).weights == size * count_parameters(LLAMA)


def test_only_types_that_fit_the_place_are_listed_and_taken() -> None:
    with pytest.raises(ValueError, match=r"^dtype must be one of float64, float32, float16, bfloat16 or a torch"):
        estimate("llama-2-7b", dtype="int4")
    for dtype in ("int64", "int32", "uint8", "nf4"):
        with pytest.raises(ValueError, match=f"^dtype must be one of [^']*int8, int4 or a torch.dtype, got '{dtype}'"):
            kv_cache_bytes("llama-2-7b", 5, dtype=dtype)


# ---- Quantised checkpoints ----


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq 4 bit"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["q_proj"]},
            "fp8 except q_proj",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128, "modules_to_not_convert": [None]}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": None, "modules_to_not_convert": 5}, "fp8 except 5"),
        ({"quant_method": "fp8", "modules_to_not_convert": "q_proj"}, "fp8 except q_proj"),
        ({"quant_method": "mxfp4"}, "mxfp4"),  # of a model without experts
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["q_proj"]}, "except q_proj"),
    ],
)
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_a_checkpoint_stored_in_a_way_not_counted_is_refused_unless_told_how(
    stored: dict[str, Any], says: str, place: str
) -> None:
    quantised = LLAMA | {"quantization_config": stored}
    if place == "inside":
        quantised = {"model_type": "llava", "text_config": quantised}
    with pytest.raises(ValueError, match=rf"stored as [^\n]*{says}, which this does not count; pass dtype=[^\n]*$"):
        estimate(quantised)
    assert (
        estimate(quantised, dtype="float16").weights == 2 * count_parameters(quantised) == 2 * count_parameters(LLAMA)
    )
    assert estimate(quantised, quantization="nf4") == estimate(LLAMA, quantization="nf4")


@pytest.mark.parametrize(
    ("stored", "scheme"),
    [
        ({"load_in_8bit": True}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head"]}, "nf4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "NF4", "llm_int8_skip_modules": "lm_head"}, "nf4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4-double"),
        ({"load_in_4bit": False, "load_in_8bit": False}, None),
    ],
)
def test_what_bitsandbytes_stored_is_counted_as_such(stored: dict[str, Any], scheme: str | None) -> None:
    assert estimate(LLAMA | {"quantization_config": stored}) == estimate(LLAMA, quantization=scheme)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama"},
        {"model_type": "qwen3_moe", "moe_intermediate_size": 136, "num_experts": 8, "num_experts_per_tok": 2},
        {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "moe_intermediate_size": 136,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 100,
            "kv_lora_rank": 72,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
        },
    ],
    ids=lambda fields: fields["model_type"],
)
def test_fp8_takes_what_transformers_layers_for_it_hold(fields: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    odd = {"vocab_size": 500, "hidden_size": 320, "intermediate_size": 500, "num_hidden_layers": 3, "head_dim": 64}
    fields = {**odd, "num_attention_heads": 4, "num_key_value_heads": 2, **fields}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    model = replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config())
    routers = "mlp.gate.weight"  # some versions hold them in float32; checkpoints do not
    held = sum(p.numel() * (2 if n.endswith(routers) else p.element_size()) for n, p in model.named_parameters())
    scales = sum(p.nbytes for n, p in model.named_parameters() if n.endswith("scale_inv"))
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "mlp.gate"]}
    found = estimate(fields | {"quantization_config": stored})
    assert (found.weights, found.quantization_constants) == (held - scales, scales)
    assert scales > 0
    assert found == estimate(fields, quantization="fp8")


@pytest.mark.parametrize(("name", "published"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)])
def test_mxfp4_takes_what_the_published_checkpoints_do(name: str, published: int) -> None:
    """The total size that their files' index states."""
    found = estimate(name)
    assert found.weights + found.quantization_constants == published
    assert estimate(name, dtype="bfloat16").weights == 2 * count_parameters(name)


def test_a_scheme_for_experts_is_refused_for_a_model_without() -> None:
    with pytest.raises(
        ValueError, match=r"^model 'llama-2-7b': quantization is 'mxfp4', which converts experts only, and it has none$"
    ):
        estimate("llama-2-7b", quantization="mxfp4")


def test_a_configuration_object_says_how_it_is_stored_too() -> None:
    from transformers import BitsAndBytesConfig, LlamaConfig

    stored = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    config = LlamaConfig(num_hidden_layers=2, quantization_config=stored)
    assert estimate(config).quantization_constants == estimate(LLAMA, quantization="nf4").quantization_constants > 0


# ---- The real class, and models inside models ----

_MIXTURES = [
    {"model_type": "mixtral", "num_local_experts": 4},
    {"model_type": "gpt_oss", "num_local_experts": 4, "layer_types": ["full_attention"] * 2, "head_dim": 32},
    {"model_type": "llama4_text", "num_local_experts": 4, "intermediate_size_mlp": 120, "moe_layers": [0, 1]},
    {"model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 56},
    {"model_type": "nemotron_h", "n_routed_experts": 4, "layers_block_type": ["moe", "attention"]},
]


@pytest.mark.parametrize("values", _MIXTURES, ids=lambda values: values["model_type"])
def test_formula_and_real_class_find_the_same_experts_and_activations(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 72, "num_attention_heads": 6,
             "num_key_value_heads": 3, "vocab_size": 50}  # fmt: skip
    found = []
    for method in ("closed form", "meta device"):
        model = Model(sizes | values)
        experts = {weight: count for weight, count in model.weights.items() if weight.kind == "experts"}
        widths = [
            estimate(sizes | values, prompt_tokens=300, attention=kind).activations for kind in ("flash", "eager")
        ]
        assert (model.method, len(experts)) == (method, 2)
        found.append((experts, widths))
        monkeypatch.setattr(counting, "FAMILIES", {})
    assert found[0] == found[1]


def test_stacked_experts_are_one_matrix_each_whichever_way_they_lie() -> None:
    import torch
    from torch import nn

    class Experts(nn.Module):
        def __init__(self, up: tuple[int, ...], down: tuple[int, ...]) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.empty(up))
            self.down_proj = nn.Parameter(torch.empty(down))

    expected = {Weight(10, 7, "experts"): 3, Weight(7, 5, "experts"): 3}
    assert meta.weights(Experts((3, 10, 7), (3, 7, 5))) == expected
    assert meta.weights(Experts((3, 7, 10), (3, 5, 7))) == expected


_TEXT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 99,
}
_COMPOSITE: list[dict[str, Any]] = [
    {"model_type": "gemma3", "text_config": _TEXT | {"layer_types": ["full_attention"] * 2}},
    {"model_type": "got_ocr2", "text_config": _TEXT | {"model_type": "qwen2"}},
    {"model_type": "llava", "text_config": _TEXT | {"model_type": "qwen2"}},
    {"model_type": "bart", "vocab_size": 99, "decoder_attention_heads": 4, "encoder_attention_heads": 8},
]


@pytest.mark.parametrize("values", _COMPOSITE, ids=lambda values: values["model_type"])
def test_eager_attention_counts_the_heads_of_the_language_model(values: dict[str, Any]) -> None:
    flash, eager = (estimate(values, prompt_tokens=512, attention=kind).activations for kind in ("flash", "eager"))
    assert eager - flash == 4 * 512**2 * (2 * 2 + 4)


def test_active_experts_of_a_model_inside_another_are_counted() -> None:
    text = {"num_hidden_layers": 2, "vocab_size": 99, "hidden_size": 64, "layer_types": ["full_attention"] * 2,
            "enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 30_000}  # fmt: skip
    models = [{"model_type": "gemma4", "text_config": text | {"top_k_experts": active}} for active in (1, 3)]
    few, many = (estimate(model, prompt_tokens=100).activations for model in models)
    assert Model(models[0]).fields.model_type == "gemma4"  # the whole, so that the number is one level down
    assert many - few == 2 * (3 * 30_000 + 2 * 64) * 100 * 2


_VISION = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe"]


@pytest.mark.parametrize("model_type", _VISION)
@pytest.mark.parametrize("tied", [False, True])
def test_a_vision_model_is_counted_as_its_language_model_with_head(model_type: str, tied: bool) -> None:
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, DynamicCache

    rotary = (
        {"mrope_section": [2, 3, 3]}
        if model_type[0] == "q"
        else {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
    )
    text = {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 333,
            "intermediate_size": 40, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rotary}}  # fmt: skip
    text |= {"head_dim": 16} if model_type == "qwen3_vl" else {}
    values = {"model_type": model_type, "tie_word_embeddings": tied, "text_config": text, "vision_config": {"depth": 1}}
    config = CONFIG_MAPPING[model_type].from_dict({k: v for k, v in values.items() if k != "model_type"})
    with torch.device("meta"):
        whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]._from_config(config, dtype=torch.bfloat16)
    language = whole.model.language_model
    parts = {id(p): p.numel() for part in (language, whole.lm_head) for p in part.parameters()}
    cache = DynamicCache(config=language.config)
    argument = "cache" if "cache" in inspect.signature(language.forward).parameters else "past_key_values"
    with torch.no_grad():
        tokens = torch.zeros((1, 9), dtype=torch.long, device="meta")
        language(input_ids=tokens, use_cache=True, **{argument: cache})
    assert Model(values).method == "closed form"
    assert count_parameters(values) == sum(parts.values())
    assert kv_cache_bytes(values, 9) == sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
    # As Transformers wrote these files before it nested them, and the text part on its own.
    alone = text | {"model_type": f"{model_type}_text", "tie_word_embeddings": tied}
    assert count_parameters(alone) == count_parameters(values)


def test_a_class_that_keeps_its_state_elsewhere_is_refused_at_once() -> None:
    values = {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    assert count_parameters(values) > 0
    with pytest.raises(ValueError, match="keeps nothing in a layered cache"):
        kv_cache_bytes(values, 10**7)


def test_counting_says_nothing_and_leaves_the_log_as_it_was() -> None:
    from transformers.utils import logging as transformers_logging

    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    transformers_logging.add_handler(handler)
    try:
        for model_type in ("arcee", "starcoder2", "big_bird", "llava"):
            count_parameters({"model_type": model_type})
        kv_cache_bytes({"model_type": "glm4_moe", "num_hidden_layers": 2}, 9)
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
    finally:
        transformers_logging.remove_handler(handler)
        transformers_logging.set_verbosity(level)
    assert [record.getMessage() for record in said] == []
