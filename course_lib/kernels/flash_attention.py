"""Flash attention in Triton: forward and backward, everything that changes a score fused into one pass over the keys.

Functions
---------
flash_attention, flash_attention_varlen
    Attention of padded and of packed sequences, with gradients.
refusal, machine_refusal
    Why the kernels, or any kernel, cannot run on a tensor.
configuration
    The block sizes, warps and stages of a kernel on a card.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy
import torch
import triton
from torch.autograd.function import once_differentiable

from course_lib.kernels.flash_attention_backward import delta_kernel, dkdv_kernel, dq_kernel
from course_lib.kernels.flash_attention_forward import forward_kernel

Pair = tuple[torch.Tensor, torch.Tensor]

#: Whether Triton's interpreter runs the kernels; it was decided when they were defined.
INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)


class Configuration(NamedTuple):
    """How one kernel is cut for a card: rows of queries and of keys in a block, warps, and stages of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By generation and arithmetic, each for head_dim up to 64, 128 and 256. What binds: accumulators and scores must stay in
# registers, and the stages of the pipeline must fit into shared memory. The report of compiled kernels shows both. A Hopper or
# Blackwell card waits for copies that are only one stage ahead, hence three stages there where they fit.
_CONFIGURATIONS: dict[tuple[str, str], dict[str, tuple[tuple[int, int, int, int], ...]]] = {
    ("sm_80", "half"): {
        "forward": ((128, 64, 4, 3), (128, 64, 8, 3), (32, 64, 4, 3)),
        "dkdv": ((64, 128, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
        "dq": ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2)),
    },
    ("sm_89", "half"): {
        "forward": ((128, 64, 4, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        "dkdv": ((64, 128, 8, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
        "dq": ((128, 64, 8, 2), (64, 64, 4, 2), (32, 32, 4, 2)),
    },
    ("sm_90", "half"): {
        "forward": ((128, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 2)),
        "dkdv": ((64, 128, 8, 3), (64, 128, 8, 3), (16, 64, 8, 2)),
        "dq": ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
    },
    ("sm_100", "half"): {
        "forward": ((128, 128, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3)),
        "dkdv": ((64, 128, 8, 3), (64, 128, 8, 3), (32, 64, 8, 2)),
        "dq": ((128, 64, 4, 3), (128, 64, 8, 2), (64, 64, 8, 1)),
    },
    ("gfx942", "half"): {
        "forward": ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 4, 1)),
        "dkdv": ((32, 64, 4, 1), (32, 64, 4, 1), (16, 32, 4, 1)),
        "dq": ((64, 32, 4, 1), (64, 32, 4, 1), (32, 16, 4, 1)),
    },
    ("small", "half"): {
        "forward": ((32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
        "dkdv": ((16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "dq": ((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
    ("large", "tf32"): {
        "forward": ((64, 32, 4, 2), (64, 32, 4, 2), (32, 16, 4, 2)),
        "dkdv": ((32, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)),
        "dq": ((64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)),
    },
    ("small", "tf32"): {
        "forward": ((32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
        "dkdv": ((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "dq": ((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
    ("large", "float32"): {
        "forward": ((32, 32, 4, 2), (32, 16, 4, 2), (16, 16, 4, 1)),
        "dkdv": ((16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "dq": ((32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1)),
    },
    ("small", "float32"): {
        "forward": ((32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
        "dkdv": ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        "dq": ((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    },
}
_GENERATIONS = {
    **{name: name for name in ("sm_80", "sm_90", "sm_100", "gfx942")},
    **{"sm_103": "sm_100", "gfx950": "gfx942"},
}


def configuration(kernel: str, head_dim: int, dtype: str, capability: str, masked: bool = False) -> Configuration:
    """Return how a kernel is cut for a card. It is looked up in a table picked by hand: no launch waits for tuning.

    Parameters
    ----------
    kernel : str
        ``"forward"``, ``"delta"``, ``"dkdv"`` or ``"dq"``.
    head_dim : int
        The larger of head_dim and value_dim.
    dtype : str
        ``"float16"``, ``"bfloat16"``, ``"float32"``, or ``"tf32"``: float32 multiplied by tensor cores.
    capability : str
        ``"sm_90"``, ``"gfx942"``, ..., or ``"interpreter"``.
    masked : bool
        Whether blocks of a mask pass through shared memory too: half as many keys (``dkdv``: queries) are taken at a time.
    """
    if kernel == "delta":
        return Configuration(64, 16, 4, 1)
    if capability == "interpreter":
        return Configuration(32, 64, 4, 1) if kernel == "dkdv" else Configuration(64, 32, 4, 1)
    # Every NVIDIA card from Ampere on has at least the shared memory of sm_89; others get blocks that fit anywhere.
    newer = capability.startswith("sm_") and int(capability[3:].rstrip("af")) >= 80
    generation = _GENERATIONS.get(capability, "sm_89" if newer else "small")
    arithmetic = "half" if dtype in ("float16", "bfloat16") else dtype
    if arithmetic != "half":
        generation = "small" if generation in ("gfx942", "small") else "large"
    column = (head_dim > 64) + (head_dim > 128)
    cut = Configuration(*_CONFIGURATIONS[generation, arithmetic][kernel][column])
    if masked and kernel == "dkdv":
        return cut._replace(block_m=max(16, cut.block_m // 2))
    return cut._replace(block_n=max(16, cut.block_n // 2)) if masked else cut


def refusal(q: torch.Tensor) -> str | None:
    """Return why the kernels cannot run on queries, as the end of a sentence, or None.

    Parameters
    ----------
    q : Tensor
        Queries; keys and values have its dtype and device.
    """
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernel computes in float16, bfloat16 or float32, and q is {_name(q.dtype)}"
    if INTERPRETED and q.dtype == torch.bfloat16:
        garbage = "the interpreter multiplies the raw bits of bfloat16, so its result is garbage"
        return f"{garbage}; use float32 or float16, or another backend"
    older = torch.version.hip is None and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] < 8
    if older and q.dtype == torch.float32 and q.shape[-1] > 128:
        return "float32 with a head_dim above 128 exceeds the shared memory of cards before compute capability 8.0"
    return machine_refusal(q, "q")


def machine_refusal(x: torch.Tensor, name: str) -> str | None:
    """Return why no kernel can run on a tensor of its dtype where it is, as the end of a sentence, or None.

    Parameters
    ----------
    x : Tensor
        Floating.
    name : str
        What the caller calls it.
    """
    if INTERPRETED:
        if x.dtype == torch.bfloat16:
            return "the interpreter cuts results in bfloat16 off where a card rounds them; use float32 or float16"
        versions = [tuple(map(int, module.__version__.split(".")[:2])) for module in (triton, numpy)]
        if versions[0] < (3, 7) and versions[1] >= (2, 4):
            return (
                f"the interpreter of Triton {triton.__version__} needs NumPy below 2.4, and this is {numpy.__version__}"
            )
        return None
    if x.device.type == "cpu":
        return "a CPU runs Triton kernels only in its interpreter: set TRITON_INTERPRET=1 before the first import of triton"
    if x.device.type != "cuda":
        return f"the kernel runs on NVIDIA and AMD cards, and {name} is on {x.device}"
    if torch.version.hip is None and x.dtype == torch.bfloat16:
        major, minor = torch.cuda.get_device_capability(x.device)
        if major < 8:
            return f"bfloat16 needs a card of compute capability 8.0, and this one has {major}.{minor}; use float16"
    return None


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float,
    attention_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Pair:
    """Compute attention of padded sequences. Arguments are taken as checked; `course_lib.attention.attention` checks them.

    Parameters
    ----------
    q, k, v : Tensor
        ``[batch, query_heads, query_len, head_dim]``, ``[batch, kv_heads, kv_len, head_dim]`` and
        ``[batch, kv_heads, kv_len, value_dim]``; float16, bfloat16 or float32; any strides.
    causal, scale, sliding_window, softcap
        As for `course_lib.attention.attention`.
    attention_mask : Tensor, optional
        Boolean or floating, four axes, each 1 or that of ``[batch, query_heads, query_len, kv_len]``. It gets no gradient.
    alibi_slopes : Tensor, optional
        float32, ``[1 or batch, query_heads]``.

    Returns
    -------
    output : Tensor
        ``[batch, query_heads, query_len, value_dim]`` in the dtype of ``q``, laid out as ``q`` is.
    lse : Tensor
        float32, ``[batch, query_heads, query_len]``, natural logarithm.

    Notes
    -----
    The algorithm is that of Dao, "FlashAttention-2", 2023; chapter 05 derives it. Products of float32 matrices are in float32
    where ``torch.get_float32_matmul_precision()`` is ``"highest"``, else in TF32. Results are the same in every run. Going back,
    scores are computed again, so that a rounding of a score becomes a relative error of its weight, which counts where scores are huge.
    """
    rules = _Rules(causal, scale, sliding_window, softcap, q.shape[2], k.shape[2])
    return _attention(_Tensors(q, k, v, attention_mask, alibi_slopes), rules)


def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Pair:
    """Compute attention within each of several packed sequences, in one launch.

    Parameters
    ----------
    q, k, v : Tensor
        ``[total_queries, query_heads, head_dim]``, ``[total_keys, kv_heads, head_dim]`` and
        ``[total_keys, kv_heads, value_dim]``.
    cu_seqlens_q, cu_seqlens_k : Tensor
        int32 or int64, ``[sequences + 1]``, on the device of ``q``: where sequences start, and the totals.
    max_seqlen_q, max_seqlen_k : int
        The longest lengths.
    causal, scale, sliding_window, softcap
        As for `flash_attention`.
    alibi_slopes : Tensor, optional
        float32, ``[1 or sequences, query_heads]``.

    Returns
    -------
    output : Tensor
        ``[total_queries, query_heads, value_dim]`` in the dtype of ``q``.
    lse : Tensor
        float32, ``[total_queries, query_heads]``.
    """
    rules = _Rules(causal, scale, sliding_window, softcap, max_seqlen_q, max_seqlen_k)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    output, lse = _attention(_Tensors(q, k, v, None, alibi_slopes, cu_seqlens_q, cu_seqlens_k), rules)
    return output[0].transpose(0, 1), lse[0].transpose(0, 1)


class _Tensors(NamedTuple):
    """The tensors of a call; packed sequences are one sequence whose parts start at ``starts_q`` and ``starts_k``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    slopes: torch.Tensor | None
    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None


class _Rules(NamedTuple):
    """What else a call asks for; lengths are those of the longest sequence."""

    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    query_len: int
    kv_len: int


def _attention(tensors: _Tensors, rules: _Rules) -> Pair:
    """Bring a call into the form that the kernels take, and run it."""
    q, k, v = (_last_axis_contiguous(tensor) for tensor in tensors[:3])
    mask, slopes = tensors.mask, tensors.slopes
    if mask is not None and mask.dtype == torch.float64:
        mask = mask.float()
    if slopes is not None:
        slopes = slopes.contiguous()
    if rules.scale < 0:
        # The forward kernel scales after it has taken a maximum, which only a factor that is not negative allows.
        q, rules = -q, rules._replace(scale=-rules.scale)
    if rules.window is not None and rules.window >= max(rules.query_len, rules.kv_len):
        rules = rules._replace(window=None)  # it hides nothing
    output, lse = _FlashAttention.apply(q, k, v, mask, slopes, tensors.starts_q, tensors.starts_k, rules)  # type: ignore[no-untyped-call]
    return output, lse


class _FlashAttention(torch.autograd.Function):
    """The kernels with their gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Pair:
        tensors, rules = _Tensors(*arguments[:-1]), arguments[-1]
        q, v = tensors.q, tensors.v
        shared = _shared(tensors, rules)
        output = laid_out_like(q, v.shape[-1])
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        shift, factor = torch.empty_like(lse), torch.empty_like(lse) if shared["CAREFUL"] else None
        results = {"out_ptr": output, "lse_ptr": lse, "shift_ptr": shift, "factor_ptr": factor}
        _launch(forward_kernel, shared | results | _strides("o", "m", output))
        ctx.save_for_backward(*tensors, output, shift, factor)
        ctx.rules = rules
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *inputs, output, shift, factor = ctx.saved_tensors
        tensors = _Tensors(*inputs)
        q, k, v = tensors[:3]
        grad = torch.zeros_like(output) if grad is None else _last_axis_contiguous(grad)
        delta = torch.empty_like(shift)
        shared = _shared(tensors, ctx.rules) | _strides("g", "m", grad)
        shared |= {"grad_ptr": grad, "delta_ptr": delta, "shift_ptr": shift, "factor_ptr": factor}
        grad_lse = grad_lse if grad_lse is None else grad_lse.contiguous()
        _launch(delta_kernel, shared | {"out_ptr": output, "grad_lse_ptr": grad_lse} | _strides("o", "m", output))
        dq = dk = dv = None
        if ctx.needs_input_grad[0]:
            dq = laid_out_like(q, q.shape[-1])
            _launch(dq_kernel, shared | {"dq_ptr": dq} | _strides("dq", "m", dq))
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = laid_out_like(k, k.shape[-1]), laid_out_like(v, v.shape[-1])
            results = {"dk_ptr": dk, "dv_ptr": dv} | _strides("dk", "n", dk) | _strides("dv", "n", dv)
            _launch(dkdv_kernel, shared | results)
        return dq, dk, dv, None, None, None, None, None


def _shared(tensors: _Tensors, rules: _Rules) -> dict[str, Any]:
    """Return the arguments that kernels share, by name, those fixed at compile time included."""
    q, k, v, mask, slopes = tensors[:5]
    query_heads, query_rows, head_dim = q.shape[1:]
    value_dim = v.shape[-1]
    additive = mask is not None and mask.is_floating_point()
    careful = additive or q.dtype == torch.float32
    unit = 1.0 if careful else math.log2(math.e)
    mask_strides = [0, 0, 0, 0]
    if mask is not None:
        mask = mask if additive else mask.view(torch.uint8)
        mask_strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "mask_ptr": mask,
        "slopes_ptr": slopes,
        "starts_q_ptr": tensors.starts_q,
        "starts_k_ptr": tensors.starts_k,
        **_strides("q", "m", q),
        **_strides("k", "n", k),
        **_strides("v", "n", v),
        "stride_lb": query_heads * query_rows,
        "stride_lh": query_rows,
        **dict(zip(("stride_mb", "stride_mh", "stride_mm", "stride_mn"), mask_strides, strict=True)),
        "stride_ab": 0 if slopes is None or len(slopes) == 1 else slopes.stride(0),
        "group": query_heads // k.shape[1],
        "query_len": rules.query_len,
        "kv_len": rules.kv_len,
        "window": rules.window or 0,
        "inner": rules.scale / rules.softcap if rules.softcap else rules.scale * unit,
        "outer": rules.softcap * unit if rules.softcap else 1.0,
        "scale": rules.scale,
        "CAUSAL": rules.causal,
        "WINDOW": rules.window is not None,
        "SOFTCAP": rules.softcap is not None,
        "ALIBI": slopes is not None,
        "MASK": None if mask is None else "additive" if additive else "boolean",
        "CAREFUL": careful,
        "VARLEN": tensors.starts_q is not None,
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
    }


def _launch(kernel: Any, arguments: dict[str, Any]) -> None:
    """Launch a kernel, cut for the card, on what it takes of the arguments: a program for each block of each head and sequence."""
    q, k, v, starts = (arguments[name] for name in ("q_ptr", "k_ptr", "v_ptr", "starts_q_ptr"))
    name = kernel.fn.__name__.removesuffix("_kernel")
    dtype = "tf32" if q.dtype == torch.float32 and arguments["PRECISION"] == "tf32" else _name(q.dtype)
    cut = configuration(name, max(q.shape[-1], v.shape[-1]), dtype, capability(), arguments["MASK"] is not None)
    if name == "dkdv":
        heads, blocks = k.shape[1], triton.cdiv(arguments["kv_len"], cut.block_n)
    else:
        heads, blocks = q.shape[1], triton.cdiv(arguments["query_len"], cut.block_m)
    arguments |= {"heads": heads, "blocks": blocks, "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n}
    programs = blocks * heads * (q.shape[0] if starts is None else len(starts) - 1)
    taken = {name: value for name, value in arguments.items() if name in kernel.arg_names}
    if programs:
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            kernel[(programs,)](**taken, num_warps=cut.num_warps, num_stages=cut.num_stages)


def capability() -> str:
    """Return the current card as `configuration` names it."""
    if INTERPRETED:
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def _last_axis_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied only if its last axis is not contiguous."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def laid_out_like(tensor: torch.Tensor, last: int) -> torch.Tensor:
    """Return an empty tensor with a last axis of its own, heads and rows in the order that they have in the tensor's memory."""
    batch, heads, rows, _ = tensor.shape
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty(batch, rows, heads, last).transpose(1, 2)
    return tensor.new_empty(batch, heads, rows, last)


def _strides(name: str, row: str, tensor: torch.Tensor) -> dict[str, int]:
    """Return the strides of batch, head and row as arguments of a kernel."""
    return dict(zip((f"stride_{name}b", f"stride_{name}h", f"stride_{name}{row}"), tensor.stride(), strict=False))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
