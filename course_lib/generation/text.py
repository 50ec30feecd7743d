"""From tokens to text while they come: no half characters, and an end wherever a text says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from course_lib.memory.units import shown

#: What decoders write for bytes that are no character, or not one yet.
REPLACEMENT = "\ufffd"


class TextStream:
    """The text of tokens that come one after the other.

    A token may hold part of a character, and a stop string may begin in one token and end in another: what is returned early is
    what no later token can change.

    Parameters
    ----------
    tokenizer
        Of Transformers, or a `course_lib.models.ByteTokenizer`.
    stop : str or sequence of str
        Strings that end the text, which is cut before the first of them.

    Attributes
    ----------
    text : str
        What is decoded so far, without special tokens, cut before a stop string.
    stopped : bool
        Whether there was one.

    Raises
    ------
    TypeError
        If the tokenizer cannot decode.
    ValueError
        If a stop string is empty.
    """

    def __init__(self, tokenizer: Any, stop: str | Sequence[str] = ()) -> None:
        if not callable(getattr(tokenizer, "decode", None)) or isinstance(tokenizer, bytes):
            raise TypeError(
                f"tokenizer is {shown(tokenizer)}; an object that decodes is needed, such as `load` returns"
            )
        self._tokenizer = tokenizer
        self._stop = check_stop(stop)
        self._longest = max(map(len, self._stop), default=0)
        self.text, self.stopped = "", False
        self._tokens: list[int] = []
        # Tokens up to `_read` are decoded; those from `_start` are decoded again with the next, whose text depends on them.
        self._start = self._read = self._returned = 0

    def push(self, token: int) -> str:
        """Take a token, and return what of the text is certain now and was not returned before; nothing after a stop."""
        self._tokens.append(int(token))
        return self._take(whole=False)

    def end(self) -> str:
        """Return what is left when no token follows: half a character, or what could have become a stop string."""
        return self._take(whole=True)

    def _take(self, *, whole: bool) -> str:
        if not self.stopped:
            before = self._decode(self._start, self._read)
            now = self._decode(self._start, len(self._tokens))
            if whole or not now.endswith(REPLACEMENT):
                self._start, self._read = self._read, len(self._tokens)
                self._add(now[len(before) :])
        certain = len(self.text) if whole or self.stopped else len(self.text) - self._held_back()
        piece = self.text[self._returned : certain]
        self._returned = max(self._returned, certain)
        return piece

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True) if end > start else ""
        return text

    def _add(self, piece: str) -> None:
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        found = [place for place in (self.text.find(one, searched) for one in self._stop) if place >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held_back(self) -> int:
        """Return the length of the longest end of the text that a stop string begins with."""
        most = min(self._longest - 1, len(self.text))
        return next((n for n in range(most, 0, -1) if any(one.startswith(self.text[-n:]) for one in self._stop)), 0)


def check_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return stop strings as a tuple.

    Raises
    ------
    ValueError
        If one is not a text, or empty.
    """
    found = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in found):
        raise ValueError(f"stop is {stop!r}; a text or several, none of them empty, is needed")
    return found


def check_on_token(on_token: Callable[[Any], object] | None) -> None:
    """Refuse what cannot be called with new tokens.

    Raises
    ------
    TypeError
        If `on_token` is neither None nor callable.
    """
    if on_token is not None and not callable(on_token):
        raise TypeError(f"on_token is {shown(on_token)}; a function of a token is needed")
