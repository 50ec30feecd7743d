"""The tracer: every tensor of a run as the configuration says, an unchanged model afterwards, and a sentence on what is wrong."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import kv_cache
from course_lib.generation import generate
from course_lib.kv_cache import DynamicCache, PagedCache, PrefixCache, QuantizedCache, SlidingWindowCache, StaticCache
from course_lib.kv_cache.base import KVCache
from course_lib.kv_cache.dynamic import GrowingLayer
from course_lib.memory import kv_cache_bytes
from course_lib.models import ByteTokenizer, load
from course_lib.models.decoder import POSITIONS, DecoderConfig, DecoderLM
from course_lib.models.tracing import trace

TOKENIZER = ByteTokenizer()
PROMPT = "import sys"
SMALL = {
    "vocab_size": 256,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CACHES = {
    "dynamic": DynamicCache,
    "static": lambda config: StaticCache(config, max_cache_len=30),
    "paged": lambda config: PagedCache(config, block_size=4),
    "prefix": PrefixCache,
    "offloaded": kv_cache.OffloadedCache,
    "on disk": lambda config: kv_cache.OffloadedCache(config, to="disk"),
    "int8": lambda config: QuantizedCache(config, scheme="int8", group_size=4, residual_length=3),
    "int4": lambda config: QuantizedCache(config, group_size=2, residual_length=1),
    "rounded": lambda config: kv_cache.RoundedCache(config, group_size=4, residual_length=3),
    "window and sinks": lambda config: SlidingWindowCache(config, window=5, sinks=2),
}


def make(**changes):
    return DecoderLM(DecoderConfig(**SMALL | changes)).eval()


def test_smollm2_is_traced_from_prefill_on_as_the_source_tells_it():
    model, tokenizer = load("smollm2-135m", dtype="float32", device="cpu", as_decoder=True)
    prompt = "The capital of China is"
    length = tokenizer(prompt, return_tensors="pt")["input_ids"].shape[1]
    found = trace(model, tokenizer, prompt, new_tokens=3).check()
    assert found.text.startswith(" Beijing")
    assert [step.name for step in found] == ["prefill", "decode 1", "decode 2"]
    # Counted from 0, the first new token stands at the prompt's length.
    assert [step.positions for step in found] == [tuple(range(length)), (length,), (length + 1,)]
    assert [step.cache_bytes for step in found] == [
        kv_cache_bytes(model.config, length + more, dtype="float32") for more in range(3)
    ]
    second = {one.name: one.shape for one in found[1].tensors if one.layer in (None, 29)}
    assert second["queries"] == second["attended"] == (1, 9, 1, 64)
    assert second["keys"] == second["values"] == (1, 3, 1, 64)
    assert second["keys in sight"] == (1, 3, length + 1, 64)
    assert second["gate_proj"] == (1, 1, 1536)
    assert second["lm_head"] == (1, 1, 49152)
    assert len(found[1].tensors) == 5 + 30 * 16


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("position", POSITIONS)
def test_every_head_layout_and_every_position_encoding_is_as_its_configuration_says(kv_heads, position):
    model = make(num_key_value_heads=kv_heads, position=position)
    found = trace(model, TOKENIZER, PROMPT, new_tokens=3).check()
    assert (
        found[-1].cache_bytes == 12 * kv_heads * 2 * 8 * 4 * 2
    )  # tokens, heads, keys and values, head_dim, bytes, layers
    names = {one.name for one in found[0].tensors}
    assert ("cos" in names) == (position == "rope")
    assert ("embed_positions" in names) == (position == "learned")


@pytest.mark.parametrize("window", [None, 4, 50])
@pytest.mark.parametrize("kind", CACHES)
def test_every_cache_is_as_its_options_say(kind, window):
    if window and kind == "prefix":
        return  # refuses such a model
    model = make(sliding_window=window)
    cache = CACHES[kind](model.config)
    found = trace(model, TOKENIZER, PROMPT, new_tokens=9, cache=cache).check()
    assert (found[0].length_before, found[-1].length_after) == (0, 18)
    assert [step.cache_bytes for step in found][-1] == cache.used_nbytes > 0
    unsaid = kind == "prefix" or (kind in ("int8", "int4") and window)
    assert all((step.expected_bytes is None) == bool(unsaid) for step in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_and_extras_are_traced_too(dtype):
    model = make(qk_norm=True, qkv_bias=True, tie_word_embeddings=False).to(dtype)
    found = trace(model, TOKENIZER, PROMPT, new_tokens=2).check()
    assert {one.dtype for one in found[0].tensors if one.name not in ("cos", "sin")} == {dtype}
    assert {"q_norm", "k_norm"} <= {one.name for one in found[1].tensors}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    trace(make(rope_parameters=rotary), TOKENIZER, PROMPT, new_tokens=2).check()


@settings(max_examples=15, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (5, 1), (3, 3)]),
    dim=st.sampled_from([2, 6, 16]),
    layers=st.integers(1, 3),
    prompt=st.text("abc", min_size=1, max_size=9),
    window=st.none() | st.integers(1, 12),
)
def test_any_architecture_passes(heads, dim, layers, prompt, window):
    model = make(
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=dim,
        num_hidden_layers=layers,
        sliding_window=window,
    )
    trace(model, TOKENIZER, prompt, new_tokens=3).check()


@pytest.mark.parametrize("kind", ["dynamic", "paged", "int4"])
def test_what_is_chosen_and_its_logits_are_those_of_an_untraced_run(kind):
    model = make().double()
    ids = TOKENIZER(PROMPT, return_tensors="pt")["input_ids"]
    found = trace(model, TOKENIZER, PROMPT, new_tokens=8, cache=CACHES[kind](model.config))
    written = generate(model, ids, max_new_tokens=8, cache=CACHES[kind](model.config)).sequences[0, len(PROMPT) :]
    assert [step.chosen for step in found] == written.tolist()
    cache = CACHES[kind](model.config)
    expected = [model(ids, cache=cache).logits[0, -1], model(written[None, :1], cache=cache).logits[0, -1]]
    torch.testing.assert_close(torch.stack([step.logits for step in found[:2]]), torch.stack(expected).detach())


def test_a_cache_that_holds_the_beginning_is_continued():
    model = make()
    cache = PrefixCache(model.config)
    ids = TOKENIZER(PROMPT, return_tensors="pt")["input_ids"]
    generate(model, ids, max_new_tokens=1, cache=cache)
    reused = cache.begin(ids)
    found = trace(model, TOKENIZER, PROMPT, new_tokens=2, cache=cache).check()
    assert reused > 0
    assert found[0].length_before == reused
    assert found[0].positions == tuple(range(reused, len(PROMPT)))


class Stop(Exception):
    """Raised in the middle of a pass."""


@pytest.mark.parametrize("broken", [False, True])
def test_nothing_is_left_behind(broken):
    model, cache = make(), DynamicCache(make().config)
    owners = [*model.modules(), *cache.layers]
    before = [set(vars(owner)) for owner in owners]
    weights = copy.deepcopy(model.state_dict())
    if broken:

        def fail(*_):
            raise Stop

        handle = model.layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(Stop):
            trace(model, TOKENIZER, PROMPT, new_tokens=2, cache=cache)
        handle.remove()
    else:
        trace(model, TOKENIZER, PROMPT, new_tokens=2, cache=cache)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    left = [set(vars(owner)) - known for owner, known in zip(owners, before, strict=True)]
    assert not any(names & {"_attend", "_place", "update"} for names in left)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


# ---- what is wrong is found, and said in a sentence


def sentence(model, cache=None, new_tokens=3):
    found = trace(model, TOKENIZER, PROMPT, new_tokens=new_tokens, cache=cache)
    with pytest.raises(AssertionError) as caught:
        found.check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        (
            "num_key_value_heads",
            3,
            "prefill: k_proj of layer 0 has shape [1, 10, 16], and the configuration says [1, 10, 24]",
        ),
        (
            "intermediate_size",
            41,
            "prefill: gate_proj of layer 0 has shape [1, 10, 40], and the configuration says [1, 10, 41]",
        ),
        ("vocab_size", 200, "prefill: lm_head has shape [1, 1, 256], and the configuration says [1, 1, 200]"),
        ("qk_norm", True, "prefill: q_norm of layer 0 was not made"),
    ],
)
def test_a_model_that_is_not_its_configuration_is_found(name, wrong, said):
    model = make()
    setattr(model.config, name, wrong)
    assert sentence(model, new_tokens=1).startswith(said)


class Late(DecoderLM):
    """Places the first new token at the prompt's length plus one, counted from zero."""

    def forward(self, input_ids, *, cache, **options):
        past, length = cache.get_seq_length(), input_ids.shape[1]
        position_ids = torch.arange(past, past + length) + (past > 0)
        return super().forward(input_ids, cache=cache, position_ids=position_ids, **options)


