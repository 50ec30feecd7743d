"""The study of products and decoding on a CPU."""

import importlib.util
from pathlib import Path

import pytest
import torch

from course_lib.quantization import cpu, quantize

PATH = Path(__file__).parents[2] / "kernels" / "decode_on_cpu.py"


@pytest.fixture
def study():
    spec = importlib.util.spec_from_file_location("decode_on_cpu", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_one_token_is_no_decode(study, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["decode_on_cpu.py", "--tokens", "1"])
    with pytest.raises(SystemExit) as ended:
        study.main()
    assert ended.value.code == 2
    assert "--tokens is 1; at least 2" in capsys.readouterr().err
