"""The study of drafts on a CPU."""

import pytest
import studies
import torch

from course_lib.generation import PromptLookup, first_layers
from course_lib.models import DecoderConfig, DecoderLM


@pytest.fixture
def study():
    return studies.load("speculative_on_cpu")


@pytest.fixture
def pair(study, monkeypatch):
    """Put a small model in the place of those that are loaded."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = DecoderLM(DecoderConfig(**sizes, vocab_size=50, num_key_value_heads=2, initializer_range=0.3)).eval()
    drafts = {"look-up": PromptLookup(), "first 1 layers": first_layers(model, 1), "itself": model}
    prompts = [torch.randint(50, (1, 6)).repeat(1, 2) for _ in range(3)]
    found = study.Pair(model, drafts, {"source": prompts})
    monkeypatch.setattr(study, "course", lambda name, count: found)
    return found


def test_every_draft_is_measured_and_recorded(study, pair, monkeypatch, tmp_path, capsys):
    runs = studies.run(study, monkeypatch, tmp_path, "--models", "course/x", "--draft-tokens", "2,3", "--tokens", "9")
    assert [(run["draft_tokens"], run["draft"]) for run in runs] == [(n, d) for n in (2, 3) for d in pair.drafts]
    for run in runs:
        assert run["prompts"] == 3
        assert run["speedup"] == run["alone_seconds"] / run["seconds"]
        assert 0 <= run["acceptance"] <= 1 <= run["tokens_per_round"]
        # What is not accepted is added by the target, a token a round.
        assert run["accepted"] + run["rounds"] == 3 * 8
    itself = [run for run in runs if run["draft"] == "itself"]
    assert [run["acceptance"] for run in itself] == [1.0, 1.0]
    assert [run["rounds"] for run in itself] == [9, 6]
    assert "the tokens are those of the target alone" in capsys.readouterr().out.lower()


def test_other_tokens_end_the_study(study, pair, monkeypatch):
    right = study.speculative_generate

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        found.sequences[0, -1] += 1
        return found

    monkeypatch.setattr(study, "speculative_generate", wrong)
    with pytest.raises(ArithmeticError, match="look-up writes other tokens than the target alone after prompt 0"):
        study.measure(pair, pair.prompts["source"], 5, 2)


def test_prompts_are_source_that_no_model_was_trained_on(study):
    texts = study.source(3)
    assert len(set(texts)) == 3
    assert all(len(text) > 1000 for text in texts)


@pytest.mark.parametrize("arguments", [("--tokens", "1"), ("--prompts", "0"), ("--draft-tokens", "0")])
def test_options_out_of_range_are_refused(study, monkeypatch, capsys, arguments):
    studies.refuses(study, monkeypatch, capsys, *arguments)
