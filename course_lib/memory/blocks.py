"""The blocks that decoders are made of, as sums of parts.

`Family` says how one model type puts them together; `describe` turns a configuration into the `Part` that gives
parameters and cache. Read `attention`, `feed_forward` and `describe` with the defaults of `Family` and you have Llama,
which chapter 01 (notebooks/01-memory.ipynb) derives line by line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from course_lib.memory.architecture import NOTHING, Part, cached, embedding, linear, total, vector
from course_lib.memory.config import MOST_LAYERS, Fields, UnsupportedError
from course_lib.memory.units import shown

Flag = bool | str  # True, False, or the configuration field that says which
Layer = Callable[["Family", Fields, "Dims", int], Part]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts that replaces the feed-forward block in some layers.

    Parameters
    ----------
    count, size : str
        Fields with the number of experts and the width of one.
    shared : str or None
        Field with the number of shared experts, each as wide as a routed one.
    shared_size : str or None
        Field with the width of the shared expert, multiplied with `shared` when both are given.
    shared_gate : bool
        Whether a scalar gate, one row of `hidden` weights, scales the shared expert.
    correction : bool
        Whether the router's load-balancing bias is a parameter (in most models it is a buffer).
    bias : bool
        Whether router and experts have biases.
    sparse : callable
        Says of each layer whether it has experts.
    """

    count: str
    size: str
    shared: str | None = None
    shared_size: str | None = None
    shared_gate: bool = False
    correction: bool = False
    bias: bool = False
    sparse: Callable[[Fields, int], bool] = lambda c, i: True


