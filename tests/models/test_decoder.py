"""DecoderLM: a Transformers model's logits from its weights, with every cache, padding and position encoding."""

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

from course_lib.attention import attention
from course_lib.kv_cache import DynamicCache as GrowingCache
from course_lib.kv_cache import KVCache
from course_lib.kv_cache.dynamic import GrowingLayer
from course_lib.memory import count_parameters, kv_cache_bytes
from course_lib.models import load
from course_lib.models.decoder import POSITIONS, DecoderConfig, DecoderLM
from course_lib.quantization import quantize_model

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama with biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama 3": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral with a window": (MistralConfig, MistralForCausalLM, {"sliding_window": 5}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}


def caches(config: DecoderConfig) -> dict[str, object]:
    """Return a growing, a layered (a window's layers keep the window) and a static cache."""
    return {
        "dynamic": DynamicCache(),
        "layered": DynamicCache(config=config),
        "static": StaticCache(config=config, max_cache_len=24),
    }


@pytest.fixture(params=FAMILIES)
def pair(request):
    config, model, options = FAMILIES[request.param]
    theirs = model(config(**SMALL, **options)).double().eval()
    for (
        weight
    ) in theirs.parameters():  # biases and norms start as zeros and ones, which would hide that they are ignored
        torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.2)
    return theirs, DecoderLM.from_transformers(theirs)


@torch.no_grad()
def test_logits_are_those_of_transformers(pair):
    theirs, ours = pair
    tokens = torch.randint(0, 100, (2, 17))
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = theirs(tokens, attention_mask=mask, position_ids=positions).logits
    found = ours(tokens, attention_mask=mask).logits
    # Transformers normalises in float32 even here.
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    for two in (2, np.int64(2), torch.tensor([15, 16])):
        torch.testing.assert_close(ours(tokens, logits_to_keep=two).logits, ours(tokens).logits[:, -2:])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "layered", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_changes_nothing(pair, kind, padded):
    _, ours = pair
    tokens = torch.randint(0, 100, (2, 17))
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, : 4 * padded] = 0
    whole = ours(tokens, attention_mask=mask).logits
    cache, pieces = caches(ours.config)[kind], []
    for start, end in ((0, 7), (7, 9), *((n, n + 1) for n in range(9, 17))):
        output = ours(tokens[:, start:end], cache=cache, attention_mask=mask[:, :end] if padded else None)
        assert output.cache is cache
        pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, 1)[mask.bool()], whole[mask.bool()], rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_encoding_works_with_a_cache(position):
    model = DecoderLM(DecoderConfig(**SMALL, position=position)).double().eval()
    tokens = torch.randint(0, 100, (2, 20))
    whole, cache = model(tokens).logits, DynamicCache()
    parts = [model(tokens[:, :11], cache=cache).logits, model(tokens[:, 11:], cache=cache).logits]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("position", POSITIONS)
def test_only_a_model_without_positions_overlooks_a_swap_far_back(position):
    """The last token's layer-one view is a set; with positions, exchanging two earlier tokens changes it."""
    model = DecoderLM(DecoderConfig(**SMALL | {"num_hidden_layers": 1}, position=position)).double().eval()
    tokens = torch.randint(0, 100, (1, 9))
    tokens[0, 2], tokens[0, 5] = 7, 8
    swapped = tokens.clone()
    swapped[0, 2], swapped[0, 5] = 8, 7
    same = torch.allclose(model(tokens).logits[0, -1], model(swapped).logits[0, -1], rtol=0, atol=1e-12)
    assert same == (position == "none")


@torch.no_grad()
def test_smollm2_has_the_logits_of_transformers():
    theirs, tokenizer = load("smollm2-135m", dtype="float32", device="cpu")
    ours, _ = load("smollm2-135m", dtype="float32", device="cpu", as_decoder=True)
    tokens = tokenizer("A cache keeps keys and values, so that a decoder", return_tensors="pt").input_ids
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens).logits, expected, rtol=0, atol=2e-3)
    assert ours.lm_head.weight is ours.embed_tokens.weight
    shared = DecoderLM.from_transformers(theirs)
    assert shared.embed_tokens.weight.data_ptr() == theirs.get_input_embeddings().weight.data_ptr()


