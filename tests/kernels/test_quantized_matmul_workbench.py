"""The workbench's products with quantised weights: every version multiplies, its bytes are counted as it runs, a run records it."""

import random

import pytest
import studies
import torch

from course_lib import benchmark
from course_lib.quantization import nf4_levels, quantize

pytest.importorskip("triton", reason="Triton exists for Linux")

study = studies.load("quantized_matmul")
DEVICE = study.DEVICE
VERSIONS = pytest.mark.parametrize("version", study.VERSIONS, ids=lambda version: version.name)
SCHEMES = pytest.mark.parametrize("scheme", ["nf4", "int4"])
interpreted = pytest.mark.skipif(not study.INTERPRETED, reason="only the interpreter can be listened to")


def random_inputs(scheme, rows, out_features, in_features, dtype, block_size=64):
    x = torch.randn(rows, in_features, device=DEVICE).to(dtype)
    weight = quantize(torch.randn(out_features, in_features, device=DEVICE), scheme, block_size=block_size)
    levels = nf4_levels() if scheme == "nf4" else torch.arange(-8.0, 8.0)
    return x, weight, levels.to(DEVICE)


@SCHEMES
@VERSIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_version_is_about_as_exact_as_pytorch(version, dtype, scheme):
    x, weight, levels = random_inputs(scheme, random.choice([1, 3, 7]), random.randrange(1, 30), 320, dtype)
    exact = x.double() @ weight.dequantize(torch.float32).double().T
    allowed = (x @ weight.dequantize(dtype).T - exact).abs().max()
    found = version.run(x, weight, levels)
    assert found.dtype == dtype
    assert (found - exact).abs().max() <= 2 * allowed + torch.finfo(dtype).eps * exact.abs().max()
    assert version.idea.endswith(".")


