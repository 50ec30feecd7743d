"""Transformers' models compute the same with our attention as with their own, whatever they ask of it."""

import copy
import inspect
import subprocess
import sys
from functools import partial

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers import masking_utils as theirs

from course_lib.attention import attention
from course_lib.attention.backends import refusal
from course_lib.attention.rules import Rules, positions
from course_lib.integrations import transformers as ours
from course_lib.integrations.transformers import register
from course_lib.models import load

NO_TRITON = refusal("triton", torch.zeros(1, 1, 1, 1), Rules(1.0), False)
TRITON = pytest.param("triton", marks=pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON)))
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough for attention to prefer some keys
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "experts_implementation": "eager",  # the others have no float64
}
ALTERNATING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
DECODERS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {**ALTERNATING, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 5}),
    "gemma3": ("Gemma3TextConfig", ALTERNATING),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "phi3": ("Phi3Config", {"sliding_window": 7}),
    "phimoe": ("PhimoeConfig", {"sliding_window": 7, "num_local_experts": 2}),  # its layers are not told of the window
    "cohere2": ("Cohere2Config", {**ALTERNATING, "logit_scale": 1.0}),
    "olmo2": ("Olmo2Config", {}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {**LATENT, "first_k_dense_replace": 2, "head_dim": 4, "num_key_value_heads": 4},
    ),
    "gpt-oss": ("GptOssConfig", {**ALTERNATING, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "llama4": (
        "Llama4TextConfig",
        {"attention_chunk_size": 7, "no_rope_layers": [1, 0], "moe_layers": [], "intermediate_size_mlp": 48},
    ),
    "gpt2": ("GPT2Config", {}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2, "dropout": 0.0}),
}


@pytest.fixture(autouse=True)
def one_thread():
    """These models are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Float64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32, as in its norms and softmax."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def randomize(model):
    """Give every parameter a random value: norms of one and biases of zero would hide faults."""
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + ("norm" in name and parameter.ndim == 1)
    return model.eval()


def build(name, **changes):
    kind, settings = DECODERS[name]
    config = getattr(transformers, kind)(**{**SMALL, **settings, **changes})
    return randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def using(model, implementation, dtype=torch.float32):
    model = copy.deepcopy(model).to(dtype)
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model


@torch.no_grad()
def logits(model, tokens, padding=None, kind=None, pieces=()):
    """The logits of all tokens, fed in pieces of these lengths (then one by one) with a cache of this kind."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    make = {"dynamic": DynamicCache, "static": partial(StaticCache, max_cache_len=LENGTH + 9)}
    given = {name: make[kind](config=model.config), "use_cache": True} if kind else {"use_cache": False}
    steps = [*pieces, *[1] * (LENGTH - sum(pieces))] if kind else [LENGTH]
    found, seen = [], 0
    for step in steps:
        if padding is not None:
            given["attention_mask"] = padding[:, : seen + step]
            given["position_ids"] = (padding.cumsum(1) - 1).clamp(min=0)[:, seen : seen + step]
        found.append(model(tokens[:, seen : seen + step], **given).logits)
        seen += step
    return torch.cat(found, dim=1)


def assert_close(found, plain, truth, context=""):
    """Our error against float64 is at most twice that of the model's own attention, plus rounding."""
    error, allowed = ((x - truth).abs().max() for x in (found, plain))
    assert error <= 2 * allowed + 2e-6 * truth.abs().max(), (error, allowed, context)


def compare(model, run):
    """Hold what `run` makes of a model with our attention against what it makes of it with its own."""
    with Float64():
        truth = run(using(model, "eager", torch.float64))
    assert_close(run(using(model, "course")), run(using(model, "eager")), truth)


