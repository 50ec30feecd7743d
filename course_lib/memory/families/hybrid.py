"""Recurrent decoders, and those that mix recurrent layers with attention."""

from __future__ import annotations

from course_lib.memory import recurrent as r
from course_lib.memory.blocks import Experts, Family
from course_lib.memory.families import blends as b
from course_lib.memory.families import variants as v
from course_lib.memory.families.base import LLAMA, QWEN3, SLIDING
from course_lib.memory.families.latent import MLA

MAMBA = Family(
    heads=None,
    kv_heads=None,
    head_dim="latent",
    ffn=0,
    norms=1,
    unused=("expand",),
    mixers={"linear_attention": r.mamba},
    layer_types=lambda c, n: ["linear_attention"] * n,
)
DELTA = SLIDING.but(
    qk_norm="head",
    mixers={
        "linear_attention": r.gated_delta_net,
        "full_attention": r.gated_attention,
        "sliding_attention": r.gated_attention,
    },
)

FAMILIES: dict[str, Family] = {
    # Recurrent and hybrid.
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": MAMBA.but(mixers={"linear_attention": r.mamba2}, unused=("expand", "chunk_size")),
    "bamba": LLAMA.but(
        head_dim="optional",
        windows=None,
        unused=("mamba_chunk_size", "attn_layer_indices", "mamba_expand"),
        mixers={"linear_attention": r.mamba2_prefixed},
    ),
    "granitemoehybrid": LLAMA.but(
        head_dim="optional",
        windows="layer_types",
        mlp_bias=False,
        ffn=0,
        mixers={"linear_attention": r.mamba2_prefixed},
        extra_layer=b.granite_hybrid_ffn,
        unused=("mamba_chunk_size", "mamba_expand", "position_embedding_type"),
    ),
    "falcon_h1": LLAMA.but(
        head_dim="optional",
        mixers={"hybrid": r.attention_beside_mamba2},
        layer_types=lambda c, n: ["hybrid"] * n,
        unused=("mamba_chunk_size", "mlp_multipliers", "ssm_multipliers"),
    ),
    "jamba": Family(
        head_dim="optional",
        qkv_bias=False,
        out_bias=False,
        mixers={"linear_attention": r.mamba},
        experts=Experts("num_experts", "intermediate_size", sparse=v.jamba_step),
        unused=("attn_layer_offset", "attn_layer_period"),
    ),
    "qwen3_next": DELTA.but(
        experts=Experts(
            "num_experts",
            "moe_intermediate_size",
            shared_size="shared_expert_intermediate_size",
            shared_gate=True,
            sparse=v.every_step,
        ),
    ),
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA.but(
        ffn=0,
        experts=Experts(
            "num_experts", "moe_intermediate_size", shared_size="shared_expert_intermediate_size", shared_gate=True
        ),
    ),
    "lara_mini": QWEN3.but(
        mixers={"linear_attention": r.gated_delta_net},
        ffn=0,
        experts=Experts("num_experts", "moe_intermediate_size", shared_size="shared_expert_intermediate_size"),
    ),
    "kimi_linear": MLA.but(
        tied=False,
        windows="layer_types",
        mixers={"full_attention": r.latent_attention, "linear_attention": r.kimi_delta_attention},
        experts=Experts("num_experts", "moe_intermediate_size", "num_shared_experts", sparse=v.by_mlp_type),
        unused=("moe_renormalize",),
    ),
    "lfm2": SLIDING.but(
        head_dim="optional",
        qkv_bias=False,
        out_bias=False,
        qk_norm="head",
        ffn=0,
        mixers={"conv": r.short_convolution},
        extra_layer=b.lfm2_ffn,
    ),
    "lfm2_moe": SLIDING.but(
        head_dim="optional",
        qkv_bias=False,
        out_bias=False,
        qk_norm="head",
        mixers={"conv": r.short_convolution},
        experts=Experts("num_experts", "moe_intermediate_size", sparse=lambda c, i: i >= c.whole("num_dense_layers")),
        unused=("use_expert_bias",),
    ),
    "lfm3": QWEN3.but(mixers={"conv": r.short_convolution}, extra_layer=b.lfm3_layer),
    "olmo_hybrid": SLIDING.but(head_dim="optional", qk_norm="width", mixers={"linear_attention": r.gated_delta_net}),
    "bailing_hybrid": MLA.but(
        tied=False,
        windows="layer_types",
        mixers={"full_attention": b.bailing_attention, "linear_attention": r.kimi_delta_attention},
        experts=Experts("num_experts", "moe_intermediate_size", "num_shared_experts", sparse=v.by_mlp_type),
        unused=(
            "moe_renormalize",
            "first_k_dense_replace",
            "kda_lower_bound",
            "kda_safe_gate",
            "layer_group_size",
            "short_conv_kernel_size",
        ),
    ),
    "nemotron_h": Family(
        tied=False,
        qkv_bias=False,
        out_bias=False,
        norms=1,
        ffn=0,
        gated=False,
        mlp_bias="mlp_bias",
        layer_types=lambda c, n: list(c["layers_block_type"]),
        mixers={"linear_attention": r.mamba2, "moe": b.moe_block, "mlp": b.mlp_block},
        unsupported=("moe_latent_size",),
        unused=(
            "attention_bias",
            "chunk_size",
            "expand",
            "intermediate_size",
            "moe_intermediate_size",
            "mtp_layers_block_type",
            "mamba_proj_bias",
            "moe_shared_expert_overlap",
            "n_shared_experts",
            "sliding_window",
        ),
    ),
    "recurrent_gemma": SLIDING.but(
        out_bias=True,
        mlp_bias=True,
        ffn=0,
        extra_layer=b.half_ffn,
        layer_types=lambda c, n: list(c["layers_block_type"]),
        mixers={"linear_attention": b.rglru},
        unused=("block_types", "w_init_variance_scale", "final_w_init_variance_scale", "attention_window_size"),
    ),
    "zamba": MAMBA.but(
        heads="num_attention_heads",
        kv_heads="num_key_value_heads",
        head_dim="attention_head_dim",
        extra_model=b.zamba_shared,
        layer_types=lambda c, n: list(c["layers_block_type"]),
        mixers=dict.fromkeys(("linear_attention", "hybrid"), b.zamba_mamba),
        unused=("attn_layer_offset", "attn_layer_period"),
    ),
    "zamba2": MAMBA.but(
        heads="num_attention_heads",
        kv_heads="num_key_value_heads",
        head_dim="attention_head_dim",
        extra_model=b.zamba2_shared,
        layer_types=lambda c, n: list(c["layers_block_type"]),
        mixers=dict.fromkeys(("linear_attention", "hybrid"), b.zamba_mamba),
        unused=("chunk_size", "use_conv_bias"),
    ),
}
