"""An offloaded cache is elsewhere, comes back in time, and never writes where a layer still reads."""

import copy
import errno
import gc
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from cache_cases import CONFIGURATIONS, SMALL, written
from transformers import AutoModelForCausalLM

from course_lib.kv_cache import OffloadedCache, records
from course_lib.memory.meta import cache_argument

CONFIG = transformers.LlamaConfig(**SMALL)
PER_TOKEN = 2 * 2 * (8 + 8) * 4  # bytes of one token of one layer at batch 2


def states(length: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, batch, 2, length, 8).to(dtype)


def filled(length: int, to: str = "disk", config=CONFIG, **options) -> tuple[OffloadedCache, list[torch.Tensor]]:
    """Return a cache and what each layer should hold."""
    cache = OffloadedCache(config, to=to, **options)
    held = [states(length) for _ in range(3)]
    for index, (keys, values) in enumerate(held):
        cache.update(keys, values, index)
    return cache, held


def folders(parent: Path) -> list[Path]:
    return sorted(parent.iterdir())


def wait_for(number: int, parent: Path) -> bool:
    """A thread that still reads keeps its folder for a moment."""
    for _ in range(100):
        gc.collect()
        if len(folders(parent)) == number:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_every_layer_returns_its_own_tokens_in_order(to):
    cache, held = filled(7, to)
    for new in (1, 0, 4, 1):
        for index in range(3):
            more = states(new)
            held[index] = torch.cat((held[index], more), 3)
            keys, values = cache.update(*more, index)
            assert torch.equal(keys, held[index][0])
            assert torch.equal(values, held[index][1])


def test_a_slow_prefetch_never_overwrites_what_a_layer_reads(monkeypatch):
    """While the next layer comes, slowly, the running one keeps reading what it got."""
    read = records.File.read

    def slowly(self, start, end):
        time.sleep(0.02)
        return read(self, start, end)

    cache, held = filled(20)
    monkeypatch.setattr(records.File, "read", slowly)
    for _ in range(3):
        for index in range(3):
            more = states(1)
            held[index] = torch.cat((held[index], more), 3)
            keys, values = cache.update(*more, index)
            # The layer "runs" until the next has come, and for two layers after that.
            for _ in range(2):
                time.sleep(0.015)
                assert torch.equal(keys, held[index][0])
                assert torch.equal(values, held[index][1])


def test_what_was_returned_stays_even_when_the_whole_cache_has_moved_on(monkeypatch):
    cache, held = filled(20)
    kept = [cache.update(*states(0), index) for index in range(3)]
    for _ in range(5):
        for index in range(3):
            cache.update(*states(3), index)
    for (keys, values), (old_keys, old_values) in zip(kept, held, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)


def test_the_next_layer_is_read_while_this_one_works(monkeypatch):
    """Each is read once, by another thread, before it is asked for, and after the last comes the first."""
    read, reads = records.File.read, []

    def noted(self, start, end):
        reads.append((self.path.name, threading.current_thread() is not threading.main_thread()))
        return read(self, start, end)

    cache, _ = filled(20)
    names = [layer._home.path.name for layer in cache.layers]
    cache.update(*states(1), 0)
    monkeypatch.setattr(records.File, "read", noted)
    for index in (1, 2, 0, 1):
        cache.update(*states(1), index)
    [layer.tensors() for layer in cache.layers]  # waits for the last read
    assert reads == [(names[index], True) for index in (2, 0, 1, 2)]


def test_disk_leaves_memory_and_says_where_everything_is():
    cache, _ = filled(500)
    assert cache.places["disk"] == 3 * 500 * PER_TOKEN
    # The first layer is ahead for the next call; nothing else is in memory.
    assert cache.nbytes == cache.places["cpu"] == 500 * PER_TOKEN
    assert cache.used_nbytes == 3 * 500 * PER_TOKEN
    for index in range(3):
        cache.update(*states(1), index)
        in_memory = cache.nbytes
        assert in_memory <= 501 * PER_TOKEN


