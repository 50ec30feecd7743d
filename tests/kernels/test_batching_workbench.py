"""The study of batching on a CPU."""

import copy

import pytest
import studies
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from course_lib.models import DecoderLM


@pytest.fixture
def study(monkeypatch):
    """Return the study with a small model, timed once."""
    module = studies.load("batching_on_cpu")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=64, eos_token_id=None, initializer_range=0.3)
    theirs = LlamaForCausalLM(config).eval()

    def load(name, *, dtype, device, as_decoder=False):
        copied = copy.deepcopy(theirs)
        return (DecoderLM.from_transformers(copied).optimize_for_decoding() if as_decoder else copied), None

    monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(module, "ROUNDS", 1)
    return module


def test_every_way_to_serve_is_checked_and_timed(study, monkeypatch, tmp_path, capsys):
    runs = studies.run(study, monkeypatch, tmp_path, "--requests", "9", "--prompt", "4,40", "--new", "6,30")
    assert [run["runner"].split()[0] for run in runs] == ["one", "transformers,", "batched", "in"]
    assert len({run["tokens"] for run in runs}) == 1
    assert 9 * 6 <= runs[0]["tokens"] <= 9 * 30
    assert all(run["seconds"] > 0 and run["same_texts"] == 9 for run in runs)
    batched, small = runs[2:]
    assert batched["preemptions"] == 0 < small["preemptions"]
    assert small["blocks_peak"] < batched["blocks_peak"]
    assert batched["prefill_tokens"] == batched["prompt_tokens"] < small["prefill_tokens"]
    assert "tokens/s" in capsys.readouterr().out


def test_other_texts_than_alone_end_the_study(study, monkeypatch):
    right = study.alone
    monkeypatch.setattr(study, "alone", lambda *arguments: [[*row[:-1], -1] for row in right(*arguments)])
    with pytest.raises(ArithmeticError, match="batched continuously: other texts than alone; nothing was timed"):
        study.study("small", 3, [4, 8], [2, 4])


@pytest.mark.parametrize("arguments", [("--new", "9,3"), ("--prompt", "5"), ("--requests", "0"), ("--new", "0,3")])
def test_wrong_bounds_are_refused(study, monkeypatch, capsys, arguments):
    studies.refuses(study, monkeypatch, capsys, *arguments)
