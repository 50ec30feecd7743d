"""Rotary positions in Triton: queries and keys turned in one pass over their memory, in place if wanted.

Functions
---------
rope, rope_qk
    Turn one tensor, or queries and keys in one launch, with gradients.

Rotation is bound by memory: four multiplications for every two numbers that are read and written. What counts is bytes. In
16 bits a token's heads move ``4 * heads * head_dim`` bytes, there and back. Its cosines and sines are ``4 * head_dim`` bytes of
float32: a share of ``1 / (heads + 1)`` if they are read once for all heads of queries and keys, 2.4 percent for Llama 3 8B with
its 32 and 8. So a program turns all heads of its tokens, and angles come from tables: computing them in every layer anew would
save those few percent at most, and a sine of an angle of 100,000 radians is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from course_lib.kernels.flash_attention import laid_out_like, machine_refusal
from course_lib.kernels.rope_arguments import Layout, check_rope
from course_lib.kernels.rope_kernel import rope_kernel

#: Pairs that a program holds at once, and its warps, on every card. In 16 bits a thread of an NVIDIA card then has four loads of
#: 16 bytes in flight, and eight programs on a processor, which the compiled kernels allow, 64 KiB: more than bandwidth times latency.
PAIRS_AT_ONCE, NUM_WARPS = 2048, 4


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, layout: Layout = "half", inplace: bool = False
) -> torch.Tensor:
    """Turn each pair of coordinates by its angle, as `course_lib.positions.apply_rope` does.

    Parameters
    ----------
    x : Tensor
        Queries or keys, ``[batch, heads, length, head_dim]`` or without leading axes, in any strides: a transposed view is not
        copied. Packed sequences ``[total_tokens, heads, head_dim]`` go in as ``x.transpose(0, 1)``. float16, bfloat16, float32
        or float64.
    cos, sin : Tensor
        From `course_lib.positions.rope_cos_sin`: ``[length, pairs]``, or ``[batch, length, pairs]`` where each sequence has
        positions of its own. With fewer pairs than ``head_dim / 2`` the first ``2 * pairs`` coordinates are turned and the
        rest pass.
    layout : str
        ``"half"``: ``i`` and ``i + pairs`` make a pair; ``"interleaved"``: ``2 i`` and ``2 i + 1``.
    inplace : bool
        Whether the result is written over ``x``, and ``x`` returned. That is for inference: it has no gradient.

    Returns
    -------
    Tensor
        Shape and dtype of ``x``, laid out as it is; computed in float32, or in float64 where ``x`` is float64. Gradients reach
        ``x`` (turned by minus the angle, to any order).

    Raises
    ------
    ValueError
        If ``layout`` is unknown, shapes or devices do not fit, the kernel cannot run here, a table requires a gradient, or
        ``inplace`` is asked for where ``x`` requires one or holds an element twice.

    Notes
    -----
    Su et al., "RoFormer", 2021, equation 34.
    """
    return _turned({"x": x}, cos, sin, layout, inplace)[0]


def rope_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    layout: Layout = "half",
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn queries and keys in one launch, which reads the tables once; for one new token, launching is most of the time.

    Parameters
    ----------
    q, k : Tensor
        ``[batch, query_heads, length, head_dim]`` and ``[batch, kv_heads, length, head_dim]``, as ``x`` of `rope`.
    cos, sin, layout, inplace
        As for `rope`.

    Returns
    -------
    q, k : Tensor
        As from `rope`.

    Raises
    ------
    ValueError
        As from `rope`.
    """
    turned = _turned({"q": q, "k": k}, cos, sin, layout, inplace)
    return turned[0], turned[1]


def _turned(
    named: dict[str, torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, layout: Layout, inplace: bool
) -> tuple[torch.Tensor, ...]:
    """Check tensors of one call, bring them into four axes and turn them."""
    for name, x in named.items():
        _check(name, x, cos, sin, inplace)
        check_rope(x, cos, sin, layout, name)
    tensors = tuple(named.values())
    views = [_four_axes(x, cos) for x in tensors]
    if len({view.shape[0] for view in views}) > 1:
        raise ValueError(f"q has {views[0].shape[0]} sequences and k {views[1].shape[0]}; they must be equal")
    if not inplace:
        outputs = Rotation.apply(cos, sin, layout, False, *views)  # type: ignore[no-untyped-call]
        return tuple(output.view(x.shape) for output, x in zip(outputs, tensors, strict=True))
    _launch(views, views, cos, sin, layout, inverse=False)
    # PyTorch then notices if another operation had kept these tensors for its gradient.
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])
    return tensors


