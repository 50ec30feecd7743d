"""The workbench's flash attention: every version computes attention, its bytes are counted as it runs, a run records it."""

import inspect
import random

import pytest
import studies
import torch

from course_lib import benchmark
from course_lib.memory import cards

pytest.importorskip("triton", reason="Triton exists for Linux")

from course_lib.attention import attention
from course_lib.attention.cost import Cost
from course_lib.attention.yardstick import Contestant, formula, measure, others, output_error, share_of_bound

study = studies.load("flash_attention")
DEVICE = torch.device("cpu" if study.INTERPRETED else "cuda")
VERSIONS = pytest.mark.parametrize("version", study.VERSIONS, ids=lambda version: version.name)
interpreted = pytest.mark.skipif(not study.INTERPRETED, reason="only the interpreter can be listened to")


def random_inputs(batch, query_heads, kv_heads, tokens, head_dim, dtype):
    # Laid out as a projection leaves them: heads beside one another for each token.
    return [
        torch.randn(batch, tokens, heads, head_dim, device=DEVICE).to(dtype).transpose(1, 2)
        for heads in (query_heads, kv_heads, kv_heads)
    ]


@VERSIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_version_is_about_as_exact_as_plain_pytorch(version, dtype):
    q, k, v = random_inputs(1, 6, 2, random.randrange(129, 149, 2), random.choice([16, 32]), dtype)
    before = [tensor.clone() for tensor in (q, k, v)]
    exact, plain = (formula(q, k, v, q, wanted)[0] for wanted in (torch.float64, dtype))
    output = version.run(q, k, v)
    assert output.dtype == dtype
    assert output_error(output, exact) <= 2 * output_error(plain, exact) + torch.finfo(dtype).eps
    assert all(torch.equal(*pair) for pair in zip((q, k, v), before, strict=True))


@VERSIONS
@pytest.mark.parametrize("tokens", [1, 64, 65])
def test_every_version_takes_batches_of_one_token_of_full_blocks_and_of_one_more(version, tokens):
    q, k, v = random_inputs(2, 2, 1, tokens, 16, torch.float32)
    assert output_error(version.run(q, k, v), formula(q, k, v, q, torch.float64)[0]) < 1e-5


@VERSIONS
def test_the_source_of_every_versions_kernels_can_be_shown(version):
    assert version.idea.endswith(".")
    for kernel in version.kernels:
        assert f"def {kernel.fn.__name__}(" in inspect.getsource(kernel.fn)


@pytest.mark.parametrize("version", study.VERSIONS[:5], ids=lambda version: version.name)
def test_study_versions_say_what_they_do_not_take(version):
    for sizes in [(1, 2, 1, 8, 24), (1, 2, 1, 8, 8), (1, 3, 2, 8, 16)]:
        with pytest.raises(ValueError, match="power of two"):
            version.run(*random_inputs(*sizes, torch.float32))
    q, k, v = random_inputs(1, 2, 1, 8, 16, torch.float32)
    with pytest.raises(ValueError, match="equal lengths"):
        version.run(q[:, :, :5], k, v)


@interpreted
@VERSIONS
def test_bfloat16_in_the_interpreter_is_one_clear_sentence(version):
    with pytest.raises((TypeError, ValueError), match="bfloat16"):
        version.run(*random_inputs(1, 2, 1, 8, 16, torch.bfloat16))


# ---- bytes


@interpreted
@VERSIONS
@pytest.mark.parametrize(("group", "tokens"), [(1, 141), (3, 50), (2, 129)])
def test_bytes_are_those_that_the_kernels_load_and_store(version, group, tokens, moved):
    version.run(*random_inputs(1, group, 1, tokens, 16, torch.float16))
    # The library cuts smaller blocks for the interpreter than for a card.
    here = {"capability": "interpreter"} if version.run is study.production else {}
    assert sum(moved) == version.bytes_moved(1, group, 1, tokens, 16, 2, **here)