@VERSIONS
def test_rows_longer_than_a_program_takes_at_once(version):
    x, weight, levels = random_inputs("nf4", 2, 9, 1600, torch.float32)
    torch.testing.assert_close(version.run(x, weight, levels), x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("version", study.VERSIONS[1:4], ids=lambda version: version.name)
def test_study_kernels_say_what_they_do_not_take(version):
    for scheme, in_features, block_size in (("nf4", 100, 64), ("int8", 128, 64), ("nf4", 128, 128)):
        with pytest.raises(ValueError, match="rows of whole blocks of 64"):
            version.run(*random_inputs(scheme, 2, 5, in_features, torch.float32, block_size))
    x, *others = random_inputs("nf4", 64, 5, 64, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        version.run(x.T, *others)


@interpreted
@pytest.mark.parametrize("version", study.VERSIONS[1:], ids=lambda version: version.name)
def test_bfloat16_in_the_interpreter_is_one_clear_sentence(version):
    with pytest.raises((TypeError, ValueError), match="bfloat16"):
        version.run(*random_inputs("nf4", 2, 5, 64, torch.bfloat16))


# ---- bytes


@interpreted
@SCHEMES
@pytest.mark.parametrize("rows", [1, 3, 6, 20])
@pytest.mark.parametrize("version", study.VERSIONS[1:], ids=lambda version: version.name)
def test_bytes_are_those_that_the_kernels_load_and_store(version, rows, scheme, moved):
    sizes = (rows, random.randrange(1, 140), 64 * random.randrange(1, 30))
    version.run(*random_inputs(scheme, *sizes, torch.float16))
    options = {"scheme": scheme} if version.run is study.production else {}
    assert sum(moved) == version.bytes_moved(*sizes, 2, **options)


@pytest.mark.parametrize("rows", [1, 16])
def test_dequantising_first_moves_many_times_the_least_and_production_little_more_than_it(rows):
    sizes = (rows, 4096, 14336, 2)
    least = study.least_bytes(*sizes)
    moved = [version.bytes_moved(*sizes) for version in study.VERSIONS]
    assert moved[0] > 20 * least
    assert moved[2] < moved[1]
    assert least < moved[4] < (2 if rows == 1 else 3) * least
    # A program for each row of x reads the weight for each.
    once = study.VERSIONS[2].bytes_moved(1, *sizes[1:])
    assert moved[2] == rows * once


# ---- measuring


def test_a_run_prints_a_table_and_records_it(monkeypatch, tmp_path, capsys):
    sizes = ["--rows", "1,5", "--shapes", "9x128,16x64", "--schemes", "nf4"]
    runs = studies.run(study, monkeypatch, tmp_path, "--versions", "1,3,5", *sizes)
    ours = [one for one in runs if one["version"]]
    assert {(one["version"], one["rows"], one["out_features"]) for one in ours} == {
        (number, rows, size) for number in (1, 3, 5) for rows in (1, 5) for size in (9, 16)
    }
    for one in ours:
        assert one["error"] <= one["limit"]
        assert (one["seconds"] is None) == study.INTERPRETED
        assert one["bytes_moved"] > one["least_bytes"]
        assert one["flop"] == 2 * one["rows"] * one["out_features"] * one["in_features"]
    shown = capsys.readouterr().out
    assert "production" in shown
    assert "operations a byte at best" in shown
    assert ("would say nothing about their speed" in shown) == study.INTERPRETED


@pytest.mark.parametrize(
    "arguments",
    [
        ["--versions", "6"],
        ["--rows", "0"],
        ["--shapes", "4096"],
        ["--shapes", "0x64"],
        ["--schemes", "nf4,int3"],
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, monkeypatch, capsys):
    studies.refuses(study, monkeypatch, capsys, *arguments)


def test_a_version_that_multiplies_wrongly_is_never_timed(monkeypatch):
    monkeypatch.setattr(benchmark, "medians", lambda calls: pytest.fail("timed"))
    sizes = {"rows": 2, "out_features": 9, "in_features": 128}
    for wrong in (
        lambda x, weight, levels: x @ weight.dequantize().T.roll(1, 1),
        lambda x, weight, levels: x @ weight.dequantize().T * 1.01,
        lambda x, weight, levels: x @ weight.dequantize().T * torch.nan,
    ):
        with pytest.raises(ArithmeticError, match="nothing was timed"):
            study.study(sizes, "nf4", torch.float32, [study.Version(9, "wrong", wrong, study.word_bytes)])


def test_the_kernels_of_others_multiply_by_the_same_weight():
    x, weight, _ = random_inputs("nf4", 1, 16, 128, torch.float32)
    wanted = x @ weight.dequantize().T
    others = study.others(weight, weight.dequantize())
    torch.testing.assert_close(others["values in 16 bits"](x), wanted)
    pytest.importorskip("bitsandbytes", reason="bitsandbytes has no macOS wheels")
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(others["bitsandbytes"](x), wanted, rtol=1e-2, atol=1e-2)
    assert "bitsandbytes" not in study.others(random_inputs("int4", 1, 16, 128, torch.float32)[1], weight.dequantize())


def test_kernels_of_others_that_fail_are_listed_with_the_reason(monkeypatch):
    def missing(x):
        raise ImportError("No module named 'bitsandbytes'")

    monkeypatch.setattr(study, "others", lambda *_: {"bitsandbytes": missing})
    monkeypatch.setattr(benchmark, "medians", lambda calls: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Abacus")
    monkeypatch.setattr(study, "INTERPRETED", False)
    sizes = {"rows": 1, "out_features": 9, "in_features": 128}
    entries = study.study(sizes, "nf4", torch.float32, study.VERSIONS[:1])
    assert {one["name"]: one["reason"] for one in entries}["bitsandbytes"] == "No module named 'bitsandbytes'"
    assert benchmark.traffic_table(entries).count("not timed: ") == 1


def test_without_triton_the_study_says_so_and_succeeds():
    studies.succeeds_without_triton("quantized_matmul")