def test_a_token_in_the_wrong_place_is_found():
    said = sentence(Late(make().config))
    assert said == "decode 1: embed_tokens has positions 11, and the configuration says 10"


class Forgetful(GrowingLayer):
    """Drops the oldest token after each call."""

    def trim(self):
        self._drop_first(1)
        self.held -= 1


class Miscounting(GrowingLayer):
    """Takes a token for two."""

    def store(self, key_states, value_states):
        super().store(key_states, value_states)
        self.seen += 1


class Greedy(GrowingLayer):
    """Says that it needs more than it does."""

    @property
    def used_nbytes(self):
        return super().used_nbytes + 1


class Repeating(GrowingLayer):
    """Shows keys of as many heads as there are queries."""

    def update(self, key_states, value_states, *args, **options):
        keys, values = super().update(key_states, value_states, *args, **options)
        return keys.repeat_interleave(3, 1), values.repeat_interleave(3, 1)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Forgetful, "prefill: the cache holds 2,304 bytes, and the configuration says 2,560"),
        (Miscounting, "prefill: the cache has taken 11 tokens, and 10 have gone in"),
        (Greedy, "prefill: the cache holds 2,562 bytes, and the configuration says 2,560"),
        (
            Repeating,
            "prefill: keys in sight of layer 0 has shape [1, 6, 10, 8], and the configuration says [1, 2, 10, 8] "
            "(batch, kv_heads, in_sight, head_dim)",
        ),
    ],
)
def test_a_cache_that_does_not_keep_its_promise_is_found(layer, said):
    model = make()
    cache = KVCache(model.config, layer)
    assert sentence(model, cache, new_tokens=1) == said


