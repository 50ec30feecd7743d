"""The workbench's rotary positions: every version turns as apply_rope does, its bytes are counted as it runs, a run records it."""

import random

import pytest
import studies
import torch

from course_lib import benchmark

pytest.importorskip("triton", reason="Triton exists for Linux")

from course_lib.positions import apply_rope, rope_cos_sin, rope_frequencies

study = studies.load("rope")
DEVICE = study.DEVICE
VERSIONS = pytest.mark.parametrize("version", study.VERSIONS, ids=lambda version: version.name)
interpreted = pytest.mark.skipif(not study.INTERPRETED, reason="only the interpreter can be listened to")


def random_inputs(batch, query_heads, kv_heads, tokens, head_dim, dtype):
    # Laid out as a projection leaves them: heads beside one another for each token.
    q, k = (
        torch.randn(batch, tokens, heads, head_dim, device=DEVICE).to(dtype).transpose(1, 2)
        for heads in (query_heads, kv_heads)
    )
    positions = torch.randperm(10_000)[:tokens].to(DEVICE)
    return q, k, *rope_cos_sin(positions, rope_frequencies(head_dim)[0].to(DEVICE))


@VERSIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_version_is_about_as_exact_as_apply_rope(version, dtype):
    *tensors, cos, sin = random_inputs(2, random.randrange(1, 8), 2, random.randrange(1, 9), 16, dtype)
    turned = version.run(*(one.clone() for one in tensors), cos, sin)
    for found, x in zip(turned, tensors, strict=True):
        exact = apply_rope(x.double(), cos.double(), sin.double())
        assert found.dtype == dtype
        allowed = 2 * (apply_rope(x, cos, sin) - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        assert (found - exact).abs().max() <= allowed


@pytest.mark.parametrize("version", study.VERSIONS, ids=lambda version: version.name)
def test_only_production_writes_over_its_inputs(version):
    tensors = random_inputs(1, 2, 1, 5, 16, torch.float32)
    before = [one.clone() for one in tensors]
    turned = version.run(*tensors)
    same = [torch.equal(*pair) for pair in zip(tensors, before, strict=True)]
    assert same == [version.run is not study.production] * 2 + [True, True]
    assert [one is other for one, other in zip(turned, tensors[:2], strict=True)] == [
        version.run is study.production
    ] * 2
    assert version.idea.endswith(".")


@pytest.mark.parametrize("version", study.VERSIONS[2:4], ids=lambda version: version.name)
def test_study_kernels_say_what_they_do_not_take(version):
    for head_dim in (24, 7):
        q, k, cos, sin = random_inputs(1, 2, 1, 5, 2 * (head_dim // 2), torch.float32)
        q = torch.nn.functional.pad(q, (0, head_dim - q.shape[-1]))
        with pytest.raises(ValueError, match="power of two"):
            version.run(q, k, cos, sin)
    q, k, cos, sin = random_inputs(1, 2, 1, 5, 16, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        version.run(q.transpose(2, 3).contiguous().transpose(2, 3), k, cos, sin)


@interpreted
@pytest.mark.parametrize("version", study.VERSIONS[2:], ids=lambda version: version.name)
def test_bfloat16_in_the_interpreter_is_one_clear_sentence(version):
    with pytest.raises((TypeError, ValueError), match="bfloat16"):
        version.run(*random_inputs(1, 2, 1, 5, 16, torch.bfloat16))


# ---- bytes


@interpreted
@pytest.mark.parametrize("version", study.VERSIONS[2:], ids=lambda version: version.name)
def test_bytes_are_those_that_the_kernels_load_and_store(version, moved):
    sizes = (2, random.randrange(1, 8), 3, random.randrange(1, 9), 16)
    version.run(*random_inputs(*sizes, torch.float16))
    assert sum(moved) == version.bytes_moved(*sizes, 2)


def test_eager_bytes_are_inputs_and_result_of_each_operation():
    def once(q, k, cos, sin):
        return (q * 2).to(torch.float32), k[..., :3].transpose(1, 2)

    elements = 2 * 3 * 5 * 16
    assert study.eager_bytes(once, 2, 3, 1, 5, 16, 2) == elements * (2 + 2) + elements * (2 + 4)
    assert study.eager_bytes(once, 2, 3, 1, 5, 16, 4) == elements * (4 + 4)


@pytest.mark.parametrize("element_size", [2, 4])
def test_each_version_asks_for_less_than_the_one_before_and_the_last_for_about_the_least(element_size):
    sizes = (4, 32, 8, 512, 128)
    moved = [version.bytes_moved(*sizes, element_size) for version in study.VERSIONS]
    assert moved == sorted(moved, reverse=True)
    least = study.data_bytes(*sizes, element_size) + study.table_bytes(512, 128)
    assert moved[0] > 5 * least
    assert least < moved[-1] < 1.03 * least
    tables = moved[2] - study.data_bytes(*sizes, element_size)
    assert tables == 40 * (moved[4] - study.data_bytes(*sizes, element_size)), (
        "once for each of 40 heads, or once for all"
    )


# ---- measuring


def test_a_run_prints_a_table_and_records_it(monkeypatch, tmp_path, capsys):
    sizes = ["--tokens", "1,6", "--head-dims", "16", "--heads", "3", "--kv-heads", "1"]
    runs = studies.run(study, monkeypatch, tmp_path, "--versions", "1,3,5", *sizes)
    ours = [one for one in runs if one["version"]]
    assert {(one["version"], one["tokens"]) for one in ours} == {(number, n) for number in (1, 3, 5) for n in (1, 6)}
    for one in ours:
        assert one["error"] <= one["limit"]
        assert (one["seconds"] is None) == study.INTERPRETED
        assert one["bytes_moved"] > one["least_bytes"]
        assert one["flop"] == one["batch"] * 4 * one["tokens"] * 8 * 6, "four products and two sums a pair"
    shown = capsys.readouterr().out
    assert "production, in place" in shown
    assert "operations a byte at best" in shown
    assert ("would say nothing about their speed" in shown) == study.INTERPRETED


@pytest.mark.parametrize("arguments", [["--versions", "6"], ["--tokens", "0"], ["--tokens", "many"]])
def test_arguments_that_mean_nothing_are_refused(arguments, monkeypatch, capsys):
    studies.refuses(study, monkeypatch, capsys, *arguments)


def test_a_version_that_turns_wrongly_is_never_timed(monkeypatch):
    monkeypatch.setattr(benchmark, "medians", lambda calls: pytest.fail("timed"))
    sizes = {"batch": 1, "query_heads": 2, "kv_heads": 1, "tokens": 5, "head_dim": 16}
    for wrong in (
        lambda q, k, cos, sin: (apply_rope(q, cos, sin), k),
        lambda q, k, cos, sin: (apply_rope(q, cos, -sin), apply_rope(k, cos, sin)),
        lambda q, k, cos, sin: (q * torch.nan, k),
    ):
        with pytest.raises(ArithmeticError, match="nothing was timed"):
            study.study(sizes, torch.float32, [study.Version(9, "wrong", wrong, study.row_bytes)])


def test_kernels_of_others_that_are_not_there_are_listed_with_the_reason(monkeypatch):
    listed = {name: run for name, run in study.others().items() if name != "torch.compile of 2"}
    monkeypatch.setattr(study, "others", lambda: listed)
    monkeypatch.setattr(benchmark, "medians", lambda calls: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Abacus")
    sizes = {"batch": 1, "query_heads": 2, "kv_heads": 1, "tokens": 5, "head_dim": 16}
    monkeypatch.setattr(study, "INTERPRETED", False)
    entries = study.study(sizes, torch.float32, study.VERSIONS[:2])
    reasons = {one["name"]: one["reason"] for one in entries if one["version"] is None}
    assert "liger_kernel" in reasons["Liger"]
    assert "flash_attn" in reasons["flash-attn"]
    assert benchmark.traffic_table(entries).count("not timed: ") == 2


def test_without_triton_the_study_says_so_and_succeeds():
    studies.succeeds_without_triton("rope")
