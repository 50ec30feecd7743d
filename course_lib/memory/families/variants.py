"""Parts that only one or two model types have, and the rules that say which layers have experts."""

from __future__ import annotations

from course_lib.memory import recurrent as r
from course_lib.memory.architecture import NOTHING, Part, cached, embedding, linear, vector
from course_lib.memory.blocks import Dims, Experts, Family, flag, mixture, mlp, norm, window
from course_lib.memory.config import Fields, UnsupportedError
from course_lib.memory.units import whole


def by_mlp_type(c: Fields, i: int) -> bool:
    return bool(c["mlp_layer_types"][i] == "sparse")


def after_dense(c: Fields, i: int) -> bool:
    return i >= c.whole("first_k_dense_replace")


def every_step(c: Fields, i: int) -> bool:
    listed = i not in (c["mlp_only_layers"] or []) and (i + 1) % c.whole("decoder_sparse_step", 1) == 0
    return listed and c.whole("num_experts") > 0


def only_sparse(c: Fields, i: int) -> bool:
    if not by_mlp_type(c, i):
        raise UnsupportedError(f"no formula for dense layers in {c.model_type!r}")
    return True


def ernie_step(c: Fields, i: int) -> bool:
    inside = c.whole("moe_layer_start_index") <= i <= c.whole("moe_layer_end_index")
    return inside and (i + 1) % c.whole("moe_layer_interval") == 0


def jamba_step(c: Fields, i: int) -> bool:
    return c.whole("num_experts") > 1 and i % c.whole("expert_layer_period") == c.whole("expert_layer_offset")


# ---- What a family has besides ----


def gpt_neox_japanese(f: Family, c: Fields, d: Dims) -> Part:
    return vector(d.hidden * (d.layers > 0))  # only the last layer's output projection has a bias


def roc_bert(f: Family, c: Fields, d: Dims) -> Part:
    if not (c["enable_pronunciation"] and c["enable_shape"] and c["concat_input"]):
        raise UnsupportedError("no formula for a RoCBert without pronunciation and shape")
    sound, shape = c.whole("pronunciation_embed_dim"), c.whole("shape_embed_dim")
    tables = embedding(c.whole("pronunciation_vocab_size"), sound) + embedding(c.whole("shape_vocab_size"), shape)
    return tables + linear(d.hidden + sound + shape, d.hidden, True)


def electra(f: Family, c: Fields, d: Dims) -> Part:
    width = c.whole("embedding_size")
    tables = embedding(d.vocab + c.whole("max_position_embeddings") + c.whole("type_vocab_size"), width)
    project = linear(width, d.hidden, True) if width != d.hidden else NOTHING
    return tables + project + 2 * norm(f, width) + linear(d.hidden, width, True, "head") + vector(d.vocab)


def opt(f: Family, c: Fields, d: Dims) -> Part:
    width, before = c.whole("word_embed_proj_dim"), flag(c, "do_layer_norm_before")
    tied = flag(c, "tie_word_embeddings")
    part = (1 if tied else 2) * embedding(d.vocab, width) + embedding(c.whole("max_position_embeddings") + 2, d.hidden)
    part += norm(f, d.hidden * (before and not c["_remove_final_layer_norm"]))
    return part + (linear(width, d.hidden) + linear(d.hidden, width) if width != d.hidden else NOTHING)


