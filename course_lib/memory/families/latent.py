"""Decoders with latent attention, several residual streams, or keys and values shared between layers."""

from __future__ import annotations

from course_lib.memory import recurrent as r
from course_lib.memory.architecture import embedding, vector
from course_lib.memory.blocks import Experts, Family
from course_lib.memory.families import variants as v
from course_lib.memory.families.base import GEMMA2

DEEPSEEK = Experts("n_routed_experts", "moe_intermediate_size", "n_shared_experts", sparse=v.by_mlp_type)
MLA = Family(
    mixers=dict.fromkeys(("full_attention", "sliding_attention"), r.latent_attention), head_dim="latent", kv_heads=None
)

FAMILIES: dict[str, Family] = {
    # Latent attention.
    "deepseek_v2": MLA.but(
        mlp_bias="mlp_bias",
        experts=Experts("n_routed_experts", "moe_intermediate_size", "n_shared_experts", sparse=v.after_dense),
    ),
    "deepseek_v3": MLA.but(
        experts=Experts("n_routed_experts", "moe_intermediate_size", "n_shared_experts", sparse=v.after_dense)
    ),
    "axk1": MLA.but(norms=2, experts=DEEPSEEK, extra_layer=lambda f, c, d, i: vector(d.hidden * v.by_mlp_type(c, i))),
    "glm4_moe_lite": MLA.but(experts=DEEPSEEK),
    "minicpm3": MLA.but(mlp_bias="mlp_bias", unused=("dim_model_base", "scale_depth", "scale_emb")),
    "youtu": MLA,
    "deepseek_v32": MLA.but(
        experts=DEEPSEEK,
        mixers={"indexed_attention": r.indexed_latent_attention},
        windows="layer_types",
        unused=("first_k_dense_replace", "mlp_bias"),
    ),
    "glm_moe_dsa": MLA.but(
        experts=DEEPSEEK,
        mixers={"indexed_attention": v.shared_indexer},
        windows="layer_types",
        unused=("first_k_dense_replace", "mlp_bias"),
    ),
    # More than one stream, or keys and values shared between layers.
    "gemma3n_text": GEMMA2.but(
        ffn=0,
        mixers=dict.fromkeys(("full_attention", "sliding_attention"), v.gemma3n),
        extra_layer=v.gemma3n_layer,
        extra_model=v.gemma3n_model,
    ),
    "gemma4_text": GEMMA2.but(
        kv_heads=None,
        head_dim="latent",
        dense=False,
        mixers=dict.fromkeys(("full_attention", "sliding_attention"), v.gemma4),
        extra_layer=v.gemma4_layer,
        extra_model=v.per_layer_embedding,
    ),
    "hy_v4": MLA.but(
        windows="layer_types",
        mixers={"indexed_attention": v.hy_v4},
        experts=DEEPSEEK,
        extra_layer=v.hyper_connections,
        extra_model=v.hyper_head,
    ),
    "mllama_text_model": Family(
        head_dim=None,
        qkv_bias=False,
        out_bias=False,
        layer_types=v.mllama_types,
        mixers={"cross_attention": v.mllama_cross},
        extra_model=lambda f, c, d: embedding(8, d.hidden),
    ),
}
