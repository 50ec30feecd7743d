"""Requests that share passes: each gets what it gets alone, whatever arrives, ends or is cancelled beside it, and nothing leaks."""

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from course_lib.generation import ContinuousBatcher, generate
from course_lib.kv_cache import packed, tables
from course_lib.models import ByteTokenizer, load
from course_lib.models.decoder import DecoderConfig, DecoderLM

VOCAB = 40


@pytest.fixture(autouse=True, scope="module")
def nothing_is_zero_by_chance():
    """Fill new memory of pools with NaN, as memory that others have used may be."""
    with pytest.MonkeyPatch.context() as patch:
        empty = tables._empty
        patch.setattr(tables, "_empty", lambda like, shape: empty(like, shape).fill_(torch.nan))
        yield


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
POSITIONS = ("rope", "alibi", "sinusoidal", "learned")


@cache
def small(position: str = "rope", kv_heads: int = 2, window: int | None = None, vocab_size: int = VOCAB) -> DecoderLM:
    """Return a decoder whose random weights prefer some tokens clearly."""
    config = DecoderConfig(
        **SIZES,
        vocab_size=vocab_size,
        num_key_value_heads=kv_heads,
        position=position,
        sliding_window=window,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return DecoderLM(config).eval()


def alone(model, prompt, **options):
    """Return the tokens that a request gets by itself."""
    return generate(model, torch.tensor([prompt]), **options).sequences[0, len(prompt) :].tolist()


def check(batcher: ContinuousBatcher) -> None:
    """Compare the pool's counts with the blocks of the requests that run, which came before all that wait."""
    batcher.cache.pool.check([request._row.blocks for request in batcher.running])
    order = [request.id for request in (*batcher.running, *batcher.waiting)]
    assert order == sorted(order)
    assert {request.state for request in batcher.running} <= {"running"}
    assert {request.state for request in batcher.waiting} <= {"waiting"}


samplings = st.one_of(
    st.just({}),
    st.just({"repetition_penalty": 1.7}),
    st.fixed_dictionaries({"temperature": st.sampled_from([0.5, 1.5]), "seed": st.integers(0, 99)}),
    st.fixed_dictionaries(
        {"temperature": st.just(1.0), "seed": st.integers(0, 99), "top_k": st.just(7), "min_p": st.just(0.01)}
    ),
)
jobs = st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14), st.integers(1, 8), samplings)
#: Something arrives, some steps are made, or one of the requests so far is cancelled.
events = st.one_of(jobs, st.integers(1, 4), st.tuples(st.just("cancel"), st.integers(0, 5)))
models = st.tuples(st.sampled_from(POSITIONS), st.sampled_from([1, 2, 4]), st.sampled_from([None, None, 1, 5]))


@settings(max_examples=30)
@given(
    model=models,
    schedule=st.lists(events, min_size=2, max_size=14),
    block_size=st.sampled_from([1, 3, 16]),
    spare=st.one_of(st.none(), st.integers(0, 6)),
    max_batch=st.integers(1, 5),
    budget=st.integers(0, 12),
)
def test_every_request_gets_what_it_gets_alone(model, schedule, block_size, spare, max_batch, budget):
    model = small(*model)
    tightest = -(-(14 + 8 - 1) // block_size)  # blocks for the longest request
    batcher = ContinuousBatcher(
        model,
        num_blocks=None if spare is None else tightest + spare,
        block_size=block_size,
        max_batch=max_batch,
        token_budget=max_batch + budget,
    )
    requests, wanted = [], []
    for event in schedule:
        if isinstance(event, int):
            for _ in range(event):
                batcher.step()
                check(batcher)
        elif event[0] == "cancel":
            if event[1] < len(requests):
                batcher.cancel(requests[event[1]])
                check(batcher)
        else:
            prompt, new, sampling = event
            requests.append(batcher.submit(prompt, max_new_tokens=new, **sampling))
            wanted.append(alone(model, prompt, max_new_tokens=new, **sampling))
    batcher.run()
    for request, tokens in zip(requests, wanted, strict=True):
        if request.state == "finished":
            assert (request.tokens, request.reason) == (tokens, "length")
        else:
            assert request.state == "cancelled"
            assert request.tokens == tokens[: len(request.tokens)]
    assert batcher.cache.pool.used == 0
    check(batcher)


@settings(max_examples=12)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=3, max_size=6),
    spare=st.integers(0, 4),
    window=st.sampled_from([None, 4]),
)
def test_whoever_came_first_goes_on_at_every_step(lengths, spare, window):
    batcher = ContinuousBatcher(small(window=window), num_blocks=10 + spare, block_size=2, max_batch=4, token_budget=5)
    todo = [batcher.submit([1] * length, max_new_tokens=new) for length, new in lengths]
    while batcher.running or batcher.waiting:
        first = next(request for request in todo if request.state != "finished")
        batcher.step()
        # More newcomers do not change that.
        if len(todo) < 10:
            todo.append(batcher.submit([2, 3], max_new_tokens=2))
        assert dict(batcher.last_step).get(first)
        assert sum(count for _, count in batcher.last_step) <= 5
    assert todo[0].preemptions == 0
    assert all(request.state == "finished" for request in todo)


