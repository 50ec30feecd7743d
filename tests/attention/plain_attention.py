"""Attention in a dozen lines, and random calls on which backends are compared with it."""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

INFINITY = math.inf


def plain_attention(
    q, k, v, *, causal=False, scale=None, attention_mask=None, alibi_slopes=None, sliding_window=None, softcap=None
):
    """Return output and log-sum-exp by the formula, in the dtype of ``q`` (scores that an additive mask widens apart)."""
    group = q.shape[1] // k.shape[1]
    ahead = torch.arange(k.shape[2]) - k.shape[2] - torch.arange(-q.shape[2], 0)[:, None]
    scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(q.dtype)[..., None, None] * ahead.abs()
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if causal:
        seen = seen & (ahead <= 0)
    if sliding_window is not None:
        seen = seen & (ahead.abs() < sliding_window)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        seen = seen & attention_mask
    elif attention_mask is not None:
        scores = scores + attention_mask.to(torch.promote_types(q.dtype, torch.float32))
    scores = scores.masked_fill(~seen, -INFINITY)
    blind = (scores == -INFINITY).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0)
    weights = scores.softmax(-1).masked_fill(blind, 0).to(v.dtype)
    return weights @ v.repeat_interleave(group, 1), scores.logsumexp(-1).masked_fill(blind[..., 0], -INFINITY)


