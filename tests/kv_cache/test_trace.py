"""A replayed trace: nobody is lost, nothing is held twice, and pages waste less than one page a request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.kv_cache.trace import POLICIES, Trace, draw_trace, replay

MOST = 40
drawn = st.builds(
    draw_trace,
    st.integers(1, 60),
    mean_prompt=st.floats(1, 30),
    mean_output=st.floats(1, 30),
    max_tokens=st.just(MOST),
    interval=st.sampled_from([0.0, 0.7, 30.0]),
    seed=st.integers(0, 2**32),
)


def trace_of(*requests: tuple[int, int, int]) -> Trace:
    return Trace(*np.array(requests, dtype=np.int64).T)


@given(trace=drawn, policy=st.sampled_from(POLICIES), pool=st.integers(1, 12), block=st.integers(1, 20))
def test_every_request_gets_all_its_tokens_and_the_pool_is_never_overdrawn(trace, policy, pool, block):
    found = replay(trace, pool * MOST + 20, policy, max_tokens=MOST, block_size=block)
    held = found.stored + found.later + found.never
    assert held.max() <= found.capacity
    assert min(found.stored.min(), found.later.min(), found.never.min()) >= 0
    # Each step of a running request is one token of its output, those done again after a preemption not counted twice.
    assert found.running.sum() == trace.output.sum()
    assert (found.stored >= found.running * 2).all()
    assert (found.running > 0).all()
    assert 0 <= found.waste < 1


@given(trace=drawn, block=st.integers(1, 20))
def test_pages_waste_less_than_one_page_a_request(trace, block):
    found = replay(trace, 5 * MOST + 20, "paged", max_tokens=MOST, block_size=block)
    assert found.most_unused < block
    assert (found.later + found.never <= (block - 1) * found.running).all()
    if block == 1:
        assert found.waste == 0


@given(trace=drawn)
def test_what_is_known_beforehand_is_not_held_for_nothing(trace):
    exact, powers, most = (
        replay(trace, 10**6, policy, max_tokens=MOST) for policy in ("exact", "power of two", "maximum")
    )
    assert exact.never.sum() == 0
    assert (exact.stored == most.stored).all()  # with room for all, every policy runs the same
    assert (exact.never <= powers.never).all()
    assert (powers.never <= most.never).all()
    assert (most.later == exact.later).all()
    assert most.most_unused == MOST - trace.prompt.min() - 1


def test_by_hand():
    """Two requests of 3 + 2 tokens, pages of 4: the first steps fill one page each, the second takes another."""
    found = replay(trace_of((0, 3, 2), (0, 3, 2)), 16, "paged", max_tokens=8, block_size=4)
    assert found.stored.tolist() == [8, 10]
    assert (found.later.tolist(), found.never.tolist()) == ([0, 0], [0, 6])
    assert found.running.tolist() == [2, 2]
    assert found.waste == 1 - 18 / 24
    one = replay(trace_of((0, 3, 2), (0, 3, 2)), 8, "maximum", max_tokens=8)
    assert one.running.tolist() == [1, 1, 1, 1]
    assert one.waiting.tolist() == [1, 1, 0, 0]
    assert (one.later.tolist(), one.never.tolist()) == ([1, 0, 1, 0], [3, 3, 3, 3])
    assert one.when_full(one.stored) == 4.5


def test_the_last_to_enter_gives_its_pages_back_and_is_done_later():
    """Two pages of 4: both enter with 3 tokens, and at the fifth there is room for one of them."""
    found = replay(trace_of((0, 3, 4), (0, 3, 3)), 8, "paged", max_tokens=8, block_size=4)
    assert found.preemptions == 1
    assert found.running.tolist() == [2, 1, 1, 1, 1, 1]
    assert found.stored.tolist() == [8, 5, 6, 7, 5, 6]


def test_free_memory_in_pieces_does_not_help_a_contiguous_request():
    """[a: 3][b: 8][c: 3][free: 2]; when a and c have left, 8 slots are free, at most 5 of them in a row."""
    trace = trace_of((0, 1, 2), (0, 1, 7), (0, 1, 2), (2, 1, 6))
    found = replay(trace, 16, "exact", max_tokens=8)
    assert found.stored[2] == 4
    assert found.waiting.tolist()[2:7] == [1] * 5
    assert replay(trace, 16, "paged", max_tokens=8, block_size=1).waiting.sum() == 0


def test_idle_time_is_not_recorded():
    found = replay(trace_of((0, 1, 1), (1_000, 1, 1)), 8, "paged", max_tokens=8, block_size=4)
    assert found.steps == 2
    assert np.isnan(found.when_full(found.stored))


def test_lengths_have_the_means_that_were_asked_for_and_a_seed_repeats_them():
    options = {"mean_prompt": 160.0, "mean_output": 340.0, "max_tokens": 10**6, "interval": 2.0}
    trace = draw_trace(40_000, **options, seed=5)
    again, other = draw_trace(40_000, **options, seed=5), draw_trace(40_000, **options, seed=6)
    for name in ("arrival", "prompt", "output"):
        assert (getattr(trace, name) == getattr(again, name)).all()
        assert (getattr(trace, name) != getattr(other, name)).any()
    # The standard error of a geometric mean is about the mean over the root of the number: 0.5 percent.
    assert trace.prompt.mean() == pytest.approx(160, rel=0.03)
    assert trace.output.mean() == pytest.approx(340, rel=0.03)
    assert trace.arrival[-1] == pytest.approx(80_000, rel=0.03)
    assert (np.diff(trace.arrival) >= 0).all()


def test_lengths_are_cut_to_the_context():
    trace = draw_trace(500, mean_prompt=90, mean_output=90, max_tokens=64, seed=1)
    assert trace.total.max() == 64
    assert min(trace.prompt.min(), trace.output.min()) == 1
    assert draw_trace(9, mean_prompt=1, mean_output=1, max_tokens=2, seed=0).total.tolist() == [2] * 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "lazy"}, "policy is 'lazy'; accepted are maximum"),
        ({"capacity": 7}, "capacity must be a whole number of at least 8, got 7"),
        ({"policy": "maximum", "capacity": 7}, "capacity must be a whole number of at least 8, got 7"),
        ({"block_size": 0}, "block_size must be a whole number of at least 1, got 0"),
        ({"max_tokens": 4}, "a request of 5 tokens; max_tokens, 4"),
    ],
)
def test_errors_of_a_replay_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        replay(trace_of((0, 3, 2)), **{"capacity": 8, "policy": "paged", "max_tokens": 8, "block_size": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"requests": 0}, "requests must be a whole number of at least 1, got 0"),
        ({"mean_prompt": 0.5}, "mean_prompt must be a number of at least 1, got 0.5"),
        ({"mean_output": float("nan")}, "mean_output must be a number of at least 1, got nan"),
        ({"interval": -1.0}, r"interval must be a number of at least 0, got -1\.0"),
        ({"max_tokens": 1}, "max_tokens must be a whole number of at least 2, got 1"),
    ],
)
def test_errors_of_a_draw_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_trace(**{"requests": 3, "mean_prompt": 2, "mean_output": 2, "max_tokens": 9, "seed": 0, **arguments})
