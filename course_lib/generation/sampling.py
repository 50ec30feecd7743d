"""How the next token is chosen: the most likely one, or one drawn from those that are likely enough."""

from __future__ import annotations

import math
from typing import Any

import torch

from course_lib.memory.units import seed_number, shown, whole

#: Options nearer to 0, or to infinity, are taken for this one, which draws the same: float32 could not hold what they make of logits.
EXTREME = 1e20


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
    if not 0 <= _number(temperature) < float("inf"):
        raise ValueError(
            f"temperature is {shown(temperature)}; 0 (the most likely token) or a finite number above is needed"
        )
    if top_k is not None:
        whole(top_k, "top_k", least=1)
    if top_p is not None and not 0 < _number(top_p) <= 1:
        raise ValueError(f"top_p is {shown(top_p)}; a number above 0 and at most 1 is needed")
    if min_p is not None and not 0 <= _number(min_p) <= 1:
        raise ValueError(f"min_p is {shown(min_p)}; a number from 0 to 1 is needed")
    if repetition_penalty is not None and not 0 < _number(repetition_penalty) < float("inf"):
        raise ValueError(
            f"repetition_penalty is {shown(repetition_penalty)}; a finite number above 0 is needed, 1 for none"
        )
    for name, option in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if option is not None and temperature == 0:
            raise ValueError(f"{name} is {option!r} and temperature 0, which always takes the most likely token")


def seeded(seed: int | None, device: torch.device) -> torch.Generator | None:
    """Return a generator of draws that repeat, or None for draws that do not.

    Raises
    ------
    ValueError
        If torch takes no such seed.
    """
    if seed is None:
        return None
    return torch.Generator(device=device).manual_seed(seed_number(seed))


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
    logits = logits.float()
    if top_k is not None and top_k < logits.shape[-1]:
        last = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < last, -torch.inf)
    # The most likely token becomes 0, so that a low temperature makes none infinite but those that are out of the question.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / _bounded(temperature)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        chances = ordered.softmax(dim=-1)
        enough = chances.cumsum(dim=-1) - chances >= _bounded(top_p)  # what stands before a token suffices without it
        logits = logits.masked_fill(enough.scatter(-1, order, enough), -torch.inf)
    chances = logits.softmax(dim=-1)
    if min_p:
        chances = chances.masked_fill(chances < min_p * chances.amax(dim=-1, keepdim=True), 0.0)
        chances = chances / chances.sum(dim=-1, keepdim=True)
    return chances


def _number(value: Any) -> float:
    """Return a number, and NaN, which no range holds, for what is none."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _bounded(number: float) -> float:
    return min(max(float(number), 1 / EXTREME), EXTREME)


def _penalised(logits: torch.Tensor, previous: torch.Tensor, penalty: float) -> torch.Tensor:
    """Return logits in which tokens of the text so far are less likely, however often they stand there."""
    vocab_size, penalty = logits.shape[-1], _bounded(penalty)
    # One column more, for what is no token, or has no logit.
    seen = logits.new_zeros(len(logits), vocab_size + 1, dtype=torch.bool)
    seen.scatter_(1, previous.where((previous >= 0) & (previous < vocab_size), vocab_size), True)
    return torch.where(seen[:, :vocab_size], torch.where(logits < 0, logits * penalty, logits / penalty), logits)
