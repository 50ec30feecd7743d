"""Counting parameters and cache bytes of a model that is known only by its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

from course_lib.memory import meta
from course_lib.memory.architecture import Cached, Part, Weight
from course_lib.memory.blocks import Family, describe
from course_lib.memory.config import Fields, MissingFieldError, UnsupportedError, resolve
from course_lib.memory.families import FAMILIES
from course_lib.memory.families.base import LLAMA
from course_lib.memory.units import DTYPE_BITS, dtype_name, weight_bytes, whole

CACHE_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
CACHE_GROUP = 64  # values that share a scale and a zero point, 16 bit each, in an int8 or int4 cache
_GENERIC = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
)


def _describe(family: Family, fields: Fields) -> Part:
    try:
        return describe(family, fields)
    except (TypeError, AttributeError, KeyError, IndexError, ZeroDivisionError) as error:
        # Something is not of its kind; the class that checks every field says what.
        raise UnsupportedError(f"{fields.label}: no formula for these fields ({error})") from error


def _formula(fields: Fields) -> Part:
    """Apply the model type's row of the table; raise if it has none or something in the configuration is not covered."""
    family = FAMILIES.get(fields.model_type)
    if family is None:
        raise UnsupportedError(f"{fields.label}: no formula for model_type {fields.model_type!r}")
    part = _describe(family, fields)
    left = fields.leftover()
    if left:
        raise UnsupportedError(
            f"{fields.label}: the formula for {fields.model_type!r} does not cover {', '.join(left)}"
        )
    return part


def _plain(fields: Fields) -> Part:
    """Read an unknown type as a decoder in the manner of Llama, if it names every field that one has and no other."""
    kind = f"model_type {fields.model_type!r} is unknown" if fields.model_type else "there is no model_type"
    missing = [name for name in _GENERIC if name not in fields.source]
    if missing:
        raise ValueError(f"{fields.label}: {kind} and the configuration leaves out {', '.join(missing)}")
    part = _describe(LLAMA, fields)
    left = fields.leftover()
    if left:
        raise ValueError(f"{fields.label}: {kind} and a plain decoder does not cover {', '.join(left)}")
    return part


