"""SmolLM2 out of llama.cpp's GGUF file, exactly, into the folder that Transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import Progress
    from transformers import PreTrainedTokenizerBase

# llama.cpp's tensor names, and the modules of Transformers' Llama that hold the same weights.
LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_OUTER = {"token_embd": "embed_tokens", "output_norm": "norm"}


def convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write the GGUF's weights, configuration, tokenizer and chat template as a Transformers folder.

    Parameters
    ----------
    gguf : Path
        A Llama model with a byte-level BPE, in llama.cpp's format.
    folder : Path
        Made here; what ``from_pretrained`` reads. The weights are float32 safetensors.
    progress : rich.progress.Progress
        Where the conversion shows its bar.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file
    from transformers import GenerationConfig

    reader = GGUFReader(gguf)
    fields = {key: value.contents() for key, value in reader.fields.items()}
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in progress.track(reader.tensors, description="Converting it once"):
        *layer, kind, _ = tensor.name.split(".")
        module = f"layers.{layer[1]}.{LLAMA_LAYER[kind]}" if layer else LLAMA_OUTER[kind]
        weight = dequantize(tensor.data, tensor.tensor_type)
        weights[f"model.{module}.weight"] = _split_halves(weight, heads[kind]) if kind in heads else weight
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors keeps it from other users of a shared cache
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _tokenizer(fields).save_pretrained(folder)


def _split_halves(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder each head's rows from llama.cpp's rotary pairs (2i, 2i + 1) to Transformers' (i, i + head_dim / 2)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], *, tied: bool) -> Any:
    """Read the GGUF's metadata into a LlamaConfig."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        # Stored in float32: its shortest decimal is the 1e-05 that was meant.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Build the byte-level BPE that the GGUF describes.

    Transformers' own GGUF conversion depends on its version (5.17 takes the wrong end-of-text token), and none
    splits digits before merging, as SmolLM2 was trained to and the GGUF asks with ``pre = smollm``: without it, numbers
    after two or more spaces, in tables and indented code, become token sequences that the model never saw.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
