"""Exercises of chapter 11 about a decoder's layers: weights and caches to test with, right answers, and what common mistakes lead to."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import torch
from torch.nn import functional

# Of the weights: so small that angles in float32, which a right solution may have, move no output by what a test allows.
SPREAD = 0.15
Weights = dict[str, torch.Tensor]
Sizes = dict[str, Any]


def random_layer(rng: Random) -> tuple[Weights, Sizes, torch.Generator]:
    """Draw a Llama layer's weights in float64, by their names, and its sizes. Its heads are wider than ``hidden_size / heads``."""
    kv_heads, head_dim = rng.randint(2, 3), rng.choice([8, 12])
    heads, hidden, inner = kv_heads * rng.choice([2, 4]), rng.choice([20, 24, 28]), rng.randint(20, 40)
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    queries, keys = heads * head_dim, kv_heads * head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {
        f"{name}.weight": SPREAD * torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.weight"] = 0.5 + torch.rand(hidden, generator=draw, dtype=torch.float64)
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": float(rng.choice([50, 100, 500])),
    }
    return weights, sizes, draw


def _stream(rng: Random, width: int, draw: torch.Generator) -> torch.Tensor:
    # A mean away from 0 tells a norm that subtracts it.
    return 0.3 + 0.5 * torch.randn(rng.randint(1, 3), rng.randint(5, 8), width, generator=draw, dtype=torch.float64)


# ---- one layer from its weights -----------------------------------------------------------------------------------


def random_pass(rng: Random) -> tuple[torch.Tensor, Weights, Sizes]:
    """Draw a stream ``[batch, length, hidden]``, a layer's weights by their names, and its sizes."""
    weights, sizes, draw = random_layer(rng)
    return _stream(rng, len(weights["input_layernorm.weight"]), draw), weights, sizes


Fault = Literal[
    "", "pre", "mean", "stream", "post", "unturned", "pairs", "values", "width", "apart", "open", "gate", "relu", "alone",
    "sum", "scale", "beside", "plain", "columns", "reversed",
]  # fmt: skip
LAYER_FAULTS: dict[str, Fault] = {
    "Attention reads the stream itself: it reads a normalised copy.": "pre",
    "The norm subtracts the mean: RMSNorm divides by the root of the mean square, and no more.": "mean",
    "The norm's weight is missing.": "plain",
    "Attention's output takes the stream's place: it is added to it.": "stream",
    "The feed-forward network's output takes the stream's place: it is added to it.": "alone",
    "The feed-forward network reads the layer's input: it comes after attention, and reads what attention added too.": "beside",
    "The feed-forward network reads the stream itself: it reads a normalised copy.": "post",
    "The feed-forward network's output is added to its normalised input, not to the stream.": "sum",
    "Queries and keys are not turned by their positions.": "unturned",
    "Neighbouring coordinates are turned together: in a Llama layer the first half of a head goes with the second.": "pairs",
    "Values are turned too: RoPE is for queries and keys alone.": "values",
    "Positions run from the end to the beginning.": "reversed",
    "Scores are divided by the root of hidden_size / heads: this layer's heads are wider, and `head_dim` says how wide.": "width",
    "Scores are not divided by the root of head_dim.": "scale",
    "Query heads go round the key-value heads in turn: neighbouring query heads share one.": "apart",
    "A token sees those behind it.": "open",
    "SiLU is applied to the `up` projection: it belongs to the `gate`.": "gate",
    "ReLU stands where SiLU belongs.": "relu",
    "Heads are put beside one another in the wrong order: exchange heads and tokens before the output projection.": "columns",
}


def layer(x: torch.Tensor, weights: Weights, sizes: Sizes) -> torch.Tensor:
    """Return what a Llama layer makes of a stream that begins at position 0, ``[batch, length, hidden]``."""
    return _layer(x, weights, sizes, "")


