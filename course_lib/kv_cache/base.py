"""What all caches share: a layer that keeps keys and values of earlier tokens, and the cache of all layers of a model."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import transformers
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

Pair = tuple[torch.Tensor, torch.Tensor]


class CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer of a model; each kind of cache says how they are stored.

    Parameters
    ----------
    window : int, optional
        How many tokens a query sees, itself included. Then ``window - 1`` are kept between calls, as in Transformers.

    Attributes
    ----------
    seen : int
        Tokens that have passed through, also those that a window has dropped: the next token's position.
    held : int
        Tokens that are stored.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, window: int | None = None) -> None:
        # Not the parent's: it sets keys and values, which here are read from the store.
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = self.record_past = False
        self.seen = self.held = 0

    # ---- what each kind of cache defines

    @abstractmethod
    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Prepare to store tokens like these, ``[batch, kv_heads, length, head_dim]``; none of them is stored yet."""

    @abstractmethod
    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store tokens after the `held` ones, which do not count them yet."""

    @abstractmethod
    def _read(self) -> Pair:
        """Return the `held` tokens, ``[batch, kv_heads, held, ...]``, valid until the next `_append`, `_select` or `_forget`."""

    @abstractmethod
    def _drop_first(self, count: int) -> None:
        """Forget the oldest of the `held` tokens, which still count them."""

    @abstractmethod
    def _drop_last(self, count: int) -> None:
        """Forget the newest of the `held` tokens, which still count them."""

    @abstractmethod
    def _select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, int64 ``[new batch]``, in this order; a row may come twice, or not at all."""

    @abstractmethod
    def _forget(self) -> None:
        """Give all memory back."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that is allocated, by name, whole."""

    @property
    def used_nbytes(self) -> int:
        """Bytes that the tokens held need; what is allocated beyond them is room to grow."""
        if not self.is_initialized:
            return 0
        return self.held * self.batch * self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    def attend(
        self,
        q: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        **rules: Any,
    ) -> torch.Tensor | None:
        """Store new tokens and let their queries attend, reading the store as it is.

        Parameters
        ----------
        q : Tensor
            ``[batch, query_heads, length, head_dim]``, the queries of the new tokens; causal, and within the layer's window.
        key_states, value_states : Tensor
            As for `update`.
        **rules
            ``scale``, ``alibi_slopes`` and ``softcap`` as for :func:`course_lib.attention.attention`.

        Returns
        -------
        Tensor or None
            ``[batch, query_heads, length, value_dim]``; None, with nothing stored, where `update` and attention do as well.
        """
        return None

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what a file keeps: tensors of the tokens held, by name, and plain values for JSON."""
        keys, values = self._read()
        return {"keys": keys, "values": values}, {"seen": self.seen}

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
        """Take over, in an empty layer, what `state` returned."""
        keys, values = tensors["keys"], tensors["values"]
        self.lazy_initialization(keys, values)
        self._append(keys, values)
        self.held, self.seen = keys.shape[2], int(plain["seen"])

    # ---- what Transformers calls

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys held, ``[batch, kv_heads, held, head_dim]``; None before the first."""
        return self._read()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """The values held, ``[batch, kv_heads, held, value_dim]``; None before the first."""
        return self._read()[1] if self.is_initialized else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch, self.kv_heads, _, self.head_dim = key_states.shape
        self.value_dim = value_states.shape[-1]
        self._begin(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store the keys and values of new tokens, and return all that these tokens may see.

        Parameters
        ----------
        key_states, value_states : Tensor
            ``[batch, kv_heads, length, head_dim]`` and ``[batch, kv_heads, length, value_dim]``.

        Returns
        -------
        keys, values : Tensor
            ``[batch, kv_heads, kv_len, ...]``, the new tokens last; valid until the layer is next changed.

        Raises
        ------
        TypeError
            If the dtype or the device is not that of the tokens held.
        ValueError
            If shapes do not fit each other, or those of the tokens held.
        """
        visible = self.kept() + key_states.shape[2]
        self.store(key_states, value_states)
        keys, values = self._read()
        if self.held > visible:
            keys, values = keys[:, :, self.held - visible :], values[:, :, self.held - visible :]
        self.trim()
        return keys, values

    def store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store new tokens behind those that are held, of which none is dropped yet."""
        self.check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states)
        self.held += key_states.shape[2]
        self.seen += key_states.shape[2]

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Refuse tokens unlike those that are held; see `update`."""
        if key_states.ndim != 4 or key_states.shape[:3] != value_states.shape[:3]:
            raise ValueError(
                f"key_states has shape {list(key_states.shape)} and value_states {list(value_states.shape)}; "
                "[batch, kv_heads, length, head_dim] is needed, equal but for the last"
            )
        if key_states.dtype != value_states.dtype or key_states.device != value_states.device:
            raise TypeError(
                f"key_states is {key_states.dtype} on {key_states.device} and value_states {value_states.dtype} on "
                f"{value_states.device}; they must be alike"
            )
        if not self.is_initialized:
            return
        found = (key_states.shape[0], key_states.shape[1], key_states.shape[3], value_states.shape[3])
        if found != (self.batch, self.kv_heads, self.head_dim, self.value_dim):
            raise ValueError(
                f"key_states has shape {list(key_states.shape)} and value_states {list(value_states.shape)}, but the cache holds a "
                f"batch of {self.batch} with {self.kv_heads} heads of {self.head_dim} and {self.value_dim}; reset() empties it"
            )
        if key_states.dtype != self.dtype or key_states.device != self.device:
            raise TypeError(
                f"key_states is {key_states.dtype} on {key_states.device}, but the cache holds {self.dtype} on {self.device}; "
                "reset() empties it"
            )

    def kept(self) -> int:
        """Return how many of the tokens held the next one may see."""
        return self.held if self.window is None else min(self.held, self.window - 1)

    def trim(self) -> None:
        """Drop the tokens that no later one may see, unless the past is recorded."""
        excess = self.held - self.kept()
        if excess and not self.record_past:
            self._drop_first(excess)
            self.held -= excess

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self.kept()
        return kept + query_length, self.seen - kept

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def activate_past_recording(self) -> None:
        """Keep what a window would drop until the next `crop`, so that it can go back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, whose number is given as 0 or negative, as in Transformers.

        Raises
        ------
        ValueError
            If the number is positive, if there are fewer tokens, or if a window has dropped those that would be in it again.
        """
        count = -tokens_to_remove
        if count < 0 or count > self.seen:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; 0 or a negative number down to {-self.seen} is needed, "
                "for there are no more tokens"
            )
        back = self.seen - count
        needed = back if self.window is None else min(back, self.window - 1)
        if count and self.held - count < needed:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}, but the window of {self.window} has dropped tokens that would be in it "
                "again; activate_past_recording() before makes it keep them"
            )
        if count:
            self._drop_last(count)
            self.held -= count
            self.seen = back
        excess = self.held - self.kept()
        if excess:
            self._drop_first(excess)
            self.held -= excess

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.is_initialized:
            self._select(beam_idx.to(self.device))
            self.batch = len(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.batch, device=self.device)[indices])

    def reset(self) -> None:
        """Forget all tokens; those that come next may be of another batch, dtype or device."""
        if self.is_initialized:
            self._forget()
        self.is_initialized = False
        self.seen = self.held = 0


class KVCache(Cache):  # type: ignore[misc]
    """A cache of Transformers whose layers are ours wherever the model's layers keep keys and values.

    It serves ``model.generate(...)`` of every decoder of Transformers, and `course_lib.models.DecoderLM`. Layers that the model itself
    gives a window keep that window; those that keep a running state instead stay Transformers' own.

    Parameters
    ----------
    config : PretrainedConfig
        The model's.
    layer : callable
        Makes a layer, given the window that the model gives it, or None.
    **options
        What else the kind of cache was built with; a file keeps it.
    """

    def __init__(self, config: PretrainedConfig, layer: Callable[[int | None], CacheLayer], **options: Any) -> None:
        if not isinstance(config, PretrainedConfig):
            raise TypeError(f"config is {config!r:.60}; a model's configuration, as model.config, is needed")
        plain = (DynamicLayer, DynamicSlidingWindowLayer)
        super().__init__(
            layers=[
                layer(getattr(theirs, "sliding_window", None)) if type(theirs) in plain else theirs
                for theirs in transformers.DynamicCache(config=config).layers
            ]
        )
        self.options = options

    @property
    def nbytes(self) -> int:
        """Bytes of all memory that the cache has allocated, room to grow included; memory that layers share counts once."""
        storages = (tensor.untyped_storage() for tensor in self.tensors().values())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def used_nbytes(self) -> int:
        """Bytes that the tokens held need, in the form in which they are stored."""
        own = sum(layer.used_nbytes for layer in self.layers if isinstance(layer, CacheLayer))
        theirs = (
            t.nbytes
            for i, one in enumerate(self.layers)
            if not isinstance(one, CacheLayer)
            for t in _found(one).values()
        )
        return own + sum(theirs)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that is allocated, as ``"layer.name"``."""
        return {f"{i}.{name}": tensor for i, layer in enumerate(self.layers) for name, tensor in _found(layer).items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokens held to a safetensors file, as they are stored, whole or not at all.

        Raises
        ------
        FileNotFoundError
            If there is no such folder.
        ValueError
            If the model has layers that keep a state instead of keys and values.
        """
        from course_lib.kv_cache.storage import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: PretrainedConfig) -> Self:
        """Return the cache that `save` wrote, on the CPU.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If the file is damaged, or of another kind of cache or model.
        """
        from course_lib.kv_cache.storage import load

        return load(cls, path, config)


def _found(layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer, ours or Transformers'."""
    if isinstance(layer, CacheLayer):
        return layer.tensors() if layer.is_initialized else {}
    found = {}
    for name, value in vars(layer).items():
        for key, tensor in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(tensor, torch.Tensor) and name != "_sliding_window_tensor":
                found[f"{name}{key}"] = tensor
    return found
