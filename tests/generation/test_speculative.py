"""Speculative decoding: the target's own tokens, or draws of its own distribution, whatever drafts them."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_llama import SMALL
from transformers import (
    DynamicCache,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from course_lib import kv_cache
from course_lib.generation import (
    PromptLookup,
    accept_tokens,
    expected_speedup,
    expected_tokens,
    first_layers,
    generate,
    speculative,
    speculative_generate,
    token_chances,
)
from course_lib.models import DecoderConfig, DecoderLM, load

#: How unlikely a deviation must be to be called one: a right rule fails once in a million runs.
SIGNIFICANCE = 1e-6


@pytest.fixture(scope="module")
def target(model):
    return model


def similar(model, share=0.15):
    """Return a copy that often, but not always, finds the same token most likely."""
    found = copy.deepcopy(model)
    for weight in found.parameters():
        weight.data += share * weight.std() * torch.randn_like(weight)
    return found


@pytest.fixture(scope="module", params=["DecoderLM", "Transformers", "look-up"])
def draft(request, theirs):
    if request.param == "look-up":
        return PromptLookup()
    found = similar(theirs)
    return DecoderLM.from_transformers(found) if request.param == "DecoderLM" else found


def prompt(length: int = 9) -> torch.Tensor:
    """Return a text that stands in it twice, so that a look-up finds something."""
    once = torch.randint(1, SMALL["vocab_size"], (1, length))
    return torch.cat((once, once), dim=1)


@pytest.mark.parametrize(
    ("cache", "draft_tokens"),
    [("dynamic", 1), ("static", 3), ("offloaded", 3), ("paged", "adaptive"), ("prefix", 1), ("object", "adaptive")],
)
def test_greedy_tokens_are_those_of_the_target_alone(target, draft, draft_tokens, cache):
    ids = prompt()
    expected = generate(target, ids, max_new_tokens=24).sequences
    kept = DynamicCache(config=target.config) if cache == "object" else cache
    told: list[torch.Tensor] = []
    found = speculative_generate(
        target, draft, ids, max_new_tokens=24, draft_tokens=draft_tokens, cache=kept, on_token=told.append
    )
    assert torch.equal(found.sequences, expected)
    assert torch.equal(torch.stack(told, dim=1), expected[:, 18:])
    assert found.cache.get_seq_length() == expected.shape[1] - 1
    assert found.new_tokens == 24
    # Each round adds what was accepted, and one more; the first token came before.
    assert found.new_tokens == 1 + found.rounds + found.accepted
    assert found.accepted == sum(found.accepted_at) <= sum(found.tried_at) <= found.drafted


@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_no_token_more_than_asked_for_is_added_or_run(target, new):
    """Even where a whole draft would be accepted."""
    ids = prompt()
    cache = kv_cache.StaticCache(target.config, max_cache_len=18 + new)
    found = speculative_generate(target, target, ids, max_new_tokens=new, draft_tokens=4, cache=cache)
    assert torch.equal(found.sequences, generate(target, ids, max_new_tokens=new).sequences)
    assert found.rounds == -(-(new - 1) // 5)
    assert found.accepted == found.drafted
    assert found.acceptance == (1.0 if found.drafted else 0.0)


@pytest.mark.parametrize("place", range(1, 9))
def test_a_text_ends_at_its_token_also_within_a_draft(target, place):
    ids = prompt()
    free = generate(target, ids, max_new_tokens=12).sequences
    end = int(free[0, 17 + place])
    expected = generate(target, ids, max_new_tokens=12, eos_token_id=[end, 999]).sequences
    found = speculative_generate(target, target, ids, max_new_tokens=12, draft_tokens=3, eos_token_id=[end, 999])
    assert torch.equal(found.sequences, expected)
    assert found.new_tokens == expected.shape[1] - 18
    assert found.cache.get_seq_length() == expected.shape[1] - 1
    assert found.accepted == sum(found.tried_at)


@pytest.mark.parametrize("kind", [None, "static", "paged", DynamicCache])
def test_a_window_does_not_drop_what_a_rejected_token_hid(kind):
    torch.manual_seed(1)
    model = DecoderLM(DecoderConfig(**SMALL, sliding_window=6)).eval()
    ids = prompt()
    cache = kind(config=model.config) if kind is DynamicCache else kind or "dynamic"
    found = speculative_generate(model, similar(model), ids, max_new_tokens=30, cache=cache)
    assert torch.equal(found.sequences, generate(model, ids, max_new_tokens=30).sequences)
    assert 0 < found.accepted < found.drafted


def test_the_cache_serves_another_call(target, draft):
    ids = prompt()
    whole = generate(target, ids, max_new_tokens=20).sequences
    first = speculative_generate(target, draft, ids, max_new_tokens=8)
    second = speculative_generate(target, draft, first.sequences, max_new_tokens=5, cache=first.cache)
    third = generate(target, second.sequences, max_new_tokens=7, cache=second.cache)
    assert torch.equal(third.sequences, whole)


def test_a_prefix_cache_is_asked_and_told(target):
    ids = prompt(20)
    cache = kv_cache.PrefixCache(target.config, block_size=4)
    for _ in range(2):
        speculative_generate(target, PromptLookup(), ids, max_new_tokens=6, cache=cache)
    assert cache.reused_tokens == 39


def test_the_course_s_smaller_model_drafts_for_its_larger():
    (larger, tokenizer), (smaller, _) = load("course/native"), load("course/rope")
    ids = tokenizer("def expand(self, other):\n    return", return_tensors="pt")["input_ids"]
    found = speculative_generate(larger, smaller, ids, max_new_tokens=40)
    assert torch.equal(found.sequences, generate(larger, ids, max_new_tokens=40).sequences)
    assert 0.3 < found.acceptance < 1
    assert found.tokens_per_round > 1.5


# ---- draws


def tail(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the chance of counts that fit chances as badly as these, by Pearson's chi-square; rare outcomes count as one."""
    expected = expected.double() * observed.sum()
    assert not observed[expected == 0].any()
    rare = expected < 5
    cells = [(observed[~rare], expected[~rare])]
    if rare.any() and expected[rare].sum() > 0:
        cells.append((observed[rare].sum()[None], expected[rare].sum()[None]))
    counts, means = (torch.cat(parts) for parts in zip(*cells, strict=True))
    statistic = ((counts - means) ** 2 / means).sum()
    return float(torch.special.gammaincc(torch.tensor((len(means) - 1) / 2).double(), statistic / 2))


