"""What a model needs in memory to run: weights, cache, activations and workspace, before anything is downloaded.

Derived in chapter 01 (notebooks/01-memory.ipynb). Weights and cache are exact; activations and workspace are estimates
whose terms are stated in `estimate`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from course_lib.memory.architecture import Kind, Weight
from course_lib.memory.blocks import active_experts
from course_lib.memory.config import Fields
from course_lib.memory.counting import CACHE_DTYPES, Model
from course_lib.memory.units import (
    DTYPE_BITS,
    attention_scores_bytes,
    dtype_name,
    format_gib,
    weight_bytes,
    whole,
)

BITSANDBYTES = ("int8", "fp4", "nf4", "fp4-double", "nf4-double")
#: What only `course_lib.quantization` stores, and the most bytes for each weight of a matrix that dequantising it takes: one
#: float32 copy; codes one a byte and two copies; or as much as unpacking by 64-bit words.
OURS = {"bfloat16": 4, "int4": 9, "int3": 17, "int2": 17}


class Published(NamedTuple):
    """How a checkpoint may be published in fewer bits: the kinds of weights, the bits of each, a block's scale and its sides."""

    kinds: tuple[Kind, ...]
    bits: int
    scale_bytes: int
    rows: int
    columns: int


#: DeepSeek's FP8 (DeepSeek-V3, section 3.3) and the microscaling format of gpt-oss (OCP MX specification 1.0).
PUBLISHED = {
    "fp8": Published(("linear", "experts"), 8, 4, 128, 128),
    "mxfp4": Published(("experts",), 4, 1, 1, 32),
}
QUANTIZATIONS = (*BITSANDBYTES, *OURS, *PUBLISHED)
BLOCK = 64  # weights that share a scale, but in int8
WEIGHT_DTYPES = ("float64", "float32", "float16", "bfloat16")
ATTENTIONS = ("flash", "eager")
#: What an FP8 checkpoint lists as left alone and no kind that it converts covers anyway.
_KEPT = re.compile(r"(^|\.)(lm_head|embed_tokens|gate|shared_expert_gate|router|\w*norm)$")
_SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
# The decoder's own first: an encoder-decoder's configuration calls its encoder's heads by the plain name too.
_HEADS = (
    "num_attention_heads_per_layer",
    "decoder_attention_heads",
    "num_decoder_attention_heads",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "attention_heads",
    "num_heads",
)


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of an inference run, in bytes.

    Attributes
    ----------
    weights : int
        All parameters as stored.
    quantization_constants : int
        Scales that go with quantised weights.
    kv_cache : int
        The cache once all tokens are in it.
    activations : int
        The largest set of intermediate tensors alive at one time.
    workspace : int
        Copies that the chosen quantisation makes while it multiplies.
    method : {"closed form", "meta device"}
        Whether our formulas or the real class on the meta device counted weights and cache.
    """

    weights: int
    quantization_constants: int
    kv_cache: int
    activations: int
    workspace: int
    method: Literal["closed form", "meta device"]

    @property
    def total(self) -> int:
        """Everything together, in bytes."""
        return self.weights + self.quantization_constants + self.kv_cache + self.activations + self.workspace

    @property
    def parts(self) -> dict[str, int]:
        """The parts and their total under names for people, in bytes."""
        return {
            "weights": self.weights,
            "quantisation constants": self.quantization_constants,
            "KV cache": self.kv_cache,
            "activations": self.activations,
            "workspace": self.workspace,
            "total": self.total,
        }

    def fits(self, available: float) -> bool:
        """Return whether the total is at most `available` bytes (of a card: ``card.memory_bytes``)."""
        return self.total <= available

    def __str__(self) -> str:
        lines = [f"{name:<24}{format_gib(size):>14}" for name, size in self.parts.items()]
        return "\n".join([*lines, f"{'method':<24}{self.method:>14}"])


def _choice(value: str | None, argument: str, accepted: tuple[str, ...]) -> str | None:
    if value is not None and value not in accepted:
        raise ValueError(
            f"{argument} must be one of {', '.join(accepted)}{' or None' * (argument != 'attention')}, got {value!r}"
        )
    return value


def converted_kinds(quantization: str | None) -> tuple[Kind, ...]:
    """Return the kinds of weights that a scheme converts."""
    if quantization is None:
        return ()
    return PUBLISHED[quantization].kinds if quantization in PUBLISHED else ("linear",)


def stored_bytes(weights: dict[Weight, int], dtype: str, quantization: str | None) -> tuple[int, int]:
    """Return the bytes of weights and of their constants; what a scheme does not convert stays in `dtype`."""
    quantised = {w: n for w, n in weights.items() if w.kind in converted_kinds(quantization)}
    rest = sum(w.size * n for w, n in weights.items() if w not in quantised)
    if not quantised or not quantization:
        return weight_bytes(rest, dtype), 0
    if published := PUBLISHED.get(quantization):
        blocks = sum(
            -(-w.rows // published.rows) * -(-w.columns // published.columns) * n for w, n in quantised.items()
        )
        stored = sum(w.size * n for w, n in quantised.items()) * published.bits // 8
        return weight_bytes(rest, dtype) + stored, published.scale_bytes * blocks
    bits = quantization.removesuffix("-double")
    if quantization in OURS:  # codes are packed, and blocks end, with each row
        stored = weight_bytes(rest, dtype) + sum(
            w.rows * weight_bytes(w.columns, bits) * n for w, n in quantised.items()
        )
        blocks = sum(w.rows * -(-w.columns // BLOCK) * n for w, n in quantised.items())
        return stored, 0 if quantization == "bfloat16" else 4 * blocks
    stored = weight_bytes(rest, dtype) + sum(weight_bytes(w.size, bits) * n for w, n in quantised.items())
    if quantization == "int8":
        return stored, sum(4 * w.rows * n for w, n in quantised.items())
    constants = 0
    for weight, count in quantised.items():
        blocks = -(-weight.size // BLOCK)
        # Double quantisation: an 8-bit code per block, a float32 per 256 of them and one float32 offset.
        constants += count * (blocks + 4 * -(-blocks // 256) + 4 if quantization.endswith("-double") else 4 * blocks)
    return stored, constants


def query_heads(c: Fields) -> int | None:
    """Query heads of the widest layer, or None where the configuration has no such field."""
    return _first(c, _HEADS)


def _first(c: Fields, names: tuple[str, ...]) -> int | None:
    return next((number for name in names if (number := c.largest(name)) is not None), None)


def layer_widths(model: Model) -> tuple[int, int]:
    """Channels of the residual stream, and the values that a layer keeps for a token beside two such streams."""
    hidden = _first(model.text, _HIDDEN) or 0
    width = 3 * max((w.columns for w in model.weights if w.kind == "linear"), default=hidden)
    expert = max((w.columns for w in model.weights if w.kind == "experts"), default=0)
    if expert:
        width = max(width, active_experts(model.text) * (3 * expert + 2 * hidden))
    return hidden, width


def _activations(model: Model, dtype: str, batch: int, tokens: int, attention: str) -> int:
    """Peak of one pass over `tokens` tokens of each sequence: the widest layer, or the logits of the last position."""
    if not tokens:
        return 0
    size = DTYPE_BITS[dtype] // 8
    vocab = _first(model.text, ("vocab_size",)) or 0
    hidden, width = layer_widths(model)
    layer = batch * tokens * (2 * hidden + width) * size
    if attention == "eager" and model.has_attention:
        heads = query_heads(model.text)
        if heads is None:
            raise ValueError(
                f"{model.fields.label}: attention='eager' needs a number of heads, and the configuration has none"
            )
        layer += 2 * attention_scores_bytes(heads, tokens, dtype, batch) + attention_scores_bytes(
            heads, tokens, "float32", batch
        )
    return max(layer, batch * vocab * (size + 4))


def _workspace(model: Model, quantization: str | None, batch_tokens: int) -> int:
    linears = [w for w in model.weights if w.kind == "linear"]
    if quantization is None or quantization in PUBLISHED or not linears or not batch_tokens:
        return 0
    if quantization == "int8":
        return 4 * batch_tokens * max(w.rows for w in linears)
    return OURS.get(quantization, 2 + 4) * max(w.size for w in linears)


def estimate(
    model: Any,
    *,
    dtype: Any = None,
    quantization: str | None = None,
    batch_size: int = 1,
    prompt_tokens: int = 0,
    new_tokens: int = 0,
    attention: str = "flash",
    kv_cache_dtype: Any = None,
) -> MemoryEstimate:
    """Estimate the memory that running a causal language model takes.

    Parameters
    ----------
    model : str, path, dict or transformers.PretrainedConfig
        See `count_parameters`.
    dtype : str or torch.dtype, optional
        Data type of weights and activations; the configuration's own by default, bfloat16 if it names none.
    quantization : {None, "int8", "fp4", "nf4", "fp4-double", "nf4-double", "bfloat16", "int4", "int3", "int2", "fp8", "mxfp4"}
        How the weights of linear layers are stored: by bitsandbytes or, equally, by `course_lib.quantization.quantize_model`
        (whose llm-int8 is stored as int8), bfloat16 to int2 by the latter alone; ``-double`` quantises the constants again. The
        output head, embeddings, norms, biases and stacked expert tensors stay in `dtype`. The last two are how checkpoints are
        published: fp8 converts linear layers and experts, in blocks of 128 by 128, mxfp4 the experts alone. If neither this nor
        `dtype` is given, what the configuration says of its checkpoint decides.
    batch_size : int
        Sequences at a time.
    prompt_tokens, new_tokens : int
        Tokens of each prompt, and tokens generated after it.
    attention : {"flash", "eager"}
        Whether the score matrices are written out.
    kv_cache_dtype : str or torch.dtype, optional
        Data type of the cache, `dtype` by default; see `kv_cache_bytes`.

    Returns
    -------
    MemoryEstimate
        In bytes.

    Raises
    ------
    FileNotFoundError, TypeError
        As for `count_parameters`.
    ValueError
        If a name or number is not accepted; the message says which are. If the configuration says that its checkpoint is
        quantised in another way (GPTQ, AWQ, ...) and neither `dtype` nor `quantization` is given. If
        `kv_cache_bytes` raises.

    Notes
    -----
    Derived in chapter 01 (notebooks/01-memory.ipynb).

    *Quantisation constants*: int8 has one float32 per row, 4 bit one float32 per 64 weights, double quantisation one byte
    per 64 weights, a float32 per 256 of those and one float32 per matrix. int4, int3 and int2 have one float32 per 64 weights
    of a row, and for the rest of it; fp8 has one float32 per block, mxfp4 a byte per 32 weights of a row. The table of levels
    that bitsandbytes keeps with each matrix, up to 1 KiB, is left out.

    *Activations*: the larger of one layer's pass over the prompt, two residual streams and three tensors of the widest
    matrix's input width (for experts, of all active ones), and the last position's logits with their float32 copy, which
    is what Transformers' ``generate`` keeps. Eager attention adds one layer's scores before and after softmax and the
    softmax in float32.

    *Workspace*, an upper bound: int8 has the int32 product of the widest matrix. Four bit has two dequantised copies of
    the largest matrix, one of 16 and one of 32 bit, 6 bytes per weight. That is what bitsandbytes needs for float16
    inputs, as its compute type is float32 unless another is asked for; with bfloat16 or float32 inputs it makes one copy,
    and newer versions multiply small inputs without any. bfloat16 to int2 have what dequantising the largest matrix takes
    `course_lib.quantization.QuantizedLinear`, which needs less where it multiplies few rows by the codes themselves. fp8 and mxfp4
    have none: kernels for them multiply the codes. Where there is no such kernel, copies come on top.
    """
    if _choice(attention, "attention", ATTENTIONS) is None:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got None")
    batch = whole(batch_size, "batch_size", least=1)
    prompt, new = whole(prompt_tokens, "prompt_tokens"), whole(new_tokens, "new_tokens")
    if kv_cache_dtype is not None:
        dtype_name(kv_cache_dtype, argument="kv_cache_dtype", accepted=CACHE_DTYPES)
    counted = Model.of(model)
    name, quantization = own_storage(counted, dtype, quantization)
    stored, constants = stored_bytes(counted.weights, name, quantization)
    tokens = max(prompt, 1 if new else 0)
    return MemoryEstimate(
        weights=stored,
        quantization_constants=constants,
        kv_cache=counted.cache_bytes(prompt + new, batch, kv_cache_dtype or name, "kv_cache_dtype"),
        activations=_activations(counted, name, batch, tokens, attention),
        workspace=_workspace(counted, quantization, batch * tokens),
        method=counted.method,
    )


def own_storage(model: Model, dtype: Any, quantization: str | None) -> tuple[str, str | None]:
    """Data type and scheme of the weights: those asked for, else what the configuration says of its checkpoint."""
    _choice(quantization, "quantization", QUANTIZATIONS)
    if quantization in PUBLISHED and not _converts(model, quantization):
        kinds = " and ".join(converted_kinds(quantization))
        raise ValueError(
            f"{model.fields.label}: quantization is {quantization!r}, which converts {kinds} only, and it has none"
        )
    if dtype is not None:
        return dtype_name(dtype, accepted=WEIGHT_DTYPES), quantization
    return _own_dtype(model), quantization or _own_quantization(model)


def _converts(model: Model, quantization: str) -> bool:
    return any(w.kind in converted_kinds(quantization) for w in model.weights)


def _own_dtype(model: Model) -> str:
    for key, value in model.stated("dtype", "torch_dtype"):
        if str(value) != "auto":
            argument = f"{model.fields.label}: {key}, which dtype=... overrides,"
            return dtype_name(value, argument=argument, accepted=WEIGHT_DTYPES)
    return "bfloat16"


def _names(listed: Any) -> list[str]:
    """What a configuration lists, which may be one name or nothing."""
    return [str(name) for name in (listed if isinstance(listed, list | tuple) else [listed]) if name is not None]


def _own_quantization(model: Model) -> str | None:
    """The scheme in which a checkpoint is stored; those that are not counted are refused."""
    for _, value in model.stated("quantization_config", "compression_config", "quantization"):
        spec = value if isinstance(value, Mapping) else value.to_dict() if hasattr(value, "to_dict") else {"": value}
        method = str(getattr(spec.get("quant_method"), "value", spec.get("quant_method") or ""))
        skipped = {name for key in _SKIPPED for name in _names(spec.get(key)) if not _KEPT.search(name)}
        if method in ("bitsandbytes", "") and {"load_in_8bit", "load_in_4bit"} & set(spec) and not skipped:
            if spec.get("load_in_8bit"):
                return "int8"
            if spec.get("load_in_4bit"):
                double = "-double" * bool(spec.get("bnb_4bit_use_double_quant"))
                kind = str(spec.get("bnb_4bit_quant_type") or "fp4").lower()
                argument = f"{model.fields.label}: bnb_4bit_quant_type"
                return f"{_choice(kind, argument, ('fp4', 'nf4'))}{double}"
            continue
        if method == "fp8" and spec.get("weight_block_size") in ([128, 128], (128, 128)) and not skipped:
            return method
        if method == "mxfp4" and _converts(model, method):  # which converts experts, whatever else is named as skipped
            return method
        if spec:
            bits = next((spec[name] for name in ("bits", "w_bit", "weight_bits") if spec.get(name)), None)
            how = (method or "quantised weights") + (f" {bits} bit" if bits else "")
            but = f" except {', '.join(sorted(skipped))}" if skipped else ""
            raise ValueError(
                f"{model.fields.label}: the checkpoint is stored as {how}{but}, which this does not count; "
                "pass dtype=... to count it so (for an estimate, quantization=... too)"
            )
    return None