def layer_mistakes(x: torch.Tensor, weights: Weights, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Return what mistakes in a decoder layer lead to."""
    return {why: _layer(x, weights, sizes, fault) for why, fault in LAYER_FAULTS.items()}


def _layer(x: torch.Tensor, weights: Weights, sizes: Sizes, fault: Fault) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if fault == "mean" else x
        scaled: torch.Tensor = x * (x.square().mean(-1, keepdim=True) + sizes["rms_norm_eps"]).rsqrt()
        return scaled if fault == "plain" else scaled * weights[f"{name}.weight"]

    read = x if fault == "pre" else norm(x, "input_layernorm")
    q, k, v = (_heads(read, weights, sizes, name) for name in ("q_proj", "k_proj", "v_proj"))
    added = _attend(q, k, v, weights, sizes, torch.arange(x.shape[1]), fault)
    stream = added if fault == "stream" else x + added
    source = x if fault == "beside" else stream
    read = source if fault == "post" else norm(source, "post_attention_layernorm")
    gate, up = (functional.linear(read, weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    gate, up = (up, gate) if fault == "gate" else (gate, up)
    active = gate.relu() if fault == "relu" else functional.silu(gate)
    network = functional.linear(active * up, weights["mlp.down_proj.weight"])
    kept = {"alone": torch.zeros_like(stream), "sum": read}.get(fault, stream)
    return kept + network


def _heads(x: torch.Tensor, weights: Weights, sizes: Sizes, name: str) -> torch.Tensor:
    projected: torch.Tensor = functional.linear(x, weights[f"self_attn.{name}.weight"])
    return projected.view(*x.shape[:2], -1, sizes["head_dim"]).transpose(1, 2)


def _turn(x: torch.Tensor, positions: torch.Tensor, sizes: Sizes, fault: str = "") -> torch.Tensor:
    half = sizes["head_dim"] // 2
    angles = positions[:, None] * sizes["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos(), angles.sin()
    if fault == "unturned":
        return x
    if fault == "pairs":
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: Weights, sizes: Sizes, places: torch.Tensor, fault: str
) -> torch.Tensor:
    places = places.flip(0) if fault == "reversed" else places
    q, k = (_turn(x, places, sizes, fault) for x in (q, k))
    v = _turn(v, places, sizes) if fault == "values" else v
    hidden = weights["self_attn.q_proj.weight"].shape[1]
    width = {"width": hidden / q.shape[1], "scale": 1.0}.get(fault, q.shape[-1])
    return _merge(q, k, v, weights, width, causal=fault != "open", apart=fault == "apart", columns=fault == "columns")


def _merge(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weights: Weights,
    width: float,
    *,
    causal: bool = True,
    apart: bool = False,
    columns: bool = False,
) -> torch.Tensor:
    """Attend with turned queries and keys, and project the heads' outputs."""
    heads, groups = q.shape[1], k.shape[1]
    served = torch.arange(heads) % groups if apart else torch.arange(heads) // (heads // groups)
    scores = q @ k[:, served].mT * width**-0.5
    if causal:
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~sees, -torch.inf)
    output = scores.softmax(-1) @ v[:, served]
    output = output if columns else output.transpose(1, 2)
    batch, length = q.shape[0], q.shape[2]
    return functional.linear(output.reshape(batch, length, -1), weights["self_attn.o_proj.weight"])


# ---- a trace of passes --------------------------------------------------------------------------------------------


def passes(prompt: int, new: int, chunk: int, token_bytes: int) -> torch.Tensor:
    """Return tokens run, first and last position, and bytes cached afterwards, of every pass, int64 ``[passes, 4]``."""
    return _passes(prompt, new, chunk, token_bytes)


def _passes(prompt: int, new: int, chunk: int, token_bytes: int, fault: str = "") -> torch.Tensor:
    starts, held = list[tuple[int, int]](), 0
    whole = prompt - 1 if fault == "kept" else prompt
    while held < whole:
        run = chunk if fault == "padded" else min(chunk, whole - held)
        run = whole if fault == "whole" else run
        starts.append((run, held))
        held += run
    prefill = len(starts)
    if fault == "twice":
        starts.append((1, prompt - 1))
    more = {"one more": 1, "one less": -1, "kept": 1}.get(fault, 0)
    starts += [(1, held + step) for step in range(new - 1 + more)]
    rows = []
    for number, (run, start) in enumerate(starts):
        late = fault == "one" or (fault == "behind" and number >= prefill)
        first = 0 if fault == "again" else start + late
        last = first + run - (fault != "end")
        cached = {"before": start, "run": run}.get(fault, start + run)
        rows.append((run, first, last, cached * (1 if fault == "tokens" else token_bytes)))
    return torch.tensor(rows)


PASS_FAULTS = {
    "One pass too many: the last chunk's pass makes the first new token, and the last new token is never run.": "one more",
    "One pass too few: each new token but the last runs, in a pass of its own.": "one less",
    "The prompt's last token runs twice: the last chunk's pass already says what comes first.": "twice",
    "The prompt's last token has a pass of its own: it is the last of its chunk.": "kept",
    "The prompt is run in one pass: in chunks, no more than `chunk` tokens run at once.": "whole",
    "The last chunk is filled up: it runs what is left of the prompt.": "padded",
    "Positions count from 1: the prompt's first token stands at 0.": "one",
    "The first new token stands one place too late: the prompt ends at `prompt - 1`, so it stands at `prompt`.": "behind",
    "Positions start at 0 again in every pass: a token stands behind all that the cache holds.": "again",
    "The last position is one too large: of `n` tokens, the last stands `n - 1` places behind the first.": "end",
    "These are the bytes before the pass; afterwards the cache holds what has run, too.": "before",
    "These are the bytes that a pass adds: the cache keeps those of earlier passes.": "run",
    "These are tokens, not bytes: each takes token_bytes.": "tokens",
}


