"""Fewer key-value heads out of many: what the new heads are, and that all else is as it was."""

import copy

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from course_lib.generation import generate
from course_lib.memory import kv_cache_bytes
from course_lib.models import DecoderConfig, DecoderLM, load, mha_to_gqa
from course_lib.quantization import quantize_model

SIZES = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 8,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def decoder(**changes):
    return DecoderLM(DecoderConfig(**SIZES | changes)).eval()


def with_equal_heads(model, kept):
    """Give all heads of a group the same keys and values, so that grouping them loses nothing."""
    for module in model.modules():
        for name in ("k_proj", "v_proj"):
            if hasattr(module, name):
                for weight in getattr(module, name).parameters():
                    groups = weight.data.normal_().view(kept, 12 // kept, 8, -1)
                    groups.copy_(groups[:, :1].clone().expand_as(groups))
    return model


@given(kept=st.sampled_from([1, 2, 3, 4, 6, 12]), init=st.sampled_from(["mean", "first"]), bias=st.booleans())
def test_heads_that_were_equal_within_a_group_give_the_same_logits(kept, init, bias):
    model = with_equal_heads(decoder(qkv_bias=bias), kept)
    ids = torch.randint(50, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(mha_to_gqa(model, kept, init=init)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformers_model_and_its_decoder_become_the_same_grouped_model(family):
    kind, build = FAMILIES[family]
    theirs = build(kind(**SIZES)).eval()
    grouped = mha_to_gqa(theirs, 3)
    assert type(grouped) is build
    assert (theirs.config.num_key_value_heads, grouped.config.num_key_value_heads) == (12, 3)
    ours = mha_to_gqa(DecoderLM.from_transformers(theirs), 3)
    ids = torch.randint(50, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, grouped(ids).logits, atol=1e-5, rtol=1e-4)
    again = DecoderLM.from_transformers(grouped)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, grouped(ids).logits, atol=1e-5, rtol=1e-4)
    greedy = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = grouped.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
    assert torch.equal(out, generate(ours, ids, max_new_tokens=3).sequences)


def test_each_new_head_is_made_of_neighbours():
    model = decoder()
    old = model.layers[1].self_attn.v_proj.weight.view(3, 4, 8, 48)
    found = {init: mha_to_gqa(model, 3, init=init).layers[1].self_attn.v_proj.weight for init in ("mean", "first")}
    torch.testing.assert_close(found["mean"], old.mean(1).reshape(24, 48))
    assert torch.equal(found["first"], old[:, 0].reshape(24, 48))


def test_the_mean_of_float64_weights_is_as_precise_as_they_are():
    model = decoder().double()
    old = model.layers[0].self_attn.k_proj.weight.view(3, 4, 8, 48)
    new = mha_to_gqa(model, 3).layers[0].self_attn.k_proj.weight
    torch.testing.assert_close(new, old.mean(1).reshape(24, 48), rtol=0, atol=1e-15)


def test_any_kind_of_integer_is_a_number_of_heads():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    grouped = mha_to_gqa(model, np.int64(3))
    assert type(grouped.config.num_key_value_heads) is int
    assert grouped(torch.ones(1, 2, dtype=torch.long)).logits.shape == (1, 2, 50)


def test_random_heads_are_drawn_anew_and_a_seed_repeats_them():
    model = decoder(hidden_size=256, initializer_range=0.5)
    one, same, other = (
        mha_to_gqa(model, 4, init="random", seed=seed).layers[0].self_attn.k_proj.weight for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0.45 < one.std() < 0.55


def test_nothing_is_shared_and_the_original_is_as_it_was():
    model = decoder(qkv_bias=True)
    before = copy.deepcopy(model.state_dict())
    grouped = mha_to_gqa(model, 1)
    with torch.no_grad():
        for weight in grouped.parameters():
            weight.zero_()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.config.num_key_value_heads == 12
    assert model.layers[0].self_attn.k_proj.out_features == 96
    assert grouped.lm_head.weight is not model.lm_head.weight


def test_the_cache_shrinks_to_g_of_h():
    model = decoder()
    ids = torch.randint(50, (2, 9))
    full = generate(model, ids, max_new_tokens=4).cache.used_nbytes
    assert full == kv_cache_bytes(model.config, 12, 2, "float32")
    for kept in (6, 4, 1):
        grouped = mha_to_gqa(model, kept)
        assert generate(grouped, ids, max_new_tokens=4).cache.used_nbytes == full * kept // 12


def test_a_model_laid_out_for_decoding_gives_the_same_tokens_when_grouped():
    model, _ = load("course/native", device="cpu")
    ids = torch.randint(256, (1, 9))
    plain = generate(mha_to_gqa(model, 1), ids, max_new_tokens=8).sequences
    laid_out = copy.deepcopy(model).optimize_for_decoding()
    generate(laid_out, ids, max_new_tokens=2)
    grouped = mha_to_gqa(laid_out, 1)
    assert torch.equal(generate(grouped, ids, max_new_tokens=8).sequences, plain)
    assert torch.equal(generate(grouped.optimize_for_decoding(), ids, max_new_tokens=8).sequences, plain)


def test_precision_mode_and_gradients_are_kept():
    model = decoder().to(torch.bfloat16).train()
    model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    grouped = mha_to_gqa(model, 2)
    assert grouped.training
    assert grouped.layers[0].self_attn.v_proj.training
    assert {weight.dtype for weight in grouped.parameters()} == {torch.bfloat16}
    assert not grouped.layers[0].self_attn.k_proj.weight.requires_grad
    grouped(torch.randint(50, (1, 5))).logits.sum().backward()
    assert grouped.layers[0].self_attn.v_proj.weight.grad is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_kv_heads": 5},
            r"^num_kv_heads is 5; the model has 12 key-value heads, so accepted are 1, 2, 3, 4, 6, 12$",
        ),
        ({"num_kv_heads": 24}, r"^num_kv_heads is 24; the model has 12"),
        ({"num_kv_heads": 0}, r"^num_kv_heads "),
        ({"num_kv_heads": 2, "init": "median"}, r"^init is 'median'; accepted are mean, first, random$"),
        ({"num_kv_heads": 2, "seed": "a"}, r"^seed must be a whole number .*, got 'a'"),
    ],
)
def test_what_cannot_be_is_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        mha_to_gqa(decoder(), **changes)