class Case:
    """A model, and what its own attention says of random tokens."""

    def __init__(self, model):
        self.model, self.tokens = using(model, "course"), torch.randint(3, 100, (2, LENGTH))
        self.exact, self.plain = using(model, "eager", torch.float64), using(model, "eager")
        self.known = {}

    def check(self, pad=None, **run):
        padding = PADDING[pad]
        real = torch.ones(2, LENGTH, dtype=torch.bool) if padding is None else padding.bool()
        if pad not in self.known:
            with Float64():
                truth = logits(self.exact, self.tokens, padding)[real]
            self.known[pad] = logits(self.plain, self.tokens, padding)[real], truth
        assert_close(logits(self.model, self.tokens, padding, **run)[real], *self.known[pad], context=run)


LENGTH = 24
PADDING = {
    None: None,
    "left": torch.ones(2, LENGTH, dtype=torch.long),
    "right": torch.ones(2, LENGTH, dtype=torch.long),
}
PADDING["left"][0, :5] = 0
PADDING["right"][1, -4:] = 0


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_the_model(name):
    register()
    case = Case(build(name))
    for pad in PADDING:
        case.check(pad)
    for kind in ("dynamic", "static"):  # a prompt, a second piece, then token by token, past the window
        case.check(kind=kind, pieces=(10, 6))
        case.check("left", kind=kind, pieces=(10, 6))
    case.check(kind="static", pieces=(1,))


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa", TRITON])
def test_every_backend_runs_a_model(backend):
    register(backend)
    case = Case(build("mistral"))
    case.check()
    case.check("left")
    case.check("left", kind="static", pieces=(10, 13))


@pytest.mark.parametrize("backend", ["reference", "blockwise", TRITON])
@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_every_backend_that_can_caps_scores_and_has_sinks(name, backend):
    register(backend)
    Case(build(name)).check("left")


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_pytorchs_attention_is_refused_where_it_cannot(name):
    register("sdpa")
    with pytest.raises(ValueError, match=r"backend is 'sdpa', but PyTorch.*backend='auto' chooses one that can"):
        Case(build(name)).check()


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("kind", ["BertConfig", "ModernBertConfig"])
def test_encoders_look_both_ways(kind, pad):
    settings = SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "local_attention": 8}
    config = getattr(transformers, kind)(**{k: v for k, v in settings.items() if k != "head_dim"})
    model = randomize(transformers.AutoModel.from_config(config, attn_implementation="eager"))
    tokens, real = torch.randint(3, 100, (2, LENGTH)), PADDING[pad].bool()
    register()
    for mask in (None, PADDING[pad]):
        with torch.no_grad():
            compare(model, lambda m, mask=mask: m(tokens, attention_mask=mask).last_hidden_state[real])


