"""A cache that imposes a window on a model that has none, and keeps the first tokens, on which attention leans, before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from course_lib.kernels.rope_arguments import Layout
from course_lib.kv_cache.base import CacheLayer, KVCache, Pair
from course_lib.kv_cache.dynamic import GrowingLayer
from course_lib.memory.units import whole
from course_lib.positions import apply_rope, rope_cos_sin, rope_frequencies

#: No configuration says how a model pairs coordinates. These types of Transformers turn neighbours, the others halves.
INTERLEAVED = {
    *("blt", "codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text", "glm", "glm4"),
    *("glm4v_text", "glm_ocr_text", "gptj", "helium", "llama4_text"),
}
#: Nor that these types turn keys in layers with a window only, if there are any.
TURNED_IN_WINDOWS = {"afmoe", "cohere2", "exaone4", "exaone4_5_text", "exaone_moe", "flint", "kolibri1", "lara_mini"}
#: Nor what these do, which is like no other.
UNKNOWN = {
    "cohere2_moe": "turns the keys of some layers only",
    "deepseek_v4": "compresses keys",
    "nanochat": "turns keys backwards",
}


class Turn(NamedTuple):
    """How a layer turns its keys by their position: what `rope_frequencies` takes, and which coordinates make a pair."""

    head_dim: int | None
    scaling: Mapping[str, Any]
    max_position_embeddings: int | None
    layout: Layout


def find_turn(config: PretrainedConfig, index: int) -> Turn | None:
    """Return how a layer of a model turns its keys, or None if it does not.

    Raises
    ------
    ValueError
        If the model's keys cannot be moved to another position.
    """
    config = config.get_text_config(decoder=True)
    kind, scaling = config.model_type, getattr(config, "rope_parameters", None)
    types = getattr(config, "layer_types", None) or []
    layer_type = types[index] if index < len(types) else None

    def refuse(reason: str) -> ValueError:
        return ValueError(f"sinks must be 0 for a model of type {kind!r}, which {reason}")

    if kind in UNKNOWN:
        raise refuse(UNKNOWN[kind])
    if getattr(config, "kv_lora_rank", None):
        raise refuse("keeps compressed keys")
    if getattr(config, "position", "rope") != "rope" or getattr(config, "position_embedding_type", "rope") != "rope":
        return None
    layout: Layout = "interleaved" if kind in INTERLEAVED else "half"
    if scaling is None:
        rotary_dim = getattr(config, "rotary_dim", None)
        return Turn(rotary_dim, {}, None, layout) if rotary_dim and kind in INTERLEAVED else None
    if not {"rope_type", "type", "rope_theta"} & scaling.keys():
        scaling = scaling.get(layer_type)
    thetas, turned = getattr(config, "layer_rope_theta", None), getattr(config, "no_rope_layers", None)
    if (
        scaling is None
        or (thetas and not thetas[index])
        or (turned and not turned[index])
        or (kind in TURNED_IN_WINDOWS and layer_type == "full_attention" and "sliding_attention" in types)
    ):
        return None
    scaling = dict(scaling)
    if thetas:
        scaling["rope_theta"] = thetas[index]
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type in ("dynamic", "longrope"):
        raise refuse(f"turns keys otherwise as the text grows (rope_type {rope_type!r})")
    return Turn(None, scaling, getattr(config, "max_position_embeddings", None), layout)


class SinkLayer(GrowingLayer):
    """Keys and values of the last ``window - 1`` tokens, and of the first, which are shown as if they stood right before those.

    Parameters
    ----------
    window, sinks : int
        As for `SlidingWindowCache`.
    turn : Turn, optional
        How the model turns this layer's keys.
    own_window : bool
        Whether the model itself gives this layer a window, a larger one.
    """

    def __init__(self, window: int, sinks: int, turn: Turn | None, own_window: bool) -> None:
        super().__init__(window)
        # Transformers takes the mask of a layer from here: it is the model's kind of layer that counts.
        self.is_sliding = own_window
        self.sinks, self._turn = sinks, turn
        self.first_tokens: torch.Tensor | None = None

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super()._begin(keys, values)
        self._sink_keys, self._sink_values = (
            tensor.new_zeros(*tensor.shape[:2], self.sinks, tensor.shape[3]) for tensor in (keys, values)
        )
        self._first = torch.zeros(keys.shape[0], dtype=torch.long, device=keys.device)
        if self._turn is not None:
            head_dim, scaling, longest, _ = self._turn
            frequencies, _ = rope_frequencies(
                head_dim or keys.shape[3], scaling=scaling, max_position_embeddings=longest
            )
            self._frequencies = frequencies.to(keys.device)

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().check(key_states, value_states)
        first, batch = self.first_tokens, key_states.shape[0]
        if not self.seen and first is not None and len(first) != batch:
            raise ValueError(f"first_tokens has {len(first)} entries and the batch {batch} rows; they must be equal")

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.seen:
            first = self.first_tokens
            self._first = torch.zeros_like(self._first) if first is None else first.to(self.device)
            self._last_sink = self.sinks + (int(self._first.max()) if self.batch else 0)
            self._padded = self._last_sink > self.sinks
        super()._append(keys, values)
        if self.seen < self._last_sink and keys.shape[2]:
            # Each row's sinks that are among these tokens, as they come: shown elsewhere, they are turned from here each time.
            place = self._first[:, None] + torch.arange(self.sinks, device=self.device) - self.seen
            here = ((place >= 0) & (place < keys.shape[2]))[:, None, :, None]
            place = place.clamp(0, keys.shape[2] - 1)
            self._sink_keys = torch.where(here, _at(keys.detach(), place), self._sink_keys)
            self._sink_values = torch.where(here, _at(values.detach(), place), self._sink_values)

    def _shown(self) -> int:
        """Return how many sinks stand before the window now."""
        return min(self.sinks, self.seen - self.kept())

    def _placed(self, begin: int, count: int) -> Pair:
        """Return sinks as they are seen in the ``count`` places from position ``begin``."""
        keys, values = self._sink_keys[:, :, :count], self._sink_values[:, :, :count]
        if self._padded:
            # A row that began late still has its first tokens in their own places; before them is padding, which is masked.
            place = torch.arange(count, device=self.device) - (self._first - begin).clamp(min=0)[:, None]
            keys, values = (_at(tensor, place.clamp(min=0)) for tensor in (self._sink_keys, self._sink_values))
        if self._turn is not None and begin:
            moved = (begin - self._first).clamp(min=0)[:, None].expand(-1, count)
            keys = apply_rope(keys, *rope_cos_sin(moved, self._frequencies), layout=self._turn.layout)
        return keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store the keys and values of new tokens, and return the sinks, what was kept of later tokens, and the new ones."""
        shown, kept = self._shown(), self.kept()
        begin, visible = self.seen - kept - shown, kept + key_states.shape[2]
        self.store(key_states, value_states)
        start = self._start + self.held - visible
        keys, values = self._keys[:, :, start : start + visible], self._values[:, :, start : start + visible]
        if shown:
            sinks = self._placed(begin, shown)
            if start >= shown and visible == self.held and not self._keys.requires_grad:
                # The places before the window are those of dropped tokens.
                whole = slice(start - shown, start + visible)
                self._keys[:, :, start - shown : start], self._values[:, :, start - shown : start] = sinks
                keys, values = self._keys[:, :, whole], self._values[:, :, whole]
            else:
                keys, values = torch.cat((sinks[0], keys), 2), torch.cat((sinks[1], values), 2)
        self.trim()
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        shown, kept = self._shown(), self.kept()
        return shown + kept + query_length, self.seen - kept - shown

    def get_max_length(self) -> int:
        return int(self.window or 0) + self.sinks

    @property
    def used_nbytes(self) -> int:
        if not self.is_initialized:
            return 0
        token = self.batch * self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize
        return (self.held + min(self.sinks, self.seen)) * token

    def _select(self, rows: torch.Tensor) -> None:
        super()._select(rows)
        self._first = self._first.index_select(0, rows)
        if self.first_tokens is not None:
            self.first_tokens = self._first
        self._sink_keys, self._sink_values = (t.index_select(0, rows) for t in (self._sink_keys, self._sink_values))

    def _forget(self) -> None:
        super()._forget()
        del self._first, self._sink_keys, self._sink_values

    def reset(self) -> None:
        super().reset()
        self.first_tokens = None

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, plain = super().state()
        own = {"first": self._first, "sink_keys": self._sink_keys, "sink_values": self._sink_values}
        return tensors | own, plain

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
        self.first_tokens = tensors["first"]
        super().restore(tensors, plain)
        self._sink_keys, self._sink_values = tensors["sink_keys"], tensors["sink_values"]

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {"first": self._first, "sink_keys": self._sink_keys, "sink_values": self._sink_values}
        return super().tensors() | own | ({} if self._turn is None else {"frequencies": self._frequencies})


