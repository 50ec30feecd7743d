"""Decoders of encoder-decoder models, and encoders used as decoders."""

from __future__ import annotations

from course_lib.memory.blocks import Family
from course_lib.memory.families import variants as v
from course_lib.memory.families.base import BERT, SLIDING

_ENCODER = ("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "max_source_positions", "num_hidden_layers")
_SPEECH = (
    "apply_spec_augment",
    "begin_suppress_tokens",
    "suppress_tokens",
    "mask_feature_length",
    "mask_feature_min_masks",
    "mask_feature_prob",
    "mask_time_length",
    "mask_time_min_masks",
    "mask_time_prob",
    "median_filter_width",
    "num_mel_bins",
    "use_weighted_layer_sum",
)
BART = Family(
    hidden="d_model",
    layers="decoder_layers",
    heads="decoder_attention_heads",
    kv_heads=None,
    head_dim=None,
    ffn="decoder_ffn_dim",
    norm="layer",
    gated=False,
    mlp_bias=True,
    qkv_bias=True,
    out_bias=True,
    cross_attention=True,
    positions="max_position_embeddings",
    positions_offset=2,
    embedding_norm=True,
    final_norm=False,
    unused=_ENCODER,
)

FAMILIES: dict[str, Family] = {
    # Encoders' families used as decoders.
    "bert": BERT,
    "camembert": BERT,
    "data2vec-text": BERT,
    "roberta": BERT,
    "xlm-roberta": BERT,
    "ernie": BERT.but(unsupported=("use_task_id",), unused=("task_type_vocab_size",)),
    "bert-generation": BERT.but(token_types=None, head="plain", head_bias=True),
    "roberta-prelayernorm": BERT.but(final_norm=True),
    "xlm-roberta-xl": BERT.but(embedding_norm=False, final_norm=True),
    "roc_bert": BERT.but(extra_model=v.roc_bert),
    "electra": BERT.but(ends=v.electra),
    "bart": BART,
    "mvp": BART.but(unsupported=("use_prompt",), unused=(*_ENCODER, "prompt_length", "prompt_mid_dim")),
    "mbart": BART.but(final_norm=True),
    "plbart": BART,
    "pegasus": BART.but(positions_offset=0, embedding_norm=False, final_norm=True),
    "blenderbot": BART.but(positions_offset=0, embedding_norm=False, final_norm=True),
    "blenderbot-small": BART.but(positions_offset=0),
    "marian": BART.but(positions_offset=0, embedding_norm=False),
    "bigbird_pegasus": BART.but(
        positions_offset=0,
        tied=False,
        qkv_bias="use_bias",
        out_bias="use_bias",
        unused=(*_ENCODER, "attention_type", "block_size", "num_random_blocks"),
    ),
    "whisper": BART.but(
        positions="max_target_positions",
        positions_offset=0,
        key_bias=False,
        embedding_norm=False,
        final_norm=True,
        unused=(*_ENCODER, *_SPEECH),
    ),
    "trocr": BART.but(embedding_norm="layernorm_embedding"),
    "prophetnet": BERT.but(
        layers="num_decoder_layers",
        heads="num_decoder_attention_heads",
        ffn="decoder_ffn_dim",
        token_types=None,
        head="plain",
        cross_attention=True,
        norms=2,
        extra_layer=v.prophetnet_layer,
        extra_model=v.prophetnet_model,
        unused=(
            "num_encoder_layers",
            "num_encoder_attention_heads",
            "encoder_ffn_dim",
            "disable_ngram_loss",
            "relative_max_distance",
            "num_hidden_layers",
            "ngram",
        ),
    ),
    "modernbert-decoder": SLIDING.but(
        kv_heads=None,
        head_dim=None,
        norms=1,
        fused_gate_up=True,
        mlp_bias="mlp_bias",
        embedding_norm=True,
        head_bias="decoder_bias",
        extra_layer=v.modernbert_layer,
        extra_model=v.modernbert_head,
        unsupported=("norm_bias",),
    ),
}