@VERSIONS
def test_traffic_grows_with_the_square_of_long_inputs_and_in_proportion_to_the_rest(version):
    def moved(batch=1, heads=8, tokens=2**16, head_dim=128, size=2):
        return version.bytes_moved(batch, heads, heads // 4, tokens, head_dim, size)

    assert moved(tokens=2**17) / moved() == pytest.approx(4, rel=0.01)
    assert moved(batch=3) == 3 * moved()
    assert moved(heads=16) == 2 * moved()


def test_each_version_asks_for_less_than_the_one_before():
    for tokens in (100, 1000, 16384):
        moved = [version.bytes_moved(1, 16, 4, tokens, 128, 2) for version in study.VERSIONS[:5]]
        assert moved == sorted(moved, reverse=True)
    naive, tiled, online, skipping, grouped = moved
    assert naive > 4 * 16 * 16384**2 * 2, "every score travels four times"
    assert tiled / online == pytest.approx(1.5, rel=0.02), "K once instead of twice"
    assert online / skipping == pytest.approx(2, rel=0.05), "half of the blocks"
    assert skipping / grouped == pytest.approx(1, rel=0.01), "full blocks of rows ask for the same"
    short = [version.bytes_moved(1, 64, 8, 16, 128, 2) for version in study.VERSIONS[3:5]]
    keys_and_values, queries_and_output = 64 * 2 * 16 * 128 * 2, 64 * 2 * 16 * 128 * 2
    assert short == [keys_and_values + queries_and_output, keys_and_values // 8 + queries_and_output]


def test_on_a_card_the_library_asks_for_as_much_as_version_4_does_with_blocks_of_its_size():
    sizes = (2, 16, 4, 4096, 128, 2)
    cut = study.library.configuration("forward", 128, "float16", "sm_90")
    there, here = study.production_bytes(*sizes, capability="sm_90"), study.block_skipping_bytes(*sizes)
    assert there / here == pytest.approx(study.ROWS / cut.block_m, rel=0.05)
    assert not study.INTERPRETED or study.production_bytes(*sizes) == there


# ---- measuring


def test_a_run_prints_a_table_and_records_it(monkeypatch, tmp_path, capsys):
    sizes = ["--tokens", "70", "--head-dims", "16", "--heads", "2", "--kv-heads", "1"]
    runs = studies.run(study, monkeypatch, tmp_path, "--versions", "1,3,6", *sizes)
    ours = [one for one in runs if one["version"]]
    assert {one["version"] for one in ours} == {1, 3, 6}
    assert {one["pass"] for one in ours if one["version"] == 6} == {"forward", "backward"}
    for one in ours:
        assert one["error"] <= one["limit"]
        assert (one["seconds"] is None) == study.INTERPRETED
        if one["pass"] == "forward":
            assert one["bytes_moved"] > 0
            assert one["flop"] == one["batch"] * 2 * (70 * 71 // 2) * 4 * 16
    shown = capsys.readouterr().out
    assert "online softmax" in shown
    assert ("would say nothing about their speed" in shown) == study.INTERPRETED


@pytest.mark.parametrize("arguments", [["--versions", "7"], ["--tokens", "0"], ["--tokens", "many"]])
def test_arguments_that_mean_nothing_are_refused(arguments, monkeypatch, capsys):
    studies.refuses(study, monkeypatch, capsys, *arguments)


def test_a_version_that_forgets_its_late_rows_is_never_timed(monkeypatch):
    def forgetful(q, k, v):
        output = attention(q, k, v, causal=True, backend="reference")
        output[:, :, -3:] = 0
        return output

    monkeypatch.setattr(benchmark, "medians", lambda calls: pytest.fail("timed"))
    sizes = {"batch": 1, "query_heads": 2, "kv_heads": 1, "tokens": 400, "head_dim": 16}
    for wrong in (forgetful, lambda q, k, v: q * torch.nan):
        with pytest.raises(ArithmeticError, match="nothing was timed"):
            measure([Contestant("wrong", wrong, ours=True)], sizes, torch.float32, DEVICE)
    (entry,) = measure([Contestant("wrong", forgetful, backward=False)], sizes, torch.float32, torch.device("cpu"))
    assert "is accepted" in entry["reason"]


def test_a_wrong_gradient_is_found():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return q.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / 2

    sizes = {"batch": 1, "query_heads": 2, "kv_heads": 1, "tokens": 100, "head_dim": 16}
    wrong = Contestant(
        "w", lambda q, k, v: attention(Halved.apply(q), k, v, causal=True, backend="reference"), ours=True
    )
    with pytest.raises(ArithmeticError, match="backward"):
        measure([wrong], sizes, torch.float32, torch.device("cpu"))


def test_somebody_elses_kernel_that_is_not_there_is_listed_with_the_reason():
    sizes = {"batch": 1, "query_heads": 4, "kv_heads": 2, "tokens": 33, "head_dim": 16}
    listed = [one for one in others() if one.name in ("SDPA flash", "SDPA cuDNN", "flash-attn")]
    found = {(one["name"], one["pass"]): one for one in measure(listed, sizes, torch.float32, torch.device("cpu"))}
    assert found["SDPA flash", "forward"]["error"] <= found["SDPA flash", "forward"]["limit"]
    assert found["SDPA flash", "forward"]["reason"] is None
    for name, reason in (("SDPA cuDNN", "backend"), ("flash-attn", "flash_attn")):
        assert reason in found[name, "backward"]["reason"]
    rows = study.table([one | {"version": None, "bytes_moved": None} for one in found.values()]).splitlines()
    assert ["not timed: " in row for row in rows] == [False, False, False, True, True, True, True]


def test_without_triton_the_study_says_so_and_succeeds():
    studies.succeeds_without_triton("flash_attention")


# ---- cards


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_a_devices_name_means_a_card_of_the_table_or_none(device, card):
    found = benchmark.card_of(device)
    assert (found.name if found else None) == card


def test_the_bound_is_the_slower_of_arithmetic_and_traffic_and_unknown_for_an_unknown_card():
    card = next(card for card in cards() if card.name == "H200")
    assert share_of_bound(card, Cost(card.tensor_flops_per_second, 1), 2.0) == 0.5
    assert share_of_bound(card, Cost(1, 3 * card.bandwidth_bytes_per_second), 4.0) == 0.75
    assert share_of_bound(None, Cost(1, 1), 1.0) is None