def test_every_attention_backend_gives_the_same_logits():
    model = DecoderLM(DecoderConfig(**SMALL, sliding_window=6)).eval()
    tokens = torch.randint(0, 100, (2, 13))
    found = {}
    for backend in ("reference", "blockwise", "sdpa"):
        model.attention_backend = backend
        assert model.attention_backend == backend
        found[backend] = model(tokens).logits
    torch.testing.assert_close(found["blockwise"], found["reference"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["sdpa"], found["reference"], rtol=1e-4, atol=1e-5)


class Attending(GrowingLayer):
    """Attends itself, to a stretch of at most three tokens, and notes how often."""

    count = 0

    def attend(self, q, key_states, value_states, *, alibi_slopes):
        if q.shape[2] > 3:
            return None
        Attending.count += 1
        k, v = self.update(key_states, value_states)
        return attention(q, k, v, causal=True, alibi_slopes=alibi_slopes, sliding_window=self.window)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_a_cache_that_attends_itself_is_let(position, window):
    model = DecoderLM(DecoderConfig(**SMALL, position=position, sliding_window=window)).double().eval()
    tokens = torch.randint(0, 100, (2, 12))
    whole, mask = model(tokens).logits, torch.ones(2, 12, dtype=torch.long)
    for backend, padded, layers, attended in (
        ("auto", False, lambda own: Attending(own), 3 * 3),  # the prompt of eight tokens is too long for it
        ("auto", True, lambda own: Attending(own), 0),  # it knows of no padding
        ("auto", False, lambda own: Attending(None), 0 if window else 3 * 3),  # nor of a window that only the model has
        ("reference", False, lambda own: Attending(own), 0),  # and is no backend that was asked for by name
    ):
        model.attention_backend = backend
        mask[0, 0], Attending.count = int(not padded), 0
        expected = model(tokens, attention_mask=mask).logits if padded else whole
        cache, parts = KVCache(model.config, layers), []
        for start, end in ((0, 8), (8, 9), (9, 11), (11, 12)):
            part = model(tokens[:, start:end], cache=cache, attention_mask=mask[:, :end])
            parts.append(part.logits)
        torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], expected[mask.bool()], rtol=1e-6, atol=1e-6)
        assert Attending.count == attended


@torch.no_grad()
def test_a_model_may_turn_a_part_of_each_head():
    model, tokens = DecoderLM(DecoderConfig(**SMALL)).double().eval(), torch.randint(0, 100, (2, 9))
    whole = model(tokens).logits
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    part, cache = model(tokens).logits, KVCache(model.config, GrowingLayer)
    assert not torch.allclose(part, whole)
    steps = [model(tokens[:, i : i + 1], cache=cache).logits for i in range(9)]
    torch.testing.assert_close(torch.cat(steps, 1), part)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@torch.no_grad()
def test_dynamic_ntk_never_mixes_bases_in_a_cache():
    model = DecoderLM(DecoderConfig(**SMALL | {"max_position_embeddings": 10}, rope_parameters=DYNAMIC)).double().eval()
    tokens = torch.randint(0, 100, (1, 16))
    whole, cache = model(tokens[:, :10]).logits, DynamicCache()
    parts = [model(tokens[:, :6], cache=cache).logits, model(tokens[:, 6:10], cache=cache).logits]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-6, atol=1e-6)  # within the trained length: as usual
    with pytest.raises(ValueError, match=r"'dynamic' turns keys otherwise at length 11 .* without a cache$"):
        model(tokens[:, 10:11], cache=cache)
    fresh = DynamicCache()
    torch.testing.assert_close(model(tokens, cache=fresh).logits, model(tokens).logits)  # a long prompt in one piece