class Model:
    """A model known by its configuration: its weights and its cache.

    A formula of ours gives both where one covers the configuration; elsewhere the real class on the meta device does.

    Parameters
    ----------
    model : str, path, dict or transformers.PretrainedConfig
        See `count_parameters`.

    Attributes
    ----------
    method : {"closed form", "meta device"}
        Which of the two counted.
    fields : Fields
        The configuration that was counted, a nested language model's where the given one is composite.
    """

    def __init__(self, model: Any) -> None:
        self._given = resolve(model)
        self.fields, self._part = _locate(self._given)

    @classmethod
    def of(cls, model: Any) -> Model:
        """Return a model that was read already, or read it."""
        return model if isinstance(model, Model) else cls(model)

    @property
    def text(self) -> Fields:
        """The language model's fields, also where the real class that was counted is more than that."""
        return self.fields.nested() or self.fields

    def stated(self, *names: str) -> Iterator[tuple[str, Any]]:
        """What the given configuration says under some names, a composite one's own word before that of its parts."""
        for fields in (self._given, self._given.nested()):
            for name in names if fields else ():
                # Asking a configuration object for the old name of its data type logs a warning.
                if fields and (fields.is_mapping or name != "torch_dtype") and fields.get(name) is not None:
                    yield name, fields.get(name)

    @property
    def part(self) -> Part | None:
        """The formula's sum of parts; None where the real class is counted."""
        return self._part

    @property
    def method(self) -> Literal["closed form", "meta device"]:
        """Which way the model was counted."""
        return "meta device" if self._part is None else "closed form"

    @cached_property
    def _real(self) -> Any:
        try:
            return meta.build(self.fields)
        except ImportError as error:
            raise ValueError(
                f"{self.fields.label} needs the real class, and torch or transformers is missing"
            ) from error

    @cached_property
    def _first_tokens(self) -> tuple[list[meta.StoredTensor], Any]:
        return meta.first_tokens(self._real)

    @property
    def has_attention(self) -> bool:
        """Whether it caches keys and values of tokens."""
        if self._part is None:
            return any(tensor.attention for tensor in self._first_tokens[0])
        return any(_holds_keys(cached) for cached in self._part.cache)

    @cached_property
    def weights(self) -> dict[Weight, int]:
        """Every weight's shape and kind with its number of occurrences; tied weights count once."""
        return dict(self._part.weights) if self._part else dict(meta.weights(self._real))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(weight.size * count for weight, count in self.weights.items())

    def cached_elements(self, sequence_length: int) -> list[meta.StoredTensor]:
        """Tensors in the cache of one sequence after `sequence_length` tokens."""
        if not sequence_length:
            return []
        if self._part is None:
            return meta.cached_tensors(self._real, sequence_length, self._first_tokens[1])
        return [
            meta.StoredTensor(cached.elements(sequence_length) * count, cached.float32, _holds_keys(cached))
            for cached, count in self._part.cache.items()
        ]

    def cache_bytes(self, sequence_length: int, batch_size: int, dtype: Any, argument: str = "dtype") -> int:
        """Bytes of the cache; see `kv_cache_bytes`."""
        name = dtype_name(dtype, argument=argument, accepted=CACHE_DTYPES)
        length, batch = whole(sequence_length, "sequence_length"), whole(batch_size, "batch_size", least=1)
        tensors = self.cached_elements(length)
        if DTYPE_BITS[name] < 16 and not self.has_attention:
            kind = self.fields.model_type
            raise ValueError(
                f"{argument}={name!r} stores keys and values in fewer bits, and {kind!r} has none to store"
            )
        total = 0
        for tensor in tensors:
            elements = tensor.elements * batch
            if tensor.float32:
                total += 4 * elements
            elif not tensor.attention and DTYPE_BITS[name] < 16:
                total += 2 * elements
            else:
                total += weight_bytes(elements, name)
                total += 4 * -(-elements // CACHE_GROUP) if name in ("int8", "int4") else 0
        return total


def _holds_keys(cached: Cached) -> bool:
    return cached.attention and cached.per_token > 0


def _locate(fields: Fields) -> tuple[Fields, Part | None]:
    """Find the configuration to count and its formula; None leaves it to the real class."""
    try:
        return fields, _formula(fields)
    except (MissingFieldError, UnsupportedError) as reason:
        why = reason
    if fields.is_mapping:
        inner = fields.nested()
        if not fields.model_type and inner is None:
            return fields, _plain(fields)
        try:
            completed = fields.completed()
        except UnsupportedError:
            return _locate(inner) if inner else (fields, _plain(fields))
        except ImportError:
            raise ValueError(f"{why}, and transformers is not installed to fill in or count the rest") from None
        return _locate(completed)
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError:
        raise ValueError(f"{why}, and torch is not installed to count the real class") from None
    known = type(fields.source) in MODEL_FOR_CAUSAL_LM_MAPPING
    inner = fields.nested()
    if inner and known and not isinstance(fields.source, MODEL_FOR_CAUSAL_LM_MAPPING[type(fields.source)].config_class):
        try:
            return inner, _formula(inner)
        except (MissingFieldError, UnsupportedError):
            return fields, None
    if not inner and not known and fields.model_type in FAMILIES:
        raise why  # there is no real class to count what the formula does not cover
    if not inner or known:
        return fields, None
    if type(inner.source) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        # It has no output head of its own: the composite model brings one, and ties it or not.
        tied = bool(fields.get("tie_word_embeddings", False))
        inner = Fields(inner.source, inner.label, {"tie_word_embeddings": tied})
    return _locate(inner)


def count_parameters(model: Any) -> int:
    """Number of parameters of a causal language model, from its configuration alone.

    Parameters
    ----------
    model : str, path, dict or transformers.PretrainedConfig
        A published name in any case ("octocoder"), a config.json or a folder that holds one, its content, or a
        configuration object. Keys that a known `model_type` leaves out take Transformers' class defaults. Of a composite
        model the whole is counted where Transformers' causal-LM class is the whole (Gemma 3), else the language model
        inside with its output head (LLaVA, Llama 4, Qwen-VL, GLM-4V), without what sees.

    Returns
    -------
    int
        The parameters of the real class, exactly: every expert of a mixture, tied weights once. They are those of the
        architecture: a checkpoint's `quantization_config`, which packs several into one stored number, changes nothing.

    Raises
    ------
    FileNotFoundError
        If a path does not exist.
    TypeError
        If `model` is none of the above.
    ValueError
        If the name is unknown, the file is not a configuration, or an unknown type leaves out fields.

    Notes
    -----
    Derived in chapter 01 (notebooks/01-memory.ipynb).
    """
    return Model(model).parameters


def kv_cache_bytes(model: Any, sequence_length: int, batch_size: int = 1, dtype: Any = "bfloat16") -> int:
    """Bytes that Transformers' dynamic cache holds after a number of tokens.

    Parameters
    ----------
    model : str, path, dict or transformers.PretrainedConfig
        See `count_parameters`.
    sequence_length : int
        Tokens of each sequence that have passed through the model.
    batch_size : int
        Sequences.
    dtype : str or torch.dtype
        Data type of the cache. ``"int8"`` and ``"int4"`` add a 16-bit scale and a 16-bit zero point per 64 values, and
        convert keys and values only.

    Returns
    -------
    int
        Keys and values of the layers that have them: of a sliding window of W tokens the last W - 1, of latent
        attention the compressed vectors; and the states of recurrent and convolution layers, which do not grow and are
        float32 where the model keeps them so.

    Raises
    ------
    ValueError
        If a number is out of range, `dtype` is none that a cache has, or it has fewer than 16 bits and the model has no
        attention; if neither a formula covers the model nor its real class keeps a layered cache.

    Notes
    -----
    The formula ``2 * layers * kv_heads * head_dim`` values per token is derived in chapter 01
    (notebooks/01-memory.ipynb); chapter 09 shows where it fails.
    """
    return Model.of(model).cache_bytes(sequence_length, batch_size, dtype)
