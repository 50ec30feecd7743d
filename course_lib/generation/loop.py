"""The decode loop: the prompt once, then one token at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from course_lib.generation.sampling import check_sampling, choose_tokens
from course_lib.memory.meta import cache_argument
from course_lib.models.decoder import DecoderLM

CACHES = ("dynamic", "static")


@dataclass(frozen=True)
class GenerationResult:
    """What `generate` returns.

    Attributes
    ----------
    sequences : Tensor
        int64, ``[batch, length + new]``: the prompts and what follows. A row that ended early is filled up with the token that
        ended it.
    cache : transformers.Cache or None
        Keys and values of all tokens but the last, for another call.
    prefill_seconds, decode_seconds : float
        Time to the first new token, and from there to the last.
    """

    sequences: torch.Tensor
    cache: Cache | None
    prefill_seconds: float
    decode_seconds: float


@torch.no_grad()
def generate(
    model: DecoderLM | PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    cache: str | Cache | None = "dynamic",
    attention_mask: torch.Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
    on_token: Callable[[torch.Tensor], object] | None = None,
) -> GenerationResult:
    """Continue texts.

    Parameters
    ----------
    model : DecoderLM or PreTrainedModel
        A causal language model.
    input_ids : Tensor
        Integers ``[batch, length]``, all that is known, also what a cache already holds.
    max_new_tokens : int
        How many tokens to add at most.
    cache : str, transformers.Cache or None
        ``"dynamic"`` grows, ``"static"`` has room for all tokens at once, None computes everything anew at each token; or a cache
        object, empty or from an earlier call.
    attention_mask : Tensor, optional
        ``[batch, length]``, 0 where a shorter prompt is filled up, on the left.
    temperature, top_k, top_p
        As in :func:`course_lib.generation.choose_tokens`; the most likely token by default.
    eos_token_id : int or sequence of int, optional
        Tokens that end a text.
    seed : int, optional
        Makes sampling repeatable.
    on_token : callable, optional
        Called with each step's tokens, ``[batch]``, as soon as they are chosen.

    Returns
    -------
    GenerationResult

    Raises
    ------
    ValueError
        If an argument is out of range, or shapes do not fit.

    Notes
    -----
    Chapter 08 derives the loop and measures what the cache saves.
    """
    check_sampling(temperature, top_k, top_p)
    batch, length = _check(input_ids, attention_mask, max_new_tokens)
    kept = _cache(cache, model, length + max_new_tokens)
    past = 0 if kept is None else int(kept.get_seq_length())
    if past >= length:
        raise ValueError(f"cache holds {past} tokens and input_ids {length}; at least one token must be new")
    generator = None if seed is None else torch.Generator(device=input_ids.device).manual_seed(seed)
    ends = None
    if eos_token_id is not None:
        ends = torch.tensor(
            [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id), device=input_ids.device
        )
    padded = attention_mask is not None and not bool(attention_mask.all())
    mask = attention_mask.long() if padded and attention_mask is not None else None

    sequences = torch.empty(batch, length + max_new_tokens, dtype=torch.long, device=input_ids.device)
    sequences[:, :length] = input_ids
    done = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    moments = [_now(input_ids.device)]
    for end in range(length, length + max_new_tokens):
        logits = _next_logits(model, sequences[:, past:end], kept, mask)
        tokens = choose_tokens(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if ends is not None:
            tokens = torch.where(done, sequences[:, end - 1], tokens)
            done |= torch.isin(tokens, ends)
        sequences[:, end] = tokens
        past = end if kept is not None else 0
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(batch, 1)), dim=1)
        if end == length:
            moments.append(_now(input_ids.device))
        if on_token:
            on_token(tokens)
        if ends is not None and bool(done.all()):
            break
    moments.append(_now(input_ids.device))
    return GenerationResult(sequences[:, : end + 1], kept, moments[1] - moments[0], moments[2] - moments[1])


def _check(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, max_new_tokens: int) -> tuple[int, int]:
    if input_ids.ndim != 2 or input_ids.is_floating_point() or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)} and dtype {input_ids.dtype}; integers [batch, length] are needed, at least one"
        )
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}; a whole number of at least 1 is needed")
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)} and input_ids {list(input_ids.shape)}; they must be equal"
            )
        if not bool(attention_mask[:, -1].all()):
            raise ValueError(
                "attention_mask hides the last token of a prompt; shorter prompts are filled up on the left"
            )
    batch, length = input_ids.shape
    return batch, length


def _cache(cache: str | Cache | None, model: DecoderLM | PreTrainedModel, length: int) -> Cache | None:
    if cache is None or isinstance(cache, Cache):
        return cache
    if cache == "dynamic":
        return DynamicCache(config=model.config)
    if cache == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    raise ValueError(f"cache is {cache!r}; accepted are {', '.join(CACHES)}, a cache object, or None")


def _next_logits(
    model: DecoderLM | PreTrainedModel, tokens: torch.Tensor, cache: Cache | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Run the model over the tokens that the cache lacks and return the logits after the last, ``[batch, vocab_size]``."""
    logits: torch.Tensor
    if isinstance(model, DecoderLM):
        logits = model(tokens, cache=cache, attention_mask=mask, logits_to_keep=1).logits
        return logits[:, -1]
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": cache is not None}
    if mask is not None:
        options |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]}
    logits = model(tokens, logits_to_keep=1, **options).logits
    return logits[:, -1]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