def _check(name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inplace: bool) -> None:
    """Raise a ValueError for what `course_lib.positions.apply_rope` accepts and the kernel does not."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{name} is {x.dtype}; float16, bfloat16, float32 and float64 are accepted")
    if not 2 <= x.ndim <= 4 or not 2 <= cos.ndim <= min(x.ndim, 3):
        raise ValueError(
            f"{name} has {x.ndim} axes and cos {cos.ndim}; accepted are 2 to 4, [batch, heads, length, head_dim] at most, and "
            "2 or 3, [batch, length, pairs] at most"
        )
    if cos.ndim == 3 and len(cos) not in (1, len(x)):
        raise ValueError(
            f"cos has {len(cos)} sequences and {name} {len(x)}; they must be equal, or cos have one for all"
        )
    if not x.device == cos.device == sin.device:
        raise ValueError(
            f"{name} is on {x.device}, cos on {cos.device} and sin on {sin.device}; they must be on one device"
        )
    # Tensors without memory pass, so that a launch can be recorded instead of run.
    if x.device.type != "meta" and (reason := machine_refusal(x, name)):
        raise ValueError(f"{name} cannot be turned by the kernel: {reason}")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("cos or sin requires a gradient, which the kernel does not compute; use apply_rope")
    if inplace and torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"inplace is True and {name} requires a gradient; in place is accepted without gradients")
    if inplace and any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(
            f"inplace is True and {name} is expanded: several of its elements are one in memory; clone it first"
        )


def _four_axes(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Return a tensor as ``[batch, heads, length, head_dim]``; tables of three axes say that the first axis is the batch."""
    if x.ndim == 4:
        return x
    if x.ndim == 3:
        return x[:, None] if cos.ndim == 3 else x[None]
    return x[None, None]


class Rotation(torch.autograd.Function):
    """The kernel with its gradient: the rotation back."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        cos, sin, ctx.layout, ctx.inverse, *tensors = arguments
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        outputs = tuple(laid_out_like(x, x.shape[-1]) for x in tensors)
        _launch(tensors, outputs, cos, sin, ctx.layout, ctx.inverse)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = [grad if wants else None for grad, wants in zip(grads, ctx.needs_input_grad[4:], strict=True)]
        present = [grad for grad in wanted if grad is not None]
        turned = Rotation.apply(*ctx.saved_tensors, ctx.layout, not ctx.inverse, *present) if present else ()  # type: ignore[no-untyped-call]
        back = iter(turned)
        return None, None, None, None, *(None if grad is None else next(back) for grad in wanted)


def _launch(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: Layout,
    inverse: bool,
) -> None:
    """Launch the kernel on one or two tensors of four axes, a program for each block of tokens of each sequence."""
    if not any(x.numel() for x in inputs):
        return
    batch, _, length, _ = inputs[0].shape
    pairs, heads = cos.shape[-1], [x.shape[1] for x in inputs]
    rests = [0 if inputs is outputs else x.shape[-1] - 2 * pairs for x in inputs]
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    table = cos if cos.ndim == 3 else cos[None]
    # A row is a head of a token: a program holds the pairs of so many at once. What passes is only copied and counts less.
    rows = max(1, PAIRS_AT_ONCE // triton.next_power_of_2(max(1, pairs, *(rest // 4 for rest in rests))))
    blocks = [min(rows, triton.next_power_of_2(max(1, count))) for count in heads]
    tokens = min(rows // max(blocks), triton.next_power_of_2(length))
    reaches = [_reach(x.stride()[1:], (max(blocks), tokens, x.shape[-1])) for x in (*inputs, *outputs)]
    reaches.append(_reach(table.stride()[1:], (tokens, pairs)))
    last = len(inputs) - 1  # the keys, or where there are none the queries again, of which the kernel makes no use
    arguments: dict[str, Any] = {
        "q_ptr": inputs[0],
        "q_out_ptr": outputs[0],
        "k_ptr": inputs[1] if last else None,
        "k_out_ptr": outputs[1] if last else None,
        "cos_ptr": cos,
        "sin_ptr": sin,
        **_strides("q", "bhld", inputs[0]),
        **_strides("qo", "bhld", outputs[0]),
        **_strides("k", "bhld", inputs[last]),
        **_strides("ko", "bhld", outputs[last]),
        **_strides("t", "blp", table if len(table) == batch else table.expand(batch, -1, -1)),
        "batch": batch,
        "length": length,
        "q_heads": heads[0],
        "k_heads": heads[last],
        "INTERLEAVED": layout == "interleaved",
        "INVERSE": inverse,
        "WIDE": max(reaches) >= 2**31,
        "PAIRS": pairs,
        "Q_REST": rests[0],
        "K_REST": rests[last],
        "TOKENS": tokens,
        "Q_HEADS": blocks[0],
        "K_HEADS": blocks[last],
        "BLOCK_P": triton.next_power_of_2(max(1, pairs)),
    }
    with torch.cuda.device_of(inputs[0]):  # type: ignore[no-untyped-call]
        rope_kernel[(batch * triton.cdiv(length, tokens),)](**arguments, num_warps=NUM_WARPS, num_stages=1)


def _strides(name: str, axes: str, x: torch.Tensor) -> dict[str, int]:
    """Return strides as arguments of the kernel."""
    return {f"stride_{name}{axis}": stride for axis, stride in zip(axes, x.stride(), strict=True)}


def _reach(strides: Sequence[int], sizes: Sequence[int]) -> int:
    """Return how many elements a block of some sizes spans."""
    return sum(stride * size for stride, size in zip(strides, sizes, strict=True))
