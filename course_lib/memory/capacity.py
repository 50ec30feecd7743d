"""How long a context a card has room for: the estimator, asked the other way round."""

from __future__ import annotations

from typing import Any

from course_lib.memory.cards import Card, find_card
from course_lib.memory.estimate import estimate
from course_lib.memory.units import whole

#: Where the search ends. It stands for no limit, as in a model whose cache does not grow.
NO_LIMIT = 2**40


def largest_context(
    model: Any,
    card: str | int | Card,
    *,
    batch_size: int = 1,
    dtype: Any = None,
    quantization: str | None = None,
    attention: str = "flash",
    kv_cache_dtype: Any = None,
    prefill_chunk: int | None = None,
) -> int:
    """Find the most tokens of each sequence, prompt and output together, for which `estimate` fits on a card.

    Parameters
    ----------
    model, batch_size, dtype, quantization, attention, kv_cache_dtype
        As for `estimate`.
    card : str, Card or int
        A card's name (see `find_card`), a card, or a number of bytes.
    prefill_chunk : int, optional
        The most tokens of a prompt that run at a time, which bounds the activations. By default the whole context may be a prompt
        that runs at once.

    Returns
    -------
    int
        The largest number that fits while the next does not; 0 if the weights leave no room for a token, and 2**40 if there is no
        limit up to there. It is the memory's limit: what lengths the model was trained for is another question.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        As for `estimate`; if no card has the name, or a number is not positive.

    Notes
    -----
    Chapter 09 (notebooks/09-cache-memory.ipynb) draws it. Like `estimate`, it leaves out what drivers and fragmentation take.
    """
    available = card_memory(card)
    chunk = NO_LIMIT if prefill_chunk is None else whole(prefill_chunk, "prefill_chunk", least=1)

    def fits(tokens: int) -> bool:
        prompt = min(tokens, chunk)
        return estimate(
            model,
            dtype=dtype,
            quantization=quantization,
            batch_size=batch_size,
            prompt_tokens=prompt,
            new_tokens=tokens - prompt,
            attention=attention,
            kv_cache_dtype=kv_cache_dtype,
        ).fits(available)

    # By doubling, then by halves: the real class on the meta device, where it is needed, runs over no more than twice the answer.
    held, too_many = 0, 1
    while fits(too_many):
        held = too_many
        if held >= NO_LIMIT:
            return NO_LIMIT
        too_many *= 2
    while too_many - held > 1:
        middle = (held + too_many) // 2
        if fits(middle):
            held = middle
        else:
            too_many = middle
    return held


def card_memory(card: str | int | Card) -> int:
    """Return the bytes of a card, of a card's name, or the number that is given."""
    if isinstance(card, Card):
        return card.memory_bytes
    if not isinstance(card, str):
        return whole(card, "card", least=1)
    return find_card(card, "card, a number of bytes or a name,").memory_bytes