def test_a_pool_too_small_for_all_takes_blocks_from_the_last_to_come():
    model, prompts = small(), [[i] * 6 for i in range(4)]
    batcher = ContinuousBatcher(model, num_blocks=14, block_size=2)
    requests = [batcher.submit(prompt, max_new_tokens=9) for prompt in prompts]
    batcher.run()
    assert [request.tokens for request in requests] == [alone(model, prompt, max_new_tokens=9) for prompt in prompts]
    stats = batcher.stats
    assert stats.preemptions == sum(request.preemptions for request in requests) > 0
    assert requests[0].preemptions == 0
    assert stats.prefill_tokens > 4 * 6
    assert (stats.tokens, stats.blocks_used, stats.blocks_total) == (36, 0, 14)
    assert 7 <= stats.blocks_peak <= 14


def test_one_pass_a_step_whose_logits_are_those_of_tokens_that_are_chosen():
    model = small("alibi", 1)
    passes, rows = [], []
    hooks = [
        model.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape[1])),
        model.lm_head.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[1])),
    ]
    batcher = ContinuousBatcher(model, max_batch=3, token_budget=8)
    batcher.submit([1] * 20, max_new_tokens=3)
    batcher.submit([2, 3], max_new_tokens=6)
    chosen = []
    while batcher.running or batcher.waiting:
        chosen.append(len(batcher.step()))
        assert passes[-1] == sum(count for _, count in batcher.last_step)
    for hook in hooks:
        hook.remove()
    assert rows == chosen
    assert len(passes) == batcher.stats.steps
    # The long prompt takes three steps, beside which the short one is not held up longer than the budget wants.
    assert passes[:3] == [8, 8, 6]
    assert batcher.step() == []
    assert batcher.stats.prefill_tokens == 22
    assert 0 < batcher.stats.occupancy <= 2 / 3


def test_chosen_positions_have_the_logits_of_a_whole_pass():
    model, tokens = small(), torch.randint(VOCAB, (2, 7))
    with torch.no_grad():
        some = model(tokens, logits_to_keep=torch.tensor([5, 0, 6])).logits
        torch.testing.assert_close(some, model(tokens).logits[:, [5, 0, 6]])


def test_a_window_bounds_the_blocks_of_a_long_text():
    model = small(window=5)
    batcher = ContinuousBatcher(model, num_blocks=5, block_size=2, max_batch=2, token_budget=4)
    request = batcher.submit(list(range(20)), max_new_tokens=30)
    batcher.run()
    assert request.tokens == alone(model, list(range(20)), max_new_tokens=30)
    assert batcher.stats.blocks_peak <= 5


@pytest.mark.parametrize("position", ["rope", "alibi"])
@pytest.mark.parametrize("window", [None, 4])
def test_blocks_read_in_place_give_the_same(monkeypatch, position, window):
    model, prompts = small(position, 2, window), [[i, 3, 5][: i + 1] * 3 for i in range(3)]
    calls = itertools.count()
    monkeypatch.setattr(packed, "_reads_blocks", lambda q, *_: q.shape[2] <= 16 and next(calls) >= 0)
    batcher = ContinuousBatcher(model, block_size=4, max_batch=3, token_budget=6)
    requests = [batcher.submit(prompt, max_new_tokens=8) for prompt in prompts]
    batcher.run()
    assert next(calls) > 8
    assert [request.tokens for request in requests] == [alone(model, prompt, max_new_tokens=8) for prompt in prompts]


