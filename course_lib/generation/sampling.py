"""How the next token is chosen: the most likely one, or one drawn from those that are likely enough."""

from __future__ import annotations

import torch


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse options out of range, or without effect.

    Raises
    ------
    ValueError
        With the option's name.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            f"temperature is {temperature!r}; 0 (the most likely token) or a finite number above is needed"
        )
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k is {top_k!r}; a whole number of at least 1 is needed")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p!r}; a number above 0 and at most 1 is needed")
    for name, option in (("top_k", top_k), ("top_p", top_p)):
        if option is not None and temperature == 0:
            raise ValueError(f"{name} is {option!r} and temperature 0, which always takes the most likely token")


def choose_tokens(
    logits: torch.Tensor,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Choose a token for each row of logits.

    Parameters
    ----------
    logits : Tensor
        ``[batch, vocab_size]``, any floating dtype.
    temperature : float
        0 takes the most likely token; otherwise logits are divided by it before softmax and a token is drawn.
    top_k : int, optional
        Draw from the so many most likely tokens (and those as likely as the last of them).
    top_p : float, optional
        Draw from the fewest most likely tokens that together have this probability, after `top_k`.
    generator : torch.Generator, optional
        Makes draws repeatable.

    Returns
    -------
    Tensor
        int64, ``[batch]``.

    Raises
    ------
    ValueError
        If an option is out of range, or has no effect because the temperature is 0.

    References
    ----------
    Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p).
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        last = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < last, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        chances = ordered.softmax(dim=-1)
        enough = chances.cumsum(dim=-1) - chances >= top_p  # what stands before a token suffices without it
        logits = logits.masked_fill(enough.scatter(-1, order, enough), -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
