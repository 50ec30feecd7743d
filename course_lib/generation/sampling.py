"""How the next token is chosen: the most likely one, or one drawn from those that are likely enough."""

from __future__ import annotations

import torch

from course_lib.memory.units import whole


def check_sampling(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> None:
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
    if top_k is not None:
        whole(top_k, "top_k", least=1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p!r}; a number above 0 and at most 1 is needed")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p is {min_p!r}; a number from 0 to 1 is needed")
    if repetition_penalty is not None and not 0 < repetition_penalty < float("inf"):
        raise ValueError(f"repetition_penalty is {repetition_penalty!r}; a finite number above 0 is needed, 1 for none")
    for name, option in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if option is not None and temperature == 0:
            raise ValueError(f"{name} is {option!r} and temperature 0, which always takes the most likely token")


def choose_tokens(
    logits: torch.Tensor,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    previous: torch.Tensor | None = None,
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
    min_p : float, optional
        Draw from tokens that are at least so many times as likely as the most likely one, after the others.
    repetition_penalty : float, optional
        Before all else, logits of tokens in `previous` are divided by it, negative ones multiplied.
    previous : Tensor, optional
        Integers ``[batch, length]``, the text so far; -1 where there is none.
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
    Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p); Keskar et al. 2019 (repetition penalty).
    """
    check_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if repetition_penalty not in (None, 1):
        if previous is None:
            raise ValueError(f"previous is None; repetition_penalty {repetition_penalty!r} needs the text so far")
        logits = _penalised(logits.float(), previous, repetition_penalty)
    if temperature == 0:
        return logits.argmax(dim=-1)
    chances = token_chances(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return torch.multinomial(chances, 1, generator=generator)[:, 0]


def token_chances(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> torch.Tensor:
    """Return the chances with which `choose_tokens` draws each token.

    Parameters
    ----------
    logits : Tensor
        ``[batch, vocab_size]``, any floating dtype.
    temperature : float
        Above 0.
    top_k, top_p, min_p
        As for :func:`choose_tokens`.

    Returns
    -------
    Tensor
        float32, ``[batch, vocab_size]``; a row sums to 1.
    """
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        last = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < last, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        chances = ordered.softmax(dim=-1)
        enough = chances.cumsum(dim=-1) - chances >= top_p  # what stands before a token suffices without it
        logits = logits.masked_fill(enough.scatter(-1, order, enough), -torch.inf)
    chances = logits.softmax(dim=-1)
    if min_p:
        chances = chances.masked_fill(chances < min_p * chances.amax(dim=-1, keepdim=True), 0.0)
        chances = chances / chances.sum(dim=-1, keepdim=True)
    return chances


def _penalised(logits: torch.Tensor, previous: torch.Tensor, penalty: float) -> torch.Tensor:
    """Return logits in which tokens of the text so far are less likely, however often they stand there."""
    vocab_size = logits.shape[-1]
    # One column more, for what is no token, or has no logit.
    seen = logits.new_zeros(len(logits), vocab_size + 1, dtype=torch.bool)
    seen.scatter_(1, previous.where((previous >= 0) & (previous < vocab_size), vocab_size), True)
    return torch.where(seen[:, :vocab_size], torch.where(logits < 0, logits * penalty, logits / penalty), logits)