@torch.no_grad()
def test_longrope_does_not_mix_its_two_sets_in_a_cache():
    factors = {
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 8,
        "factor": 4.0,
    }
    config = DecoderConfig(**SMALL, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4} | factors)
    model, cache = DecoderLM(config).eval(), DynamicCache()
    tokens = torch.randint(0, 100, (1, 12))
    model(tokens[:, :8], cache=cache)
    with pytest.raises(ValueError, match="'longrope' turns keys otherwise at length 9"):
        model(tokens[:, 8:9], cache=cache)


@torch.no_grad()
def test_angles_stay_in_float32_in_a_half_precision_model():
    model = DecoderLM(DecoderConfig(**SMALL)).to(torch.bfloat16)
    place = model._place(0, torch.arange(60000, 60004), None)
    exact = DecoderLM(DecoderConfig(**SMALL))._place(0, torch.arange(60000, 60004), None)
    assert torch.equal(place.cos_sin[0], exact.cos_sin[0])
    assert place.cos_sin[0].dtype == torch.float32


def test_gradients_reach_every_weight():
    model = DecoderLM(DecoderConfig(**SMALL, position="learned", qk_norm=True, qkv_bias=True, mlp_bias=True))
    model(torch.randint(0, 100, (2, 12))).logits.logsumexp(-1).sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": "spiral"}, "position is 'spiral'; accepted are rope, alibi, sinusoidal, learned, none"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, which num_key_value_heads, 3, does not divide"),
    ],
)
def test_an_architecture_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**SMALL | options)


def test_calls_that_do_not_fit_are_refused():
    model = DecoderLM(DecoderConfig(**SMALL, position="learned"))
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 3\]; \[batch, past \+ length\] = \[1, 4\]"):
        model(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="positions holds 64; this model has learned positions 0 to 63"):
        model(torch.ones(1, 65, dtype=torch.long))
    for wrong in (-1, 2.0, "2"):
        with pytest.raises(ValueError, match=f"^logits_to_keep must be a whole number of at least 0, got {wrong!r}$"):
            model(torch.ones(1, 4, dtype=torch.long), logits_to_keep=wrong)


def test_a_model_of_another_kind_is_not_converted():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10))
    with pytest.raises(ValueError, match="model is of type 'gpt2'; accepted are llama, mistral, qwen2, qwen3"):
        DecoderLM.from_transformers(gpt2)
    layers = ["full_attention", "sliding_attention", "full_attention"]
    mixed = Qwen3ForCausalLM(Qwen3Config(**SMALL, layer_types=layers, use_sliding_window=True, sliding_window=4))
    with pytest.raises(ValueError, match="model mixes layers of types full_attention, sliding_attention"):
        DecoderLM.from_transformers(mixed)
    relu = LlamaForCausalLM(LlamaConfig(**SMALL, hidden_act="relu"))
    with pytest.raises(ValueError, match="model has hidden_act 'relu'; 'silu' is needed"):
        DecoderLM.from_transformers(relu)


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_a_quantised_model_is_not_converted(scheme):
    model = quantize_model(LlamaForCausalLM(LlamaConfig(**SMALL | {"hidden_size": 64})), scheme)
    said = r"^model has other weights than its configuration says, layers\.0\.\S+ among them; one that is not quantised .*$"
    with pytest.raises(ValueError, match=said):
        DecoderLM.from_transformers(model)


@pytest.mark.parametrize("position", ["rope", "alibi", "learned"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"qkv_bias": True}, {"attention_bias": True, "mlp_bias": True}, {"qk_norm": True}]
)
def test_the_estimator_counts_a_decoder_by_its_configuration(position, tied, options):
    config = DecoderConfig(**SMALL | options, position=position, tie_word_embeddings=tied, sliding_window=6)
    model = DecoderLM(config).eval()
    assert count_parameters(config) == sum(weight.numel() for weight in model.parameters())
    assert count_parameters(config.to_dict()) == count_parameters(config)
    cache = GrowingCache(config)
    model(torch.randint(SMALL["vocab_size"], (2, 5)), cache=cache)
    assert cache.used_nbytes == kv_cache_bytes(config, 5, 2, "float32")
    assert kv_cache_bytes(config, 50, 2, "float32") == kv_cache_bytes(config, 5, 2, "float32")
