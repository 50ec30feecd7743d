"""A bad argument is one sentence that names it; the automatic choice of a backend has a reason that people can read."""

import sys
from unittest import mock

import pytest
import torch

from course_lib import kernels
from course_lib.attention import attention, attention_varlen, choose_backend
from course_lib.attention import backends as backends_module
from course_lib.attention.sdpa import narrow

HEADS = 4


def inputs(**changes):
    arguments = {"q": torch.randn(2, HEADS, 3, 8), "k": torch.randn(2, 2, 5, 8), "v": torch.randn(2, 2, 5, 8)}
    return arguments | changes


BAD = {
    "no tensor": ({"q": [1.0]}, TypeError, "q is of type list"),
    "three axes": ({"k": torch.randn(2, 5, 8)}, ValueError, "k has shape [2, 5, 8]; 4 axes"),
    "integers": ({"v": torch.ones(2, 2, 5, 8, dtype=torch.long)}, TypeError, "v is int64"),
    "two dtypes": ({"k": torch.randn(2, 2, 5, 8).half()}, TypeError, "q is float32 and k float16"),
    "two devices": ({"v": torch.empty(2, 2, 5, 8, device="meta")}, TypeError, "q is on cpu and v on meta"),
    "head_dim 0": ({"q": torch.randn(2, 4, 3, 0)}, ValueError, "q has head_dim 0; 1 to 256"),
    "head_dim 257": ({"v": torch.randn(2, 2, 5, 257)}, ValueError, "v has head_dim 257; 1 to 256"),
    "two head_dims": ({"k": torch.randn(2, 2, 5, 9)}, ValueError, "q has head_dim 8 and k 9"),
    "heads of k and v": ({"v": torch.randn(2, 4, 5, 8)}, ValueError, "k has 2 heads and v 4"),
    "heads that do not divide": ({"q": torch.randn(2, 3, 3, 8)}, ValueError, "q has 3 heads, which k's 2 heads do not divide"),
    "no heads": ({"q": torch.randn(2, 0, 3, 8)}, ValueError, "q has 0 heads"),
    "batch": ({"q": torch.randn(1, 4, 3, 8)}, ValueError, "q has batch size 1, k 2 and v 2"),
    "lengths": ({"v": torch.randn(2, 2, 6, 8)}, ValueError, "k has length 5 and v 6"),
    "causal": ({"causal": 1}, TypeError, "causal is 1; True or False"),
    "scale": ({"scale": float("nan")}, ValueError, "scale is nan; a finite number"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap is 0.0; a positive number"),
    "window 0": ({"sliding_window": 0}, ValueError, "sliding_window is 0; a whole number of at least 1"),
    "window 2.5": ({"sliding_window": 2.5}, ValueError, "sliding_window is 2.5; a whole number"),
    "slopes": ({"alibi_slopes": [0.5]}, TypeError, "alibi_slopes is [0.5]; a floating tensor"),
    "slopes' shape": ({"alibi_slopes": torch.rand(3)}, ValueError, "alibi_slopes has shape [3]; [4] (query heads) or [2, 4]"),
    "slopes' gradient": ({"alibi_slopes": torch.rand(4, requires_grad=True)}, ValueError, "slopes are constants"),
    "mask of numbers": ({"attention_mask": torch.ones(3, 5, dtype=torch.long)}, TypeError, "attention_mask is int64; a boolean"),
    "mask of no kind": ({"attention_mask": "causal"}, TypeError, "attention_mask is str"),
    "mask elsewhere": ({"attention_mask": torch.empty(3, 5, device="meta")}, TypeError, "attention_mask on meta"),
    "mask's shape": ({"attention_mask": torch.ones(3, 4) > 0}, ValueError, "attention_mask has shape [3, 4], which does not broadcast"),
    "mask of padding": ({"attention_mask": torch.ones(2, 5) > 0}, ValueError, "a padding mask is given as mask[:, None, None, :]"),
    "backend": ({"backend": "flash"}, ValueError, "backend is 'flash'; accepted are auto, reference, blockwise, sdpa, triton"),
    "sdpa and softcap": ({"backend": "sdpa", "softcap": 5.0}, ValueError, "backend is 'sdpa', but"),
    "sdpa and lse": ({"backend": "sdpa", "return_lse": True}, ValueError, "returns no log-sum-exp"),
    "triton and float64": ({"backend": "triton", **{name: one.double() for name, one in inputs().items()}}, ValueError, "float64"),
    "triton and mask": (
        {"backend": "triton", "attention_mask": torch.rand(3, 5, requires_grad=True)}, ValueError, "gives attention_mask no gradient"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_one_sentence_that_names_it(case):
    changes, kind, words = BAD[case]
    with pytest.raises(kind) as caught:
        attention(**inputs(**changes))
    message = str(caught.value)
    assert words in message
    assert "\n" not in message


def packed(**changes):
    arguments = {"q": torch.randn(5, HEADS, 8), "k": torch.randn(7, 2, 8), "v": torch.randn(7, 2, 8)}
    arguments |= {"cu_seqlens_q": torch.tensor([0, 2, 5]), "cu_seqlens_k": torch.tensor([0, 4, 7])}
    return arguments | changes


BAD_PACKED = {
    "padded": ({"q": torch.randn(1, 5, 4, 8)}, ValueError, "3 axes [total_tokens, heads, head_dim]"),
    "floating": ({"cu_seqlens_q": torch.tensor([0.0, 5.0])}, TypeError, "cu_seqlens_q is float32; an int32 or int64"),
    "list": ({"cu_seqlens_k": [0, 7]}, TypeError, "cu_seqlens_k is list"),
    "empty": ({"cu_seqlens_k": torch.tensor([], dtype=torch.int32)}, ValueError, "cu_seqlens_k has shape [0]"),
    "two counts": ({"cu_seqlens_k": torch.tensor([0, 7])}, ValueError, "cu_seqlens_q has 3 entries and cu_seqlens_k 2"),
    "start": ({"cu_seqlens_q": torch.tensor([1, 2, 5])}, ValueError, "cu_seqlens_q is [1, 2, 5]; it must start at 0"),
    "end": ({"cu_seqlens_k": torch.tensor([0, 4, 6])}, ValueError, "end at 7"),
    "falling": ({"cu_seqlens_q": torch.tensor([0, 6, 5])}, ValueError, "never fall"),
    "longest": ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q is 2; the longest sequence has 3 tokens"),
    "slopes": ({"alibi_slopes": torch.rand(3, 4)}, ValueError, "[4] (query heads) or [2, 4]"),
    "backend": ({"backend": "flash"}, ValueError, "backend is 'flash'"),
}


@pytest.mark.parametrize("case", BAD_PACKED)
def test_bad_packed_argument_is_one_sentence_that_names_it(case):
    changes, kind, words = BAD_PACKED[case]
    with pytest.raises(kind) as caught:
        attention_varlen(**packed(**changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- the choice


LONG = {"q": torch.empty(1, 2, 1200, 8), "k": torch.empty(1, 2, 1200, 8), "v": torch.empty(1, 2, 1200, 8)}
ON_A_CPU = {
    "plain": (inputs(), "sdpa", "PyTorch's attention does this"),
    "causal": (inputs(causal=True), "sdpa", "PyTorch's attention does this"),
    "softcap": (inputs(softcap=3.0), "blockwise", "cannot cap scores"),
    "log-sum-exp": (inputs(return_lse=True), "blockwise", "returns no log-sum-exp"),
    "small window": (inputs(sliding_window=2), "sdpa", "PyTorch's attention does this"),
    "long and causal": (LONG | {"causal": True}, "sdpa", "PyTorch's attention does this"),
    "long window": (LONG | {"sliding_window": 100}, "blockwise", "would need a mask of 1,440,000 elements"),
    "long slopes": (LONG | {"alibi_slopes": torch.rand(2)}, "blockwise", "would need a mask of 2,880,000 elements"),
    "long, values of another size": (
        LONG | {"v": torch.empty(1, 2, 1200, 4)},
        "blockwise",
        "hold the whole matrix of scores",
    ),
    "long, learned bias": (
        LONG | {"attention_mask": torch.zeros(1200, 1200, requires_grad=True)},
        "blockwise",
        "hold the whole matrix of scores",
    ),
    "no keys": (inputs(k=torch.randn(2, 2, 0, 8), v=torch.randn(2, 2, 0, 8)), "reference", "nothing to compute"),
}


@pytest.mark.parametrize("case", ON_A_CPU)
def test_choice_on_a_cpu_has_a_reason_and_runs(case):
    arguments, backend, words = ON_A_CPU[case]
    choice = choose_backend(**arguments)
    assert choice.backend == backend
    assert words in choice.reason
    assert choice.reason.endswith(".")
    attention(**arguments)


class Card:
    """Stands for a tensor on a card, as far as the choice looks at it."""

    device, is_cuda = torch.device("cuda"), True

    def __init__(self, tensor):
        self.shape, self.dtype, self.numel = tensor.shape, tensor.dtype, tensor.numel


ON_A_CARD = [
    # dtype, capability, rules, wants log-sum-exp: backend
    (torch.float16, (9, 0), {"causal": True}, False, "sdpa"),
    (torch.float16, (9, 0), {"sliding_window": 2}, False, "triton"),
    (torch.float16, (9, 0), {"softcap": 2.0}, False, "triton"),
    (torch.float16, (9, 0), {}, True, "triton"),
    (torch.float32, (8, 0), {"alibi_slopes": torch.rand(1, HEADS)}, False, "triton"),
    (torch.float64, (9, 0), {"causal": True}, False, "sdpa"),
    (torch.float64, (9, 0), {"softcap": 2.0}, False, "blockwise"),
    (torch.float16, (7, 5), {"causal": True}, False, "sdpa"),
    (torch.float16, (7, 5), {"sliding_window": 2}, False, "sdpa"),
    (torch.float16, (7, 5), {"softcap": 2.0}, False, "blockwise"),
]


@pytest.mark.parametrize(("dtype", "capability", "rules", "lse", "backend"), ON_A_CARD)
def test_choice_on_a_card_follows_dtype_features_and_generation(dtype, capability, rules, lse, backend):
    q, k, v = (Card(torch.empty(2, HEADS, 16, 8, dtype=dtype)) for _ in range(3))
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        choice = backends_module.choose(q, k, v, backends_module.Rules(scale=1.0, **rules), lse, "auto")
    assert choice.backend == backend
    assert choice.reason.endswith(".")
    if capability == (7, 5) and backend != "sdpa":
        assert "no tensor-core instructions for compute capability 7.5" in choice.reason


def test_without_triton_the_others_do_everything(monkeypatch):
    monkeypatch.delattr(kernels, "flash_attention", raising=False)
    monkeypatch.setitem(sys.modules, "course_lib.kernels.flash_attention", None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        attention(**inputs(backend="triton"))
    for name in ("auto", "reference", "blockwise", "sdpa"):
        attention(**inputs(backend=name))


def test_narrow_turns_only_minus_infinity_into_minus_infinity():
    bias = torch.tensor([0.5, -1.0e6, torch.finfo(torch.float32).min, -torch.inf])
    for dtype in (torch.float16, torch.bfloat16):
        expected = [0.5, max(-1.0e6, torch.finfo(dtype).min), torch.finfo(dtype).min, -torch.inf]
        assert torch.equal(narrow(bias, dtype), torch.tensor(expected).to(dtype))
