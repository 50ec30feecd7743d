"""Worker processes, what they exchange, and where `device_map` puts layers."""

import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3Config, LlamaConfig

from course_lib.integrations import parallel
from course_lib.memory import count_parameters


def test_workers_that_take_too_long_are_stopped():
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(TimeoutError, match=r"subprocess:run took more than 0\.5 s in 2 processes"):
        parallel.launch("subprocess:run", 2, timeout=0.5, args=sleep)


@pytest.fixture
def alone(tmp_path):
    """A group of one process, this one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_are_counted_with_the_bytes_of_their_results(alone):
    numbers, parts = torch.ones(6, 5), [torch.empty(3, dtype=torch.float64)]
    dist.all_reduce(numbers)
    with parallel.Communication() as traffic:
        for _ in range(3):
            dist.all_reduce(numbers)
        dist.all_gather(parts, torch.zeros(3, dtype=torch.float64))
        numbers + 1
    assert traffic.found == {
        "all_reduce": {"count": 3, "bytes": 3 * 6 * 5 * 4},
        "all_gather": {"count": 1, "bytes": 24},
    }
    assert parallel.everyones([1, "a"]) == [[1, "a"]]


# ---- heads


@given(groups=st.integers(1, 12), keys=st.integers(1, 12), processes=st.integers(1, 16))
def test_processes_share_heads_only_evenly(groups, keys, processes):
    config = LlamaConfig(hidden_size=groups * keys, num_attention_heads=groups * keys, num_key_value_heads=keys)
    if keys % processes:
        with pytest.raises(
            ValueError, match=f"{processes} processes cannot share {groups * keys} query and {keys} key-value"
        ):
            parallel.check_heads(config, processes)
    else:
        parallel.check_heads(config, processes)


def test_numbers_that_can_share_are_named():
    with pytest.raises(ValueError, match=r"2 processes .* 9 query and 3 key-value heads evenly; 1, 3 can"):
        parallel.check_heads(LlamaConfig(hidden_size=9, num_attention_heads=9, num_key_value_heads=3), 2)


@pytest.mark.parametrize("processes", [0, -1, 2.0])
def test_processes_are_a_whole_number(processes):
    with pytest.raises(ValueError, match=f"^processes must be a whole number of at least 1, got {processes}$"):
        parallel.check_heads(LlamaConfig(), processes)


def test_heads_of_a_model_that_also_sees_are_those_of_its_text():
    config = Gemma3Config(text_config={"num_attention_heads": 8, "num_key_value_heads": 4})
    parallel.check_heads(config, 4)
    with pytest.raises(ValueError, match="3 processes cannot share 8 query and 4 key-value heads evenly; 1, 2, 4 can"):
        parallel.check_heads(config, 3)


# ---- device_map

SMALL = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@settings(max_examples=20)
@given(free=st.lists(st.floats(0.05, 1.5), min_size=1, max_size=5), tied=st.booleans())
def test_every_layer_and_byte_has_one_place_and_no_card_is_overfilled(free, tied):
    config = {**SMALL, "tie_word_embeddings": tied}
    size = 2 * count_parameters(config)
    memory = [int(one * size) for one in free]
    shares = parallel.auto_device_map(config, memory)
    assert [share.device for share in shares[: len(free)]] == list(range(len(free)))
    assert sum(share.layers for share in shares) == 7
    assert sum(share.bytes for share in shares) == size
    assert all(share.bytes <= held for share, held in zip(shares, memory, strict=False))


def test_one_card_with_room_takes_all(caplog, capfd):
    size = 2 * count_parameters("smollm2-135m")
    assert parallel.auto_device_map("smollm2-135m", [2 * size]) == [parallel.Share(0, 30, size)]
    assert not caplog.text
    assert capfd.readouterr() == ("", "")
