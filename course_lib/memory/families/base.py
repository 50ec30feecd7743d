"""Families that several model types start from; the table's rows say what differs."""

from __future__ import annotations

from course_lib.memory.blocks import Family

LLAMA = Family(mlp_bias="mlp_bias")
SLIDING = LLAMA.but(windows="layer_types", mlp_bias=False)
QWEN3 = SLIDING.but(qk_norm="head")
GEMMA2 = SLIDING.but(norms=4)
GPT2 = Family(
    hidden="n_embd",
    layers="n_layer",
    heads="n_head",
    kv_heads=None,
    head_dim=None,
    ffn="n_inner",
    norm="layer",
    gated=False,
    mlp_bias=True,
    qkv_bias=True,
    out_bias=True,
    fused_qkv=True,
    positions="n_positions",
)
NEOX = Family(
    kv_heads=None,
    head_dim=None,
    norm="layer",
    gated=False,
    mlp_bias=True,
    fused_qkv=True,
    qkv_bias="attention_bias",
    unused=("use_parallel_residual",),
)
BERT = Family(
    kv_heads=None,
    head_dim=None,
    norm="layer",
    gated=False,
    mlp_bias=True,
    qkv_bias=True,
    out_bias=True,
    positions="max_position_embeddings",
    token_types="type_vocab_size",
    embedding_norm=True,
    final_norm=False,
    head="masked",
    must_tie=True,
)
