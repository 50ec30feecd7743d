"""The workbench's decoding: every version attends as the formula does, its bytes are counted as it runs, a run records it."""

import random
from unittest import mock

import pytest
import studies
import torch

from course_lib import benchmark

pytest.importorskip("triton", reason="Triton exists for Linux")

study = studies.load("flash_decoding")
DEVICE = study.DEVICE
VERSIONS = pytest.mark.parametrize("version", study.VERSIONS, ids=lambda version: version.name)
interpreted = pytest.mark.skipif(not study.INTERPRETED, reason="only the interpreter can be listened to")


def random_inputs(batch, query_heads, kv_heads, tokens, head_dim, dtype):
    shapes = ((query_heads, 1), (kv_heads, tokens), (kv_heads, tokens))
    return [torch.randn(batch, heads, length, head_dim, device=DEVICE).to(dtype) for heads, length in shapes]


@VERSIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_version_is_about_as_exact_as_pytorch(version, dtype):
    q, k, v = random_inputs(2, 6, 2, random.randrange(1, 300), 16, dtype)
    exact = study.exactly(q, k, v)
    group_k, group_v = (x.double().repeat_interleave(3, dim=1) for x in (k, v))
    torch.testing.assert_close(exact, torch.softmax(q.double() @ group_k.mT / 4, dim=-1) @ group_v)
    found = version.run(q, *version.prepare(k, v))
    assert found.dtype == dtype
    allowed = 2 * (study.repeated(q, k, v) - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= allowed
    assert version.idea.endswith(".")


@pytest.mark.parametrize("version", study.VERSIONS[1:3], ids=lambda version: version.name)
def test_study_kernels_say_what_they_do_not_take(version):
    q, k, v = random_inputs(1, 2, 1, 20, 16, torch.float32)
    for wrong in (
        (q[..., :12].contiguous(), k[..., :12].contiguous(), v[..., :12].contiguous()),
        (q.expand(-1, -1, 2, -1).contiguous(), k, v),
        (q, k.mT.contiguous().mT, v),
        (q, k[:, :, :0], v[:, :, :0]),
    ):
        with pytest.raises(ValueError, match="study versions take one row"):
            version.run(*wrong)


@interpreted
@pytest.mark.parametrize("version", study.VERSIONS[1:], ids=lambda version: version.name)
def test_bfloat16_in_the_interpreter_is_one_clear_sentence(version):
    q, k, v = random_inputs(1, 2, 1, 20, 16, torch.bfloat16)
    with pytest.raises((TypeError, ValueError), match="bfloat16"):
        version.run(q, *version.prepare(k, v))


# ---- bytes


@interpreted
@pytest.mark.parametrize("processors", [1, 30])
@pytest.mark.parametrize("version", study.VERSIONS[1:], ids=lambda version: version.name)
def test_bytes_are_those_that_the_kernels_load_and_store(version, processors, moved):
    sizes = (2, 4, 2, random.randrange(1, 500), 16)
    q, k, v = random_inputs(*sizes, torch.float16)
    prepared = version.prepare(k, v)
    with mock.patch.object(study.library, "multiprocessors", return_value=processors):
        version.run(q, *prepared)
        assert sum(moved) == version.bytes_moved(*sizes, 2)


@pytest.mark.parametrize("element_size", [2, 4])
def test_only_a_group_in_one_tile_reads_keys_once(element_size):
    sizes = (32, 32, 8, 4096, 128, element_size)
    least = study.least_bytes(*sizes)
    moved = [version.bytes_moved(*sizes) for version in study.VERSIONS]
    assert moved[0] > moved[1]
    assert 3.9 * least < moved[1] < moved[2] < 4.2 * least, "four query heads share a key"
    assert least < moved[3] < moved[4] < 1.05 * least


# ---- measuring


def test_a_run_prints_a_table_and_records_it(monkeypatch, tmp_path, capsys):
    sizes = ["--batches", "1,2", "--keys", "33", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    runs = studies.run(study, monkeypatch, tmp_path, "--versions", "1,3,4,5", *sizes)
    ours = [one for one in runs if one["version"]]
    assert {(one["version"], one["batch"]) for one in ours} == {(number, n) for number in (1, 3, 4, 5) for n in (1, 2)}
    for one in ours:
        assert one["error"] <= one["limit"]
        assert (one["seconds"] is None) == study.INTERPRETED
        assert one["bytes_moved"] > one["least_bytes"]
        assert one["flop"] == one["batch"] * 4 * 33 * 16 * 4, "two products, of a multiplication and a sum"
    shown = capsys.readouterr().out
    assert "production, paged" in shown
    assert "operations a byte at best" in shown
    assert ("would say nothing about their speed" in shown) == study.INTERPRETED


@pytest.mark.parametrize("arguments", [["--versions", "6"], ["--keys", "0"], ["--batches", "many"]])
def test_arguments_that_mean_nothing_are_refused(arguments, monkeypatch, capsys):
    studies.refuses(study, monkeypatch, capsys, *arguments)


def test_a_version_that_attends_wrongly_is_never_timed(monkeypatch):
    monkeypatch.setattr(benchmark, "medians", lambda calls: pytest.fail("timed"))
    sizes = {"batch": 2, "query_heads": 4, "kv_heads": 2, "tokens": 9, "head_dim": 16}
    for wrong in (
        lambda q, k, v: study.repeated(q, k, v.flip(1)),
        lambda q, k, v: study.repeated(q, k[:, :, 1:], v[:, :, 1:]),
        lambda q, k, v: study.repeated(q, k, v)[:1].expand_as(q),
        lambda q, k, v: q * torch.nan,
    ):
        with pytest.raises(ArithmeticError, match="nothing was timed"):
            study.study(sizes, torch.float32, [study.Version(9, "wrong", wrong, study.head_bytes)])


def test_kernels_of_others_that_are_not_there_are_listed_with_the_reason(monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("No module named 'flash_attn'")

    monkeypatch.setattr(study, "others", lambda: {"flash_attn_with_kvcache": missing})
    monkeypatch.setattr(benchmark, "medians", lambda calls: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Abacus")
    monkeypatch.setattr(study, "INTERPRETED", False)
    sizes = {"batch": 1, "query_heads": 2, "kv_heads": 1, "tokens": 5, "head_dim": 16}
    entries = study.study(sizes, torch.float32, study.VERSIONS[:1])
    reasons = {one["name"]: one["reason"] for one in entries}
    assert reasons["flash_attn_with_kvcache"] == "No module named 'flash_attn'"
    assert benchmark.traffic_table(entries).count("not timed: ") == 1


@pytest.mark.parametrize("name", ["SDPA"])
def test_kernels_of_others_that_pytorch_has_compute_the_same(name):
    q, k, v = random_inputs(2, 4, 2, 30, 16, torch.float32)
    torch.testing.assert_close(study.others()[name](q, k, v).double(), study.exactly(q, k, v), rtol=1e-5, atol=1e-5)


def test_without_triton_the_study_says_so_and_succeeds():
    studies.succeeds_without_triton("flash_decoding")
