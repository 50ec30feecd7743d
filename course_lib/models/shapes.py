"""What a pass through a decoder must make, by its configuration alone: every tensor's shape and place, and the bytes of a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from course_lib.kv_cache import KVCache, PrefixCache
from course_lib.kv_cache.codes import channel_group
from course_lib.kv_cache.quantized import QuantizedLayer
from course_lib.kv_cache.static import StaticLayer
from course_lib.models.decoder import DecoderConfig

_STREAM, _SEEN = ("batch", "tokens", "hidden_size"), ("batch", "kv_heads", "in_sight", "head_dim")

#: The axes of every tensor, in the order of a pass. In sight are the tokens, or slots, that a cache shows to the new ones.
AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens": _STREAM,
    "embed_positions": ("tokens", "hidden_size"),
    "cos": ("tokens", "pairs"),
    "sin": ("tokens", "pairs"),
    "input_layernorm": _STREAM,
    "q_proj": ("batch", "tokens", "query_width"),
    "k_proj": ("batch", "tokens", "kv_width"),
    "v_proj": ("batch", "tokens", "kv_width"),
    "q_norm": ("batch", "tokens", "query_heads", "head_dim"),
    "k_norm": ("batch", "tokens", "kv_heads", "head_dim"),
    "queries": ("batch", "query_heads", "tokens", "head_dim"),
    "keys": ("batch", "kv_heads", "tokens", "head_dim"),
    "values": ("batch", "kv_heads", "tokens", "head_dim"),
    "keys in sight": _SEEN,
    "values in sight": _SEEN,
    "attended": ("batch", "query_heads", "tokens", "head_dim"),
    "o_proj": _STREAM,
    "post_attention_layernorm": _STREAM,
    "gate_proj": ("batch", "tokens", "intermediate_size"),
    "up_proj": ("batch", "tokens", "intermediate_size"),
    "down_proj": _STREAM,
    "layer": _STREAM,
    "norm": ("batch", "last", "hidden_size"),
    "lm_head": ("batch", "last", "vocab_size"),
}
#: Those that a pass makes once, outside the layers.
OUTSIDE = ("embed_tokens", "embed_positions", "cos", "sin", "norm", "lm_head")


@dataclass(frozen=True)
class Traced:
    """A tensor that a pass makes.

    Attributes
    ----------
    name : str
        A module's, for its output; ``"queries"`` and ``"keys"`` (turned, as attention and cache take them), ``"values"``,
        ``"keys in sight"`` and ``"values in sight"`` (what the cache returns), ``"attended"``, ``"cos"`` and ``"sin"``.
    layer : int or None
        None outside the layers.
    shape : tuple of int
        Its axes are ``AXES[name]``.
    dtype : torch.dtype
        Its type.
    positions : tuple of int
        Of its tokens, counted from 0.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    positions: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def label(self) -> str:
        """Its name with its layer."""
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


def expected_tensors(
    config: DecoderConfig, dtype: torch.dtype, cache: KVCache, past: int, length: int
) -> Iterator[Traced]:
    """Yield what a pass over one sequence makes.

    Parameters
    ----------
    config : DecoderConfig
        The model's.
    dtype : torch.dtype
        Of its weights.
    cache : KVCache
        Of which only the options count: windows, first tokens that stay, and room from the start.
    past, length : int
        Tokens that the cache has taken, and that go in.
    """
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rotary = config.rope_parameters or {}
    part = 1 if rotary.get("rope_type") == "proportional" else rotary.get("partial_rotary_factor") or 1
    sizes = {"batch": 1, "tokens": length, "last": 1, "query_heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    sizes |= {"query_width": heads * dim, "kv_width": kv_heads * dim, "pairs": int(dim * part) // 2}
    sizes |= {name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
    absent = set() if config.qk_norm else {"q_norm", "k_norm"}
    absent |= set() if config.position == "rope" else {"cos", "sin"}
    absent |= set() if config.position == "learned" else {"embed_positions"}
    for layer in (None, *range(config.num_hidden_layers)):
        first = past
        if layer is not None:
            sizes["in_sight"], first = _in_sight(cache.layers[layer], past, length)
        for name, axes in AXES.items():
            if name in absent or (name in OUTSIDE) != (layer is None):
                continue
            if name in ("q_norm", "k_norm") and length == 1:  # the heads of a single token stand before it
                axes = (axes[0], axes[2], axes[1], axes[3])
            start = past + length - 1 if "last" in axes else first if "in_sight" in axes else past
            kind = torch.float32 if name in ("cos", "sin") else dtype
            yield Traced(name, layer, tuple(sizes[axis] for axis in axes), kind, tuple(range(start, past + length)))


def _in_sight(layer: Any, past: int, length: int) -> tuple[int, int]:
    """Return how many slots a cache's layer shows to new tokens, and the position of the first."""
    kept = past if layer.window is None else min(past, layer.window - 1)
    shown = kept + min(getattr(layer, "sinks", 0), past - kept)
    slots = shown + length
    if isinstance(layer, StaticLayer):
        slots = max(slots, min(layer.window or layer.max_cache_len, layer.max_cache_len))
    return slots, past - shown


def expected_bytes(config: DecoderConfig, dtype: torch.dtype, cache: KVCache, seen: int) -> int | None:
    """Return the bytes of what a cache holds after so many tokens of one sequence.

    Parameters
    ----------
    config, dtype, cache
        As for `expected_tensors`.
    seen : int
        Tokens that the cache has taken.

    Returns
    -------
    int or None
        None where they depend on more: for codes behind a window, and for what a `PrefixCache` stores besides.
    """
    token = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    total = 0
    for layer in cache.layers:
        held = seen if layer.window is None else min(seen, layer.window - 1)
        coded = 0
        if isinstance(layer, QuantizedLayer):
            coded = max(0, (seen - layer.residual_length) // layer.group_size * layer.group_size)
            total += config.num_key_value_heads * _code_bytes(coded, config.head_dim, layer)
        if isinstance(cache, PrefixCache) or (isinstance(layer, QuantizedLayer) and layer.window is not None):
            return None
        total += (held - coded + min(getattr(layer, "sinks", 0), seen)) * token
    return total


def _code_bytes(tokens: int, head_dim: int, layer: QuantizedLayer) -> int:
    """Return the bytes of a head's keys and values as codes, with two constants of 16 bits for each group."""
    channels = head_dim + head_dim % 2 if layer.bits == 4 else head_dim
    groups = tokens // layer.group_size * channels  # keys: a channel of neighbouring tokens
    groups += tokens * channels // channel_group(head_dim, layer.bits, layer.group_size)  # values: channels of a token
    return 2 * tokens * channels * layer.bits // 8 + 4 * groups