def always(target, draft, tokens, generator=None):
    return len(tokens), torch.multinomial(target[len(tokens)], 1)[0]


def without_residual(target, draft, tokens, generator=None):
    accepted, token = accept_tokens(target, draft, tokens)
    return accepted, torch.multinomial(target[accepted], 1)[0] if accepted < len(tokens) else token


def only_certain(target, draft, tokens, generator=None):
    """Accept what the target gives more to than the draft."""
    kept = [bool(target[place, token] >= draft[place, token]) for place, token in enumerate(tokens)]
    accepted = kept.index(False) if False in kept else len(kept)
    more = (target[accepted] - draft[accepted]).clamp(min=0) if accepted < len(kept) else target[accepted]
    return accepted, torch.multinomial(more, 1)[0]


@pytest.mark.parametrize(
    ("rule", "right"), [(accept_tokens, True), (always, False), (without_residual, False), (only_certain, False)]
)
def test_accepted_and_replaced_tokens_are_distributed_as_the_target_s(rule, right):
    """The joint chances of the first two tokens, of a draft of two; wrong rules are found out."""
    target = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    draft = torch.tensor([[0.2, 0.2, 0.3, 0.3], [0.4, 0.3, 0.2, 0.1]])
    counts = torch.zeros(4, 4)
    for _ in range(2500):
        tokens = torch.multinomial(draft, 1)[:, 0]
        accepted, token = rule(target, draft, tokens)
        text = [*tokens[:accepted].tolist(), int(token)]
        if len(text) < 2:  # what the next round would draw
            text.append(int(torch.multinomial(target[1], 1)))
        counts[text[0], text[1]] += 1
    chances = target[0][:, None] * target[1]
    if not right and bool((counts[chances == 0] > 0).any()):
        return  # found out at once: a token that the target never writes
    assert (tail(counts, chances) > SIGNIFICANCE) == right