@pytest.mark.parametrize("kind", ["T5Config", "BartConfig"])
def test_encoder_and_decoder_meet_in_cross_attention(kind):
    settings = SMALL | {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 1,
    }
    settings |= {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 2), ("ffn_dim", 48), ("attention_heads", 4))
    }
    config = getattr(transformers, kind)(**settings, dropout=0.0, dropout_rate=0.0)
    model = randomize(transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager"))
    tokens, target = torch.randint(3, 100, (2, LENGTH)), torch.randint(3, 100, (2, 9))
    register()
    for mask in (None, PADDING["right"]):
        with torch.no_grad():
            compare(
                model,
                lambda m, mask=mask: m(tokens, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits,
            )
        for cache in ("dynamic", "static"):
            words = [
                using(model, name).generate(tokens, attention_mask=mask, max_new_tokens=8, cache_implementation=cache)
                for name in ("eager", "course")
            ]
            assert torch.equal(*words)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_packed_sequences_do_not_see_each_other(name):
    register()
    model, both = build(name), torch.randint(3, 100, (1, LENGTH))
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None]
    starts = torch.tensor([0, 9, LENGTH], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 15, "max_length_k": 15}

    def packed(m, **given):
        if m.config._attn_implementation == "course":
            return m(both, position_ids=positions, **given).logits
        return torch.cat([m(both[:, :9]).logits, m(both[:, 9:]).logits], dim=1)

    with torch.no_grad():
        compare(model, partial(packed, use_cache=True, **lengths))
        if name != "gpt-oss":  # which does not tell its masks of positions
            compare(model, partial(packed, use_cache=False))


def test_selection_of_an_indexer_is_kept():
    register()
    index = {"index_topk": 5, "index_head_dim": 8, "index_n_heads": 2, "mlp_layer_types": ["dense"] * 2}
    DECODERS["indexed"] = ("DeepseekV32Config", DECODERS["deepseek-v3"][1] | index | {"q_lora_rank": 16})
    model, tokens = build("indexed"), torch.randint(3, 100, (2, LENGTH))
    for run in ({}, {"kind": "dynamic", "pieces": (10, 6)}, {"kind": "static", "pieces": (10, 6)}):
        found, right = (logits(using(model, name), tokens, PADDING["left"], **run) for name in ("course", "eager"))
        torch.testing.assert_close(found[:, 5:], right[:, 5:], rtol=0, atol=1e-4)


def test_sink_of_each_query_is_that_of_its_head():
    tensors, sinks = torch.randn(3, 2, 4, 5, 8), torch.randn(4)
    of_heads, _ = ours._attend(torch.nn.Module(), *tensors, backend="auto", s_aux=sinks)
    of_queries, _ = ours._attend(
        torch.nn.Module(), *tensors, backend="auto", sinks=sinks.view(4, 1, 1).expand(2, 4, 5, 1)
    )
    assert torch.equal(of_heads, of_queries)


def test_images_look_both_ways_inside_text():
    text = transformers.Gemma3TextConfig(**SMALL, **ALTERNATING)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=99,
        boi_token_index=98,
        eoi_token_index=97,
    )
    model = randomize(transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    tokens, pixels = torch.randint(3, 90, (1, LENGTH)), torch.randn(1, 3, 8, 8)
    tokens[0, 11:15] = 99
    register()
    with torch.no_grad():
        compare(
            model, lambda m: m(tokens, pixel_values=pixels.to(m.dtype), token_type_ids=(tokens == 99).long()).logits
        )


def training(model, tokens, real):
    labels = tokens.where(real & real.roll(1, dims=1), -100)  # padding predicts nothing
    model.train()
    model(tokens, attention_mask=real.long(), labels=labels, use_cache=False).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")  # 5.17 knows no other name
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_training_step_has_the_gradients_of_the_model(name, checkpointing):
    register()
    model, tokens = build(name), torch.randint(3, 100, (2, LENGTH))
    for pad in ("left", None):
        real = torch.ones(2, LENGTH, dtype=torch.bool) if pad is None else PADDING[pad].bool()

        def gradients(m, real=real):
            if checkpointing and m.config._attn_implementation == "course":
                m.gradient_checkpointing_enable({"use_reentrant": False})
            return training(m, tokens, real)

        compare(model, gradients)


def test_mixed_precision_is_that_of_autocast():
    register()
    model, tokens = build("qwen3"), torch.randint(3, 100, (2, LENGTH))  # its norms of q and k return float32

    def run(m):
        with torch.autocast("cpu", torch.bfloat16, enabled=m.dtype == torch.float32):
            return m(tokens).logits

    with torch.no_grad():
        compare(model, run)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("layers", [False, True])
def test_compiled_models_compute_the_same(name, layers):
    register()
    model, tokens = build(name), torch.randint(3, 100, (2, LENGTH))

    def run(m):
        if m.config._attn_implementation == "course":
            for part in m.model.layers if layers else [m]:
                part.compile(backend="eager", dynamic=False)
        return torch.cat([m(tokens, position_ids=ids, use_cache=False).logits for ids in (None, packed)])

    packed = torch.cat([torch.arange(9), torch.arange(15)])[None]
    with torch.no_grad():
        compare(model, run)
    torch._dynamo.reset()


# ---- masks: built where needed, right where not


@given(st.data())
def test_explanation_of_a_mask_is_the_mask(data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    query_len, before, spare, size = draw(1, 6), draw(0, 12), draw(-1, 3), draw(1, 8)
    end, kv_offset = before + query_len, draw(0, min(before + 1, 3))
    kv_length = max(1, end - kv_offset + spare)
    padding = {
        "none": None,
        "whole": torch.ones(1, end + draw(0, 2)).bool(),
        "left": torch.arange(end)[None] >= draw(1, 3),
        "hole": torch.arange(end)[None] != draw(0, end - 1),
        "short": torch.ones(1, max(1, end - 1)).bool(),  # what it does not tell of is hidden
    }[data.draw(st.sampled_from(["none", "whole", "left", "hole", "short"]))]
    left = torch.zeros(1, dtype=torch.long) if padding is None else (padding.cumsum(1) == 0).sum(1)
    function, local = {
        "causal": (theirs.causal_mask_function, None),
        "window": (theirs.sliding_window_causal_mask_function(size), size),
        "chunks": (theirs.chunked_causal_mask_function(size, left), size),
    }[kind := data.draw(st.sampled_from(["causal", "window", "chunks"]))]
    asked = {
        "batch_size": 1,
        "q_length": query_len,
        "kv_length": kv_length,
        "q_offset": data.draw(st.sampled_from([before, torch.tensor(before)])),
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": padding,
        "local_size": local,
    }
    found, right = ours._mask(**asked), theirs.sdpa_mask(**asked, allow_is_causal_skip=False)
    unpadded = padding is None or (padding.shape[1] >= end and bool(padding[:, kv_offset:end].all()))
    within = query_len <= end - kv_offset <= kv_length
    explained = unpadded and within and (kind != "chunks" or end <= size or size == 1)
    assert isinstance(found, ours._CausalMask) == explained
    if explained:
        rules = Rules(1.0, causal=True, sliding_window=found.window)
        seen = ~rules.hidden(*positions(query_len, found.keys, torch.device("cpu")))
        assert torch.equal(torch.nn.functional.pad(seen, (0, found.shape[-1] - found.keys))[None, None], right)
    assert torch.equal(found & True, right)  # whoever looks into it finds the mask, here and on another device
    moved = found.to("cpu")
    assert isinstance(moved, ours._CausalMask) == explained
    assert torch.equal(moved[..., -1:, :], right[..., -1:, :])


@pytest.mark.parametrize("additive", [False, True])
def test_mask_of_the_caller_is_taken_as_it_is(additive):
    register()
    model, tokens = build("mistral"), torch.randint(3, 100, (2, LENGTH))
    seen = (torch.rand(2, 1, LENGTH, LENGTH) < 0.5) | torch.eye(LENGTH, dtype=torch.bool)

    def run(m):
        as_it_is = not additive and m.config._attn_implementation == "course"
        added = torch.zeros(seen.shape, dtype=m.dtype).masked_fill(~seen, torch.finfo(m.dtype).min)
        return m(tokens, attention_mask=seen if as_it_is else added, use_cache=False).logits

    with torch.no_grad():
        compare(model, run)


def test_two_masks_of_any_kind_make_one():
    seen, added = torch.rand(2, 1, 4, 6) < 0.5, torch.randn(1, 3, 4, 6)
    both = added.expand(2, 3, 4, 6).masked_fill(~seen, -torch.inf)
    assert torch.equal(ours._both(None, added), added)
    assert torch.equal(ours._both(seen, added), both)
    assert torch.equal(ours._both(added, seen), both)
    assert torch.equal(ours._both(added, added), 2 * added)
    assert torch.equal(ours._both(seen, ~seen), torch.zeros_like(seen))


@pytest.mark.parametrize("size", range(2, 9))
def test_chunks_are_no_window_wherever_padding_puts_them(size):
    assert ours._is_window(theirs.sliding_window_causal_mask_function(size), size)
    for left in range(2 * size):
        assert not ours._is_window(theirs.chunked_causal_mask_function(size, torch.tensor([left])), size)


def test_mask_for_other_keys_is_an_error():
    mask = ours._mask(batch_size=1, q_length=5, kv_length=5, mask_function=theirs.causal_mask_function)
    tensors = torch.randn(1, 2, 5, 8), *torch.randn(2, 1, 2, 7, 8)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 1, 5, 5\], which does not broadcast"):
        ours._attend(torch.nn.Module(), *tensors, mask, backend="auto")


def test_without_a_mask_the_first_query_stands_at_the_first_key():
    query, (key, value) = torch.randn(1, 2, 3, 8), torch.randn(2, 1, 2, 7, 8)
    layer = torch.nn.Module()
    right = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(ours._attend(layer, query, key, value, None, backend="auto")[0], right)
    layer.is_causal = False
    right = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    torch.testing.assert_close(ours._attend(layer, query, key, value, None, backend="auto")[0], right)
    one = ours._attend(layer, query[:, :, :1], key, value, None, backend="auto", is_causal=True)[0]
    torch.testing.assert_close(one, right[:, :1])  # the query of a step sees all keys


@pytest.fixture
def seen(monkeypatch):
    """Whether attention was given a mask, its window, the number of keys and the backend, call by call."""
    calls = []

    def spy(*tensors, **given):
        masked = given["attention_mask"] is not None
        calls.append((masked, given["sliding_window"], tensors[1].shape[2], given["backend"]))
        return attention(*tensors, **given)

    monkeypatch.setattr(ours, "attention", spy)
    return calls


@pytest.mark.parametrize("name", ["mistral", "phimoe"])
def test_no_mask_is_built_where_causality_and_window_explain_it(name, seen):
    register()
    model, tokens = using(build(name, num_hidden_layers=1), "course"), torch.randint(3, 100, (2, LENGTH))
    logits(model, tokens)
    logits(model, tokens, torch.ones_like(tokens), kind="dynamic", pieces=(5, 17))
    assert [call[:3] for call in seen] == [(False, 7, 24), (False, None, 5), (False, 7, 22), *[(False, None, 7)] * 2]
    seen.clear()
    logits(model, tokens, kind="static", pieces=(5, 19))
    assert [call[:3] for call in seen] == [(False, None, 5), (False, 7, 24)]
    seen.clear()
    logits(model, tokens, PADDING["left"])
    assert [call[:3] for call in seen] == [(True, None, 24)]


def test_registering_again_changes_the_backend_of_models_that_are_there(seen):
    register("reference")
    model, tokens = using(build("llama", num_hidden_layers=1), "course"), torch.randint(3, 100, (2, LENGTH))
    logits(model, tokens)
    for _ in range(2):
        register("blockwise")
        logits(model, tokens)
    assert [call[3] for call in seen] == ["reference", "blockwise", "blockwise"]


def top_left(q, k, v, *, causal=False, **given):
    query_len = q.shape[2] if causal and q.shape[2] > 1 else k.shape[2]
    return attention(q, k[:, :, :query_len], v[:, :, :query_len], causal=causal, **given)


def explained_otherwise(change):
    explained = ours._CausalMask.explained
    return lambda shape, device, keys, window, build: explained(shape, device, *change(shape, keys, window), build)


FAULTS = {
    "no mask function": (
        "llama",
        {"pad": "left"},
        lambda m: m.delitem(transformers.AttentionMaskInterface._global_mapping, "course"),
    ),
    "top-left": ("llama", {"kind": "dynamic", "pieces": (10, 6)}, lambda m: m.setattr(ours, "attention", top_left)),
    "empty places of a static cache": (
        "llama",
        {"kind": "static", "pieces": (10, 6)},
        lambda m: m.setattr(ours._CausalMask, "explained", explained_otherwise(lambda s, k, w: (s[-1], w))),
    ),
    "window one wider": (
        "mistral",
        {},
        lambda m: m.setattr(ours._CausalMask, "explained", explained_otherwise(lambda s, k, w: (k, w + 1))),
    ),
    "window one narrower": (
        "mistral",
        {},
        lambda m: m.setattr(ours._CausalMask, "explained", explained_otherwise(lambda s, k, w: (k, w - 1))),
    ),
    "window lost": (
        "phimoe",
        {},
        lambda m: m.setattr(ours._CausalMask, "explained", explained_otherwise(lambda s, k, w: (k, None))),
    ),
    "chunks taken for a window": ("llama4", {}, lambda m: m.setattr(ours, "_is_window", lambda *_: True)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault, monkeypatch):
    name, run, plant = FAULTS[fault]
    register()
    case = Case(build(name))
    case.check(**run)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        case.check(**run)


# ---- what is refused, in one sentence


def test_dropout_weights_and_blocks_are_refused():
    register()
    model, tokens = using(build("llama", attention_dropout=0.5), "course"), torch.randint(3, 100, (1, 5))
    with pytest.raises(
        ValueError, match=r"dropout is 0\.5, which attn_implementation='course' does not have; 'eager' does"
    ):
        model.train()(tokens)
    model.eval()(tokens)
    for asked in ({"output_attentions": True}, {"block_indices": torch.tensor(0)}):
        with pytest.raises(ValueError, match=r"attn_implementation='course' does not have; 'eager' does$"):
            ours._attend(model, *torch.randn(3, 1, 4, 5, 8), backend="auto", **asked)


@pytest.mark.parametrize("kind", ["BloomConfig", "MptConfig"])
def test_model_with_attention_of_its_own_is_refused(kind):
    register()
    config = getattr(transformers, kind)(vocab_size=100, hidden_size=32, n_heads=4, n_layers=1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="course")
    with pytest.raises(ValueError, match=f"the model of {kind} computes attention itself; 'eager' is needed"):
        model(torch.randint(3, 100, (1, 5)))


def test_unknown_backend_and_missing_or_old_transformers_are_one_sentence(monkeypatch):
    with pytest.raises(ValueError, match=r"backend is 'flash'; accepted are auto, reference, blockwise, sdpa, triton$"):
        register("flash")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.9.1")
    with pytest.raises(ImportError, match=r"needs transformers 5\.17 or newer, found 5\.9\.1$"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers 5\.17 or newer, which is not installed here$"):
        register()


def test_package_is_light_and_transformers_waits_for_register():
    source = "import sys, course_lib.integrations; assert not {'torch', 'transformers'} & set(sys.modules); "
    source += "import course_lib.integrations.transformers; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True)


# ---- a real model writes the same text


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2-135m", device="cpu", dtype="float32")


PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old man who",
    "def area(radius):",
]


@pytest.mark.parametrize("how", ["left-padded batch", "static cache", "prompt of 2,000 tokens"])
def test_smollm2_writes_the_text_that_it_writes_with_sdpa(smollm2, how):
    model, tokenizer = smollm2
    if how == "prompt of 2,000 tokens":
        inputs = {"input_ids": tokenizer(inspect.getsource(subprocess), return_tensors="pt").input_ids[:, :2000]}
        given = {"max_new_tokens": 4}
    else:
        texts = PROMPTS if how == "left-padded batch" else PROMPTS[1]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        given = {"max_new_tokens": 24} | ({"cache_implementation": "static"} if how == "static cache" else {})
    register()
    written = []
    for implementation in ("sdpa", "course"):
        model.set_attn_implementation(implementation)
        written.append(model.generate(**inputs, **given, do_sample=False))
    assert written[0].shape[1] > inputs["input_ids"].shape[1]
    assert torch.equal(*written)