def test_a_quantised_model_and_one_without_such_heads_are_refused():
    model = quantize_model(decoder(hidden_size=64), "int8")
    with pytest.raises(TypeError, match=r"^k_proj is a \w+; a plain nn\.Linear of 12 heads is needed$"):
        mha_to_gqa(model, 3)
    for other in (torch.nn.Linear(2, 2), (decoder(), None), None):
        with pytest.raises(TypeError, match=rf"^model is a {type(other).__name__}; a decoder with num_key_value_heads"):
            mha_to_gqa(other, 1)


NORMALISED = SIZES | {"hidden_size": 96, "pad_token_id": 0, "eos_token_id": None}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("Olmo2", {}, "k_norm"),
        ("Olmo3", {}, "k_norm"),
        ("Olmoe", EXPERTS, "k_norm"),
        ("FlexOlmo", EXPERTS, "k_norm"),
        ("Cohere", {"use_qk_norm": True}, "k_norm"),
        ("StableLm", {"qk_layernorm": True}, "k_layernorm"),
    ],
)
def test_keys_that_are_normalised_across_heads_or_each_by_its_own_are_refused(family, changes, name):
    model = normalised(family, changes)
    with pytest.raises(TypeError, match=rf"^{name} has 96 weights; 8, which all key heads share, are needed$"):
        mha_to_gqa(model, 3)


@pytest.mark.parametrize(
    ("family", "changes"), [("Cohere", {}), ("StableLm", {}), ("Phi", {"qk_layernorm": True}), ("Qwen3", {})]
)
def test_keys_that_share_a_norm_or_have_none_are_grouped(family, changes):
    model = with_equal_heads(normalised(family, changes), 3)
    ids = torch.randint(50, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(mha_to_gqa(model, 3)(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)


def normalised(family, changes):
    config = getattr(transformers, f"{family}Config")(**NORMALISED | changes)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()