def tiny(seed: int) -> DecoderLM:
    """Return the same model each time, and leave the draws of the test fresh."""
    sizes = {"vocab_size": 3, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "head_dim": 4}
    sizes |= {"num_key_value_heads": 1, "num_hidden_layers": 1, "initializer_range": 0.7}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DecoderLM(DecoderConfig(**sizes, tie_word_embeddings=False)).eval()


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("model", {"temperature": 1.5, "top_p": 0.9, "min_p": 0.1}),
        ("look-up", {"temperature": 0.8}),
        ("model, all accepted", {"temperature": 1.0, "top_k": 2}),
    ],
)
def test_drawn_texts_are_distributed_as_the_target_s(draft, options, monkeypatch):
    """The exact joint chances of three tokens, by all 27 texts, against as many draws as show a rule that accepts all."""
    target, ids, new = tiny(3), torch.tensor([[0, 1, 2, 1, 0, 1]]), 3
    drafts = PromptLookup() if draft == "look-up" else tiny(4)
    texts = torch.cartesian_prod(*[torch.arange(3)] * new)
    whole = torch.cat((ids.expand(len(texts), -1), texts), dim=1)
    with torch.no_grad():
        logits = target(whole).logits[:, ids.shape[1] - 1 : -1]
    chances = token_chances(logits.reshape(-1, 3), **options).view(len(texts), new, 3)
    joint = chances.gather(2, texts[..., None]).prod(dim=1)[:, 0]
    assert joint.sum().item() == pytest.approx(1)
    wrong = "all accepted" in draft
    if wrong:
        monkeypatch.setattr(speculative, "accept_tokens", always)
    counts = torch.zeros(len(texts))
    places = 3 ** torch.arange(new - 1, -1, -1)
    for _ in range(300):
        found = speculative_generate(target, drafts, ids, max_new_tokens=new + 1, draft_tokens=2, **options)
        counts[(found.sequences[0, ids.shape[1] : -1] * places).sum()] += 1
    assert bool((counts[joint == 0] == 0).all()) or wrong
    found_out = bool((counts[joint == 0] > 0).any()) or tail(counts, joint) <= SIGNIFICANCE
    assert found_out == wrong


def test_equal_chances_are_always_accepted_and_rounding_is_no_error():
    chances = torch.rand(3, 40).softmax(dim=-1)
    tokens = torch.multinomial(chances[:2], 1)[:, 0]
    assert accept_tokens(chances, chances[:2], tokens)[0] == 2
    # Chances that are smaller by rounding everywhere leave no residual.
    less = chances.clone()
    less[0] = 0.0
    less[0, tokens[0]] = 1e-45
    sure = torch.zeros(2, 40)
    sure[range(2), tokens] = 1.0
    accepted, token = accept_tokens(less, sure, tokens)
    assert accepted == 0
    assert token == tokens[0]


def test_a_seed_repeats_its_draws_and_another_draws_otherwise(target, draft):
    ids = prompt()
    draws = [
        speculative_generate(target, draft, ids, max_new_tokens=16, temperature=1.5, seed=seed).sequences
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


# ---- drafts, and what they save


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 3), st.integers(1, 6))
def test_a_look_up_returns_what_followed_the_longest_last_tokens_at_their_latest_place(text, ngram, fewer, count):
    lookup = PromptLookup(ngram, max(1, ngram - fewer))
    expected: list[int] = []
    for size in range(ngram, lookup.min_ngram - 1, -1):
        places = [i for i in range(len(text) - size) if text[i : i + size] == text[-size:]]
        if places:
            expected = text[places[-1] + size :][:count]
            break
    assert lookup.find(torch.tensor(text), count).tolist() == expected


def test_an_adaptive_draft_grows_while_it_is_accepted(target):
    found = speculative_generate(target, target, prompt(), max_new_tokens=40, draft_tokens="adaptive")
    assert found.rounds == 5  # 5, 7, 9 and 11 tokens, and what is left
    assert found.accepted_at[0] == 5
    assert len(found.accepted_at) == 10
    assert found.acceptance_at == (1.0,) * 10


def test_first_layers_share_all_weights(theirs):
    model = DecoderLM.from_transformers(theirs)
    whole, first = first_layers(model, 2), first_layers(model, 1)
    ids = prompt()
    assert torch.equal(whole(ids).logits, model(ids).logits)
    assert not torch.equal(first(ids).logits, model(ids).logits)
    assert {id(weight) for weight in first.parameters()} < {id(weight) for weight in model.parameters()}
    assert (len(first.layers), first.config.num_hidden_layers, len(model.layers)) == (1, 1, 2)
    with pytest.raises(ValueError, match="count is 3; the model has 2 layers"):
        first_layers(model, 3)