@dataclass(frozen=True)
class Family:
    """How a model type is put together; the defaults are Llama's.

    A `Flag` is a bool or the name of the configuration field that decides.
    """

    # Names of fields, where a family has its own.
    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str | None = "num_attention_heads"  # None: no attention
    kv_heads: str | None = "num_key_value_heads"  # None: as many as query heads
    head_dim: str | None = "head_dim"  # "optional": hidden / heads unless given; None: always; "latent": not used
    ffn: str | int = "intermediate_size"  # a number: that many times hidden; 0: no feed-forward block
    vocab: str = "vocab_size"
    windows: Literal["layer_types", "sliding_window"] | None = None
    # Embeddings and head.
    positions: str | None = None  # field with the number of learned position vectors
    positions_offset: int = 0
    token_types: str | None = None
    embedding_norm: Flag = False
    tied: Flag = "tie_word_embeddings"
    head: Literal["plain", "masked"] = "plain"  # "masked": dense, norm and a bias before the tied table, as in BERT
    head_bias: Flag = False
    must_tie: bool = False  # no formula for an untied head
    # Norms.
    norm: Literal["rms", "layer", "none"] = "rms"
    norms: int = 2
    final_norm: Flag = True
    # Attention.
    qkv_bias: Flag = "attention_bias"
    key_bias: Flag | None = None  # where it differs from qkv_bias
    out_bias: Flag = "attention_bias"
    fused_qkv: bool = False
    qk_norm: Literal["head", "heads", "width"] | None = None  # one scale per channel of a head, of each head, of all
    qk_norm_if: Flag = True
    gate: Literal["element", "head"] | None = None
    sinks: Flag = False
    cross_attention: Flag = False
    # Feed-forward.
    mlp_bias: Flag = False
    gated: bool = True
    fused_gate_up: bool = False
    experts: Experts | None = None
    # Blocks of their own, by layer type, and whatever a layer or the model has besides.
    mixers: dict[str, Layer] = field(default_factory=dict)
    layer_types: Callable[[Fields, int], list[str]] | None = None
    extra_layer: Layer | None = None
    extra_model: Callable[[Family, Fields, Dims], Part] | None = None
    ends: Callable[[Family, Fields, Dims], Part] | None = None  # instead of the usual embeddings, final norm and head
    dense: bool = True  # False: the mixer brings its feed-forward block
    unused: tuple[str, ...] = ()  # fields that this family's class never reads
    unsupported: tuple[str, ...] = ()  # fields that must be off for the formula to hold

    def but(self, **changes: Any) -> Family:
        """Return the family with some options changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Dims:
    """The numbers that every formula needs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    types: tuple[str, ...] = ()

    @property
    def q(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all key, or value, heads together."""
        return self.kv_heads * self.head_dim


def flag(c: Fields, option: Flag) -> bool:
    """Return what a flag says for a configuration."""
    return c.switch(option) if isinstance(option, str) else option


def active_experts(c: Fields) -> int:
    """Experts that work on a token: 1 where the configuration does not say."""
    return max(c.largest(name) or 1 for name in _ACTIVE_EXPERTS)


def norm(f: Family, width: int) -> Part:
    """Scale of an RMS norm, scale and shift of a layer norm, or nothing."""
    return vector({"rms": 1, "layer": 2, "none": 0}[f.norm] * width)


def window(f: Family, c: Fields, d: Dims, i: int) -> int | None:
    """Width of layer `i`'s sliding window, by the rule of Transformers' dynamic cache."""
    if d.types[i] in ("sliding_attention", "hybrid_sliding"):
        return c.whole("sliding_window", 1)
    return c.whole("attention_chunk_size", 1) if d.types[i] == "chunked_attention" else None


def attention(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Queries, keys, values and output; keys and values of every kept token stay in the cache."""
    bias, key_bias = flag(c, f.qkv_bias), flag(c, f.qkv_bias if f.key_bias is None else f.key_bias)
    if f.fused_qkv:
        part = linear(d.hidden, d.q + 2 * d.kv, bias)
    else:
        part = linear(d.hidden, d.q, bias) + linear(d.hidden, d.kv, key_bias) + linear(d.hidden, d.kv, bias)
    part += linear(d.q, d.hidden, flag(c, f.out_bias)) + cached(2 * d.kv, window(f, c, d, i), products=2 * d.q)
    if f.qk_norm and flag(c, f.qk_norm_if):
        widths = {"head": (d.head_dim, d.head_dim), "heads": (d.q, d.kv), "width": (d.q, d.kv)}[f.qk_norm]
        part += total(norm(f, width) for width in widths)
    if f.gate:
        part += linear(d.hidden, d.q if f.gate == "element" else d.heads)
    return part + vector(d.heads * flag(c, f.sinks))


def cross_attention(f: Family, c: Fields, d: Dims) -> Part:
    """The cross-attention that decoders of encoder-decoder models carry; without an encoder it caches nothing."""
    bias, key_bias = flag(c, f.qkv_bias), flag(c, f.qkv_bias if f.key_bias is None else f.key_bias)
    projections = 2 * linear(d.hidden, d.q, bias) + linear(d.hidden, d.q, key_bias)
    return projections + linear(d.q, d.hidden, flag(c, f.out_bias)) + norm(f, d.hidden)


def mlp(f: Family, c: Fields, hidden: int, ffn: int) -> Part:
    """Up and down, and for a gated one a gate beside the up projection."""
    bias = flag(c, f.mlp_bias)
    if f.gated and f.fused_gate_up:
        up = linear(hidden, 2 * ffn, bias)
    else:
        up = (2 if f.gated else 1) * linear(hidden, ffn, bias)
    return up + linear(ffn, hidden, bias)


def mixture(f: Family, e: Experts, c: Fields, d: Dims) -> Part:
    """Every expert's weights, a router, and whatever shared expert there is: all are in memory, few are active."""
    count, size, active = c.whole(e.count), c.whole(e.size), active_experts(c)
    if count and active > count:
        raise ValueError(f"{c.label}: a token goes to {active} experts, and there are {count}")
    columns = (2 if f.gated else 1) * size
    part = linear(d.hidden, count, e.bias, "other")
    part += count * (linear(d.hidden, columns, e.bias, "experts") + linear(size, d.hidden, e.bias, "experts"))
    shared = c.whole(e.shared_size) if e.shared_size else size if e.shared else 0
    shared *= c.optional(e.shared, 0) if e.shared else 1
    if shared:
        part += mlp(f, c, d.hidden, shared)
    return part + vector(d.hidden * e.shared_gate + count * e.correction)


def feed_forward(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """The dense block, or the experts where layer `i` has them."""
    if f.experts and f.experts.sparse(c, i):
        return mixture(f, f.experts, c, d)
    return mlp(f, c, d.hidden, d.ffn)


def layer(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Layer `i`: mixer, feed-forward and norms."""
    mixer = f.mixers.get(d.types[i]) or (attention if d.types[i] in _ATTENTION else None)
    if mixer is None:
        raise UnsupportedError(f"no formula for layers of type {d.types[i]!r} in {c.model_type!r}")
    part = mixer(f, c, d, i) + f.norms * norm(f, d.hidden)
    if f.dense and (f.ffn or f.experts):
        part += feed_forward(f, c, d, i)
    if flag(c, f.cross_attention):
        part += cross_attention(f, c, d)
    return part + (f.extra_layer(f, c, d, i) if f.extra_layer else NOTHING)


_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")


def _layers(f: Family, c: Fields, d: Dims) -> Part:
    """All layers: those of a kind are described once, where nothing but its kind and experts can tell one from another."""
    if f.mixers or f.extra_layer:
        return total(layer(f, c, d, i) for i in range(d.layers))
    first: dict[tuple[str, bool], int] = {}
    count: Counter[tuple[str, bool]] = Counter()
    for i, name in enumerate(d.types):
        kind = (name, bool(f.experts and f.experts.sparse(c, i)))
        first.setdefault(kind, i)
        count[kind] += 1
    return total(count[kind] * layer(f, c, d, i) for kind, i in first.items())


def _types(f: Family, c: Fields, layers: int) -> tuple[str, ...]:
    """Layer types by the rule of Transformers' dynamic cache: named, or told by a window, or all full."""
    types = f.layer_types(c, layers) if f.layer_types else c["layer_types"] if f.windows == "layer_types" else None
    types = types or c.get("layer_types")
    if types is not None:
        c.ignore("sliding_window", "attention_chunk_size")  # read by the layers that have one
    if types is None:
        sliding = c["sliding_window"] if f.windows == "sliding_window" else c.get("sliding_window")
        chunk = None if sliding is not None else c.get("attention_chunk_size")
        name = "sliding_attention" if sliding is not None else "chunked_attention" if chunk else "full_attention"
        types = [name] * layers
    if not isinstance(types, list | tuple):
        raise ValueError(f"{c.label}: layer_types must be a list with one name for each layer, got {shown(types)}")
    if len(types) != layers:
        raise UnsupportedError(f"{c.label} names {len(types)} layer types for {layers} layers")
    return tuple(types)


def dims(f: Family, c: Fields) -> Dims:
    """Read the numbers that every formula needs."""
    hidden, layers = c.whole(f.hidden, 1), c.whole(f.layers, most=MOST_LAYERS)
    heads = c.whole(f.heads, 1) if f.heads else 1
    kv_heads = heads if f.kv_heads is None or c[f.kv_heads] is None else c.whole(f.kv_heads, 1)
    if heads % kv_heads:
        raise ValueError(f"{c.label}: {f.heads} ({heads}) must be a multiple of {f.kv_heads} ({kv_heads})")
    own = f.head_dim not in (None, "optional", "latent")
    name = str(f.head_dim) if own else "head_dim"
    given = None if f.head_dim == "latent" or (c[name] if own else c.get(name)) is None else c.whole(name, 1)
    ffn = f.ffn * hidden if isinstance(f.ffn, int) else c.optional(f.ffn, 0 if f.experts else 4 * hidden)
    if f.head_dim is None and (hidden % heads or (given or hidden // heads) != hidden // heads):
        raise UnsupportedError(f"{c.label}: no formula for {heads} heads of {given} over {hidden} channels")
    head_dim = hidden // heads if given is None else given
    rope = c.get("rope_parameters", {})
    if rope and int(head_dim * rope.get("partial_rotary_factor", 1.0)) % 2:
        raise UnsupportedError(f"{c.label}: no formula for a rotation of {head_dim} channels that leaves one unpaired")
    return Dims(hidden, layers, heads, kv_heads, head_dim, ffn, c.whole(f.vocab), _types(f, c, layers))


def ends(f: Family, c: Fields, d: Dims) -> Part:
    """Everything that is there once: embeddings, final norm, output head."""
    part = embedding(d.vocab, d.hidden)
    if f.positions:
        part += embedding(c.whole(f.positions) + f.positions_offset, d.hidden)
    if f.token_types:
        part += embedding(c.whole(f.token_types), d.hidden)
    part += (flag(c, f.embedding_norm) + flag(c, f.final_norm)) * norm(f, d.hidden)
    if f.head == "masked":
        part += linear(d.hidden, d.hidden, True, "head") + norm(f, d.hidden) + vector(d.vocab)
    elif not flag(c, f.tied):
        part += linear(d.hidden, d.vocab, kind="head")
    return part + vector(d.vocab * flag(c, f.head_bias))


def describe(f: Family, c: Fields) -> Part:
    """Turn a configuration into the sum of its parts.

    Parameters
    ----------
    f : Family
        How the model type is put together.
    c : Fields
        The configuration.

    Returns
    -------
    Part
        All weights, tied ones once, and all cached tensors.

    Raises
    ------
    MissingFieldError
        If the configuration leaves out a field that the formula needs.
    UnsupportedError
        If it turns on something that the formula does not cover.
    """
    for name in f.unsupported:
        if c.get(name):
            raise UnsupportedError(f"no formula for {name}={c.get(name)!r} in {c.model_type!r}")
    c.ignore(*f.unused)
    if "xielu" in (c.get("hidden_act"), c.get("hidden_activation")) and not c.model_type.startswith("apertus"):
        raise UnsupportedError(f"no formula for an activation with parameters in {c.model_type!r}")
    if f.must_tie and not flag(c, f.tied):
        raise UnsupportedError(f"no formula for an untied head in {c.model_type!r}")
    d = dims(f, c)
    part = _layers(f, c, d) + (f.ends or ends)(f, c, d)
    return part + (f.extra_model(f, c, d) if f.extra_model else NOTHING)