def _at(tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return the tokens of ``[batch, kv_heads, length, dim]`` at places ``[batch, count]`` of their rows."""
    return tensor.gather(2, place[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))


class SlidingWindowCache(KVCache):
    """Keys and values of the last tokens and of the very first, for a model that would keep all.

    A query sees the first `sinks` tokens of its text, then the last `window` tokens, itself included. Positions are those of such
    a shorter text: the sinks' keys are turned so that they stand right before the window.

    Parameters
    ----------
    config : PretrainedConfig
        The model's. A layer to which it gives a window of at most ``window + sinks`` keeps that, without sinks.
    window : int
        How many tokens a query sees, itself included, besides the sinks.
    sinks : int
        How many first tokens stay; 0 for none.

    Attributes
    ----------
    first_tokens : Tensor or None
        int64 ``[batch]``: index of each row's first token that is not padding, the first column if None. May be set before the first
        tokens come; without it, padding on the left is what is kept.

    Raises
    ------
    ValueError
        If a number is out of range, if the model reckons with a key for each token, or if `sinks` is not 0 and its keys cannot be
        moved: dynamic NTK and LongRoPE turn them otherwise as the text grows.

    Notes
    -----
    What is dropped is dropped after a call: a call of several tokens sees all that was kept, and itself as far as the model allows.
    A prompt in one call is thus read whole.

    References
    ----------
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023, section 3.2.
    """

    def __init__(self, config: PretrainedConfig, *, window: int = 1024, sinks: int = 4) -> None:
        whole(window, "window", least=1)
        whole(sinks, "sinks")
        super().__init__(config, GrowingLayer, window=window, sinks=sinks)
        text = config.get_text_config(decoder=True)
        if text.model_type == "bloom" or getattr(text, "alibi", False):
            raise ValueError(
                f"config is of a model of type {text.model_type!r} with ALiBi, which reckons with a key for each token; "
                "no window can be imposed on it"
            )
        for index, layer in enumerate(self.layers):
            own = layer.window if isinstance(layer, CacheLayer) else 0
            if own is None or own > window + sinks:
                turn = find_turn(config, index) if sinks else None
                self.layers[index] = SinkLayer(window, sinks, turn, own is not None)

    @property
    def first_tokens(self) -> torch.Tensor | None:
        return next((layer.first_tokens for layer in self.layers if isinstance(layer, SinkLayer)), None)

    @first_tokens.setter
    def first_tokens(self, first: torch.Tensor | None) -> None:
        if first is not None and (first.ndim != 1 or first.dtype != torch.long or bool((first < 0).any())):
            raise ValueError(f"first_tokens is {first!r:.80}; int64 [batch], 0 or more, is needed")
        layers = [layer for layer in self.layers if isinstance(layer, SinkLayer)]
        for layer in layers:
            if layer.seen and not torch.equal(
                layer._first.cpu(), torch.zeros(layer.batch).long() if first is None else first.cpu()
            ):
                raise ValueError("first_tokens cannot change while the cache holds tokens; reset() empties it")
        for layer in layers:
            layer.first_tokens = first