def pass_mistakes(prompt: int, new: int, chunk: int, token_bytes: int) -> dict[str, torch.Tensor]:
    """Return what mistakes about passes, positions and the cache lead to."""
    return {why: _passes(prompt, new, chunk, token_bytes, fault) for why, fault in PASS_FAULTS.items()}


# ---- attention of one new token -----------------------------------------------------------------------------------

DecodeInputs = tuple[torch.Tensor, Weights, torch.Tensor, torch.Tensor, Sizes]


def random_decode(rng: Random) -> DecodeInputs:
    """Draw normalised states of new tokens ``[batch, 1, hidden]``, weights, what a cache holds of the tokens before, and sizes.

    Keys and values are ``[batch, kv_heads, held, head_dim]``; the keys are turned.
    """
    weights, sizes, draw = random_layer(rng)
    weights = {name: weight for name, weight in weights.items() if name.startswith("self_attn.")}
    x = _stream(rng, weights["self_attn.q_proj.weight"].shape[1], draw)
    before = x[:, :-1]
    keys, values = (_heads(before, weights, sizes, name) for name in ("k_proj", "v_proj"))
    return x[:, -1:], weights, _turn(keys, torch.arange(before.shape[1]), sizes), values.contiguous(), sizes


def decoded(x: torch.Tensor, weights: Weights, keys: torch.Tensor, values: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return what attention adds to the stream of new tokens, ``[batch, 1, hidden]``."""
    return _decoded(x, weights, keys, values, sizes, "")


DECODE_FAULTS = {
    "The new token stands at 0: it stands behind those that the cache holds.": "zero",
    "The new token stands one place too late: with `held` tokens in the cache, the next stands at `held`.": "late",
    "The new token stands where the cache's last one does: with `held` tokens in the cache, the next stands at `held`.": "early",
    "The query is not turned.": "query",
    "The new key is not turned; those in the cache are.": "key",
    "The cache's keys are turned again: they were turned when they came.": "again",
    "The new value is turned: RoPE is for queries and keys alone.": "values",
    "The new token does not see itself: its key and value belong to those that it reads.": "itself",
    "The new token sees the first key alone: it is the last token, and sees all of them.": "first",
    "Only keys are appended: the new token's value is read too.": "value",
    "The new key stands in front of the cache's, its value behind theirs: they must lie in the same order.": "front",
    "Scores are not divided by the root of head_dim.": "scale",
    "Query heads go round the key-value heads in turn: neighbouring query heads share one.": "apart",
    "The output projection is missing.": "project",
}


def decode_mistakes(
    x: torch.Tensor, weights: Weights, keys: torch.Tensor, values: torch.Tensor, sizes: Sizes
) -> dict[str, torch.Tensor]:
    """Return what mistakes in the attention of a new token lead to."""
    return {why: _decoded(x, weights, keys, values, sizes, fault) for why, fault in DECODE_FAULTS.items()}


def _decoded(
    x: torch.Tensor, weights: Weights, keys: torch.Tensor, values: torch.Tensor, sizes: Sizes, fault: str
) -> torch.Tensor:
    held = keys.shape[2]
    place = torch.tensor([{"zero": 0, "late": held + 1, "early": held - 1}.get(fault, held)])
    q, k, v = (_heads(x, weights, sizes, name) for name in ("q_proj", "k_proj", "v_proj"))
    q = q if fault == "query" else _turn(q, place, sizes)
    k = k if fault == "key" else _turn(k, place, sizes)
    v = _turn(v, place, sizes) if fault == "values" else v
    if fault == "again":
        keys = _turn(keys, torch.arange(held), sizes)
    if fault != "itself":
        keys = torch.cat((k, keys) if fault == "front" else (keys, k), dim=2)
        values = torch.cat((values, torch.zeros_like(v) if fault == "value" else v), dim=2)
    if fault == "first":
        keys, values = keys[:, :, :1], values[:, :, :1]
    if fault == "project":
        weights = weights | {"self_attn.o_proj.weight": torch.eye(q.shape[1] * q.shape[-1], dtype=q.dtype)}
    width = 1 if fault == "scale" else sizes["head_dim"]
    return _merge(q, keys, values, weights, width, causal=False, apart=fault == "apart")