@given(st.floats(0, 1), st.integers(0, 12))
def test_expected_tokens_are_the_mean_of_how_far_a_draft_comes(acceptance, count):
    ends = [acceptance**place * (1 - acceptance) for place in range(count)]
    mean = sum((place + 1) * chance for place, chance in enumerate(ends)) + (count + 1) * acceptance**count
    assert expected_tokens(acceptance, count) == pytest.approx(mean)
    assert expected_speedup(acceptance, count, 0.0) == pytest.approx(mean)
    assert expected_speedup(acceptance, count, 0.25, 1.5) == pytest.approx(mean / (count / 4 + 1.5))


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": torch.ones(2, 5, dtype=torch.long)}, ValueError, "input_ids has 2 rows; one is needed"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"draft_tokens": 0}, ValueError, "draft_tokens"),
        ({"draft_tokens": "Adaptive"}, ValueError, "draft_tokens, where it is not 'adaptive', .* got 'Adaptive'"),
        ({"seed": 1.5}, ValueError, "seed must be a whole number"),
        ({"eos_token_id": 2.5}, ValueError, "eos_token_id must be a whole number"),
        ({"on_token": []}, TypeError, r"on_token is \[\]; a function of a token is needed"),
        ({"draft": "prompt"}, TypeError, "draft is of type str; a language model or a PromptLookup is needed"),
        ({"cache": "sliding_window"}, ValueError, "cache is 'sliding_window'; one that shows each"),
        ({"cache": None}, ValueError, "cache is None; one that shows each"),
        ({"cache": "big"}, ValueError, "cache is 'big'; accepted are"),
        ({"top_k": 3}, ValueError, "top_k is 3 and temperature 0"),
    ],
)
def test_what_cannot_be_is_one_clear_error(theirs, change, error, message):
    arguments = {"draft": PromptLookup(), "input_ids": prompt(), "max_new_tokens": 4} | change
    with pytest.raises(error, match=message):
        speculative_generate(theirs, **arguments)


#: Sizes for models of other families, with experts where there are any.
HYBRID = SMALL | {"pad_token_id": 0, "num_local_experts": 2, "num_experts_per_tok": 1, "mamba_n_heads": 4}


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_recurrent_state_is_refused_for_it_cannot_go_back(theirs, name):
    jamba = JambaForCausalLM(
        JambaConfig(
            **SMALL | {"pad_token_id": 0, "num_experts": 2, "num_experts_per_tok": 1},
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
        )
    ).eval()
    models, told = {"target": theirs, "draft": theirs} | {name: jamba}, []
    with pytest.raises(ValueError, match=f"^{name} is a JambaForCausalLM, whose recurrent state cannot give up"):
        speculative_generate(**models, input_ids=prompt(), max_new_tokens=4, on_token=told.append)
    assert not told


@pytest.mark.parametrize(
    "model",
    [
        lambda: Lfm2ForCausalLM(Lfm2Config(**HYBRID | {"layer_types": ["conv", "full_attention"]})),
        lambda: GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**HYBRID | {"layer_types": ["attention"] * 2})),
    ],
)
def test_families_of_hybrids_that_can_go_back_write_their_own_text(model):
    model, ids = model().eval(), prompt()
    found = speculative_generate(model, similar(model, 0.3), ids, max_new_tokens=20)
    assert found.accepted < found.drafted
    assert torch.equal(found.sequences, generate(model, ids, max_new_tokens=20).sequences)


def test_integers_of_numpy_and_a_tiny_temperature_are_taken(target):
    ids, options = prompt(), {"temperature": 1e-40, "seed": np.int64(1)}
    found = speculative_generate(
        target, similar(target), ids, max_new_tokens=np.int64(9), draft_tokens=np.int64(3), **options
    )
    assert torch.equal(found.sequences, generate(target, ids, max_new_tokens=9).sequences)
    assert first_layers(tiny(1), np.int64(1)).config.num_hidden_layers == 1
    assert type(first_layers(tiny(1), np.int64(1)).config.num_hidden_layers) is int


def test_a_draft_of_another_vocabulary_is_refused(theirs):
    other = LlamaForCausalLM(LlamaConfig(**SMALL | {"vocab_size": 60}))
    with pytest.raises(
        ValueError, match="draft has a vocabulary of 60 tokens and target one of 50; it must be the same"
    ):
        speculative_generate(theirs, other, prompt(), max_new_tokens=4)


def test_a_cache_that_holds_the_whole_text_is_refused(theirs):
    ids = prompt()
    cache = generate(theirs, ids, max_new_tokens=2).cache
    with pytest.raises(ValueError, match="cache holds 19 tokens and input_ids 18; at least one token must be new"):
        speculative_generate(theirs, PromptLookup(), ids, max_new_tokens=2, cache=cache)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PromptLookup(0), "ngram"),
        (lambda: PromptLookup(2, 3), "min_ngram is 3 and ngram 2"),
        (lambda: expected_tokens(1.1, 2), "acceptance is 1.1"),
        (lambda: expected_speedup(0.5, 2, -1.0), "draft_cost is -1.0"),
        (lambda: expected_speedup(0.5, 2, 0.1, 0.0), "verify_cost is 0.0"),
    ],
)
def test_numbers_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