@dataclass
class Call:
    """Inputs of one call, and what flows back into its results."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rules: dict
    output_grad: torch.Tensor
    lse_grad: torch.Tensor

    def __repr__(self):
        tensors = {name: getattr(self, name) for name in "qkv"} | self.rules
        return ", ".join(
            f"{name}={tuple(one.shape)}/{one.stride()} {one.dtype}"
            if isinstance(one, torch.Tensor)
            else f"{name}={one}"
            for name, one in tensors.items()
        )

    def with_numbers(self, change):
        """Return the same call with other q, k, v and gradients."""
        return Call(*map(change, (self.q, self.k, self.v)), self.rules, *map(change, (self.output_grad, self.lse_grad)))

    def fresh(self, seed):
        """Return a call of the same kind and as hard, with luck of its own."""
        generator = torch.Generator().manual_seed(seed)

        def change(one):
            size = one.double().square().mean().sqrt() if one.numel() else 1.0
            return (torch.randn(one.shape, generator=generator, dtype=torch.float64) * size).to(one.dtype)

        return self.with_numbers(change)

    def nudged(self, seed):
        """Return this call with each number moved by about a rounding: who computes exactly hardly notices."""
        generator = torch.Generator().manual_seed(seed)

        def change(one):
            step = torch.randn(one.shape, generator=generator, dtype=torch.float64) * torch.finfo(self.q.dtype).eps / 2
            return (one.double() * (1 + step)).to(one.dtype)

        return self.with_numbers(change)

    def run(self, attend, dtype=None, with_lse=True, mask_grad=False):
        """Return output, log-sum-exp and the gradients of q, k, v (and of the mask), in the order of their names."""
        dtype = dtype or self.q.dtype
        # Inputs in their own dtype keep their strides, too.
        leaves = [one.detach().to(dtype).requires_grad_() for one in (self.q, self.k, self.v)]
        rules = dict(self.rules)
        if mask_grad:
            rules["attention_mask"] = rules["attention_mask"].detach().clone().requires_grad_()
        output, lse = attend(*leaves, **rules)
        results, upstream = [output], [self.output_grad.to(dtype)]
        if with_lse:
            # PyTorch's logsumexp has a gradient n times too large where log(n) is nothing beside the maximum.
            upstream.append(self.lse_grad.to(lse.dtype).masked_fill(lse.detach() < -1e4, 0))
            results.append(lse)
        if mask_grad:
            leaves.append(rules["attention_mask"])
        gradients = torch.autograd.grad(results, leaves, upstream, allow_unused=True)
        gradients = [
            torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, gradients, strict=True)
        ]
        names = ["output", "lse"][: len(results)] + ["q_grad", "k_grad", "v_grad", "mask_grad"][: len(leaves)]
        return dict(zip(names, [one.detach() for one in (*results, *gradients)], strict=True))

    def terms(self, exact, **options):
        """Return for each result the size of what is summed up for it, which one rounding is relative to.

        The rounding of a score, which is as large as the score, moves weights and all that they multiply. Terms of the gradients of
        q and k cancel: where one key is seen, the formula finds exactly 0, and others the rounding of two equal numbers.
        Both roundings are in float32 at least.
        """
        finer = torch.finfo(torch.promote_types(self.q.dtype, torch.float32)).eps / torch.finfo(self.q.dtype).eps
        largest = {name: one.abs().max().item() if one.numel() else 0.0 for name, one in exact.items()} | {"lse": 1.0}
        if 0 in (self.q.numel(), self.k.numel()):
            return largest
        scale = abs(self.rules.get("scale", self.q.shape[-1] ** -0.5))
        positive = Call(self.q, self.k, self.v.abs(), self.rules, self.output_grad.abs(), self.lse_grad)
        summed = positive.run(plain_attention, torch.float64, **options)
        keys = self.k.repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)
        score = scale * (self.q.double() @ keys.double().mT).abs().max().item()
        for name in ("output", "v_grad"):
            largest[name] = summed[name].max().item() * (1 + finer * score)
        q, k, v, gradient = (
            one.double().norm(dim=-1).max().item() for one in (self.q, self.k, self.v, self.output_grad)
        )
        for name, factor in (("q_grad", scale * k), ("k_grad", scale * q), ("mask_grad", 1.0)):
            if name in largest:
                largest[name] += finer * gradient * v * factor
        return largest


LAYOUTS = ["contiguous", "heads last", "every other row", "every other column", "column-major", "one for all heads"]


def lay_out(layout, shape, make):
    """Return random values of a shape ``[batch, heads, length, size]``, as a view of some larger or transposed tensor."""
    batch, heads, length, size = shape
    match layout:
        case "contiguous":
            return make(*shape)
        case "heads last":
            return make(batch, length, heads, size).transpose(1, 2)
        case "every other row":
            return make(batch, heads, 2 * length, size)[:, :, ::2]
        case "every other column":
            return make(batch, heads, length, 2 * size)[..., ::2]
        case "column-major":
            return make(batch, heads, size, length).mT
        case "one for all heads":
            return make(batch, 1, length, size).expand(shape)


@st.composite
def masks(draw, shape, make):
    """Draw a mask that broadcasts to a shape, boolean or of any floating dtype."""
    sizes = [draw(st.sampled_from([1, full])) for full in shape]
    while sizes and sizes[0] == 1 and draw(st.booleans()):
        sizes = sizes[1:]
    holes = make(*sizes) > draw(st.sampled_from([-1.5, 0.0, 2.0]))
    if draw(st.booleans()):
        return ~holes
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    lowest = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    return make(*sizes).to(dtype).masked_fill(holes, draw(st.sampled_from([-INFINITY, lowest, -3.0])))


@st.composite
def calls(draw, dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64), softcap=True, longest=24):
    """Draw a call: shapes, strides, dtype and rules by hypothesis, values by a generator."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(dtypes))
    amplitude = draw(st.sampled_from([0.5, 1.0, 2.0]))

    def make(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    batch, kv_heads, group = draw(st.sampled_from([1, 2, 3, 0])), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    kv_len = draw(st.integers(0, longest))
    query_len = draw(st.just(kv_len) | st.just(1) | st.integers(0, longest))
    head_dim = draw(st.sampled_from([1, 2, 5, 8, 16, 17, 40]))
    value_dim = draw(st.just(head_dim) | st.sampled_from([1, 7, 16]))
    query_heads = kv_heads * group
    shapes = [(batch, query_heads, query_len, head_dim), (batch, kv_heads, kv_len, head_dim)]
    shapes.append((batch, kv_heads, kv_len, value_dim))
    q, k, v = (
        lay_out(draw(st.sampled_from(LAYOUTS)), shape, lambda *sizes: (amplitude * make(*sizes)).to(dtype))
        for shape in shapes
    )
    rules = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        rules["scale"] = draw(st.sampled_from([0.0, 0.25, -0.3, 1.0]))
    if draw(st.booleans()):
        rules["sliding_window"] = draw(st.integers(1, longest + 2))
    if draw(st.booleans()):
        slopes = torch.rand(
            draw(st.sampled_from([(query_heads,), (1, query_heads), (batch, query_heads)])), generator=generator
        )
        rules["alibi_slopes"] = slopes
    if softcap and draw(st.booleans()):
        rules["softcap"] = draw(st.sampled_from([0.5, 3.0, 50.0]))
    if draw(st.booleans()):
        rules["attention_mask"] = draw(masks((batch, query_heads, query_len, kv_len), make))
    lse_grad = make(batch, query_heads, query_len)
    return Call(q, k, v, rules, make(batch, query_heads, query_len, value_dim).to(dtype), lse_grad)
