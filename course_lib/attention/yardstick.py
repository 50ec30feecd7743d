"""How kernels for causal attention are measured: against the formula, and beside the kernels of others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from course_lib import benchmark
from course_lib.attention.cost import Cost
from course_lib.attention.functional import attention
from course_lib.memory import Card

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
PRODUCTS = {"forward": 2, "backward": 5}  # of matrices as large as the scores

SLICE = 512  # queries whose scores are held at once


class Contestant(NamedTuple):
    """Something that computes causal attention of q, k and v.

    Attributes
    ----------
    name : str
        For people.
    run : callable
        Takes q, k and v and returns the output.
    ours : bool
        Whether an error in it ends the measurement; that of somebody else's is noted.
    backward : bool
        Whether it has a gradient.
    """

    name: str
    run: Attention
    ours: bool = False
    backward: bool = True


def measure(
    contestants: Sequence[Contestant], sizes: dict[str, int], dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    """Check every contestant on the same random inputs, and only then time them, on a CUDA card.

    Parameters
    ----------
    contestants : sequence of Contestant
        With names of their own.
    sizes : dict of str to int
        ``batch``, ``query_heads``, ``kv_heads``, ``tokens`` and ``head_dim``.
    dtype, device : torch.dtype, torch.device
        Of q, k and v. Times are taken on a CUDA card only.

    Returns
    -------
    list of dict
        For each contestant and pass: name, pass, sizes, dtype, flop (of the scores that count, products only), error and limit
        (relative; at most twice that of plain PyTorch in this dtype, and one rounding), seconds, share_of_bound (the least time
        in which a card of the table could do it, as a share of the time it took), and reason
        (why there is no time). What was not measured is None.

    Raises
    ------
    ArithmeticError
        If the error of one of ours is above its limit.
    """
    batch, query_heads, kv_heads, tokens, head_dim = (
        sizes[name] for name in ("batch", "query_heads", "kv_heads", "tokens", "head_dim")
    )
    q, k, v, gradient = (
        torch.randn(batch, heads, tokens, head_dim, device=device).to(dtype)
        for heads in (query_heads, kv_heads, kv_heads, query_heads)
    )
    exact, plain = formula(q, k, v, gradient, torch.float64), formula(q, k, v, gradient, dtype)
    rounding = torch.finfo(dtype).eps
    limits = {
        "forward": 2 * output_error(plain[0], exact[0]) + rounding,
        "backward": 2 * gradient_error(plain[1:], exact[1:]) + rounding,
    }
    scores = batch * query_heads * (tokens * (tokens + 1) // 2)

    entries: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], Any]] = {}
    for one in contestants:
        for direction in ("forward", "backward") if one.backward else ("forward",):
            entry: dict[str, Any] = {
                "name": one.name,
                "pass": direction,
                **sizes,
                "dtype": str(dtype).removeprefix("torch."),
            }
            entry |= {"flop": PRODUCTS[direction] * 2 * head_dim * scores, "error": None, "limit": limits[direction]}
            entry |= {"seconds": None, "share_of_bound": None, "reason": None}
            entries.append(entry)
            try:
                call, error = _attempt(one.run, (q, k, v), gradient, exact, direction)
            except Exception as problem:
                if one.ours and not _is_too_large(problem):
                    raise
                entry["reason"] = (str(problem).strip() or type(problem).__name__).splitlines()[0]
                continue
            entry["error"] = error
            if error <= limits[direction]:
                calls[str(len(entries) - 1)] = call
                continue
            entry["reason"] = f"its error is {error:.1e}, and {limits[direction]:.1e} is accepted"
            if one.ours:
                raise ArithmeticError(f"{one.name}, {direction}, {sizes}: {entry['reason']}; nothing was timed")

    if device.type == "cuda":
        card = benchmark.card_of(torch.cuda.get_device_name(device))
        elements = 2 * batch * (query_heads + kv_heads) * tokens * head_dim  # q, k, v and output, each once
        for index, seconds in benchmark.medians(calls).items():
            entry = entries[int(index)]
            moved = elements * dtype.itemsize * (2 if entry["pass"] == "backward" else 1)  # and their gradients
            entry |= {"seconds": seconds, "share_of_bound": share_of_bound(card, Cost(entry["flop"], moved), seconds)}
    return entries


def share_of_bound(card: Card | None, cost: Cost, seconds: float) -> float | None:
    """Return the least time in which a card could do work, as a share of the time taken; None where its peak is not known."""
    if card is None or card.tensor_flops_per_second is None:
        return None
    return cost.seconds(card.tensor_flops_per_second, card.bandwidth_bytes_per_second) / seconds


def _attempt(
    run: Attention,
    tensors: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    exact: Sequence[torch.Tensor],
    direction: str,
) -> tuple[Callable[[], Any], float]:
    """Return one pass as a call without arguments, and its error."""
    inputs = [tensor.detach().requires_grad_(direction == "backward") for tensor in tensors]
    if direction == "forward":
        forward = functools.partial(run, *inputs)
        return forward, output_error(forward(), exact[0])
    backward = functools.partial(torch.autograd.grad, run(*inputs), inputs, gradient, retain_graph=True)
    return backward, gradient_error(backward(), exact[1:])


def _is_too_large(problem: Exception) -> bool:
    """Tell whether a card has too little memory, or too little of it on the chip."""
    return isinstance(problem, torch.OutOfMemoryError) or type(problem).__name__ == "OutOfResources"


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute causal attention and its gradients with plain PyTorch, in slices of queries so that long inputs fit.

    Parameters
    ----------
    q, k, v : Tensor
        ``[batch, query_heads, tokens, head_dim]`` and ``[batch, kv_heads, tokens, head_dim]``.
    gradient : Tensor
        That of the output, in its shape.
    dtype : torch.dtype
        What to compute in: float64 for the exact result, the dtype of ``q`` for what plain PyTorch makes of it.

    Returns
    -------
    output, grad_q, grad_k, grad_v : Tensor
        In float64, whatever they were computed in.
    """
    queries, keys, values = inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
    output, *sums = (torch.zeros_like(tensor, dtype=torch.float64) for tensor in (q, q, k, v))
    for first in range(0, q.shape[2], SLICE):
        end = first + SLICE
        seen = (keys[:, :, :end], values[:, :, :end])
        part = attention(queries[:, :, first:end], *seen, causal=True, backend="reference")
        output[:, :, first:end] = part.detach()
        pieces = torch.autograd.grad(part, inputs, gradient[:, :, first:end].to(dtype))
        for total, piece in zip(sums, pieces, strict=True):
            total += piece
    return output, sums[0], sums[1], sums[2]


