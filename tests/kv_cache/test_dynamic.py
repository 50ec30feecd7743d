"""What growing in place promises beside the right numbers: few copies, little room beyond what is needed."""

import pytest
import torch
from cache_cases import CONFIGURATIONS, SMALL
from transformers import LlamaConfig, Qwen3NextConfig

from course_lib.kv_cache import DynamicCache, PagedCache


def tokens(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, 1, 2, length, 8)
    return keys, values


def test_a_token_does_not_copy_the_cache():
    cache = DynamicCache(CONFIGURATIONS["llama"]())
    cache.update(*tokens(1000), 0)
    places = set()
    for _ in range(1000):
        keys, _ = cache.update(*tokens(1), 0)
        places.add(keys.data_ptr())
    assert len(places) < 10


def test_room_to_grow_is_at_most_an_eighth_and_a_step():
    cache = DynamicCache(CONFIGURATIONS["llama"]())
    for length in (1, 300, 1, 1, 2000, 1):
        cache.update(*tokens(length), 0)
        token = cache.used_nbytes // cache.get_seq_length()
        assert cache.used_nbytes <= cache.nbytes <= cache.used_nbytes * 9 / 8 + 64 * token


def test_a_window_gives_the_memory_of_a_long_prompt_back():
    cache = DynamicCache(CONFIGURATIONS["mistral"]())
    keys, values = tokens(5000)
    seen = cache.update(keys, values, 0)
    assert torch.equal(seen[0], keys)  # the prompt itself was seen whole
    assert torch.equal(cache.layers[0].keys, keys[:, :, -8:])
    assert cache.nbytes < 5000 * 2 * 2 * 8 * 4 / 10


def test_gradients_flow_through_a_cache_where_they_are_asked_for():
    cache = DynamicCache(CONFIGURATIONS["llama"]())
    keys, values = (tensor.requires_grad_() for tensor in tokens(5))
    cache.update(keys, values, 0)
    (cache.update(*tokens(3), 0)[0].sum() * 2).backward()
    assert keys.grad is not None
    assert bool((keys.grad == 2).all())


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_what_was_begun_in_inference_mode_goes_on_outside(first):
    cache = DynamicCache(CONFIGURATIONS["llama"]())
    begun = tokens(5)
    with first():
        cache.update(*begun, 0)
    new = tokens(1)
    assert torch.equal(cache.update(*new, 0)[0], torch.cat((begun[0], new[0]), 2))


def test_a_file_that_is_missing_damaged_or_of_something_else_is_one_clear_error(tmp_path):
    llama, path = CONFIGURATIONS["llama"](), tmp_path / "cache"
    with pytest.raises(FileNotFoundError, match=r"path '.*cache' is no file; save\(\) of a cache writes one"):
        DynamicCache.load(path, llama)
    cache = DynamicCache(llama)
    for layer in range(len(cache.layers)):
        cache.update(*tokens(9), layer)
    cache.save(path)
    with pytest.raises(
        ValueError, match=r"path 'cache' has course_lib.kv_cache 1 DynamicCache; .* PagedCache is needed"
    ):
        PagedCache.load(path, llama)
    with pytest.raises(ValueError, match="path 'cache' has 3 layers and the model 30"):
        DynamicCache.load(path, LlamaConfig(num_hidden_layers=30))
    whole = path.read_bytes()
    for damaged in (b"", whole[:7], whole[:100], whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="path 'cache' is damaged or of another model"):
            DynamicCache.load(path, llama)
    with pytest.raises(FileNotFoundError, match="nowhere/cache' is in no folder"):
        cache.save(tmp_path / "nowhere" / "cache")
    assert [one.name for one in tmp_path.iterdir()] == ["cache"]


def test_a_layer_that_keeps_a_state_is_not_saved_in_part(tmp_path):
    types = ["linear_attention", "full_attention", "full_attention"]
    cache = DynamicCache(Qwen3NextConfig(**SMALL, layer_types=types))
    with pytest.raises(
        ValueError, match="layer 0 is a LinearAttentionLayer of Transformers, which this file cannot hold"
    ):
        cache.save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())
