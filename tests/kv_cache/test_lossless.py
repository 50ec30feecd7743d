"""Greedy text is that of Transformers' own cache, through every cache that promises to lose nothing."""

import copy

import pytest
import torch
import transformers
from cache_cases import LOSSLESS, SMALL, written

from course_lib.generation import generate
from course_lib.memory.meta import cache_argument
from course_lib.models import DecoderLM, load


def prompts(batch: int = 4, length: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fresh prompts, some of them filled up on the left, and their mask."""
    ids = torch.randint(1, SMALL["vocab_size"], (batch, length))
    mask = torch.ones_like(ids)
    for row in range(0, batch, 2):
        mask[row, : int(torch.randint(1, length - 3, ()))] = 0
    return ids.masked_fill(mask == 0, 0), mask


def own(model: transformers.PreTrainedModel) -> transformers.Cache:
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_a_padded_batch_past_the_window_and_beams(theirs, lossless, options):
    ids, mask = prompts()
    expected = written(theirs, ids, own(theirs), 40, attention_mask=mask, **options)
    assert torch.equal(written(theirs, ids, lossless(theirs.config), 40, attention_mask=mask, **options), expected)


def test_candidates_that_are_taken_back(theirs, lossless):
    """Prompt look-up writes several tokens at once and crops those that were wrong."""
    ids = torch.randint(1, 6, (1, 20))
    options = {"prompt_lookup_num_tokens": 3}
    expected = written(theirs, ids, own(theirs), 30, **options)
    assert torch.equal(written(theirs, ids, lossless(theirs.config), 30, **options), expected)


def test_a_returned_cache_continues(theirs, lossless):
    ids = torch.randint(1, SMALL["vocab_size"], (2, 11))
    expected = written(theirs, ids, own(theirs), 30)
    first = written(theirs, ids, lossless(theirs.config), 12, return_dict_in_generate=True)
    cache = first[cache_argument(theirs)]
    fork = copy.deepcopy(cache)
    for one in (cache, fork):
        assert torch.equal(written(theirs, first.sequences, one, 18), expected)


def test_a_file_continues(theirs, lossless, tmp_path):
    ids = torch.randint(1, SMALL["vocab_size"], (2, 11))
    expected = written(theirs, ids, own(theirs), 30)
    cache = lossless(theirs.config)
    first = written(theirs, ids, cache, 12)
    cache.save(tmp_path / "cache.safetensors")
    back = type(cache).load(tmp_path / "cache.safetensors", theirs.config)
    assert back.get_seq_length() == cache.get_seq_length()
    assert torch.equal(written(theirs, first, back, 18), expected)


@pytest.mark.families("llama", "qwen3", "mistral")
def test_our_own_loop_writes_the_same(theirs, lossless):
    ids, mask = prompts()
    expected = written(theirs, ids, own(theirs), 40, attention_mask=mask)
    model = DecoderLM.from_transformers(theirs)
    found = generate(model, ids, max_new_tokens=40, cache=lossless(model.config), attention_mask=mask)
    assert torch.equal(found.sequences, expected)


#: One of each way to store; the others store like one of these, and small models meet them all above.
WAYS = ["dynamic", "static", "offloaded to disk", "paged", "prefix"]


@pytest.fixture(scope="module")
def smollm2():
    model, tokenizer = load("smollm2-135m")
    model.generation_config.eos_token_id = None  # the text goes on behind its end
    return model, tokenizer


@pytest.fixture(scope="module")
def expected(smollm2):
    """What Transformers writes with its own cache: one long text, a padded batch of four, and beams of three."""
    model, tokenizer = smollm2
    texts = [
        "The lighthouse keeper climbed the stairs and",
        "Seven",
        "In the morning of the third day they",
        "She asked:",
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    one = tokenizer(texts[:1], return_tensors="pt")["input_ids"]
    wanted = {
        "long": (one, 600, {}),
        "batch": (batch["input_ids"], 24, {"attention_mask": batch["attention_mask"]}),
        "beams": (one, 24, {"num_beams": 3}),
    }
    return {
        name: (ids, options, written(model, ids, own(model), new, **options))
        for name, (ids, new, options) in wanted.items()
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("new", [1, 50])
def test_smollm2_writes_the_same(smollm2, expected, way, new):
    (ids, _, text), config = expected["long"], smollm2[0].config
    assert torch.equal(written(smollm2[0], ids, LOSSLESS[way](config), new), text[:, : ids.shape[1] + new])


@pytest.mark.parametrize("way", WAYS)
def test_our_own_loop_over_smollm2_writes_the_same_for_600_tokens(expected, way):
    (ids, _, text), (model, _) = expected["long"], load("smollm2-135m", as_decoder=True)
    found = generate(model, ids, max_new_tokens=600, cache=LOSSLESS[way](model.config))
    assert torch.equal(found.sequences, text)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["batch", "beams"])
def test_smollm2_writes_the_same_batch_and_beams(smollm2, expected, way, kind):
    ids, options, text = expected[kind]
    assert torch.equal(written(smollm2[0], ids, LOSSLESS[way](smollm2[0].config), 24, **options), text)


@pytest.mark.parametrize("way", WAYS)
def test_smollm2_goes_on_from_a_returned_cache(smollm2, expected, way):
    model, (ids, _, text) = smollm2[0], expected["long"]
    first = written(model, ids, LOSSLESS[way](model.config), 12, return_dict_in_generate=True)
    assert torch.equal(written(model, first.sequences, first[cache_argument(model)], 12), text[:, : ids.shape[1] + 24])