def output_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error of an output's worst row, relative to the length of that row.

    Late rows of causal attention average many values and are small: an error relative to the largest value of all would not
    see that they are wrong.
    """
    return float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def gradient_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the error of gradients relative to their length, all of them as one vector: single rows may be exactly 0."""
    wrong = torch.cat([(mine - right).flatten() for mine, right in zip(found, exact, strict=True)])
    return float(wrong.norm() / torch.cat([right.flatten() for right in exact]).norm())


def others() -> list[Contestant]:
    """Return causal attention as others compute it on a card.

    One that is not installed, or does not take a shape, raises when it is called. Asked for again before each new shape,
    FlexAttention is compiled for that shape. Compiled functions of the process are forgotten.
    """
    import torch._functorch.config as functorch_config
    from torch.nn.attention import SDPBackend
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # after eight shapes PyTorch would stop compiling and run the uncompiled function
    functorch_config.donated_buffer = False  # a benchmark runs many backward passes after one forward pass
    compiled: Any = torch.compile(flex_attention)
    mask = functools.cache(functools.partial(create_block_mask, lambda b, h, i, j: i >= j, None, None))

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        visible = mask(q.shape[2], k.shape[2], q.device)
        return compiled(q, k, v, block_mask=visible, enable_gqa=q.shape[1] != k.shape[1])  # type: ignore[no-any-return]

    return [
        Contestant("SDPA flash", functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
        Contestant("SDPA cuDNN", functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
        Contestant("SDPA efficient", functools.partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION)),
        Contestant("FlexAttention", flex),
        Contestant("flash-attn", _flash_attn),
    ]


def _sdpa(backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    output: torch.Tensor = flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=True)
    return output.transpose(1, 2)