def test_steps_that_do_not_follow_one_another_are_found():
    found = trace(make(), TOKENIZER, PROMPT, new_tokens=3)
    with pytest.raises(AssertionError, match="decode 2: the cache begins with 11 tokens, and the step before left 10"):
        replace(found, steps=(found[0], found[2])).check()


def test_tables_say_all_and_join_layers_that_are_alike():
    found = trace(make(), TOKENIZER, PROMPT, new_tokens=2)
    headers, rows = found[1].table()
    queries = dict(zip(headers, next(row for row in rows if row[0] == "queries"), strict=True))
    assert queries == {
        "tensor": "queries",
        "layers": "2",
        "shape": "[1, 6, 1, 8]",
        "axes": "batch, query_heads, tokens, head_dim",
        "positions": "10",
        "dtype": "float32",
        "bytes each": "192",
    }
    assert len(rows) == 5 + 16
    headers, rows = found.table()
    assert rows[0][1:6] == ["10 tokens", "0 to 9", "0", "10", "2,560"]
    assert str(found).count("keys in sight") == 2


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"new_tokens": 0}, ValueError, "new_tokens must be"),
        ({"prompt": ""}, ValueError, "prompt has 0 tokens and the cache holds 0"),
        ({"cache": "dynamic"}, TypeError, "cache is of type str"),
        (
            {"cache": DynamicCache(make(num_hidden_layers=1).config)},
            ValueError,
            "^cache has 1 layers; the model's 2 are needed$",
        ),
        ({"model": torch.nn.Linear(2, 2)}, TypeError, "model is of type Linear"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, error, said):
    given_ = {"model": make(), "tokenizer": TOKENIZER, "prompt": PROMPT, "new_tokens": 1} | arguments
    with pytest.raises(error, match=said):
        trace(given_.pop("model"), given_.pop("tokenizer"), given_.pop("prompt"), **given_)
