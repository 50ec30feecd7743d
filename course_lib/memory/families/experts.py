"""Decoders with plain attention and mixtures of experts."""

from __future__ import annotations

from course_lib.memory.architecture import vector
from course_lib.memory.blocks import Experts, Family
from course_lib.memory.families import blends as b
from course_lib.memory.families import variants as v
from course_lib.memory.families.base import LLAMA, QWEN3, SLIDING

MIXTRAL = SLIDING.but(windows=None, experts=Experts("num_local_experts", "intermediate_size"), ffn=0)

FAMILIES: dict[str, Family] = {
    # Mixtures of experts.
    "mixtral": MIXTRAL.but(qkv_bias=False, out_bias=False),
    "phimoe": MIXTRAL.but(norm="layer", head_bias="lm_head_bias", head_dim="optional"),
    "granitemoe": MIXTRAL.but(head_dim="optional"),
    "granitemoeshared": MIXTRAL.but(head_dim="optional", extra_layer=b.granite_shared),
    "granitemoe_swa": MIXTRAL.but(windows="layer_types", head_dim="optional", sinks=True, extra_layer=b.granite_shared),
    "gpt_oss": MIXTRAL.but(
        windows="layer_types", sinks=True, experts=Experts("num_local_experts", "intermediate_size", bias=True)
    ),
    "minimax_m2": MIXTRAL.but(qkv_bias=False, out_bias=False, qk_norm="width"),
    "olmoe": MIXTRAL.but(head_dim=None, qk_norm="width", experts=Experts("num_experts", "intermediate_size")),
    "flex_olmo": MIXTRAL.but(head_dim="optional", qk_norm="width", experts=Experts("num_experts", "intermediate_size")),
    "cohere2_moe": MIXTRAL.but(
        windows="layer_types",
        norms=1,
        experts=Experts("num_experts", "intermediate_size", sparse=v.only_sparse),
        unused=("expert_selection_fn", "shared_expert_combination_strategy", "prefix_dense_intermediate_size"),
        unsupported=("num_shared_experts",),
    ),
    "qwen2_moe": SLIDING.but(
        head_dim="optional",
        qkv_bias="qkv_bias",
        out_bias=False,
        experts=Experts(
            "num_experts",
            "moe_intermediate_size",
            shared_size="shared_expert_intermediate_size",
            shared_gate=True,
            sparse=v.every_step,
        ),
    ),
    "qwen3_moe": QWEN3.but(
        windows="sliding_window",
        head_dim="optional",
        experts=Experts("num_local_experts", "moe_intermediate_size", sparse=v.every_step),
    ),
    "qwen3_vl_moe_text": QWEN3.but(
        windows=None,
        head_dim="optional",
        experts=Experts("num_local_experts", "moe_intermediate_size", sparse=v.every_step),
    ),
    "mellum": QWEN3.but(experts=Experts("num_local_experts", "moe_intermediate_size", sparse=v.by_mlp_type)),
    "flint": QWEN3.but(
        sinks=True,
        experts=Experts(
            "num_experts", "moe_intermediate_size", shared_size="shared_expert_intermediate_size", sparse=v.every_step
        ),
    ),
    "aria_text": LLAMA.but(
        experts=Experts("moe_num_experts", "intermediate_size", shared="moe_num_shared_experts"), ffn=0
    ),
    "ernie4_5_moe": Family(
        head_dim="optional",
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        head_bias="use_bias",
        experts=Experts(
            "moe_num_experts", "moe_intermediate_size", "moe_num_shared_experts", correction=True, sparse=v.ernie_step
        ),
    ),
    "exaone_moe": QWEN3.but(
        head_dim="optional",
        qkv_bias=False,
        out_bias=False,
        experts=Experts("num_experts", "moe_intermediate_size", "num_shared_experts", sparse=v.by_mlp_type),
        unused=("first_k_dense_replace",),
    ),
    "dots1": QWEN3.but(
        head_dim="optional",
        experts=Experts("n_routed_experts", "moe_intermediate_size", "n_shared_experts", sparse=v.after_dense),
    ),
    "glm4_moe": Family(
        head_dim="optional",
        out_bias=False,
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        experts=Experts("n_routed_experts", "moe_intermediate_size", "n_shared_experts", sparse=v.after_dense),
    ),
    "glm4v_moe_text": Family(
        head_dim="optional",
        out_bias=False,
        experts=Experts("n_routed_experts", "moe_intermediate_size", "n_shared_experts", sparse=v.after_dense),
    ),
    "solar_open": Family(
        out_bias=False, ffn=0, experts=Experts("n_routed_experts", "moe_intermediate_size", "n_shared_experts")
    ),
    "hy_v3": LLAMA.but(
        qk_norm="head",
        extra_layer=v.shared_expert_needed,
        experts=Experts("num_experts", "moe_intermediate_size", "num_shared_experts", sparse=v.by_mlp_type),
        unused=("enable_moe_fp32_combine",),
    ),
    "kolibri1": QWEN3.but(
        qkv_bias=False,
        out_bias=False,
        norms=4,
        ffn=0,
        experts=Experts("num_local_experts", "moe_intermediate_size", shared_size="shared_expert_intermediate_size"),
    ),
    "beam": QWEN3.but(
        norms=4,
        gate="element",
        extra_layer=lambda f, c, d, i: vector(d.heads),
        experts=Experts("num_experts", "moe_intermediate_size", sparse=v.by_mlp_type),
    ),
    "afmoe": QWEN3.but(
        norms=4,
        gate="element",
        unused=("mup_enabled", "global_attn_every_n_layers"),
        experts=Experts(
            "num_experts",
            "moe_intermediate_size",
            "num_shared_experts",
            correction=True,
            sparse=lambda c, i: i >= c.whole("num_dense_layers"),
        ),
    ),
    "llama4_text": SLIDING.but(
        ffn="intermediate_size_mlp",
        unused=("use_qk_norm", "interleave_moe_layer_step", "moe_layers"),
        experts=Experts(
            "num_local_experts",
            "intermediate_size",
            shared_size="intermediate_size",
            sparse=lambda c, i: i in c["moe_layers"],
        ),
    ),
    "mimo_v2_flash": SLIDING.but(
        mixers=dict.fromkeys(("full_attention", "sliding_attention"), v.mimo),
        unused=("attention_value_scale",),
        experts=Experts("n_routed_experts", "moe_intermediate_size", sparse=v.by_mlp_type),
    ),
    "laguna": SLIDING.but(
        mixers=dict.fromkeys(("full_attention", "sliding_attention"), v.laguna),
        unused=("moe_apply_router_weight_on_input",),
        experts=Experts(
            "num_experts",
            "moe_intermediate_size",
            shared_size="shared_expert_intermediate_size",
            correction=True,
            sparse=v.by_mlp_type,
        ),
    ),
    "minimax_m3_vl_text": QWEN3.but(
        qkv_bias=False,
        out_bias=False,
        fused_gate_up=True,
        ffn="dense_intermediate_size",
        experts=Experts(
            "num_local_experts", "intermediate_size", shared_size="shared_intermediate_size", sparse=v.by_mlp_type
        ),
        unused=("index_block_size", "index_head_dim", "index_local_blocks", "index_n_heads", "index_topk_blocks"),
    ),
}