@pytest.mark.parametrize(
    "rules", [{"softcap": 0.5}, {"softcap": 0.5, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}]
)
def test_scores_are_capped(rules):
    cache = packed.PackedCache(small().config, block_size=4)
    rows, parts = [cache.row() for _ in range(3)], []
    for counts in ((5, 2, 1), (1, 1, 3)):
        total = sum(counts)
        parts.append((counts, *(torch.randn(1, heads, total, 8) for heads in (4, 2, 2))))
        for row, count in zip(rows, counts, strict=True):
            row.reserve(count)
        cache.pack(list(zip(rows, counts, strict=True)), torch.device("cpu"))
        found = cache.layers[0].attend(*parts[-1][1:], **rules)
        cache.advance()
    spans = [list(itertools.pairwise([0, *itertools.accumulate(counts)])) for counts, *_ in parts]
    for row in range(3):
        keys, values = (
            torch.cat([part[which][:, :, slice(*span[row])] for part, span in zip(parts, spans, strict=True)], 2)
            for which in (2, 3)
        )
        here = slice(*spans[1][row])
        exact = packed.attention(parts[1][1][:, :, here], keys, values, causal=True, **rules)
        torch.testing.assert_close(found[:, :, here], exact)


def test_cancelling_frees_blocks_at_once():
    batcher = ContinuousBatcher(small(), num_blocks=20, block_size=2, max_batch=2)
    first, second, third = (batcher.submit([1, 2, 3], max_new_tokens=5) for _ in range(3))
    batcher.step()
    assert (first.state, second.state, third.state) == ("running", "running", "waiting")
    used = batcher.cache.pool.used
    batcher.cancel(first)
    assert first.state == "cancelled"
    assert len(first.tokens) == 1
    assert batcher.cache.pool.used == used // 2
    batcher.cancel(third)
    batcher.run()
    batcher.cancel(second)  # which has finished, and stays so
    assert (second.state, third.state, third.tokens) == ("finished", "cancelled", [])
    assert batcher.cache.pool.used == 0
    stranger = ContinuousBatcher(small()).submit([1], max_new_tokens=1)
    with pytest.raises(ValueError, match="not one of this batcher's"):
        batcher.cancel(stranger)


def test_an_exception_from_a_callback_leaves_everything_to_go_on_with():
    model, heard = small(), []

    def failing(token):
        heard.append(token)
        if len(heard) in (1, 4):
            raise KeyError("mine")

    batcher = ContinuousBatcher(model)
    requests = [batcher.submit([i, 7], max_new_tokens=4, on_token=failing) for i in range(2)]
    wanted = [alone(model, [i, 7], max_new_tokens=4) for i in range(2)]
    for _ in range(2):
        with pytest.raises(KeyError):
            batcher.run()
        check(batcher)
    batcher.run()
    assert [request.tokens for request in requests] == wanted
    assert heard == [token for pair in zip(*wanted, strict=True) for token in pair]
    assert batcher.cache.pool.used == 0


class Failing(ByteTokenizer):
    """A tokenizer that raises an exception at each call but the first few."""

    def __init__(self, calls: int) -> None:
        self.calls = itertools.count(-calls)

    def decode(self, tokens, **options):
        if next(self.calls) >= 0:
            raise KeyError("mine")
        return ""


@pytest.mark.parametrize("calls", [0, 3])
def test_an_exception_of_a_tokenizer_ends_its_request_and_no_other(calls):
    model, heard = small(), []
    batcher = ContinuousBatcher(model)
    others = [batcher.submit([i, 7], max_new_tokens=6) for i in range(2)]
    faulty = batcher.submit([3, 7], max_new_tokens=5, tokenizer=Failing(calls), on_token=heard.append)
    others += [batcher.submit([i, 7, 1], max_new_tokens=6, tokenizer=ByteTokenizer()) for i in range(2)]
    with pytest.raises(KeyError):
        batcher.run()
    check(batcher)
    assert (faulty.state, faulty.reason) == ("finished", "error")
    assert len({len(other.tokens) for other in others}) == 1
    batcher.run()
    wanted = alone(model, [3, 7], max_new_tokens=5)
    assert heard == faulty.tokens == wanted[: len(faulty.tokens)]
    assert 0 < len(faulty.tokens) < 5
    assert [one.tokens for one in others] == [alone(model, one.prompt, max_new_tokens=6) for one in others]
    assert batcher.cache.pool.used == 0


def test_a_tokenizer_may_raise_an_exception_at_the_end():
    batcher = ContinuousBatcher(small())
    # What is held back for a stop string is decoded again.
    ended, cancelled = (batcher.submit([1, 7], max_new_tokens=2, tokenizer=Failing(calls)) for calls in (3, 1))
    batcher.step()
    with pytest.raises(KeyError):
        batcher.cancel(cancelled)
    assert (cancelled.state, len(batcher.running)) == ("cancelled", 1)
    with pytest.raises(KeyError):
        batcher.run()
    assert (ended.state, ended.reason, len(ended.tokens)) == ("finished", "error", 2)
    assert batcher.cache.pool.used == 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 1}, {"repetition_penalty": 1.2}])
