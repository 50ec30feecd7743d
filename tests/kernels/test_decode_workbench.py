"""The study of products and decoding on a CPU."""

import copy

import pytest
import studies
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from course_lib.models import DecoderLM
from course_lib.quantization import cpu, quantize


@pytest.fixture
def study():
    return studies.load("decode_on_cpu")


needs_products = pytest.mark.skipif(
    not cpu.takes(quantize(torch.randn(64, 64), "int4")),
    reason="this PyTorch has no product with packed int4 weights for this processor",
)


@needs_products
def test_products_of_every_scheme_are_timed_over_rows(study, monkeypatch):
    for name, value in {"ROWS": (1, 40), "MATRICES": 1, "ROUNDS": 1, "SHAPE": (128, 64)}.items():
        monkeypatch.setattr(study, name, value)
    with torch.no_grad():
        runs = study.products()
    ways = {(scheme, product) for scheme in study.SCHEMES for product in ("fused", "dense")} | {("float32", "plain")}
    assert {(run["rows"], run["scheme"], run["product"]) for run in runs} == {
        (n, *way) for n in (1, 40) for way in ways
    }
    assert all(run["seconds"] > 0 for run in runs)


def test_a_wrong_product_is_not_timed(study, monkeypatch):
    monkeypatch.setattr(study.cpu, "dense", lambda *arguments: 1.01 * cpu.fused(*arguments))
    with pytest.raises(ArithmeticError, match=r"int8, .*: error .* nothing was timed"):
        study.check(quantize(torch.randn(128, 64), "int8", block_size="row"))


@pytest.fixture
def small(monkeypatch, study):
    """Replace the model by a small one, and a turn by one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128, tie_word_embeddings=True, eos_token_id=None)).eval()

    def load(name, *, dtype, device, as_decoder=False):
        copied = copy.deepcopy(theirs)
        return (DecoderLM.from_transformers(copied).optimize_for_decoding() if as_decoder else copied), None

    monkeypatch.setattr(study, "load", load)
    monkeypatch.setattr(study, "ROUNDS", 1)
    monkeypatch.setattr(study, "PREFILL", 9)


@needs_products
def test_every_model_is_timed_after_every_context(study, small):
    runs = study.models("small", 3, [5, 40])
    kinds = [("transformers", "float32"), ("course_lib", "float32"), *(("course_lib", one) for one in study.SCHEMES)]
    assert [(run["prompt_tokens"], run["runner"], run["scheme"]) for run in runs] == [
        (context, *kind) for context in (5, 40) for kind in kinds
    ]
    assert all(run["decode_tokens_per_second"] > 0 and run["prefill_seconds"] > 0 for run in runs)


@needs_products
def test_other_tokens_than_transformers_writes_end_the_study(study, small, monkeypatch):
    right = study.generate

    def wrong(model, prompt, *, max_new_tokens):
        found = right(model, prompt, max_new_tokens=max_new_tokens)
        found.sequences[0, -1] += 1
        return found

    monkeypatch.setattr(study, "generate", wrong)
    with pytest.raises(ArithmeticError, match="float32 writes other tokens than Transformers after 5 tokens"):
        study.models("small", 3, [5])


@pytest.mark.parametrize("context", ["0", "64,x"])
def test_a_context_is_at_least_one_token(study, monkeypatch, capsys, context):
    monkeypatch.setattr("sys.argv", ["decode_on_cpu.py", "--context", context])
    with pytest.raises(SystemExit) as ended:
        study.main()
    assert ended.value.code == 2
    assert "--context" in capsys.readouterr().err


def test_one_token_is_no_decode(study, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["decode_on_cpu.py", "--tokens", "1"])
    with pytest.raises(SystemExit) as ended:
        study.main()
    assert ended.value.code == 2
    assert "--tokens is 1; at least 2" in capsys.readouterr().err
