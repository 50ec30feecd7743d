"""The ways to compute attention, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from course_lib.attention.rules import Rules

Result = tuple[torch.Tensor, torch.Tensor]

#: The largest mask, in elements, that ``auto`` builds for PyTorch's attention rather than computing block by block.
SMALL_MASK = 2**20


class BackendChoice(NamedTuple):
    """The backend that runs a call, and the reason in one sentence."""

    backend: str
    reason: str


def refusal(backend: str, q: torch.Tensor, rules: Rules, return_lse: bool) -> str | None:
    """Return why a backend cannot run a call, or None."""
    if backend == "sdpa":
        if rules.softcap is not None:
            return "PyTorch's scaled_dot_product_attention cannot cap scores (softcap)"
        if return_lse:
            return "PyTorch's scaled_dot_product_attention returns no log-sum-exp (return_lse)"
    if backend == "triton":
        if rules.attention_mask is not None and rules.attention_mask.requires_grad and torch.is_grad_enabled():
            return "the Triton kernel gives attention_mask no gradient"
        try:
            from course_lib.kernels import flash_attention
        except ImportError:
            return "Triton is not installed; it exists for Linux"
        return flash_attention.refusal(q)
    return None


def choose(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules, return_lse: bool, backend: str
) -> BackendChoice:
    """Return the backend for a call, by name or chosen.

    Raises
    ------
    ValueError
        If ``backend`` is unknown, or cannot do what is asked.
    """
    if backend == "auto":
        return _automatic(q, k, v, rules, return_lse)
    if backend not in RUNNERS:
        raise ValueError(f"backend is {backend!r}; accepted are auto, {', '.join(RUNNERS)}")
    reason = refusal(backend, q, rules, return_lse)
    if reason:
        raise ValueError(f"backend is {backend!r}, but {reason}; backend='auto' chooses one that can")
    return BackendChoice(backend, "asked for by name.")


def _automatic(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules, return_lse: bool) -> BackendChoice:
    if 0 in (q.numel(), k.numel(), v.numel()):
        return BackendChoice("reference", "there is nothing to compute.")
    query_len, kv_len = q.shape[2], k.shape[2]
    no_sdpa = refusal("sdpa", q, rules, return_lse)
    # What PyTorch's attention would need a mask of its own for.
    by_position = rules.sliding_window is not None or (rules.causal and query_len not in (1, kv_len))
    built = query_len * kv_len if by_position else 0
    if rules.alibi_slopes is not None:
        built = q.shape[0] * q.shape[1] * query_len * kv_len
    because = ""
    if q.device.type == "cuda":
        plain = built == 0 and rules.attention_mask is None and q.shape[-1] == v.shape[-1]
        if plain and no_sdpa is None and q.dtype in (torch.float16, torch.bfloat16):
            return BackendChoice("sdpa", "PyTorch's fused kernel does this, and no recording shows ours to be faster.")
        no_triton = refusal("triton", q, rules, return_lse) or _no_tensor_cores(q.device)
        if no_triton is None:
            return BackendChoice("triton", "our kernel fuses all that is asked.")
        because = f"; our kernel is not used because {no_triton}"
    if no_sdpa:
        return BackendChoice("blockwise", f"{no_sdpa}{because}.")
    masked_gradient = rules.attention_mask is not None and rules.attention_mask.requires_grad
    if (q.shape[-1] != v.shape[-1] or masked_gradient) and query_len * kv_len > SMALL_MASK:
        whole = "PyTorch's attention would hold the whole matrix of scores for these sizes"
        return BackendChoice("blockwise", f"{whole}{because}.")
    if built > SMALL_MASK:
        needs = f"PyTorch's attention would need a mask of {built:,} elements"
        return BackendChoice("blockwise", f"{needs}{because}.")
    return BackendChoice("sdpa", f"PyTorch's attention does this, fused where it can{because}.")


def _no_tensor_cores(device: torch.device) -> str | None:
    """Return why our kernel would be slow on a card, or None. Chapter 05's compile report shows the instructions."""
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and major < 8:
        return f"Triton emits no tensor-core instructions for compute capability {major}.{minor}"
    return None


# ---- the backends: from inputs and rules to output and log-sum-exp


def _reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> Result:
    from course_lib.attention.reference import reference_attention

    return reference_attention(q, k, v, rules)


def _blockwise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> Result:
    from course_lib.attention.blockwise import blockwise_attention

    return blockwise_attention(q, k, v, rules)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> Result:
    from course_lib.attention.sdpa import sdpa_attention

    return sdpa_attention(q, k, v, rules), q.new_empty(0)


def _triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> Result:
    from course_lib.kernels.flash_attention import flash_attention

    return flash_attention(
        q,
        k,
        v,
        causal=rules.causal,
        scale=rules.scale,
        attention_mask=rules.attention_mask,
        alibi_slopes=rules.alibi_slopes,
        sliding_window=rules.sliding_window,
        softcap=rules.softcap,
    )


def packs(q: torch.Tensor, rules: Rules) -> bool:
    """Tell whether ``auto`` runs packed sequences in one kernel; elsewhere they run one after the other."""
    if q.device.type != "cuda" or q.numel() == 0:
        return False
    return refusal("triton", q, rules, return_lse=False) is None and _no_tensor_cores(q.device) is None


def run_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rules: Rules,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Result:
    """Run the kernel for packed sequences."""
    from course_lib.kernels.flash_attention import flash_attention_varlen

    return flash_attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q.to(q.device, torch.int32),
        cu_seqlens_k=cu_seqlens_k.to(q.device, torch.int32),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=rules.causal,
        scale=rules.scale,
        alibi_slopes=rules.alibi_slopes,
        sliding_window=rules.sliding_window,
        softcap=rules.softcap,
    )


RUNNERS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rules], Result]] = {
    "reference": _reference,
    "blockwise": _blockwise,
    "sdpa": _sdpa,
    "triton": _triton,
}
