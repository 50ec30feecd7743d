"""A static cache keeps its tensors where they are, says when it is full, and otherwise does all that the others do."""

import copy

import pytest
import torch
import transformers
from cache_cases import CONFIGURATIONS, SMALL, WINDOW, written
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from course_lib.kv_cache import StaticCache
from course_lib.memory.meta import cache_argument

ROOM = 48


def states(length: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, length, 8, dtype=dtype), torch.randn(batch, 2, length, 8, dtype=dtype)


def filled(length: int = 5, config: str = "llama", batch: int = 2) -> StaticCache:
    cache = StaticCache(CONFIGURATIONS[config](), ROOM)
    for layer in range(3):
        cache.update(*states(length, batch), layer)
    return cache


def addresses(cache: StaticCache) -> list[int]:
    return [tensor.data_ptr() for tensor in cache.tensors().values()]


def logits(model, ids, cache):
    with torch.no_grad():
        return model(ids, **{cache_argument(model): cache}).logits


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGURATIONS["llama"]()).eval()


def test_tensors_never_move(theirs):
    cache = StaticCache(theirs.config, 80)
    written(theirs, torch.randint(1, 60, (2, 11)), cache, 3)
    before, size = addresses(cache), cache.nbytes
    written(theirs, torch.randint(1, 60, (2, 30)), cache, 25)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    written(theirs, torch.randint(1, 60, (2, 5)), cache, 5)
    assert addresses(cache) == before
    assert cache.nbytes == size


def test_bytes_are_those_of_all_slots_and_windows_take_only_theirs():
    per_slot = 2 * 2 * (8 + 8) * 4
    number = 8  # where the next token goes, of each layer
    assert filled(config="llama").nbytes == 3 * (per_slot * ROOM + number)
    assert filled(config="gemma3").nbytes == per_slot * (ROOM + 2 * WINDOW) + 3 * number
    assert filled(5).used_nbytes == 3 * per_slot * 5