def test_logits_that_are_no_numbers_end_their_request_and_no_other(sampling):
    model = DecoderLM(DecoderConfig(**SIZES, vocab_size=VOCAB, tie_word_embeddings=False, initializer_range=0.4)).eval()
    batcher = ContinuousBatcher(model, block_size=2)
    others = [batcher.submit([i, 7], max_new_tokens=5, **sampling) for i in range(3)]
    wanted = [alone(model, one.prompt, max_new_tokens=5, **sampling) for one in others]
    batcher.step()
    unused = next(iter(set(range(8, VOCAB)).difference(*wanted)))
    with torch.no_grad():
        model.embed_tokens.weight[unused] = torch.nan
    faulty = batcher.submit([unused, 7], max_new_tokens=5, **sampling)
    batcher.run()
    assert (faulty.state, faulty.reason, faulty.tokens) == ("finished", "nan", [])
    assert [one.tokens for one in others] == wanted
    assert batcher.cache.pool.used == 0


def test_extreme_options_are_no_trouble_to_others():
    model, prompt = small(), [1, 2, 3]
    batcher = ContinuousBatcher(model)
    cold = batcher.submit(prompt, max_new_tokens=6, temperature=1e-40)
    batcher.submit(prompt, max_new_tokens=6, repetition_penalty=1e-300, temperature=1e300, top_p=1e-300)
    plain = batcher.submit(prompt, max_new_tokens=6)
    batcher.run()
    assert cold.tokens == plain.tokens == alone(model, prompt, max_new_tokens=6)


def test_a_callback_may_submit_and_cancel():
    model = small()
    batcher = ContinuousBatcher(model)
    others = []

    def on_token(token):
        if not others:
            batcher.cancel(victim)
            others.append(batcher.submit([5, 6], max_new_tokens=3))

    first = batcher.submit([1, 2], max_new_tokens=3, on_token=on_token)
    victim = batcher.submit([3, 4], max_new_tokens=3, on_token=lambda token: pytest.fail("it was cancelled"))
    batcher.run()
    assert (victim.state, len(victim.tokens)) == ("cancelled", 1)
    assert first.tokens == alone(model, [1, 2], max_new_tokens=3)
    assert others[0].tokens == alone(model, [5, 6], max_new_tokens=3)


def test_texts_end_as_alone():
    model, tokenizer, prompt = small(vocab_size=256), ByteTokenizer(), list(b"once")
    plain = alone(model, prompt, max_new_tokens=20)
    end = plain[5]
    batcher = ContinuousBatcher(model)
    by_token = batcher.submit(prompt, max_new_tokens=20, eos_token_id=[end, 999])
    one = batcher.submit(prompt, max_new_tokens=20, eos_token_id=end)
    letter = tokenizer.decode([plain[0]])
    by_text = batcher.submit(prompt, max_new_tokens=20, stop="\N{SNOWMAN}", tokenizer=tokenizer)
    batcher.run()
    assert by_token.tokens == one.tokens == alone(model, prompt, max_new_tokens=20, eos_token_id=end)
    assert (by_token.reason, by_text.reason, by_token.text) == ("eos", "length", None)
    options = {"max_new_tokens": 20, "tokenizer": tokenizer}
    assert by_text.text == generate(model, torch.tensor([prompt]), **options).texts[0]
    if letter.isprintable() and letter.isascii() and letter:  # the half of a character may become one
        stopped = batcher.submit(prompt, **options, stop=letter)
        batcher.run()
        assert (stopped.reason, stopped.text) == ("stop", "")


