"""Generation: the tokens of Transformers, with every cache; draws only from what the options leave."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_llama import SMALL
from transformers import (
    DynamicCache,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from course_lib import kv_cache
from course_lib.generation import choose_tokens, generate, token_chances
from course_lib.generation.loop import CACHES
from course_lib.memory import peak_memory
from course_lib.models import ByteTokenizer, DecoderConfig, DecoderLM, load


def prompts(batch: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(1, SMALL["vocab_size"], (batch, length))


def expected(theirs, ids, new, **options):
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return theirs.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize(
    "cache", ["dynamic", "static", "sliding_window", "offloaded", "paged", "prefix", "object", None]
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk", [None, 2])
def test_greedy_tokens_are_those_of_transformers(model, theirs, cache, padded, chunk):
    """Whatever the cache, also where the first chunk of a row is nothing but padding."""
    chunk = chunk if cache else None  # a chunk needs one
    ids = prompts()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3], mask[2, :1] = 0, 0
    kind = StaticCache(config=theirs.config, max_cache_len=40) if cache == "object" else cache
    found = generate(model, ids, max_new_tokens=12, cache=kind, attention_mask=mask, prefill_chunk=chunk)
    assert torch.equal(found.sequences, expected(theirs, ids, 12, attention_mask=mask))
    assert found.tokens == (12, 12, 12)
    assert found.reused_tokens == 0
    assert found.prefill_seconds > 0
    assert found.decode_seconds > 0


def test_every_name_makes_its_cache(model):
    for name, kind in CACHES.items():
        found = generate(model, prompts(), max_new_tokens=3, cache=name)
        assert type(found.cache) is getattr(kv_cache, kind)
        assert found.cache.get_seq_length() == 9


def test_a_prefix_cache_is_asked_and_told(model):
    ids, cache = prompts(batch=1, length=40), kv_cache.PrefixCache(model.config, block_size=4)
    first = generate(model, ids, max_new_tokens=6, cache=cache)
    again = generate(model, torch.cat((ids[:, :30], prompts(batch=1, length=3)), 1), max_new_tokens=6, cache=cache)
    assert (first.reused_tokens, again.reused_tokens) == (0, 30)
    assert torch.equal(again.sequences, generate(model, again.sequences[:, :33], max_new_tokens=6).sequences)


def test_a_sliding_window_keeps_the_first_tokens_behind_padding(theirs):
    """A padded row is the text that it is alone, though the window has dropped what stood before."""
    model = DecoderLM.from_transformers(theirs)
    ids, options = prompts(batch=2, length=12), {"window": 6, "sinks": 2}
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded = generate(
        model, ids, max_new_tokens=20, attention_mask=mask, cache=kv_cache.SlidingWindowCache(model.config, **options)
    )
    for row, start in ((0, 5), (1, 0)):
        alone = generate(
            model,
            ids[row : row + 1, start:],
            max_new_tokens=20,
            cache=kv_cache.SlidingWindowCache(model.config, **options),
        )
        assert torch.equal(padded.sequences[row, start:], alone.sequences[0])


def test_the_cache_serves_another_call(model):
    ids = prompts(batch=2)
    whole = generate(model, ids, max_new_tokens=10)
    first = generate(model, ids, max_new_tokens=4, cache=DynamicCache())
    assert first.cache.get_seq_length() == ids.shape[1] + 3
    second = generate(model, first.sequences, max_new_tokens=6, cache=first.cache)
    assert torch.equal(second.sequences, whole.sequences)


def test_a_row_ends_at_its_token_and_all_rows_end_the_loop(model, theirs):
    ids = prompts(batch=4)
    free = generate(model, ids, max_new_tokens=12).sequences
    ends = [int(free[0, 8]), int(free[1, 10])]
    told: list[torch.Tensor] = []
    found = generate(model, ids, max_new_tokens=12, eos_token_id=ends, on_token=told.append).sequences
    assert torch.equal(torch.stack(told, dim=1), found[:, 7:])
    for row, unstopped in zip(found, free, strict=True):
        stops = [place for place in range(7, 19) if int(unstopped[place]) in ends]
        if not stops:
            assert torch.equal(row, unstopped)
            continue
        assert torch.equal(row[: stops[0] + 1], unstopped[: stops[0] + 1])
        assert (row[stops[0] :] == unstopped[stops[0]]).all()
    alone = generate(model, ids[:1], max_new_tokens=12, eos_token_id=ends[0]).sequences
    assert alone.shape[1] == 7 + 1 + (free[0, 7:] == ends[0]).nonzero()[0].item()


def test_a_seed_repeats_its_draws_and_another_draws_otherwise(model):
    ids = prompts(batch=8)
    draws = [generate(model, ids, max_new_tokens=8, temperature=2.0, seed=seed).sequences for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@given(st.integers(1, 40), st.floats(0.05, 1.0), st.floats(0.2, 3.0), st.integers(0, 2**31))
def test_draws_come_from_what_transformers_would_leave(top_k, top_p, temperature, seed):
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, 30, generator=draw)
    left = TopKLogitsWarper(top_k)(None, logits / temperature)
    left = TopPLogitsWarper(top_p)(None, left)
    rows = logits.expand(300, -1)
    found = choose_tokens(rows, temperature=temperature, top_k=top_k, top_p=top_p, generator=draw)
    assert torch.isfinite(left[0, found]).all()
    if torch.isfinite(left).sum() > 1 and left.softmax(-1).max() < 0.9:
        assert found.unique().numel() > 1


@given(st.floats(0.0, 1.0), st.floats(0.2, 3.0), st.floats(0.3, 3.0), st.integers(0, 2**31))
def test_min_p_and_penalty_are_those_of_transformers(min_p, temperature, penalty, seed):
    draw = torch.Generator().manual_seed(seed)
    logits, text = 3 * torch.randn(1, 30, generator=draw), torch.randint(0, 30, (1, 8), generator=draw)
    left = RepetitionPenaltyLogitsProcessor(penalty)(text, logits)
    options = {"repetition_penalty": penalty, "generator": draw}
    assert choose_tokens(logits, previous=text, **options) == left.argmax(-1)
    assert choose_tokens(
        logits, previous=torch.cat((text, text, -torch.ones(1, 3).long()), 1), **options
    ) == left.argmax(-1)
    left = MinPLogitsWarper(min_p)(None, left / temperature).softmax(-1)[0]
    rows = choose_tokens(
        logits.expand(2000, -1), previous=text.expand(2000, -1), temperature=temperature, min_p=min_p, **options
    )
    found = rows.bincount(minlength=30) / 2000
    assert (left[rows] > 0).all()
    torch.testing.assert_close(found, left, atol=0.07, rtol=0)


def test_a_penalty_writes_what_transformers_writes(model, theirs):
    ids = prompts()
    found = generate(model, ids, max_new_tokens=15, repetition_penalty=1.3).sequences
    assert torch.equal(found, expected(theirs, ids, 15, repetition_penalty=1.3))
    assert not torch.equal(found, expected(theirs, ids, 15))


def test_padding_is_no_text_that_a_penalty_counts(model):
    ids, penalty = prompts(batch=2, length=9), {"max_new_tokens": 15, "repetition_penalty": 1.5}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    alone = generate(model, ids[:1, 4:], **penalty).sequences[0]
    for pad in alone[5:].unique().tolist():
        ids[0, :4] = pad
        assert torch.equal(generate(model, ids, attention_mask=mask, **penalty).sequences[0, 4:], alone)


def test_draws_have_the_probabilities_of_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    draw = torch.Generator().manual_seed(0)
    found = choose_tokens(logits.expand(40_000, -1), temperature=1.5, generator=draw).bincount(minlength=4) / 40_000
    torch.testing.assert_close(found, (logits[0] / 1.5).softmax(-1), atol=0.01, rtol=0)


def test_top_k_of_one_and_a_tiny_top_p_are_greedy():
    logits = torch.randn(20, 30)
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        assert torch.equal(choose_tokens(logits, temperature=1.0, **options), logits.argmax(-1))


@pytest.mark.parametrize("extreme", [1e-40, 1e-300, 1e300])
def test_options_near_nothing_or_everything_are_their_limits(extreme):
    logits = 30 * torch.randn(20, 30)
    sure = torch.nn.functional.one_hot(logits.argmax(-1), 30).float()
    found = token_chances(logits, temperature=extreme, top_k=7, min_p=0.5)
    if extreme > 1:  # all that are left are as likely
        torch.testing.assert_close(found.amax(-1), torch.full((20,), 1 / 7))
    else:
        assert torch.equal(found, sure)
        assert torch.equal(token_chances(logits, temperature=0.5, top_p=extreme), sure)
    positive = logits.abs()
    best = positive.argmax(-1)
    chosen = choose_tokens(positive, previous=best[:, None], repetition_penalty=extreme, temperature=1e-40)
    assert bool(((chosen == best) == (extreme < 1)).all())


def test_integers_may_be_those_of_numpy_or_torch(model):
    ids = prompts(batch=1)
    free = generate(model, ids, max_new_tokens=6).sequences
    for kind in (np.int64, torch.tensor):
        found = generate(model, ids, max_new_tokens=kind(6), prefill_chunk=kind(2), seed=kind(1))
        assert torch.equal(found.sequences, free)
        end = int(free[0, 9])
        wanted = generate(model, ids, max_new_tokens=6, eos_token_id=end).sequences
        for ends in (kind(end), [kind(end), 999], kind([end, 999]) if kind is torch.tensor else np.array([end, 999])):
            assert torch.equal(generate(model, ids, max_new_tokens=6, eos_token_id=ends).sequences, wanted)


def test_a_name_is_no_tokenizer(model):
    with pytest.raises(TypeError, match=r"^tokenizer is 'gpt2'; an object that decodes is needed"):
        generate(model, prompts(), max_new_tokens=1, tokenizer="gpt2")


def test_a_stop_string_ends_its_row_where_it_is_complete_and_the_text_before_it():
    decoder, tokenizer = load("course/rope")
    ids = tokenizer(["def __init__(self", "    return self._"], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 30, "attention_mask": ids["attention_mask"], "tokenizer": tokenizer}
    free = generate(decoder, ids["input_ids"], **options)
    assert free.texts == tuple(tokenizer.decode(row[17:]) for row in free.sequences)
    stop = free.texts[0][9:14]
    found = generate(decoder, ids["input_ids"], stop=["never written", stop], **options)
    for row, text in enumerate(free.texts):
        place = text.find(stop)
        assert found.texts[row] == (text[:place] if place >= 0 else text)
        assert found.tokens[row] == (place + len(stop) if place >= 0 else 30)
        written = found.sequences[row, 17:]
        assert torch.equal(written[: found.tokens[row]], free.sequences[row, 17 : 17 + found.tokens[row]])
        assert (written[found.tokens[row] :] == written[found.tokens[row] - 1]).all()


def test_a_chunked_prompt_holds_less_at_a_time(model):
    ids, longest = prompts(batch=1, length=48), []
    hook = model.register_forward_pre_hook(
        lambda module, arguments, options: longest.append((arguments or (options.get("input_ids"),))[0].shape[1]),
        with_kwargs=True,
    )
    try:
        found = generate(model, ids, max_new_tokens=4, prefill_chunk=10)
    finally:
        hook.remove()
    assert longest == [10, 10, 10, 10, 8, 1, 1, 1]
    assert torch.equal(found.sequences, generate(model, ids, max_new_tokens=4).sequences)


def test_a_native_checkpoint_writes_bytes():
    decoder, tokenizer = load("course/rope")
    prompt = "def __init__(self, *args"
    found = generate(decoder, tokenizer(prompt, return_tensors="pt")["input_ids"], max_new_tokens=20)
    text = tokenizer.decode(found.sequences[0])
    assert text.startswith(prompt)
    assert len(text) == len(prompt) + 20


def test_dynamic_ntk_past_its_limit_is_the_uncached_text_or_a_refusal():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    torch.manual_seed(1)
    decoder = DecoderLM(DecoderConfig(**SMALL | {"max_position_embeddings": 12}, rope_parameters=scaling)).eval()
    ids = prompts(batch=1, length=8)
    assert torch.equal(
        generate(decoder, ids, max_new_tokens=5).sequences,
        generate(decoder, ids, max_new_tokens=5, cache=None).sequences,
    )
    with pytest.raises(ValueError, match=r"^rope_type 'dynamic' turns keys otherwise at length 13 than"):
        generate(decoder, ids, max_new_tokens=20)
    long = generate(decoder, ids, max_new_tokens=20, cache=None).sequences
    for end in range(8, 28):
        assert long[0, end] == decoder(long[:, :end]).logits[0, -1].argmax()


def test_learned_positions_end_with_a_sentence():
    decoder = DecoderLM(DecoderConfig(**SMALL | {"max_position_embeddings": 9}, position="learned"))
    with pytest.raises(ValueError, match=r"^positions holds 9; this model has learned positions 0 to 8$"):
        generate(decoder, prompts(), max_new_tokens=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"input_ids": torch.ones(3)}, "input_ids has shape .3. and dtype torch.float32; integers"),
        ({"input_ids": torch.ones(1, 0).long()}, r"input_ids has shape \[1, 0\]"),
        (
            {"cache": "page"},
            "cache is 'page'; accepted are dynamic, static, sliding_window, quantized, offloaded, paged, prefix, a cache object",
        ),
        ({"temperature": -1.0}, "temperature is -1.0; 0"),
        ({"temperature": float("nan")}, "temperature is nan; 0"),
        ({"temperature": None}, "temperature is None; 0"),
        ({"temperature": "hot"}, "temperature is 'hot'; 0"),
        ({"temperature": 10**400}, "temperature is 1000.*; 0"),
        ({"top_p": "0.9", "temperature": 1.0}, "top_p is '0.9'; a number above 0"),
        ({"min_p": [0.1], "temperature": 1.0}, r"min_p is \[0.1\]; a number from 0 to 1"),
        ({"repetition_penalty": "1"}, "repetition_penalty is '1'; a finite number above 0"),
        ({"seed": "a"}, "seed must be a whole number .*, got 'a'"),
        ({"seed": 1.5}, "seed must be a whole number .*, got 1.5"),
        ({"seed": 2**64}, "seed must be a whole number of at most 18446744073709551615, got 18446744073709551616"),
        ({"eos_token_id": "x"}, "eos_token_id must be a whole number of at least 0, got 'x'"),
        ({"eos_token_id": [2.7]}, "eos_token_id must be a whole number of at least 0, got 2.7"),
        ({"top_k": 0, "temperature": 1.0}, "top_k must be a whole number of at least 1, got 0"),
        ({"top_p": 1.5, "temperature": 1.0}, "top_p is 1.5; a number above 0 and at most 1 is needed"),
        ({"top_k": 3}, "top_k is 3 and temperature 0, which always takes the most likely token"),
        ({"attention_mask": torch.ones(1, 2)}, r"attention_mask has shape \[1, 2\] and input_ids \[1, 3\]"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "attention_mask hides the last token of a prompt"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "attention_mask hides a token behind a visible one"),
        ({"input_ids": torch.ones(0, 3).long()}, r"input_ids has shape \[0, 3\]"),
        ({"min_p": 1.5, "temperature": 1.0}, "min_p is 1.5; a number from 0 to 1 is needed"),
        ({"min_p": 0.1}, "min_p is 0.1 and temperature 0, which always"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; a finite number above 0 is needed"),
        ({"prefill_chunk": 0}, "prefill_chunk must be a whole number of at least 1, got 0"),
        ({"prefill_chunk": 2, "cache": None}, "prefill_chunk is 2 and cache None; a chunk needs a cache"),
        ({"stop": "end"}, "tokenizer is None; stop 'end' needs one to decode the text"),
        (
            {"stop": ["a", ""], "tokenizer": ByteTokenizer()},
            r"stop is \['a', ''\]; a text or several, none of them empty",
        ),
    ],
)
def test_calls_that_cannot_be_are_refused(model, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        generate(model, **{"input_ids": torch.ones(1, 3).long(), "max_new_tokens": 1} | options)


def test_what_cannot_hear_tokens_is_refused(model):
    with pytest.raises(TypeError, match=r"^on_token is 0; a function of a token is needed"):
        generate(model, torch.ones(1, 3).long(), max_new_tokens=1, on_token=0)


def test_a_cache_that_holds_everything_is_refused(model):
    ids = prompts(batch=1)
    first = generate(model, ids, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"^cache holds 9 tokens and input_ids 7; at least one token must be new$"):
        generate(model, ids, max_new_tokens=3, cache=first.cache)


def test_a_chunked_prompt_needs_memory_for_a_chunk():
    sizes = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 2, "max_position_embeddings": 512}
    decoder = DecoderLM(DecoderConfig(**SMALL | sizes)).eval()
    ids, peaks = prompts(batch=1, length=512), {}
    for chunk in (None, 32):
        with peak_memory() as peak:
            found = generate(decoder, ids, max_new_tokens=1, prefill_chunk=chunk)
        peaks[chunk] = peak.bytes - found.cache.nbytes
    assert peaks[32] < peaks[None] / 4