def test_without_a_card_cpu_is_plain_memory():
    cache, _ = filled(500, "cpu")
    assert cache.places == {"cpu": cache.nbytes}
    assert cache.used_nbytes <= cache.nbytes <= cache.used_nbytes * 1.2 + 3 * 64 * PER_TOKEN


def test_files_go_with_the_cache_and_a_copy_has_its_own(tmp_path):
    cache, held = filled(10, folder=tmp_path)
    fork = copy.deepcopy(cache)
    first, second = folders(tmp_path)
    assert len(list(first.iterdir())) == len(list(second.iterdir())) == 3
    for index in range(3):
        cache.update(*states(5), index)
    del cache
    assert wait_for(1, tmp_path)
    for index in range(3):
        assert torch.equal(fork.update(*states(0), index)[0], held[index][0])
    del fork
    assert wait_for(0, tmp_path)


def test_two_caches_in_one_folder(tmp_path):
    (one, first), (two, second) = filled(6, folder=tmp_path), filled(9, folder=tmp_path)
    for cache, held in ((one, first), (two, second)):
        assert all(torch.equal(layer.keys, keys) for layer, (keys, _) in zip(cache.layers, held, strict=True))


def test_reset_removes_the_files_and_takes_another_batch_and_dtype(tmp_path):
    cache, _ = filled(10, folder=tmp_path)
    cache.reset()
    assert list(folders(tmp_path)[0].iterdir()) == []
    assert cache.nbytes == 0
    more = states(3, 5, torch.bfloat16)
    cache.update(*more, 0)
    keys, _ = cache.update(*states(0, 5, torch.bfloat16), 0)
    assert torch.equal(keys, more[0])


def test_a_file_of_a_window_stays_as_small_as_the_window(tmp_path):
    config = CONFIGURATIONS["mistral"]()
    cache = OffloadedCache(config, to="disk", folder=tmp_path)
    values = torch.empty(2, 2, 0, 8)
    for _ in range(300):
        keys, new = states(1)
        values = torch.cat((values, new), 2)[:, :, -9:]
        for index in range(3):
            assert torch.equal(cache.update(keys, new, index)[1], values)
    assert cache.places["disk"] <= 3 * (64 + 2 * 9 + 1) * PER_TOKEN


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_crops_files_and_dtypes(to, dtype, tmp_path):
    cache = OffloadedCache(CONFIG, to=to)
    held = [states(12, dtype=dtype) for _ in range(3)]
    for index, (keys, values) in enumerate(held):
        cache.update(keys, values, index)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.crop(-5)
    cache.batch_select_indices(torch.tensor([0, 3, 2]))
    cache.save(tmp_path / "cache")
    loaded = OffloadedCache.load(tmp_path / "cache", CONFIG)
    for one in (cache, loaded, copy.deepcopy(cache)):
        more = states(1, 3, dtype)
        for index, (keys, values) in enumerate(held):
            found = one.update(*more, index)
            for side, old, new in zip(found, (keys, values), more, strict=True):
                assert torch.equal(side, torch.cat((old[[1, 0, 0], :, :7], new), 2))
        one.crop(-8)
        assert one.get_seq_length() == 0
        assert torch.equal(one.update(*more, 0)[0], more[0])


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_no_row_no_token_and_unlike_tokens(to):
    cache = OffloadedCache(CONFIG, to=to)
    for length in (0, 4, 0, 1):
        for index in range(3):
            keys, _ = cache.update(*states(length, 0), index)
    assert keys.shape == (0, 2, 5, 8)
    cache.reset()
    cache.update(*states(3), 0)
    with pytest.raises(TypeError, match="reset"):
        cache.update(*states(1, dtype=torch.float16), 0)
    with pytest.raises(ValueError, match="batch of 2"):
        cache.update(*states(1, 3), 0)
    assert cache.get_seq_length() == 3


