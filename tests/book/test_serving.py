"""The page on serving: a configuration whose names vLLM knows, sizes that the estimator computes, and a word on every option."""

import re
from pathlib import Path

import pytest
import yaml
from course_book.serving import sizes

from course_lib.memory import cards, kv_cache_bytes, published_config, weight_bytes

BOOK = Path(__file__).resolve().parents[2] / "book"
#: Of `vllm serve` in vLLM 0.33.0, from vllm/engine/arg_utils.py, and from vllm/entrypoints/common/cli_args.py host and port.
OPTIONS = {
    *("model", "served-model-name", "host", "port", "dtype", "quantization", "max-model-len"),
    *("gpu-memory-utilization", "block-size", "kv-cache-dtype", "enable-prefix-caching"),
    *("max-num-seqs", "max-num-batched-tokens", "enable-chunked-prefill"),
    *("tensor-parallel-size", "pipeline-parallel-size", "speculative-config"),
}
#: Of its SpeculativeConfig, in vllm/config/speculative.py.
SPECULATIVE = {"method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}


FILE = (BOOK / "serving" / "vllm.yaml").read_text("utf-8")


@pytest.fixture
def settings():
    """With the options that the file leaves to its reader, which are commented out."""
    return yaml.safe_load(re.sub(r"^# (?=(  )?[a-z_-]+:( |$))", "", FILE, flags=re.MULTILINE))


def test_every_name_is_one_of_vllm_s(settings):
    assert settings.keys() <= OPTIONS
    assert settings["speculative-config"].keys() <= SPECULATIVE


def test_what_changes_numbers_or_pays_for_few_texts_only_is_left_to_the_reader(settings):
    assert settings.keys() - yaml.safe_load(FILE).keys() == {"quantization", "speculative-config"}


def test_values_are_consistent_with_the_model_and_each_other(settings):
    config = published_config("smollm2-135m")
    assert settings["max-model-len"] <= config["max_position_embeddings"]
    assert config["num_key_value_heads"] % settings["tensor-parallel-size"] == 0
    assert config["num_hidden_layers"] % settings["pipeline-parallel-size"] == 0
    assert 0 < settings["gpu-memory-utilization"] <= 1
    # vLLM refuses a budget in which not every sequence has a token.
    assert settings["max-num-batched-tokens"] >= settings["max-num-seqs"]
    speculative = settings["speculative-config"]
    assert 1 <= speculative["prompt_lookup_min"] <= speculative["prompt_lookup_max"]


def test_the_page_explains_every_option_that_is_not_an_address(settings):
    page = (BOOK / "serving.md").read_text("utf-8")
    for name in settings.keys() - {"model", "served-model-name", "host", "port"}:
        assert f"`{name}`" in page, name
    assert "vLLM was not run here" in page
    assert "not yet measured" in page


def test_sizes_are_the_estimator_s(settings):
    row = sizes(settings, "llama-3.1-8b", "L4")
    (card,) = [card for card in cards() if card.name == "L4"]
    block = kv_cache_bytes("llama-3.1-8b", settings["block-size"])
    assert row[5] == f"{block / 2**20:.2f} MiB"
    blocks, tokens = int(row[6].replace(",", "")), int(row[7].replace(",", ""))
    assert tokens == blocks * settings["block-size"]
    assert row[8] == f"{tokens / settings['max-model-len']:.1f}"
    # The cache has what the weights leave, but for a step's working memory, which is small.
    left = settings["gpu-memory-utilization"] * card.memory_bytes - weight_bytes(8_030_261_248, "bfloat16")
    assert 0.9 * left < blocks * block < left
    assert sizes(settings, "llama-3.1-8b", "T4")[6:] == ["0", "0", "none: it does not fit"]
    with pytest.raises(ValueError, match=r"card must be one of .*, got 'L5'"):
        sizes(settings, "llama-3.1-8b", "L5")
