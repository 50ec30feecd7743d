"""The decode loop: the prompt, at once or in pieces, then one token at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from course_lib import kv_cache
from course_lib.generation.sampling import check_sampling, choose_tokens, seeded
from course_lib.generation.text import TextStream, check_on_token, check_stop
from course_lib.memory.meta import cache_argument
from course_lib.memory.units import whole
from course_lib.models.decoder import DecoderLM

CACHES = {
    "dynamic": "DynamicCache",
    "static": "StaticCache",
    "sliding_window": "SlidingWindowCache",
    "quantized": "QuantizedCache",
    "offloaded": "OffloadedCache",
    "paged": "PagedCache",
    "prefix": "PrefixCache",
}


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
    tokens : tuple of int
        New tokens of each row, the one that ended it included, filling not.
    reused_tokens : int
        Tokens of each prompt that the cache held already.
    texts : tuple of str or None
        With a tokenizer, the new text of each row, without special tokens and cut before the stop string that ended it.
    """

    sequences: torch.Tensor
    cache: Cache | None
    prefill_seconds: float
    decode_seconds: float
    tokens: tuple[int, ...]
    reused_tokens: int
    texts: tuple[str, ...] | None


@torch.no_grad()
def generate(
    model: DecoderLM | PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    cache: str | Cache | None = "dynamic",
    attention_mask: torch.Tensor | None = None,
    prefill_chunk: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    tokenizer: Any = None,
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
        A cache of `course_lib.kv_cache` by its name: ``"dynamic"``, ``"static"`` (with room for all tokens), ``"sliding_window"``,
        ``"quantized"``, ``"offloaded"``, ``"paged"`` or ``"prefix"``; a cache object, empty or from an earlier call; None computes
        everything anew at each token. A `PrefixCache` is asked for the prompts' beginnings and stores the results.
    attention_mask : Tensor, optional
        ``[batch, length]``, 0 where a shorter prompt is filled up, on the left.
    prefill_chunk : int, optional
        Run a prompt so many tokens at a time: the same result, and memory for a chunk's activations rather than the prompt's.
    temperature, top_k, top_p, min_p, repetition_penalty
        As in :func:`course_lib.generation.choose_tokens`; the most likely token by default. Padding counts as no text.
    eos_token_id : int or sequence of int, optional
        Tokens that end a text.
    stop : str or sequence of str, optional
        Strings that end a text as soon as its new part, without special tokens, holds one of them; needs `tokenizer`.
    tokenizer : optional
        Decodes the new text, see `GenerationResult.texts`.
    seed : int, optional
        Makes sampling repeatable.
    on_token : callable, optional
        Called with each step's tokens, ``[batch]``, as soon as they are chosen.

    Returns
    -------
    GenerationResult

    Raises
    ------
    TypeError
        If `on_token` is no function.
    ValueError
        If an argument is out of range, or shapes do not fit.

    Notes
    -----
    Chapter 08 derives the loop and measures what the cache saves. An exception in the middle, from `on_token` too, leaves a cache
    object with the tokens it has taken by then.
    """
    check_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    batch, length, max_new_tokens = check_prompts(input_ids, attention_mask, max_new_tokens)
    found = end_tokens(eos_token_id)
    ends = torch.tensor(sorted(found), device=input_ids.device) if found else None
    if check_stop(stop) and tokenizer is None:
        raise ValueError(f"tokenizer is None; stop {stop!r} needs one to decode the text")
    texts = None if tokenizer is None else [TextStream(tokenizer, stop or ()) for _ in range(batch)]
    check_on_token(on_token)
    generator = seeded(seed, input_ids.device)
    mask = _whole_mask(attention_mask, max_new_tokens)
    kept = make_cache(cache, model, length + max_new_tokens)
    past = _begin(kept, input_ids, attention_mask if mask is not None else None)
    if past >= length:
        raise ValueError(f"cache holds {past} tokens and input_ids {length}; at least one token must be new")
    if prefill_chunk is not None:
        prefill_chunk = whole(prefill_chunk, "prefill_chunk", least=1)
        if kept is None:
            raise ValueError(
                f"prefill_chunk is {prefill_chunk} and cache None; a chunk needs a cache of those before it"
            )

    sequences = torch.empty(batch, length + max_new_tokens, dtype=torch.long, device=input_ids.device)
    sequences[:, :length] = input_ids
    # What a penalty counts as text.
    previous = sequences
    if mask is not None and repetition_penalty is not None:
        previous = sequences.masked_fill(mask == 0, -1)
    done = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    counts, reused = [max_new_tokens] * batch, past
    step = _Step(model, kept)
    moments = [now(input_ids.device)]
    for end in range(length, length + max_new_tokens):
        while prefill_chunk is not None and end - past > prefill_chunk:
            step(sequences, past, past + prefill_chunk, mask)
            past += prefill_chunk
        tokens = choose_tokens(
            step(sequences, past, end, mask),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            previous=previous[:, :end],
            generator=generator,
        )
        if ends is not None or texts is not None:
            tokens = torch.where(done, sequences[:, end - 1], tokens)
        sequences[:, end] = previous[:, end] = tokens
        past = end if kept is not None else 0
        if end == length:
            moments.append(now(input_ids.device))
        if on_token:
            on_token(tokens)
        if _finish(done, tokens, ends, texts, counts, end - length + 1):
            break
    moments.append(now(input_ids.device))
    sequences = sequences[:, : end + 1]
    if isinstance(kept, kv_cache.PrefixCache):
        kept.commit(sequences)
    return GenerationResult(
        sequences,
        kept,
        moments[1] - moments[0],
        moments[2] - moments[1],
        tuple(min(count, sequences.shape[1] - length) for count in counts),
        reused,
        None if texts is None else tuple(map(_whole_text, texts)),
    )


def make_cache(cache: str | Cache | None, model: DecoderLM | PreTrainedModel, length: int) -> Cache | None:
    """Return a cache by its name, for so many tokens at most; what is one already, or None, as it is.

    Raises
    ------
    ValueError
        If there is none of that name.
    """
    if cache is None or isinstance(cache, Cache):
        return cache
    if not isinstance(cache, str) or cache not in CACHES:
        raise ValueError(f"cache is {cache!r}; accepted are {', '.join(CACHES)}, a cache object, or None")
    options = {"max_cache_len": length} if cache == "static" else {}
    made: Cache = getattr(kv_cache, CACHES[cache])(model.config, **options)
    return made


class _Step:
    """Runs a model over a stretch of sequences that its cache lacks."""

    def __init__(self, model: DecoderLM | PreTrainedModel, cache: Cache | None) -> None:
        self.model, self.cache = model, cache
        self.own = isinstance(model, DecoderLM)
        self.options = {} if self.own else {cache_argument(model): cache, "use_cache": cache is not None}

    def __call__(self, sequences: torch.Tensor, start: int, end: int, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the logits after the last token, ``[batch, vocab_size]``."""
        tokens, options, logits = sequences[:, start:end], self.options, None
        if mask is not None:
            mask = mask[:, :end]
        if self.own:
            logits = self.model(tokens, cache=self.cache, attention_mask=mask, logits_to_keep=1).logits
        else:
            if mask is not None:
                places = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
                options = options | {"attention_mask": mask, "position_ids": places}
            logits = self.model(tokens, logits_to_keep=1, **options).logits
        last: torch.Tensor = logits[:, -1]
        return last


def _begin(cache: Cache | None, input_ids: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Tell a cache what it needs to know of a batch, and return how many tokens it holds."""
    if cache is None:
        return 0
    if isinstance(cache, kv_cache.PrefixCache):
        return cache.begin(input_ids, mask)
    held = int(cache.get_seq_length())
    if isinstance(cache, kv_cache.SlidingWindowCache) and not held:
        cache.first_tokens = None if mask is None else (mask == 0).sum(-1)
    return held


def _finish(
    done: torch.Tensor,
    tokens: torch.Tensor,
    ends: torch.Tensor | None,
    texts: list[TextStream] | None,
    counts: list[int],
    new: int,
) -> bool:
    """Note which rows end with these tokens, the ``new``-th, and return whether all have ended."""
    if ends is None and texts is None:
        return False
    before = done.tolist()
    if ends is not None:
        done |= torch.isin(tokens, ends)
    if texts is not None:
        for row, (stream, token) in enumerate(zip(texts, tokens.tolist(), strict=True)):
            if not before[row]:
                stream.push(token)
                if stream.stopped:
                    done[row] = True
    after = done.tolist()
    for row, over in enumerate(after):
        if over and not before[row]:
            counts[row] = new
    return all(after)


def _whole_text(stream: TextStream) -> str:
    stream.end()
    return stream.text


def check_prompts(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, max_new_tokens: int
) -> tuple[int, int, int]:
    """Return batch and length of prompts, and how many tokens to add.

    Raises
    ------
    TypeError, ValueError
        If they are no integers ``[batch, length]``, if there is nothing to do, or if the mask hides more than a prompt's beginning.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(
            f"input_ids is of type {type(input_ids).__name__}; a tensor of integers [batch, length] is needed"
        )
    if input_ids.ndim != 2 or input_ids.is_floating_point() or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)} and dtype {input_ids.dtype}; integers [batch, length] are needed, at least one"
        )
    max_new_tokens = whole(max_new_tokens, "max_new_tokens", least=1)
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)} and input_ids {list(input_ids.shape)}; they must be equal"
            )
        if not bool(attention_mask[:, -1].all()):
            raise ValueError(
                "attention_mask hides the last token of a prompt; shorter prompts are filled up on the left"
            )
        if bool((attention_mask.long().diff(dim=-1) < 0).any()):
            raise ValueError(
                "attention_mask hides a token behind a visible one; shorter prompts are filled up on the left"
            )
    batch, length = input_ids.shape
    return batch, length, max_new_tokens


def end_tokens(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """Return the tokens that end a text.

    Raises
    ------
    ValueError
        If one is no whole number.
    """
    if eos_token_id is None:
        return frozenset()
    found: list[Any]
    try:
        found = list(eos_token_id)  # type: ignore[arg-type]
    except TypeError:  # a number, also one of NumPy or torch
        found = [eos_token_id]
    return frozenset(whole(token, "eos_token_id") for token in found)


def _whole_mask(attention_mask: torch.Tensor | None, new: int) -> torch.Tensor | None:
    """Return the mask of the prompts and of new tokens, int64, or None where there is no padding."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    mask = attention_mask.long()
    return torch.cat((mask, mask.new_ones(len(mask), new)), dim=1)


def now(device: torch.device) -> float:
    """Return the time when a device has done what it was told, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
