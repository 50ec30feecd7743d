"""A cache of 8 or 4 bits a value: older tokens as codes that are written once, the newest as they came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from course_lib.kernels.flash_decoding import decoding_refusal, flash_decoding, merge
from course_lib.kernels.flash_decoding_arguments import MOST_ROWS, Codes
from course_lib.kv_cache.base import CacheLayer, KVCache, Pair
from course_lib.kv_cache.codes import PARTS, changed, channel_group, check_options, decode, encode, moved, part, write

#: Room for codes is made for a 32nd more than is needed: memory is lost to at most that, and a move of all codes comes as seldom as
#: every 32nd part of the text, in which they are read hundreds of times.
GROWTH = 33 / 32


class QuantizedLayer(CacheLayer):
    """Codes of older tokens in buffers that grow, and the newest tokens in full.

    Parameters
    ----------
    window : int, optional
        How many tokens a query sees, itself included.
    bits, group_size, residual_length : int
        See :class:`QuantizedCache`.
    """

    def __init__(self, window: int | None = None, *, bits: int, group_size: int, residual_length: int) -> None:
        super().__init__(window)
        self.bits, self.group_size, self.residual_length = bits, group_size, residual_length

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        # A window has dropped the first of the tokens that are stored as codes. The buffers lose whole groups, when they are moved.
        self._stored = self._dropped = 0
        self._newest = (
            keys.new_empty(*keys.shape[:2], 0, self.head_dim),
            values.new_empty(*values.shape[:2], 0, self.value_dim),
        )
        self._codes = self._encoded(self._newest)

    def _encoded(self, tokens: Pair) -> tuple[Codes, Codes]:
        channels = channel_group(self.value_dim, self.bits, self.group_size)
        return encode(tokens[0], self.bits, self.group_size, "channel"), encode(tokens[1], self.bits, channels, "token")

    def _floor(self, count: int) -> int:
        return count // self.group_size * self.group_size

    def _keep(self, start: int, end: int) -> None:
        """Keep some of the newest tokens only: as copies, for `update` may have returned a part of the tensors they were in."""
        keys, values = self._newest
        self._newest = keys[:, :, start:end].clone(), values[:, :, start:end].clone()

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        # Few are copied: there are fewer newest ones than the residual and a group.
        self._newest = torch.cat((self._newest[0], keys.detach()), 2), torch.cat((self._newest[1], values.detach()), 2)

    def trim(self) -> None:
        """Drop the tokens that no later one may see, and quantise the oldest whole groups beyond the residual.

        By then new tokens have been seen in full, also all of a long prompt.
        """
        super().trim()
        length = self._newest[0].shape[2]
        count = self._floor(length - self.residual_length)
        if count <= 0:
            return
        fresh = self._encoded((self._newest[0][:, :, :count], self._newest[1][:, :, :count]))
        self._reserve(count)
        for codes, new in zip(self._codes, fresh, strict=True):
            write(codes, self._stored, new)
        self._stored += count
        self._keep(count, length)

    def _reserve(self, count: int) -> None:
        """Make room for more codes."""
        buffer = self._codes[0].codes
        if self._stored + count <= buffer.shape[2] and (not buffer.is_inference() or torch.is_inference_mode_enabled()):
            return
        first = self._floor(self._dropped)
        room = self._floor(int((self._stored - first + count) * GROWTH) + self.group_size - 1)
        keys, values = self._codes
        self._codes = moved(keys, first, self._stored, room), moved(values, first, self._stored, room)
        self._stored, self._dropped = self._stored - first, self._dropped - first

    def _read(self) -> Pair:
        if not self._stored:
            return self._newest
        return self._joined(self._codes[0], self._newest[0]), self._joined(self._codes[1], self._newest[1])

    def _joined(self, codes: Codes, newest: torch.Tensor) -> torch.Tensor:
        """Return keys or values as one tensor."""
        first = self._floor(self._dropped)
        count = self._stored - first
        found = newest.new_empty(*newest.shape[:2], count + newest.shape[2], newest.shape[3])
        decode(part(codes, first, self._stored), found[:, :, :count])
        found[:, :, count:] = newest
        return found[:, :, self._dropped - first :]

    def _drop_first(self, count: int) -> None:
        coded = min(count, self._stored - self._dropped)
        self._dropped += coded
        if self._dropped == self._stored:
            self._stored = self._dropped = 0
        if count > coded:
            self._keep(count - coded, self._newest[0].shape[2])

    def _drop_last(self, count: int) -> None:
        length = self._newest[0].shape[2]
        if count <= length:
            self._keep(0, length - count)
            return
        # What is left of a group that is cut waits, as its codes have it, to be quantised again with the tokens that come next.
        end = self._stored - (count - length)
        start = max(self._floor(end), self._dropped)
        keys, values = self._read()
        here = slice(start - self._dropped, end - self._dropped)
        self._newest, self._stored = (keys[:, :, here].clone(), values[:, :, here].clone()), start
        if self._dropped == self._stored:
            self._stored = self._dropped = 0

    def _select(self, rows: torch.Tensor) -> None:
        self._newest = self._newest[0].index_select(0, rows), self._newest[1].index_select(0, rows)
        keys, values = self._codes
        self._codes = (
            changed(keys, lambda t: t.index_select(0, rows)),
            changed(values, lambda t: t.index_select(0, rows)),
        )

    def _forget(self) -> None:
        del self._codes, self._newest

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._named(*self._codes)

    def _named(self, *stored: Codes) -> dict[str, torch.Tensor]:
        found = {"keys.newest": self._newest[0], "values.newest": self._newest[1]}
        for name, codes in zip(("keys", "values"), stored, strict=True):
            found |= {f"{name}.{kind}": getattr(codes, kind) for kind in PARTS}
        return found

    @property
    def used_nbytes(self) -> int:
        """Bytes of the tokens held: codes, constants and the newest in full; a group of which some are dropped counts whole."""
        return sum(tensor.nbytes for tensor in self.state()[0].values()) if self.is_initialized else 0

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        first = self._floor(self._dropped)
        used = (part(codes, first, self._stored) for codes in self._codes)
        return self._named(*used), {"seen": self.seen, "dropped": self._dropped - first}

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
        keys, values = tensors["keys.newest"], tensors["values.newest"]
        self.lazy_initialization(keys, values)
        self._newest = keys, values

        def coded(empty: Codes, name: str) -> Codes:
            codes, scale, offset = (tensors[f"{name}.{kind}"] for kind in PARTS)
            return replace(empty, codes=codes, scale=scale, offset=offset)

        self._codes = coded(self._codes[0], "keys"), coded(self._codes[1], "values")
        self._stored, self._dropped = self._codes[0].codes.shape[2], int(plain["dropped"])
        self.held, self.seen = self._stored - self._dropped + keys.shape[2], int(plain["seen"])

    def attend(
        self, q: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor, **rules: Any
    ) -> torch.Tensor | None:
        """See :meth:`CacheLayer.attend`; None where there is no kernel that reads codes, as on a CPU, or there are no codes."""
        if not self.is_initialized or not self._stored or not q.is_cuda or not 0 < q.shape[2] <= MOST_ROWS:
            return None
        if q.dtype != self.dtype or (self.bits == 4 and (self.head_dim % 2 or self.value_dim % 2)):
            return None
        if decoding_refusal(q, *self._codes) or decoding_refusal(q, key_states, value_states):
            return None
        return self._attend(q, key_states, value_states, **rules)

    def _attend(
        self, q: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor, **rules: Any
    ) -> torch.Tensor:
        """Attend to codes and to the newest tokens, each for itself, and merge the two."""
        self.store(key_states, value_states)
        rules |= {"sliding_window": self.window, "return_lse": True}
        # Codes that a window has dropped are still in the buffer, where no query sees them.
        lengths = torch.full((self.batch,), self._stored, dtype=torch.int32, device=self.device)
        old = flash_decoding(q, *self._codes, lengths=lengths, ahead=self._newest[0].shape[2], **rules)
        new = flash_decoding(q, *self._newest, **rules)
        output, _ = merge(*zip(old, new, strict=True))
        self.trim()
        return output


class QuantizedCache(KVCache):
    """Older tokens in int8 or int4, quantised once as they leave the newest, which stay in full.

    Keys are quantised per channel in groups of tokens, values per token in groups of channels (KIVI: Liu et al., 2024).

    Parameters
    ----------
    config : PretrainedConfig
        The model's.
    scheme : {"int4", "int8"}
        4.5 or 8.5 bits a value with their constants, in groups of 64.
    group_size : int
        Tokens of a key's channel that share a scale and an offset, and channels of a value: there the largest divisor of their
        number up to this one.
    residual_length : int
        So many of the newest tokens at least are kept in full, and less than a group more. A long prompt is seen in full by itself,
        and quantised when it is stored.

    Raises
    ------
    ValueError
        If an option is not accepted.

    Notes
    -----
    A value moves by at most half a step of its group's grid, once. The exception: a `crop` of more than are kept in full may cut a
    group of keys. What is left of it, less than a group, is kept as its codes have it and quantised again with its new neighbours,
    which may move it by half a step of theirs. Candidates of prompt look-up or a draft model are fewer than `residual_length`.

    NaN or infinity in a group makes all of it NaN, so that it is seen. No gradient flows through the cache.

    On a CPU the codes become numbers again at every step, see chapter 09 for the time; on a card `attend` reads them as they are.
    """

    def __init__(
        self, config: PretrainedConfig, *, scheme: str = "int4", group_size: int = 64, residual_length: int = 32
    ) -> None:
        options = {"group_size": group_size, "residual_length": residual_length}
        bits = check_options(scheme, **options)
        super().__init__(config, lambda window: QuantizedLayer(window, bits=bits, **options), scheme=scheme, **options)