def test_a_second_longer_call_and_beams_on_disk():
    model = AutoModelForCausalLM.from_config(CONFIG).eval()
    ids = torch.randint(1, 60, (1, 30))
    cache = OffloadedCache(CONFIG, to="disk")
    with torch.no_grad():
        model(ids[:, :4], **{cache_argument(model): cache})
        found = model(ids[:, 4:], **{cache_argument(model): cache}).logits
        torch.testing.assert_close(found, model(ids).logits[:, 4:], atol=1e-4, rtol=1e-4)
    expected = written(model, ids, transformers.DynamicCache(config=CONFIG), 20, num_beams=4)
    assert torch.equal(written(model, ids, OffloadedCache(CONFIG, to="disk"), 20, num_beams=4), expected)


def test_a_full_disk_is_one_clear_error_and_reset_makes_it_good(monkeypatch):
    cache, _ = filled(5)

    def full(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache.tensors()  # the first layer has come back, so that it is writing that fails
    monkeypatch.setattr(records, "_bytes", full)
    with pytest.raises(OSError, match=r"cannot be used .*reset\(\) the cache") as caught:
        cache.update(*states(1), 0)
    assert caught.value.errno == errno.ENOSPC
    assert cache.get_seq_length() == 5
    monkeypatch.undo()
    cache.reset()
    more = states(4)
    assert torch.equal(cache.update(*more, 0)[0], more[0])


@pytest.mark.parametrize("change", ["gone", "shorter"])
@pytest.mark.parametrize("ahead", [True, False])
def test_files_that_others_changed_are_one_clear_error_also_from_the_thread(change, ahead):
    cache, _ = filled(5)
    path = cache.layers[1]._home.path
    path.unlink() if change == "gone" else os.truncate(path, 40)
    if ahead:
        cache.update(*states(1), 0)
    with pytest.raises(OSError, match="cannot be used"):
        cache.update(*states(1), 1)


def test_reset_makes_good_what_others_removed(tmp_path):
    cache, _ = filled(5, folder=tmp_path)
    cache.tensors()
    shutil.rmtree(folders(tmp_path)[0])
    with pytest.raises(OSError, match="cannot be used"):
        cache.update(*states(1), 0)
    cache.layers[1].prefetch()
    cache.reset()
    more = states(4)
    assert torch.equal(cache.update(*more, 0)[0], more[0])
    del cache
    assert wait_for(0, tmp_path)


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache, held = filled(5, folder=".")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert torch.equal(cache.layers[2].keys, held[2][0])


def test_arguments_that_are_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        OffloadedCache(CONFIG, to="disk", folder=tmp_path / "missing")
    with pytest.raises(ValueError, match="accepted are cpu, disk"):
        OffloadedCache(CONFIG, to="cuda")
    with pytest.raises(ValueError, match="to='disk' takes one"):
        OffloadedCache(CONFIG, folder=tmp_path)


def test_born_in_inference_mode_it_works_outside():
    for to in ("cpu", "disk"):
        with torch.inference_mode():
            cache, held = filled(3, to)
        keys, _ = cache.update(*states(1), 0)
        assert torch.equal(keys[:, :, :3], held[0][0])


@pytest.mark.gpu
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_on_a_card_the_text_is_the_same_and_two_layers_at_most_are_there(to):
    model = AutoModelForCausalLM.from_config(CONFIG).cuda().eval()
    ids = torch.randint(1, 60, (4, 100), device="cuda")
    expected = written(model, ids, transformers.DynamicCache(config=CONFIG), 60, num_beams=2)
    cache = OffloadedCache(CONFIG, to=to)
    assert torch.equal(written(model, ids, cache, 60, num_beams=2), expected)
    assert cache.places["cuda:0"] <= cache.used_nbytes / 3
    assert cache.places["cpu" if to == "cpu" else "disk"] >= cache.used_nbytes
    fork = copy.deepcopy(cache)
    assert torch.equal(fork.layers[1].keys, cache.layers[1].keys)
    cache.crop(-3)
    cache.reset()
    assert cache.nbytes == 0
