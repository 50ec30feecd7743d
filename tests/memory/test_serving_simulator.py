"""A simulated server loses no token, stays within its card, and takes the time that counting its steps by hand gives."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.kv_cache.trace import Trace, draw_trace, replay
from course_lib.memory import published_config
from course_lib.memory.cards import cards
from course_lib.memory.chats import Chat, Statistics, Turn
from course_lib.memory.plans import Costs, Plan, plan_memory
from course_lib.memory.rates import Calibration, calibrate, datasheet
from course_lib.memory.serving import Bound, most_users, simulate
from course_lib.memory.step_cost import step_cost

MODEL = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
PLAN = Plan(8, dtype="float16", token_budget=64)
CLOCK = Calibration(math.inf, math.inf, 1.0)  # every step takes a second
SLOW = Calibration(2e6, 3e8, 0.001)
ROOM = 10**8
LONGEST = 256


def one(*turns: Turn, at: float = 0.0) -> Chat:
    return Chat(at, turns)


def served(chats, plan=PLAN, *, memory=ROOM, rates=SLOW, max_tokens=LONGEST):
    return simulate(MODEL, plan, chats, memory=memory, rates=rates, max_tokens=max_tokens)


def room_for(chats: float, plan: Plan = PLAN, max_tokens: int = LONGEST) -> int:
    fixed, each = plan_memory(MODEL, plan, max_tokens=max_tokens)
    return fixed + int(chats * each)


some_chats = st.lists(
    st.builds(
        Chat,
        st.floats(0, 3),
        st.lists(st.builds(Turn, st.integers(1, 60), st.integers(1, 30), st.floats(0, 2)), min_size=1, max_size=2).map(
            tuple
        ),
    ),
    min_size=1,
    max_size=12,
)
some_plans = st.builds(
    lambda batch, block, more, reuse: replace(
        PLAN, max_batch=batch, block_size=block, token_budget=batch + more, prefix_reuse=reuse
    ),
    st.integers(1, 6),
    st.sampled_from([None, 1, 16]),
    st.integers(1, 80),
    st.booleans(),
)


# ---- by hand ------------------------------------------------------------------------------------------------------


def test_a_prompt_and_each_later_token_take_a_step():
    (answer,) = served([one(Turn(3, 4))], rates=CLOCK).answers
    assert (answer.first_token, answer.done, answer.per_token) == (1, 4, 1)


def test_who_comes_second_waits_where_one_runs_at_a_time():
    plan = replace(PLAN, max_batch=1)
    first, second = served([one(Turn(3, 4)), one(Turn(3, 1), at=0.5)], plan, rates=CLOCK).answers
    assert (first.done, second.asked, second.done) == (4, 0.5, 5)


def test_whoever_comes_joins_at_the_next_step():
    early, late = served([one(Turn(3, 9)), one(Turn(3, 2), at=2.5)], rates=CLOCK).answers[::-1]
    assert (early.done, late.first, late.done) == (9, 4, 5)


def test_a_prompt_above_the_budget_is_read_in_chunks_beside_those_who_write():
    plan = replace(PLAN, token_budget=11)
    result = served([one(Turn(10, 8)), one(Turn(30, 2), at=0.5)], plan, rates=CLOCK)
    # One token of each step is the first request's: the second reads ten, ten and ten.
    assert {answer.chat: (answer.first, answer.done) for answer in result.answers} == {0: (1, 8), 1: (4, 5)}


def test_thinking_begins_with_the_answer_and_counts_for_nobody():
    first, second = served([one(Turn(3, 2), Turn(4, 2, think=10.0))], rates=CLOCK).answers
    assert (first.done, second.asked, second.first_token, second.done) == (2, 12, 1, 14)


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_take_the_time_that_counting_gives(overlap):
    rates = replace(SLOW, overlap=overlap)
    (answer,) = served([one(Turn(50, 6))], rates=rates).answers
    expected = rates.seconds(step_cost(MODEL, context=50, query_tokens=50, logits_to_keep=1, dtype="float16"))
    assert answer.first == pytest.approx(expected, rel=1e-3)  # an embedding's rows are looked up once each
    expected += sum(rates.seconds(step_cost(MODEL, context=50 + k, dtype="float16")) for k in range(1, 6))
    assert answer.done == pytest.approx(expected, rel=1e-3)


def test_a_batch_reads_the_weights_once():
    rates = Calibration(1e6, math.inf)
    alone = served([one(Turn(20, 40))], rates=rates).answers[-1].done
    result = served([one(Turn(20, 40)) for _ in range(3)], rates=rates)
    costs = step_cost(MODEL, context=40, batch_size=3, dtype="float16").bytes
    assert 1 < result.answers[-1].done / alone < 1.1 * costs / step_cost(MODEL, context=40, dtype="float16").bytes


def test_a_step_changes_from_arithmetic_to_reading_in_the_middle_of_an_answer():
    """With a rate at which a growing cache overtakes the arithmetic, every step still takes the longer of the two."""
    cost = step_cost(MODEL, context=150, dtype="float16")
    grown = step_cost(MODEL, context=151, dtype="float16")
    flops_per_byte = cost.flops / cost.bytes
    assert (grown.flops - cost.flops) / (grown.bytes - cost.bytes) != pytest.approx(flops_per_byte)
    rates = Calibration(1e6, 1e6 * flops_per_byte)
    (answer,) = served([one(Turn(50, 200))], rates=rates).answers
    steps = [step_cost(MODEL, context=50 + k, dtype="float16") for k in range(1, 200)]
    assert {cost.bytes / rates.bandwidth > cost.flops / rates.flops_per_second for cost in steps} == {True, False}
    assert answer.done - answer.first == pytest.approx(sum(map(rates.seconds, steps)), rel=1e-3)


# ---- promises that hold for any users ---------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(some_chats, some_plans, st.floats(1.0, 4.0))
def test_every_answer_is_written_whole_and_memory_and_time_add_up(chats, plan, chats_of_room):
    room = room_for(chats_of_room, plan)
    result = served(chats, plan, memory=room)
    turns = {(number, place): turn for number, chat in enumerate(chats) for place, turn in enumerate(chat.turns)}
    assert {(answer.chat, answer.turn): answer.written for answer in result.answers} == {
        key: turn.output for key, turn in turns.items()
    }
    assert len(result.answers) == len(turns)
    for answer in result.answers:
        assert answer.asked < answer.first <= answer.done
        assert answer.cached == answer.context - 1
        if not (plan.prefix_reuse or result.preemptions):
            assert answer.computed == answer.context - 1  # every token but the last passes through the model, once
    assert result.peak <= room
    assert all(held >= 0 and idle >= 0 for _, held, idle in result.memory)
    assert result.memory[-1][1:] == (0, 0)
    end = max(answer.done for answer in result.answers)
    assert sum(result.seconds.values()) == pytest.approx(end)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 80), st.integers(1, 60)), min_size=1, max_size=10),
    some_plans,
    st.floats(1.0, 8.0),
    st.floats(1.0, 8.0),
)
def test_a_faster_machine_is_late_for_nobody(lengths, plan, bandwidth, flops):
    """Where all come at once, what happens in which step does not depend on time, so each moment comes no later."""
    chats = [one(Turn(prompt, output)) for prompt, output in lengths]
    faster = Calibration(SLOW.bandwidth * bandwidth, SLOW.flops_per_second * flops, SLOW.overhead)
    slow, fast = (served(chats, plan, memory=room_for(2, plan), rates=rates) for rates in (SLOW, faster))
    assert slow.steps == fast.steps
    for before, after in zip(slow.answers, fast.answers, strict=True):
        assert after.first <= before.first * (1 + 1e-9)
        assert after.done <= before.done * (1 + 1e-9)
    bound = Bound(slow.percentile("first_token", 50), slow.percentile("per_token", 50))
    assert fast.users_within(bound) >= slow.users_within(bound)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_replay_of_chapter_09_where_every_step_takes_a_second(seed):
    trace = draw_trace(60, mean_prompt=30, mean_output=25, max_tokens=LONGEST, interval=4.0, seed=seed)
    chats = [
        one(Turn(int(p), int(o)), at=float(a))
        for a, p, o in zip(trace.arrival, trace.prompt, trace.output, strict=True)
    ]
    slots = 2 * LONGEST + 32
    for policy, block in (("paged", 16), ("maximum", None)):
        plan = Plan(60, dtype="float16", block_size=block, token_budget=10**6)
        fixed, each = plan_memory(MODEL, plan, max_tokens=LONGEST)
        result = served(chats, plan, memory=fixed + slots * each // LONGEST, rates=CLOCK)
        expected = replay(trace, slots, policy, max_tokens=LONGEST)
        assert result.steps == expected.steps
        assert result.preemptions == expected.preemptions
        assert (result.preemptions > 0) == (policy == "paged")


def test_a_trace_of_chapter_09_is_one_of_chats_with_a_single_turn():
    trace = Trace(np.array([0, 2]), np.array([5, 7]), np.array([3, 1]))
    chats = [one(Turn(int(p), int(o)), at=float(a)) for a, p, o in zip(*vars(trace).values(), strict=True)]
    assert [answer.done for answer in served(chats, rates=CLOCK).answers] == [3, 3]


# ---- memory -------------------------------------------------------------------------------------------------------


def test_a_kept_prefix_is_not_read_again():
    chats = [one(Turn(60, 10), Turn(20, 10, think=1.0))]
    kept, dropped = (served(chats, replace(PLAN, prefix_reuse=reuse)).answers[1] for reuse in (True, False))
    assert (kept.computed, dropped.computed) == (1 + 20 + 9, 70 + 20 + 9)
    assert kept.first_token < dropped.first_token


def test_idle_chats_give_way_to_those_that_run_the_longest_idle_first():
    chats = [
        one(Turn(100, 5), Turn(10, 5, think=500.0)),
        one(Turn(100, 5), Turn(10, 5, think=500.0), at=20.0),
        one(Turn(100, 120), at=100.0),
    ]
    result = served(chats, memory=room_for(1.5), rates=CLOCK)
    computed = {answer.chat: answer.computed for answer in result.answers if answer.turn == 1}
    assert computed == {0: 105 + 10 + 4, 1: 1 + 10 + 4}
    assert result.preemptions == 0


def test_who_entered_last_is_computed_again_when_memory_runs_out():
    chats = [one(Turn(100, 100)), one(Turn(100, 100), at=0.5)]
    plan = replace(PLAN, token_budget=300)
    result = served(chats, plan, memory=room_for(1.2, plan), rates=CLOCK)
    first, second = result.answers
    assert (result.preemptions, first.chat, first.done) == (1, 0, 100)
    assert second.computed > 199
    roomy = served(chats, rates=CLOCK)
    assert roomy.preemptions == 0


def test_a_contiguous_range_takes_the_longest_chat_s_room_and_pages_take_what_is_written():
    chats = [one(Turn(20, 20)) for _ in range(4)]
    bound = Bound(25, 1.5)
    paged, contiguous = (
        served(chats, replace(PLAN, block_size=size), memory=room_for(2.1), rates=CLOCK) for size in (16, None)
    )
    assert (paged.users_within(bound), contiguous.users_within(bound)) == (4, 4)
    assert (paged.percentile("first_token", 100), contiguous.percentile("first_token", 100)) == (2, 21)
    assert paged.peak < contiguous.peak


def test_fewer_heads_and_fewer_bits_take_less():
    plain = plan_memory("llama-2-7b", Plan(1), max_tokens=4096)
    grouped = plan_memory("llama-2-7b", Plan(1, num_key_value_heads=8), max_tokens=4096)
    rounded = plan_memory("llama-2-7b", Plan(1, quantization="nf4", kv_cache_dtype="int4"), max_tokens=4096)
    assert grouped[0] < plain[0]
    assert grouped[1] * 4 == plain[1]
    assert rounded[0] < 0.4 * plain[0]
    assert rounded[1] == pytest.approx(plain[1] * 4.5 / 16)


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-20b", "llama-3.1-8b"])
def test_tables_of_costs_are_those_that_are_counted(name):
    costs = Costs(name, Plan(16), 3000)
    rng = Random(5)
    for context in [1, 2, 3000, *(rng.randint(3, 3000) for _ in range(12))]:
        cost = step_cost(name, context=context)
        assert costs.cache[context] == pytest.approx(cost.cache_bytes, rel=2e-3)
        assert costs.attention[context] == pytest.approx(cost.attention_flops, rel=2e-3)
        assert costs.token + costs.head == cost.weight_flops
    for count in (1, 3, 30, 400):
        expected = step_cost(name, context=1, batch_size=count).weight_bytes
        assert costs.weights[count] == pytest.approx(expected, rel=2e-3)


# ---- users --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_most_users_is_where_the_bound_breaks(seed):
    chats = Statistics(turns=2, prompt=30, output=20, think=1.0, max_tokens=LONGEST).draw(40, seed)
    bound = Bound(1.5, 0.3, share=0.9)
    arguments = {"memory": room_for(6), "rates": SLOW, "max_tokens": LONGEST}
    found = most_users(MODEL, PLAN, chats, bound, **arguments)

    def kept(users: int) -> bool:
        within = simulate(MODEL, PLAN, chats[:users], **arguments).users_within(bound)
        return within >= users - math.floor((1 - bound.share) * users + 1e-9)

    assert 0 < found < 40
    assert kept(found)
    assert not kept(found + 1)
    assert most_users(MODEL, PLAN, chats, Bound(1e9, 1e9), **arguments) == 40
    assert most_users(MODEL, PLAN, chats, Bound(0.0, 0.0), **arguments) == 0
    for seed_of_memory in (1, 2):  # twice the memory and twice the speed serve no fewer
        more = arguments | {"memory": room_for(6 * 2**seed_of_memory), "rates": Calibration(4e6, 6e8, 0.0005)}
        assert most_users(MODEL, PLAN, chats, bound, **more) >= found


def test_draws_are_the_same_users_however_many_and_have_the_means_asked_for():
    statistics = Statistics(turns=3, prompt=50, output=80, think=4.0, max_tokens=10_000)
    chats = statistics.draw(2000, 7)
    assert statistics.draw(10, 7) == chats[:10]
    assert statistics.draw(10, 8) != chats[:10]
    turns = [turn for chat in chats for turn in chat.turns]
    assert len(turns) / len(chats) == pytest.approx(3, rel=0.1)
    assert np.mean([turn.prompt for turn in turns]) == pytest.approx(50, rel=0.1)
    assert np.mean([turn.output for turn in turns]) == pytest.approx(80, rel=0.1)
    assert np.mean([turn.think for chat in chats for turn in chat.turns[1:]]) == pytest.approx(4, rel=0.1)
    assert max(chat.tokens for chat in replace(statistics, max_tokens=60).draw(500, 1)) <= 60


# ---- rates --------------------------------------------------------------------------------------------------------


def counted(rng: Random):
    return step_cost(
        MODEL, context=rng.randint(30, 3000), batch_size=rng.randint(1, 30), query_tokens=rng.choice([1, 1, 30])
    )


def test_a_calibration_finds_the_rates_that_made_the_times_and_predicts_others():
    rng = Random(1)
    true = Calibration(3e9, 5e10, 2e-5, overlap=False)
    costs = [counted(rng) for _ in range(12)]
    found = calibrate([(cost, true.seconds(cost)) for cost in costs])
    assert vars(found) == pytest.approx(vars(true), rel=1e-6)
    noisy = calibrate([(cost, true.seconds(cost) * rng.uniform(0.95, 1.05)) for cost in costs])
    for _ in range(10):
        cost = counted(rng)
        assert noisy.seconds(cost) == pytest.approx(true.seconds(cost), rel=0.15)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_no_term_of_a_calibration_is_negative_and_no_other_fit_is_better(seed):
    rng = Random(seed)
    rows = [(counted(rng), rng.uniform(0.001, 0.1)) for _ in range(5)]

    def error(rates: Calibration) -> float:
        return sum((rates.seconds(cost) / seconds - 1) ** 2 for cost, seconds in rows)

    found = calibrate(rows)
    assert found.overhead >= 0
    for factor in (0.9, 1.1):
        for change in ({"bandwidth": found.bandwidth * factor}, {"flops_per_second": found.flops_per_second * factor}):
            assert error(replace(found, **change)) >= error(found) - 1e-9
        assert error(replace(found, overhead=found.overhead * factor + 1e-6 * (factor > 1))) >= error(found) - 1e-9


def test_a_datasheet_s_rates_are_those_of_the_card():
    card = next(card for card in cards() if card.name == "L4")
    assert datasheet("l4") == datasheet(card) == Calibration(300e9, 121e12)
    result = simulate("llama-2-7b", Plan(4, quantization="nf4"), [one(Turn(9, 9))], memory="L4", rates=datasheet("L4"), max_tokens=64)  # fmt: skip
    assert result.capacity == card.memory_bytes


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: served([], memory=room_for(0.9)), "memory is .* a larger card"),
        (lambda: served([one(Turn(200, 100))]), "chats holds one of 300 tokens; max_tokens, 256"),
        (lambda: Plan(0), "max_batch"),
        (lambda: Plan(8, token_budget=8), "token_budget must be a whole number of at least 9"),
        (lambda: Plan(8, block_size=0), "block_size"),
        (lambda: plan_memory("gpt-3", Plan(8, num_key_value_heads=2), max_tokens=9), "num_key_value_heads is given"),
        (lambda: served([one(Turn(1, 1))]).percentile("done", 101), "name must be"),
        (
            lambda: served([one(Turn(1, 1))]).percentile("per_token", 101),
            "percent must be a number from 0 to 100, got 101",
        ),
        (lambda: Turn(0, 5), "prompt must be a whole number of at least 1, got 0"),
        (lambda: Turn(5, 5.5), "output must be a whole number of at least 1, got 5.5"),
        (lambda: Turn(5, 5, math.nan), "think must be a number of seconds, at least 0, got nan"),
        (lambda: Chat(math.inf, ()), "arrival must be a number of seconds"),
        (lambda: Bound(1.0, math.nan), "per_token must be a number of seconds"),
        (lambda: Bound(1.0, 1.0, 95), "share must be a number from 0 to 1, got 95"),
        (lambda: Statistics(math.inf, 9, 9, 1.0, 99).draw(1, 0), "turns must be a number of at least 1"),
        (lambda: Statistics(2, 9, 9, -1.0, 99).draw(1, 0), "think must be a number of seconds"),
        (lambda: Statistics(0.5, 9, 9, 1.0, 99).draw(1, 0), "turns must be a number of at least 1"),
        (lambda: calibrate([]), "at least 3"),
        (lambda: calibrate([(counted(Random(0)), 0.0)] * 3), "positive seconds"),
        (lambda: Calibration(0.0, 1.0), "bandwidth must be positive"),
        (lambda: Calibration(1.0, 1.0, -1.0), "overhead"),
        (lambda: datasheet("L5"), "must be one of L4"),
        (lambda: datasheet("A10"), "no rate of arithmetic"),
    ],
)
def test_an_error_says_what_was_given_and_what_is_accepted(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_a_head_layout_is_taken_from_any_form_of_a_configuration(tmp_path):
    from transformers import LlamaConfig

    plan = Plan(1, num_key_value_heads=2)
    assert plan.model("llama-2-7b") == {**published_config("llama-2-7b"), "num_key_value_heads": 2}
    assert plan.model(LlamaConfig())["num_key_value_heads"] == 2
    (tmp_path / "config.json").write_text(json.dumps(published_config("llama-2-7b")), encoding="utf-8")
    for form in (tmp_path, str(tmp_path / "config.json"), "meta-llama/Llama-2-7b-hf"):
        assert plan.model(form) == plan.model("llama-2-7b")
    assert Plan(1).model(MODEL) is MODEL


def test_it_needs_neither_torch_nor_transformers():
    source = "import course_lib.memory.serving, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
