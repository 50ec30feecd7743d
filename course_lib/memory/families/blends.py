"""Parts of hybrid decoders: blocks that share weights, feed-forward blocks of their own, experts between recurrent layers."""

from __future__ import annotations

from course_lib.memory import recurrent as r
from course_lib.memory.architecture import NOTHING, Part, cached, linear, vector
from course_lib.memory.blocks import Dims, Experts, Family, flag, mixture, mlp
from course_lib.memory.config import Fields


def granite_shared(f: Family, c: Fields, d: Dims, i: int) -> Part:
    size = c.whole("shared_intermediate_size")
    return linear(d.hidden, 2 * size) + linear(size, d.hidden)


def granite_hybrid_ffn(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Granite 4: experts, where there are any, beside a shared feed-forward block."""
    experts = Experts("num_local_experts", "intermediate_size")
    part = mixture(f, experts, c, d) if c.whole("num_local_experts") else NOTHING
    c.ignore("intermediate_size")
    return part + granite_shared(f, c, d, i)


def zamba_shared(f: Family, c: Fields, d: Dims) -> Part:
    """Zamba's transformer block: once in memory, used by every hybrid layer."""
    wide = c.whole("attention_hidden_size")
    part = linear(wide, d.q) + 2 * linear(wide, d.kv) + linear(d.q, d.hidden) + vector(wide + d.hidden)
    return ("hybrid" in d.types) * (part + mlp(f, c, d.hidden, c.whole("intermediate_size")))


def zamba_mamba(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Zamba's Mamba layer; a hybrid one also projects the shared block's output and caches its keys and values."""
    part = r.mamba2_zamba(f, c, d, i) if c.model_type == "zamba2" else r.mamba(f, c, d, i)
    if d.types[i] == "hybrid":
        part += linear(d.hidden, d.hidden) + cached(2 * d.kv, products=2 * d.q)
    return part


def zamba2_shared(f: Family, c: Fields, d: Dims) -> Part:
    """Zamba2's shared blocks, and for each hybrid layer an adapter of low rank in their feed-forward part."""
    uses = sum(kind == "hybrid" for kind in d.types)
    rank, bias = c.whole("adapter_rank"), flag(c, "add_bias_linear")
    c.ignore(
        "hybrid_layer_ids", "use_mem_rope", "use_long_context", "num_query_groups", "kv_channels", "use_mem_eff_path"
    )
    wide, ffn = c.whole("attention_hidden_size"), c.whole("intermediate_size")
    block = linear(wide, d.q) + 2 * linear(wide, d.kv) + linear(d.q, d.hidden) + vector(wide + d.hidden)
    block += linear(d.hidden, 2 * ffn, bias) + linear(ffn, d.hidden, bias)
    adapter = linear(d.hidden, rank) + linear(rank, 2 * ffn)
    if c["use_shared_attention_adapter"]:
        adapter += 3 * (linear(wide, rank) + linear(rank, wide))
    return min(c.whole("num_mem_blocks"), uses) * block + uses * adapter


def rglru(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Griffin's recurrent block; its state lives in the module, not in the cache."""
    width, conv, heads = c.whole("lru_width"), c.whole("conv1d_width"), d.heads
    block = width // heads
    part = 2 * linear(d.hidden, width, True) + linear(width, d.hidden, True) + vector(width * (conv + 1))
    return part + vector(2 * heads * block * (block + 1) + width)


def half_ffn(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """A feed-forward block whose field counts gate and up together."""
    return mlp(f, c, d.hidden, c.whole("ffn_dim" if c.model_type == "moshi" else "intermediate_size") // 2)


def lfm2_ffn(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """LFM2 shrinks its feed-forward width to two thirds, rounded up to a multiple."""
    size = c.whole("intermediate_size")
    if flag(c, "block_auto_adjust_ff_dim"):
        size, factor, multiple = int(2 * size / 3), c["block_ffn_dim_multiplier"], c.whole("block_multiple_of", 1)
        size = multiple * -(-int(factor * size) // multiple) if factor is not None else size
    c.ignore("full_attn_idxs", "block_multiple_of", "block_ffn_dim_multiplier")
    return mlp(f, c, d.hidden, size)


def lfm3_layer(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """LFM3's output gate per head and its norms after each block."""
    gate = d.types[i] != "conv" and flag(c, "use_attention_gate")
    return (linear(d.hidden, d.heads) if gate else NOTHING) + vector(2 * d.hidden * flag(c, "use_sandwich_norm"))


def moe_block(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Nemotron-H: a layer that is a mixture of experts and nothing else."""
    e = Experts("n_routed_experts", "moe_intermediate_size", shared_size="moe_shared_expert_intermediate_size")
    c.whole("moe_shared_expert_intermediate_size", 1)
    return mixture(f, e, c, d)


def mlp_block(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Nemotron-H: a layer that is a feed-forward block and nothing else."""
    return mlp(f, c, d.hidden, c.whole("intermediate_size"))


def bailing_attention(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Latent attention with an output gate per head."""
    return r.latent_attention(f, c, d, i) + linear(d.hidden, d.heads)
