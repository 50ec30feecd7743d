"""A pipeline's schedule waits as its rules say, and its stages write what the whole model writes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.integrations import parallel
from course_lib.integrations.pipeline import Stage, idle, simulate, split_layers
from course_lib.kv_cache import DynamicCache
from course_lib.models import DecoderConfig, DecoderLM

counts = st.integers(1, 6)

# ---- schedules


@given(stages=counts, batches=counts)
def test_micro_batches_of_one_pass_leave_the_known_idle_share(stages, batches):
    shares = idle(simulate([0.5] * stages, requests=batches))
    assert shares == pytest.approx([(stages - 1) / (stages - 1 + batches)] * stages)


@given(stages=counts, requests=counts, tokens=counts)
def test_tokens_wait_for_their_own_text(stages, requests, tokens):
    """Fewer requests than stages can never keep all stages busy, however many tokens there are."""
    slots = simulate([1.0] * stages, requests=requests, tokens=tokens)
    rounds = tokens * max(stages, requests) + min(stages, requests) - 1
    assert max(slot.end for slot in slots) == rounds
    assert idle(slots) == pytest.approx([1 - requests * tokens / rounds] * stages)


@given(
    seconds=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=5),
    requests=counts,
    tokens=counts,
    transfer=st.floats(0.0, 1.0),
)
def test_a_schedule_keeps_its_rules(seconds, requests, tokens, transfer):
    slots = simulate(seconds, requests=requests, tokens=tokens, transfer=transfer)
    assert len(slots) == len(seconds) * requests * tokens
    for stage, lasts in enumerate(seconds):
        own = [slot for slot in slots if slot.stage == stage]
        assert all(after.start >= before.end for before, after in pairwise(own))
        assert all(slot.end - slot.start == pytest.approx(lasts) for slot in own)
    for request in range(requests):
        path = sorted((slot for slot in slots if slot.request == request), key=lambda slot: (slot.token, slot.stage))
        assert all(after.start >= before.end + transfer for before, after in pairwise(path))
    # Nothing waits longer than its rules make it: some slot begins at 0, every other when what it waited for was done.
    ends = [slot.end for slot in slots]
    ready = {0.0, *ends, *(end + transfer for end in ends)}
    assert all(slot.start in ready for slot in slots)


@given(seconds=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=5), tokens=counts)
def test_one_request_is_in_one_stage_at_a_time(seconds, tokens):
    assert sum(1 - share for share in idle(simulate(seconds, tokens=tokens))) == pytest.approx(1)


# ---- stages


def model(**options) -> DecoderLM:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 30,
    }
    return DecoderLM(DecoderConfig(**{**sizes, "num_hidden_layers": 5, **options})).eval()


@given(layers=st.integers(1, 12), stages=st.integers(1, 12), vocab=st.sampled_from([10, 300, 5000]))
@settings(max_examples=15)
def test_layers_are_split_in_order_and_as_evenly_as_layers_allow(layers, stages, vocab):
    with torch.device("meta"):
        decoder = model(num_hidden_layers=layers, vocab_size=vocab)
    if stages > layers:
        with pytest.raises(ValueError, match="stages"):
            split_layers(decoder, stages)
        return
    parts = split_layers(decoder, stages)
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert all(parts)
    each = sum(weight.numel() for weight in decoder.layers[0].parameters())
    head = decoder.lm_head.weight.numel() / each
    share = (layers + head) / stages
    if head <= share - 1:
        assert all(abs(len(part) - share) <= 1 for part in parts[:-1])
        assert abs(len(parts[-1]) + head - share) <= 1


@pytest.mark.parametrize("position", ["rope", "alibi", "none"])
@pytest.mark.parametrize("stages", [1, 2, 5])
@torch.no_grad()
def test_stages_one_after_the_other_are_the_model(position, stages):
    whole = model(position=position)
    parts = [Stage(whole, layers) for layers in split_layers(whole, stages)]
    caches, cache = [DynamicCache(whole.config) for _ in parts], DynamicCache(whole.config)
    for length in (7, 1, 1):
        tokens = hidden = torch.randint(30, (2, length))
        for part, own in zip(parts, caches, strict=True):
            hidden = part(hidden, own)
        torch.testing.assert_close(hidden, whole(tokens, cache=cache).logits[:, -1:])
    held = [[layer.get_seq_length() for layer in own.layers] for own in caches]
    assert [sum(lengths) for lengths in zip(*held, strict=True)] == [9] * 5, "each layer's cache is filled in one stage"


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_positions_of_the_embedding_are_refused(position):
    with pytest.raises(ValueError, match=f"model has {position} positions; accepted are rope"):
        Stage(model(position=position), range(2))


WRONG = """
from course_lib.integrations import pipeline as own

def run(**arguments):
    right = own.generate
    def wrong(*given, **options):
        found = right(*given, **options)
        found.sequences[0, -1] += 1
        return found
    own.generate = wrong
    return own.pipeline(**arguments)
"""


def test_a_pipeline_that_writes_other_tokens_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "wrong_pipeline.py").write_text(WRONG, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    work = {"prompts": ["def f("], "new_tokens": 4, "in_flight": [1], "model": "course/rope"}
    with pytest.raises(RuntimeError, match="ArithmeticError: 2 stages write other tokens than one process alone"):
        parallel.launch("wrong_pipeline:run", 2, **work)