def test_a_token_beyond_the_room_is_one_clear_error_and_changes_nothing(theirs):
    ids = torch.randint(1, 60, (2, ROOM + 1))
    cache = StaticCache(theirs.config, ROOM)
    logits(theirs, ids[:, : ROOM - 2], cache)
    with pytest.raises(ValueError, match=r"adds 3 tokens to 46, but max_cache_len is 48"):
        logits(theirs, ids[:, ROOM - 2 :], cache)
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {ROOM - 2}
    found = logits(theirs, ids[:, ROOM - 2 : ROOM], cache)
    expected = logits(theirs, ids[:, :ROOM], transformers.DynamicCache(config=theirs.config))[:, -2:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_generating_beyond_the_room_says_so(llama):
    with pytest.raises(ValueError, match="max_cache_len is 20"):
        written(llama, torch.randint(1, 60, (1, 10)), StaticCache(llama.config, 20), 30)


def test_a_second_call_longer_than_the_first(theirs):
    ids = torch.randint(1, 60, (2, 40))
    cache = StaticCache(theirs.config, ROOM)
    logits(theirs, ids[:, :4], cache)
    found = logits(theirs, ids[:, 4:], cache)
    expected = logits(theirs, ids, transformers.DynamicCache(config=theirs.config))[:, 4:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@given(st.lists(st.integers(1, 14), min_size=1, max_size=6), st.sampled_from(list(CONFIGURATIONS)), st.booleans())
def test_calls_of_any_lengths(lengths, name, record):
    model = AutoModelForCausalLM.from_config(CONFIGURATIONS[name]()).eval()
    ids = torch.randint(1, 60, (1, sum(lengths)))
    ours, theirs = StaticCache(model.config, 90), transformers.DynamicCache(config=model.config)
    for index, part in enumerate(ids.split(lengths, dim=1)):
        if record and index == 1:
            ours.activate_past_recording()
        found, expected = logits(model, part, ours), logits(model, part, theirs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@given(st.integers(1, 20), st.integers(1, 20), st.data())
def test_crop_goes_back_as_if_the_tokens_had_never_come(first, more, data):
    model = AutoModelForCausalLM.from_config(CONFIGURATIONS["gemma3"]()).eval()
    ids = torch.randint(1, 60, (1, first + more))
    cache = StaticCache(model.config, ROOM)
    cache.activate_past_recording()
    logits(model, ids, cache)
    back = data.draw(st.integers(0, first + more))
    cache.crop(-back)
    assert cache.get_seq_length() == first + more - back
    again = torch.randint(1, 60, (1, 3))
    found = logits(model, again, cache)
    whole = torch.cat((ids[:, : first + more - back], again), 1)
    expected = logits(model, whole, transformers.DynamicCache(config=model.config))[:, -3:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_crop_to_zero_then_another_text(llama):
    cache = StaticCache(llama.config, ROOM)
    logits(llama, torch.randint(1, 60, (2, 20)), cache)
    cache.crop(-20)
    ids = torch.randint(1, 60, (2, 30))
    expected = logits(llama, ids, transformers.DynamicCache(config=llama.config))
    torch.testing.assert_close(logits(llama, ids, cache), expected, atol=1e-4, rtol=1e-4)


def test_what_a_window_dropped_cannot_come_back():
    cache = filled(WINDOW + 6, "mistral")
    with pytest.raises(ValueError, match="window of 9 has dropped"):
        cache.crop(-4)
    cache.crop(0)
    assert cache.get_seq_length() == WINDOW + 6


@pytest.mark.parametrize("config", ["llama", "mistral"])
@pytest.mark.parametrize("length", [5, WINDOW + 8])
def test_rows_are_selected_repeated_and_reordered(config, length):
    cache = filled(length, config)
    keys = cache.layers[1].keys.clone()
    for change, rows in (
        (lambda: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda: cache.batch_repeat_interleave(2), [1, 1, 1, 1]),
        (lambda: cache.batch_select_indices(torch.tensor([3, 0, 1])), [1, 1, 1]),
    ):
        change()
        assert torch.equal(cache.layers[1].keys, keys[rows])
    cache.update(*states(1, 3), 1)


@pytest.mark.parametrize("config", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [0, 4, WINDOW, 30])
def test_mask_sizes_are_those_of_what_update_returns(config, length):
    cache = filled(length, config)
    for new in (1, 3, WINDOW + 3):
        for index in range(3):
            size, offset = cache.get_mask_sizes(new, index)
            keys, values = cache.update(*states(new), index)
            assert keys.shape[2] == values.shape[2] == size
            assert offset <= cache.get_seq_length(index) - new


def test_a_copy_and_a_file_are_independent(tmp_path):
    cache = filled(30, "gemma3")
    cache.save(tmp_path / "cache")
    others = [copy.deepcopy(cache), StaticCache.load(tmp_path / "cache", CONFIGURATIONS["gemma3"]())]
    kept = [layer.keys.clone() for layer in cache.layers]
    for index in range(3):
        cache.update(*states(4), index)
    for other in others:
        assert other.nbytes == cache.nbytes
        assert all(torch.equal(layer.keys, before) for layer, before in zip(other.layers, kept, strict=True))
        assert other.get_max_length() == ROOM


def test_a_file_of_more_tokens_than_there_is_room_for(tmp_path):
    cache = filled(30)
    cache.options["max_cache_len"] = 10
    cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match="at most 10"):
        StaticCache.load(tmp_path / "cache", CONFIGURATIONS["llama"]())


def test_other_tokens_than_those_held_are_refused_and_reset_takes_them():
    cache = filled(5)
    with pytest.raises(TypeError, match="reset"):
        cache.update(*states(1, dtype=torch.bfloat16), 0)
    with pytest.raises(ValueError, match="batch of 2"):
        cache.update(*states(1, batch=3), 0)
    cache.reset()
    assert cache.get_seq_length() == 0
    keys, _ = cache.update(*states(1, batch=3, dtype=torch.bfloat16), 0)
    assert keys.shape == (3, 2, ROOM, 8)
    assert keys.dtype == torch.bfloat16


def test_no_row_and_no_token():
    cache = StaticCache(CONFIGURATIONS["gemma3"](), ROOM)
    cache.activate_past_recording()
    for index in range(3):
        for length in (0, 3, 20, 0):
            cache.update(*states(length, batch=0), index)
    cache.crop(-23)
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 3 * 8


def test_born_in_inference_mode_it_works_outside():
    with torch.inference_mode():
        cache = filled(3)
        cache.batch_repeat_interleave(2)
    for index in range(3):
        cache.update(*states(2, batch=4), index)
    assert cache.get_seq_length() == 5


def test_a_compiled_model_meets_the_same_tensors_at_each_token(llama):
    """One graph for all tokens: positions come from a tensor, not from numbers that are compiled in."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(llama, backend=counter, fullgraph=True)
    ids = torch.randint(1, 60, (1, 30))
    cache, expected = StaticCache(llama.config, ROOM), logits(llama, ids, None)
    logits(llama, ids[:, :10], cache)
    for at in range(10, 30):
        found = logits(compiled, ids[:, at : at + 1], cache)
        torch.testing.assert_close(found[:, 0], expected[:, at], atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= 2  # numbers that change are taken as variable from the second time on


def test_a_compiled_model_says_too_when_the_room_is_full(llama):
    torch._dynamo.reset()
    compiled = torch.compile(llama, backend="eager")
    cache = StaticCache(llama.config, 20)
    logits(llama, torch.randint(1, 60, (1, 16)), cache)
    for _ in range(4):
        logits(compiled, torch.randint(1, 60, (1, 1)), cache)
    with pytest.raises(ValueError, match="max_cache_len is 20"):
        logits(compiled, torch.randint(1, 60, (1, 1)), cache)


def test_it_counts_as_compileable():
    cache = StaticCache(CONFIGURATIONS["gemma3"](), ROOM)
    assert cache.is_compileable
    assert cache.is_sliding == [True, False, True]


@pytest.mark.parametrize("length", [0, -1, 2.0, True, None])
def test_a_room_that_is_none(length):
    with pytest.raises(ValueError, match="max_cache_len must be a whole number of at least 1"):
        StaticCache(transformers.LlamaConfig(**SMALL), length)
