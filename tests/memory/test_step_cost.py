"""What a step reads and computes: by hand, against counted operations and stored tensors of real models, and as laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from course_lib.kv_cache import DynamicCache
from course_lib.memory import StepCost, count_parameters, counting, estimate, kv_cache_bytes, published_names, step_cost
from course_lib.memory.config import UnsupportedError
from course_lib.memory.estimate import BITSANDBYTES, OURS
from course_lib.models.decoder import DecoderConfig, DecoderLM

DENSE = (*BITSANDBYTES, *OURS, "fp8")  # mxfp4 converts experts, which few models have
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def test_a_decode_step_of_llama_by_hand():
    """Llama 2 7B: 32 layers, 32 heads of 128, width 4096, feed-forward 11008, 32000 words, an untied head."""
    cost = step_cost("llama-2-7b", context=1_000, batch_size=3, dtype="float16")
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    matrices = 32 * layer + 32000 * 4096
    assert cost.weight_bytes == 2 * (matrices + (2 * 32 + 1) * 4096 + 3 * 4096)
    assert cost.weight_flops == 2 * matrices * 3
    assert cost.cache_bytes == 2 * 32 * 32 * 128 * 1_000 * 2 * 3
    assert cost.attention_flops == 4 * 32 * 128 * 1_000 * 32 * 3
    assert (cost.bytes, cost.flops) == (cost.weight_bytes + cost.cache_bytes, cost.weight_flops + cost.attention_flops)


def test_one_shared_head_divides_what_is_read_and_nothing_of_what_is_computed():
    """OctoCoder at 16,000 tokens: the 327.68 MB of its cache, and the scores of all 48 heads of 128 in 40 layers."""
    cost = step_cost("octocoder", context=16_000)
    assert cost.cache_bytes == 2 * 40 * 128 * 16_000 * 2 == 327_680_000
    assert cost.attention_flops == 4 * 48 * 128 * 16_000 * 40
    many = step_cost({**counting.resolve("octocoder").source, "multi_query": False}, context=16_000)
    assert many.cache_bytes == 48 * cost.cache_bytes
    assert many.attention_flops == cost.attention_flops


def test_a_tied_head_is_read_once_and_of_an_untied_table_only_rows():
    config = {**SMALL, "model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True}
    tied = step_cost(config, context=10, batch_size=7)
    untied = step_cost(config | {"tie_word_embeddings": False}, context=10, batch_size=7)
    assert tied.weight_bytes == 2 * count_parameters(config)
    assert untied.weight_bytes - tied.weight_bytes == 2 * 7 * 32
    assert untied.flops == tied.flops
    crowd = step_cost(config | {"tie_word_embeddings": False}, context=10, batch_size=200)
    assert crowd.weight_bytes == 2 * count_parameters(config | {"tie_word_embeddings": False})


@pytest.mark.parametrize(
    "positions", [{}, {"position": "learned"}, {"sliding_window": 5}, {"tie_word_embeddings": True}]
)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("past", "new"), [(20, 1), (20, 4), (0, 7)])
def test_operations_are_those_that_a_model_does(positions, kv_heads, past, new):
    config = DecoderConfig(**SMALL, num_key_value_heads=kv_heads, attention_bias=True, **positions)
    model = DecoderLM(config).eval()
    model.attention_backend = "reference"
    cache = DynamicCache(config)
    with torch.no_grad():
        if past:
            model(torch.randint(0, 100, (2, past)), cache=cache)
        with FlopCounterMode(display=False) as counter:
            model(torch.randint(0, 100, (2, new)), cache=cache)
    cost = step_cost(config, context=past + new, query_tokens=new, batch_size=2)
    # The reference computes the masked scores too, which a kernel skips.
    keys = min(past, 4) + new if "sliding_window" in positions else past + new
    seen = sum(min(past + i + 1, 5 if "sliding_window" in positions else keys) for i in range(new))
    assert cost.flops + 4 * 32 * 3 * 2 * (new * keys - seen) == counter.get_total_flops()
    assert cost.attention_flops == 4 * 32 * 3 * 2 * seen


@pytest.mark.parametrize("window", [None, 5])
def test_bytes_are_those_of_the_tensors(window):
    config = DecoderConfig(**SMALL, num_key_value_heads=2, sliding_window=window)
    model = DecoderLM(config).eval()
    cache = DynamicCache(config)
    with torch.no_grad():
        model(torch.randint(0, 100, (2, 21)), cache=cache)
    cost = step_cost(config, context=21, batch_size=2, dtype="float32")
    assert cost.cache_bytes == sum(layer.used_nbytes for layer in cache.layers)
    table = next(p for p in model.parameters() if p.shape == (100, 32))
    assert cost.weight_bytes == sum(p.nbytes for p in model.parameters()) - table.nbytes + 2 * table[0].nbytes


def test_only_the_prompts_last_token_needs_the_head():
    every = step_cost("smollm2-135m", context=100, query_tokens=100, batch_size=2)
    last = step_cost("smollm2-135m", context=100, query_tokens=100, batch_size=2, logits_to_keep=1)
    assert every.flops - last.flops == 2 * 2 * 99 * 49152 * 576
    assert every.bytes == last.bytes


def test_a_prompt_attends_to_half_of_the_square():
    cost = step_cost("smollm2-135m", context=100, query_tokens=100)
    assert cost.attention_flops == 4 * 9 * 64 * 30 * (100 * 101 // 2)


def test_experts_are_read_as_often_as_they_are_chosen():
    """Four of 32 in every layer of gpt-oss: 4 for one token; of 32, on average 32 * (1 - (7 / 8)**2) = 7.5 for two."""
    one, two, many = (step_cost("gpt-oss-20b", context=100, batch_size=b, dtype="bfloat16") for b in (1, 2, 10_000))
    expert = 24 * (2880 * 2 * 2880 + 2880 * 2880) * 2
    cached_row = 2880 * 2
    assert two.weight_bytes - one.weight_bytes == pytest.approx(3.5 * expert + cached_row, rel=1e-9)
    held = estimate("gpt-oss-20b", dtype="bfloat16").weights
    assert many.weight_bytes == pytest.approx(held - (201088 - 10_000) * cached_row, rel=1e-9)
    assert many.weight_flops == 10_000 * one.weight_flops
    dense = 24 * (2 * 2880 * 4096 + 2 * 2880 * 512 + 2880 * 32) + 201088 * 2880
    assert one.weight_flops == 2 * (dense + 4 * expert // 2)


def test_latent_attention_reads_one_vector_and_computes_with_every_head():
    cost = step_cost("deepseek-v3", context=1_000)
    assert cost.cache_bytes == 61 * (512 + 64) * 1_000 * 2
    assert cost.attention_flops == 2 * 61 * 128 * (512 + 64 + 512) * 1_000


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(published_names()),
    context=st.integers(1, 50_000),
    batch=st.integers(1, 300),
    quantization=st.sampled_from((None, *DENSE)),
    cache=st.sampled_from((None, "float16", "int8", "int4")),
)
def test_it_reads_no_more_than_is_held_and_the_cache_to_the_byte(model, context, batch, quantization, cache):
    options = {"batch_size": batch, "dtype": "bfloat16", "quantization": quantization, "kv_cache_dtype": cache}
    held = estimate(model, prompt_tokens=context, **options)
    cost = step_cost(model, context=context, **options)
    assert cost.cache_bytes == held.kv_cache == kv_cache_bytes(model, context, batch, cache or "bfloat16")
    assert 0 < cost.weight_bytes <= held.weights + held.quantization_constants
    assert cost.flops == step_cost(model, context=context, batch_size=batch).flops


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(published_names()),
    past=st.integers(0, 5_000),
    parts=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    batch=st.integers(1, 9),
)
def test_tokens_cost_the_same_arithmetic_in_one_pass_or_in_several(model, past, parts, batch):
    whole = step_cost(model, context=past + sum(parts), query_tokens=sum(parts), batch_size=batch)
    pieces, seen = [], past
    for part in parts:
        seen += part
        pieces.append(step_cost(model, context=seen, query_tokens=part, batch_size=batch))
    assert whole.flops == sum(piece.flops for piece in pieces)
    assert whole.bytes <= sum(piece.bytes for piece in pieces)


@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral", "gpt_bigcode"])
def test_the_real_class_gives_what_the_formula_gives(kind, monkeypatch):
    config = {**SMALL, "model_type": kind, "num_key_value_heads": 2, "tie_word_embeddings": kind != "mixtral"}
    if kind == "gpt_bigcode":
        config = {"model_type": kind, "vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "multi_query": False}
    found = step_cost(config, context=30, batch_size=2)

    def refuse(fields):
        raise UnsupportedError("no formula")

    monkeypatch.setattr(counting, "_formula", refuse)
    again = step_cost(config, context=30, batch_size=2)
    assert (again.bytes, again.weight_flops) == (found.bytes, found.weight_flops)
    assert again.attention_flops == found.attention_flops


def test_time_is_the_longer_of_reading_and_computing():
    cost = StepCost(weight_bytes=60, cache_bytes=40, weight_flops=150, attention_flops=50)
    assert cost.seconds(10, 1_000) == 10
    assert cost.seconds(1_000, 10) == 20
    assert cost.seconds(10, math.inf, overhead=0.5) == 10.5
    assert cost.intensity == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 0}, "context must be a whole number of at least 1, got 0"),
        ({"context": 5, "query_tokens": 6}, "query_tokens must be a whole number of at most 5, got 6"),
        ({"context": 5, "logits_to_keep": 2}, "logits_to_keep must be a whole number of at most 1, got 2"),
        ({"context": 5, "batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"context": 5, "quantization": "int5"}, "quantization must be one of"),
        ({"context": 5, "kv_cache_dtype": "int3"}, "kv_cache_dtype must be one of"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        step_cost("llama-2-7b", **arguments)


@pytest.mark.parametrize(("rates", "name"), [((0, 1), "bandwidth"), ((1, -1), "flops_per_second")])
def test_a_rate_is_positive(rates, name):
    with pytest.raises(ValueError, match=name):
        StepCost(1, 1, 1, 1).seconds(*rates)
    with pytest.raises(ValueError, match="overhead"):
        StepCost(1, 1, 1, 1).seconds(1, 1, overhead=-1)
