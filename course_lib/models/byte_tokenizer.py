"""A tokenizer without a vocabulary: every byte of the text is a token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class ByteTokenizer:
    """Text to the bytes of its UTF-8 form and back, with the calls of a Transformers tokenizer that generation needs.

    Attributes
    ----------
    vocab_size : int
        256.
    eos_token_id : None
        No byte ends a text.
    pad_token_id : int
        0; padding stands on the left.
    """

    vocab_size = 256
    eos_token_id = None
    pad_token_id = 0
    padding_side = "left"

    def __call__(
        self, text: str | Sequence[str], *, return_tensors: str | None = None, padding: bool = False
    ) -> dict[str, Any]:
        """Encode one text or several.

        Parameters
        ----------
        text : str or sequence of str
            What to encode.
        return_tensors : str, optional
            ``"pt"`` for tensors ``[texts, length]``; lists by default.
        padding : bool
            Whether shorter texts are filled up on the left.

        Returns
        -------
        dict
            ``input_ids`` and ``attention_mask``.

        Raises
        ------
        ValueError
            If ``return_tensors`` is something else, or texts of different lengths are to make a tensor without padding.
        """
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors is {return_tensors!r}; 'pt' or None is accepted")
        rows = [list(one.encode()) for one in ([text] if isinstance(text, str) else text)]
        longest = max(map(len, rows), default=0)
        if return_tensors and not padding and any(len(row) != longest for row in rows):
            raise ValueError("the texts have different lengths; padding=True is needed for one tensor")
        fill = [longest - len(row) if padding else 0 for row in rows]
        ids: Any = [[self.pad_token_id] * n + row for n, row in zip(fill, rows, strict=True)]
        mask: Any = [[0] * n + [1] * len(row) for n, row in zip(fill, rows, strict=True)]
        if return_tensors:
            ids, mask = torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.long)
        elif isinstance(text, str):
            ids, mask = ids[0], mask[0]
        return {"input_ids": ids, "attention_mask": mask}

    def decode(self, token_ids: Iterable[int] | torch.Tensor, *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        values = token_ids.tolist() if isinstance(token_ids, torch.Tensor) else token_ids
        return bytes(values).decode(errors="replace")

    def batch_decode(
        self, rows: Iterable[Iterable[int]] | torch.Tensor, *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each row."""
        return [self.decode(row) for row in rows]