def xielu(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Apertus learns two numbers of its activation function in every layer, if it is xIELU."""
    return vector(2 * (c["hidden_act"] == "xielu"))


def square_output(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Helium's output projection is square whatever the heads' width."""
    if d.q != d.hidden:
        raise UnsupportedError(f"no formula for {d.heads} heads of {d.head_dim} over {d.hidden} channels in helium")
    return NOTHING


def shared_expert_needed(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Hunyuan 3 reads a shared expert of width 0 as one of the dense width."""
    if not c.whole("num_shared_experts") * c.whole("moe_intermediate_size"):
        raise UnsupportedError(f"no formula for {c.model_type!r} without a shared expert")
    return NOTHING


def falcon(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Falcon's heads and norms follow from three switches; grouped keys and values are repeated before they are cached."""
    c.ignore("alibi", "multi_query", "parallel_attn", "num_ln_in_parallel_attn", "num_kv_heads")
    new, parallel = flag(c, "new_decoder_architecture"), flag(c, "parallel_attn")
    kv = c.whole("num_kv_heads") if new else 1 if flag(c, "multi_query") else d.heads
    bias = flag(c, "bias")
    norms = c.optional("num_ln_in_parallel_attn", 2, least=1) if new else 1 if parallel else 2
    part = linear(d.hidden, d.q + 2 * kv * d.head_dim, bias) + linear(d.q, d.hidden, bias)
    kept = cached(2 * d.q if new else 2 * kv * d.head_dim, products=2 * d.q)
    return part + kept + norms * norm(f, d.hidden)


def bigcode(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """GPTBigCode: one key-value head for all queries, unless `multi_query` is off."""
    c.ignore("num_key_value_heads")
    kv = d.head_dim if flag(c, "multi_query") else d.q
    return linear(d.hidden, d.q + 2 * kv, True) + linear(d.q, d.hidden, True) + cached(2 * kv, products=2 * d.q)


def mimo(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """MiMo-V2: sliding layers have twice the key-value heads and sinks, values are narrower than keys."""
    sliding = d.types[i] == "sliding_attention"
    kv, value, bias = d.kv_heads * (1 + sliding), c.whole("v_head_dim"), flag(c, "attention_bias")
    part = linear(d.hidden, d.q, bias) + linear(d.hidden, kv * d.head_dim, bias) + linear(d.hidden, kv * value, bias)
    part += linear(d.heads * value, d.hidden) + vector(d.heads * sliding)
    width = c.whole("sliding_window", 1) if sliding else None
    return part + cached(kv * (d.head_dim + value), width, products=d.heads * (d.head_dim + value))


def laguna(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Laguna: every layer has its own number of query heads, and a gate per head or per channel."""
    heads = whole(c["num_attention_heads_per_layer"][i], f"{c.label}: num_attention_heads_per_layer")
    q, gating = heads * d.head_dim, c["gating"]
    bias, width = flag(c, "attention_bias"), c.whole("sliding_window", 1) if d.types[i] == "sliding_attention" else None
    if gating not in (True, "per-head"):
        raise UnsupportedError(f"no formula for gating={gating!r} in laguna")
    part = linear(d.hidden, q, bias) + 2 * linear(d.hidden, d.kv, bias) + linear(q, d.hidden, bias)
    return part + linear(d.hidden, heads) + vector(2 * d.head_dim) + cached(2 * d.kv, width, products=2 * q)


def fields_of_layer(f: Family, c: Fields, i: int) -> tuple[int, int]:
    """Key-value heads and head width of layer `i` where a configuration object keeps them per layer."""
    try:
        own = c["per_layer_config"][i]
        return int(own.num_key_value_heads), int(own.head_dim)
    except (TypeError, AttributeError, KeyError) as error:
        raise UnsupportedError(f"{c.label}: per_layer_config needs Transformers' configuration class") from error


def gemma4(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Gemma 4: global layers have wider heads, the last layers reuse keys and values, keys may serve as values."""
    kv_heads, width = fields_of_layer(f, c, i)
    c.ignore("num_kv_shared_layers")
    shared, bias = c["kv_sharing_modes"][i] == "reuse", flag(c, "attention_bias")
    q, kv = d.heads * width, kv_heads * width
    part = linear(d.hidden, q, bias) + linear(q, d.hidden, bias) + vector(width)
    if not shared:
        values = not (flag(c, "attention_k_eq_v") and d.types[i] == "full_attention")
        part += (
            (1 + values) * linear(d.hidden, kv, bias)
            + vector(width)
            + cached(2 * kv, window(f, c, d, i), products=2 * q)
        )
    wide = 2 if shared and flag(c, "use_double_wide_mlp") else 1
    return part + mlp(f, c, d.hidden, wide * d.ffn)


def gemma4_layer(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Gemma 4's per-layer input, and its experts beside the dense block."""
    width = c.optional("hidden_size_per_layer_input", 0)
    part = linear(d.hidden, width) + linear(width, d.hidden) + vector(d.hidden) if width else NOTHING
    if c.get("enable_moe_block"):
        e = Experts("num_experts", "moe_intermediate_size")
        part += mixture(f, e, c, d) + vector(4 * d.hidden + c.whole("num_experts"))
    else:
        c.ignore("num_experts", "moe_intermediate_size")
    return part


def per_layer_embedding(f: Family, c: Fields, d: Dims) -> Part:
    """Gemma's second embedding table, one narrow vector per token and layer."""
    width = c.optional("hidden_size_per_layer_input", 0)
    if not width:
        c.ignore("vocab_size_per_layer_input")
        return NOTHING
    wide = d.layers * width
    return embedding(c.whole("vocab_size_per_layer_input"), wide) + linear(d.hidden, wide) + vector(width)


def gemma3n(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Gemma 3n: the last layers reuse keys and values of earlier ones."""
    c.ignore("num_kv_shared_layers")
    bias = flag(c, "attention_bias")
    part = linear(d.hidden, d.q, bias) + linear(d.q, d.hidden, bias) + vector(d.head_dim)
    if c["kv_sharing_modes"][i] != "reuse":
        part += 2 * linear(d.hidden, d.kv, bias) + vector(d.head_dim)
        part += cached(2 * d.kv, window(f, c, d, i), products=2 * d.q)
    sizes = c["intermediate_size"]
    size = sizes[i] if isinstance(sizes, list | tuple) else sizes
    return part + mlp(f, c, d.hidden, whole(size, f"{c.label}: intermediate_size"))


def gemma3n_layer(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """AltUp's predictor and corrector, Laurel's low-rank branch and the per-layer input."""
    streams, rank, width = c.whole("altup_num_inputs"), c.whole("laurel_rank"), c.whole("hidden_size_per_layer_input")
    altup = linear(streams, streams) + linear(streams, streams**2) + linear(d.hidden, streams) + vector(2 * d.hidden)
    laurel = linear(d.hidden, rank) + linear(rank, d.hidden) + vector(d.hidden)
    return altup + laurel + linear(d.hidden, width) + linear(width, d.hidden) + vector(d.hidden)


def gemma3n_model(f: Family, c: Fields, d: Dims) -> Part:
    """The per-layer embedding and the projections into and out of AltUp's streams."""
    c.ignore("altup_active_idx", "altup_coef_clip", "altup_correct_scale", "activation_sparsity_pattern")
    return per_layer_embedding(f, c, d) + 2 * (c.whole("altup_num_inputs") - 1) * linear(d.hidden, d.hidden)


def modernbert_layer(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """ModernBERT's first layer has no norm before attention."""
    return vector(d.hidden * (i > 0))


def modernbert_head(f: Family, c: Fields, d: Dims) -> Part:
    """A dense layer and a norm before the output table."""
    c.ignore("local_attention")
    return linear(d.hidden, d.hidden, flag(c, "classifier_bias")) + vector(d.hidden)


def shared_indexer(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Latent attention with an indexer in some layers, whose choice of tokens the next layers share."""
    c.ignore(
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "index_topk_freq",
        "index_skip_topk_offset",
        "index_share_for_mtp_iteration",
    )
    full = c["indexer_types"][i] == "full"
    return (r.indexed_latent_attention if full else r.latent_attention)(f, c, d, i)


def hy_v4(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Latent attention with shared indexers, an output gate and sinks."""
    return shared_indexer(f, c, d, i) + linear(d.hidden, d.heads * c.whole("v_head_dim")) + vector(d.heads)


def hyper_connections(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Two hyper-connections a layer, each mixing `hc_mult` residual streams."""
    streams = c.whole("hc_mult")
    return 2 * vector(2 * streams * streams * d.hidden + 2 * streams + 2)


def hyper_head(f: Family, c: Fields, d: Dims) -> Part:
    """The collapse of the residual streams before the final norm."""
    streams = c.whole("hc_mult")
    c.ignore("hc_magnitude", "hc_sinkhorn_iters", "learnable_sink_init")
    return vector(streams * streams * d.hidden + streams + 1)


def mllama_types(c: Fields, layers: int) -> list[str]:
    """Layers that look at an image are named by their index."""
    return ["cross_attention" if i in c["cross_attention_layers"] else "full_attention" for i in range(layers)]


def mllama_cross(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Gated attention to an image; without one it caches nothing."""
    part = linear(d.hidden, d.q) + 2 * linear(d.hidden, d.kv) + linear(d.q, d.hidden)
    return part + vector(2 * d.head_dim + 2)


def prophetnet_layer(f: Family, c: Fields, d: Dims, i: int) -> Part:
    """Relative positions computed from the hidden state."""
    return linear(d.hidden, c.whole("num_buckets") * d.heads, True)


def prophetnet_model(f: Family, c: Fields, d: Dims) -> Part:
    """One vector per predicted future token."""
    return embedding(c.whole("ngram"), d.hidden)
