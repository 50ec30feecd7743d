"""Mixers other than plain attention: latent attention, and layers whose memory is a state of fixed size.

Each function gives one layer's mixer: its weights and what it leaves in the cache.
"""

from __future__ import annotations

from course_lib.memory.architecture import Kind, Part, cached, linear, vector
from course_lib.memory.blocks import Dims, Family, attention, flag, window
from course_lib.memory.config import Fields


def latent_attention(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one compressed vector and one rotary key."""
    bias = flag(c, "attention_bias")
    nope, rope, value = c.whole("qk_nope_head_dim"), c.whole("qk_rope_head_dim"), c.whole("v_head_dim")
    rank, query_rank = c.whole("kv_lora_rank"), c["q_lora_rank"] if c["q_lora_rank"] is None else c.whole("q_lora_rank")
    query_width = d.heads * (nope + rope)
    if query_rank is not None:
        part = linear(d.hidden, query_rank, bias) + vector(query_rank) + linear(query_rank, query_width)
    else:
        part = linear(d.hidden, query_width)
    part += linear(d.hidden, rank + rope, bias) + vector(rank) + linear(rank, d.heads * (nope + value))
    c.ignore("head_dim", "qk_head_dim", "num_key_value_heads")
    # With the expansion to keys and values absorbed into queries and output: scores by the whole vector, output by its latent part.
    products = d.heads * (rank + rope + rank)
    kept = cached(rank + rope, window(f, c, d, i), products=products)
    return part + linear(d.heads * value, d.hidden, bias) + kept


def indexed_latent_attention(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Latent attention with DeepSeek-V3.2's sparse indexer, which caches a key of its own per token."""
    heads, width, query_rank = c.whole("index_n_heads"), c.whole("index_head_dim"), c.whole("q_lora_rank")
    c.ignore("index_topk")
    part = latent_attention(f, c, d, i) + linear(query_rank, heads * width) + linear(d.hidden, width)
    return part + vector(2 * width) + linear(d.hidden, heads) + cached(width, attention=False, products=heads * width)


def _state(conv: int, recurrent: int) -> Part:
    """A convolution's last inputs in the model's data type and a recurrent state in float32."""
    part = cached(fixed=conv, attention=False)
    return part + cached(fixed=recurrent, float32=True, attention=False) if recurrent else part


def mamba(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Mamba's selective state space (section 3): inner width `expand * hidden`, `state` numbers per channel."""
    prefixed = c.model_type in ("jamba", "zamba")
    if prefixed:
        inner, bias, conv_bias = (
            c.whole("mamba_expand") * d.hidden,
            flag(c, "mamba_proj_bias"),
            flag(c, "mamba_conv_bias"),
        )
        conv_width, rank, state = c.whole("mamba_d_conv"), c.whole("mamba_dt_rank"), c.whole("mamba_d_state")
    else:
        inner, bias, conv_bias = c.whole("intermediate_size"), flag(c, "use_bias"), flag(c, "use_conv_bias")
        conv_width, rank, state = c.whole("conv_kernel"), c.whole("time_step_rank"), c.whole("state_size")
    kind: Kind = "linear"
    if c.model_type == "zamba":  # these two projections are bare parameters there, one slice per head
        c.ignore("n_mamba_heads", "hidden_mamba_act")
        kind = "other"
    part = linear(d.hidden, 2 * inner, bias) + vector(inner * (conv_width + conv_bias))
    part += linear(inner, rank + 2 * state, kind=kind) + linear(rank, inner, True, kind) + linear(inner, d.hidden, bias)
    norms = rank + 2 * state if c.model_type == "jamba" else 0
    return part + vector(inner * state + inner + norms) + _state(inner * conv_width, inner * state)


def _mamba2(
    c: Fields,
    d: Dims,
    *,
    heads: int,
    width: int,
    state: int,
    groups: int,
    conv_width: int,
    conv_bias: bool,
    bias: bool,
    out_bias: bool,
    gated_norm: bool = True,
) -> Part:
    inner = heads * width
    channels = inner + 2 * groups * state
    part = linear(d.hidden, inner + channels + heads, bias) + vector(channels * (conv_width + conv_bias) + 3 * heads)
    part += linear(inner, d.hidden, out_bias) + vector(inner * gated_norm)
    return part + _state(channels * conv_width, inner * state)


def mamba2(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Mamba-2's heads of state space (section 7), as mamba2 and Nemotron-H name the fields."""
    nemotron = c.model_type == "nemotron_h"
    return _mamba2(
        c,
        d,
        heads=c.whole("mamba_num_heads" if nemotron else "num_heads"),
        width=c.whole("mamba_head_dim" if nemotron else "head_dim"),
        state=c.whole("ssm_state_size" if nemotron else "state_size"),
        groups=c.whole("n_groups"),
        conv_width=c.whole("conv_kernel"),
        conv_bias=flag(c, "use_conv_bias"),
        bias=flag(c, "use_bias"),
        out_bias=flag(c, "use_bias"),
    )


def mamba2_prefixed(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Mamba-2 as Bamba, Granite 4 and Falcon-H1 name the fields."""
    falcon = c.model_type == "falcon_h1"
    if falcon:
        c.ignore("mamba_d_ssm", "mamba_norm_before_gate", "mamba_use_mlp", "mamba_expand")
    return _mamba2(
        c,
        d,
        heads=c.whole("mamba_n_heads"),
        width=c.whole("mamba_d_head"),
        state=c.whole("mamba_d_state"),
        groups=c.whole("mamba_n_groups"),
        conv_width=c.whole("mamba_d_conv"),
        conv_bias=flag(c, "mamba_conv_bias"),
        bias=flag(c, "mamba_proj_bias"),
        out_bias=flag(c, "projectors_bias" if falcon else "mamba_proj_bias"),
        gated_norm=flag(c, "mamba_rms_norm") if falcon else True,
    )


def mamba2_zamba(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Mamba-2 as Zamba2 names the fields."""
    bias = flag(c, "add_bias_linear")
    c.ignore("mamba_expand")
    return _mamba2(
        c,
        d,
        heads=c.whole("n_mamba_heads"),
        width=c.whole("mamba_headdim"),
        state=c.whole("mamba_d_state"),
        groups=c.whole("mamba_ngroups"),
        conv_width=c.whole("mamba_d_conv"),
        conv_bias=True,
        bias=bias,
        out_bias=bias,
    )


def gated_delta_net(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid): a matrix of key by value width per value head."""
    key_heads, value_heads = c.whole("linear_num_key_heads"), c.whole("linear_num_value_heads")
    key_dim, value_dim = c.whole("linear_key_head_dim"), c.whole("linear_value_head_dim")
    conv_width, keys, values = c.whole("linear_conv_kernel_dim"), key_heads * key_dim, value_heads * value_dim
    part = linear(d.hidden, 2 * keys + 2 * values) + 2 * linear(d.hidden, value_heads) + linear(values, d.hidden)
    part += vector((2 * keys + values) * conv_width + 2 * value_heads + value_dim)
    return part + _state((2 * keys + values) * conv_width, value_heads * key_dim * value_dim)


def kimi_delta_attention(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Kimi delta attention: a decay per channel, and gates of low rank (in Bailing of full rank)."""
    heads, width, conv_width = (
        c.whole("linear_num_heads"),
        c.whole("linear_head_dim"),
        c.whole("linear_conv_kernel_dim"),
    )
    inner = heads * width
    gate = (
        linear(d.hidden, inner) if c.model_type == "bailing_hybrid" else linear(d.hidden, width) + linear(width, inner)
    )
    part = 3 * linear(d.hidden, inner) + 2 * gate + linear(d.hidden, heads) + linear(inner, d.hidden)
    part += vector(3 * inner * conv_width + heads + inner + width)
    return part + _state(3 * inner * conv_width, heads * width * width)


def short_convolution(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """LFM2's gated short convolution: only the last inputs stay."""
    width, bias = c.whole("conv_L_cache"), flag(c, "conv_bias")
    part = linear(d.hidden, 3 * d.hidden, bias) + linear(d.hidden, d.hidden, bias)
    return part + vector(d.hidden * (width + bias)) + _state(d.hidden * width, 0)


def gated_attention(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Attention whose query projection also gives an output gate (Qwen3-Next)."""
    return attention(f, c, d, i) + linear(d.hidden, d.q, flag(c, f.qkv_bias))


def attention_beside_mamba2(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    return attention(f, c, d, i) + mamba2_prefixed(f, c, d, i)


def nothing(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """A layer without a mixer."""
    return Part()