def test_prompts_may_be_lists_or_tensors():
    batcher = ContinuousBatcher(small())
    forms = ([1, 2], (1, 2), [[1, 2]], torch.tensor([1, 2]), torch.tensor([[1, 2]], dtype=torch.int32))
    forms += (np.array([1, 2]), np.array([[1, 2]]))
    requests = [batcher.submit(form, max_new_tokens=1) for form in forms]
    assert {request.prompt for request in requests} == {(1, 2)}
    assert [request.id for request in requests] == list(range(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": []}, "input_ids has no tokens"),
        ({"input_ids": torch.ones(2, 3)}, r"input_ids has shape \[2, 3\] and dtype torch.float32"),
        ({"input_ids": [VOCAB]}, f"input_ids holds {VOCAB}; the model has {VOCAB} tokens"),
        ({"input_ids": [1.5]}, "input_ids must be a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ({"temperature": -1}, "temperature is -1"),
        ({"stop": "x"}, "tokenizer is None"),
        ({"max_new_tokens": 40}, "need 11 blocks of 4; num_blocks is 8"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(options, message):
    batcher = ContinuousBatcher(small(), num_blocks=8, block_size=4)
    with pytest.raises(ValueError, match=message):
        batcher.submit(**({"input_ids": [1, 2], "max_new_tokens": 3} | options))
    assert not batcher.waiting


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": None}, "input_ids is of type NoneType; a list or tensor of token ids is needed"),
        ({"input_ids": BatchEncoding({"input_ids": [1]})}, "input_ids is of type BatchEncoding; a list or tensor"),
        ({"input_ids": "text"}, "input_ids is of type str"),
        ({"on_token": 5}, "on_token is 5; a function of a token"),
        ({"tokenizer": "gpt2"}, "tokenizer is 'gpt2'; an object that decodes"),
    ],
)
def test_an_argument_of_another_type_is_refused_at_once(options, message):
    batcher = ContinuousBatcher(small())
    with pytest.raises(TypeError, match=f"^{message}"):
        batcher.submit(**({"input_ids": [1, 2], "max_new_tokens": 3} | options))
    assert not batcher.waiting


@pytest.mark.parametrize("model", ["course/rope", (1, 2), None])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r"^model is of type \w+; .* load\(name\) returns, \(model, tokenizer\)$"):
        ContinuousBatcher(model)


def test_a_text_longer_than_learned_positions_is_refused():
    batcher = ContinuousBatcher(small("learned"))
    batcher.submit([1] * 60, max_new_tokens=5)
    with pytest.raises(ValueError, match="the model has 64 positions"):
        batcher.submit([1] * 60, max_new_tokens=6)


def test_what_cannot_run_so_is_refused():
    with pytest.raises(ValueError, match="model is of type 'gpt2'"):
        ContinuousBatcher(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=8)))
    with pytest.raises(ValueError, match="token_budget is 3 and max_batch 4"):
        ContinuousBatcher(small(), max_batch=4, token_budget=3)
    with pytest.raises(ValueError, match="num_blocks must be a whole number of at least 1"):
        ContinuousBatcher(small(), num_blocks=0)
    other = DecoderLM(small().config)
    other.attention_backend = "blockwise"
    with pytest.raises(ValueError, match="attention_backend 'blockwise'"):
        ContinuousBatcher(other)
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        ContinuousBatcher(DecoderLM(DecoderConfig(**SIZES, vocab_size=VOCAB, rope_parameters=parameters)))
    batcher = ContinuousBatcher(small("none"))
    batcher.submit([1, 2], max_new_tokens=2)
    small("none").attention_backend = "reference"
    try:
        with pytest.raises(ValueError, match="whose attention_backend is 'auto'"):
            batcher.step()
    finally:
        small("none").attention_backend = "auto"
    batcher.run()
    assert batcher.cache.pool.used == 0


def test_a_model_of_transformers_shares_its_weights():
    config = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=VOCAB, initializer_range=0.4, eos_token_id=None)
    theirs = LlamaForCausalLM(config).eval()
    batcher = ContinuousBatcher(theirs)
    request = batcher.submit([1, 2, 3], max_new_tokens=6)
    batcher.run()
    expected = theirs.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert request.tokens == expected[0, 3:].tolist()
    assert batcher.model.lm_head.weight.data_ptr() == theirs.lm_head.weight.data_ptr()


def test_smollm2_writes_what_it_writes_alone():
    model, tokenizer = load("smollm2-135m", dtype="float32", device="cpu", as_decoder=True)
    texts = (
        "The tide",
        "def add(a, b):\n    return",
        "Once upon a time, in a village by the sea, there lived",
        "1, 2, 3, 4,",
    )
    prompts = [tokenizer(text).input_ids for text in texts]
    batcher = ContinuousBatcher(model, num_blocks=4, block_size=8, max_batch=3, token_budget=7)
    options = [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {}, {"repetition_penalty": 1.2}]
    wanted = [alone(model, ids, max_new_tokens=7, **one) for ids, one in zip(prompts, options, strict=True)]
    requests = [batcher.submit(ids, max_new_tokens=7, **one) for ids, one in zip(prompts[:2], options[:2], strict=True)]
    batcher.step()
    requests += [
        batcher.submit(ids, max_new_tokens=7, **one) for ids, one in zip(prompts[2:], options[2:], strict=True)
    ]
    batcher.run()
    assert [request.tokens for request in requests] == wanted
    assert batcher.cache.pool.used == 0
