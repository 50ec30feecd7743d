"""Exercises of chapter 08: models, texts and masks to test with, right answers, and the answers that common mistakes lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal, NamedTuple

import torch

from course_lib.kv_cache import DynamicCache
from course_lib.models import DecoderConfig, DecoderLM
from course_lib.models.decoder import DecoderOutput

# Two right solutions differ in the last bits of a logit. The next token must not depend on them.
MARGIN = 1e-3
# Rows that a test's buffer starts with, in no chunk: whoever reads them learns nothing.
UNUSED = -7.0


# ---- decoding with a cache ----------------------------------------------------------------------------------------


class CountingLM(DecoderLM):
    """A decoder that counts, in ``tokens_run``, the tokens of a row that went through it."""

    tokens_run = 0

    def forward(self, input_ids: torch.Tensor, **options: Any) -> DecoderOutput:
        self.tokens_run += input_ids.shape[1]
        return super().forward(input_ids, **options)


DecodeFault = Literal["whole", "positions", "first", "new cache", "twice", "early"]
DECODE_FAULTS: dict[str, DecodeFault] = {
    "The whole text is run with a cache that holds most of it, so that the model reads that twice: run what is new.": "whole",
    "Positions start again at 0: a new token stands behind those that the cache holds.": "positions",
    "The logits of the first token run are taken: the last token's say what comes next.": "first",
    "Each pass has a cache of its own, so that a new token sees no earlier one: keep one for the whole text.": "new cache",
    "The prompt's last token runs twice: the prompt's own pass already says what comes first.": "twice",
    "The prompt's last token never runs: it is the one that says what comes next.": "early",
}


def random_decoder(rng: Random) -> tuple[CountingLM, torch.Tensor, int, torch.Tensor]:
    """Draw a small model in float64, a prompt ``[batch, length]`` and a number of new tokens, three or more; return the text too.

    At every step one token is clearly the likeliest.
    """
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.getrandbits(60))
            kv_heads = rng.randint(1, 2)
            model = CountingLM(
                DecoderConfig(
                    vocab_size=rng.randint(30, 60),
                    hidden_size=24,
                    intermediate_size=32,
                    num_hidden_layers=2,
                    num_attention_heads=2 * kv_heads,
                    num_key_value_heads=kv_heads,
                    head_dim=8,
                    initializer_range=0.3,
                )
            )
            prompt = torch.randint(model.config.vocab_size, (rng.randint(1, 3), rng.randint(4, 9)))
        model.double().requires_grad_(False)
        new_tokens = rng.randint(3, 5)
        text = greedy(model, prompt, new_tokens)
        best = model(text).logits[:, prompt.shape[1] - 1 :].topk(2).values
        model.tokens_run = 0
        if (best[..., 0] - best[..., 1]).min() > MARGIN:
            return model, prompt, new_tokens, text


def greedy(model: DecoderLM, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Return prompt and greedy continuation, ``[batch, length + new_tokens]``, without a cache."""
    text = prompt
    for _ in range(new_tokens):
        text = torch.cat((text, model(text).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return text


def _decoded(model: DecoderLM, prompt: torch.Tensor, new_tokens: int, fault: DecodeFault) -> torch.Tensor:
    cache, text, run = DynamicCache(model.config), prompt, prompt
    if fault == "early":
        run = prompt[:, :-1]
    if fault == "twice":
        model(prompt, cache=cache)
        run = prompt[:, -1:]
    for _ in range(new_tokens):
        places = torch.arange(run.shape[1]) if fault == "positions" else None
        logits = model(run, cache=cache, position_ids=places).logits
        text = torch.cat((text, logits[:, 0 if fault == "first" else -1].argmax(-1, keepdim=True)), dim=1)
        run = text if fault == "whole" else text[:, -1:]
        cache = DynamicCache(model.config) if fault == "new cache" else cache
    return text


def decode_mistakes(model: DecoderLM, prompt: torch.Tensor, new_tokens: int) -> dict[str, torch.Tensor]:
    """Return what mistakes in decoding with a cache lead to."""
    faulty = {reason: _decoded(model, prompt, new_tokens, fault) for reason, fault in DECODE_FAULTS.items()}
    longer = greedy(model, prompt, new_tokens + 1)
    return faulty | {
        "The prompt is missing: return it with the new tokens behind it.": longer[:, prompt.shape[1] : -1],
        "One token too few: every pass makes one, the prompt's too.": longer[:, :-2],
        "One token too many: every pass makes one, the prompt's too.": longer,
    }


def tokens_needed(prompt: torch.Tensor, new_tokens: int) -> int:
    """Return how many tokens of a row must run: all but the last new one."""
    return int(prompt.shape[1]) + new_tokens - 1


def run_mistakes(prompt: torch.Tensor, new_tokens: int) -> dict[str, float]:
    """Return how many tokens run where a loop that finds the right text does needless work."""
    needed, length = tokens_needed(prompt, new_tokens), int(prompt.shape[1])
    whole = sum(length + step for step in range(new_tokens))
    return {
        "The text is right, but tokens run again: the whole text goes through the model for each new one.": whole,
        "The text is right, but the whole text goes through the model for each new token, and once more at the end.": whole
        + length
        + new_tokens,
        "The text is right, but one token runs needlessly: nobody asks what comes after the last.": needed + 1,
        "The text is right, but the prompt runs twice: a pass with the cache fills it and says what comes first.": needed
        + length,
    }


# ---- the work with and without a cache ----------------------------------------------------------------------------


def work(prompt: int, new: int, weights: int, layers: int, width: int, cached: bool) -> int:
    """Return the multiply-adds of greedy decoding, counted pass by pass."""
    return _work(prompt, new, weights, layers, width, cached)


def _work(
    prompt: int,
    new: int,
    weights: int,
    layers: int,
    width: int,
    cached: bool,
    *,
    passes: int = 0,
    products: int = 2,
    causal: bool = True,
    itself: int = 1,
    keys: bool = True,
) -> int:
    total = 0
    for step in range(new + passes):
        end = prompt + step
        first = end - 1 if cached and step else 0
        seen = sum((at + itself if causal else end) if keys else at - first + 1 for at in range(first, end))
        total += (end - first) * weights + layers * products * width * seen
    return total


def work_mistakes(prompt: int, new: int, weights: int, layers: int, width: int, cached: bool) -> dict[str, float]:
    """Return what mistakes in counting multiply-adds lead to."""
    inputs = (prompt, new, weights, layers, width, cached)
    return {
        "With a cache only the new token runs; without one the whole text does. These are the other way round.": _work(
            prompt, new, weights, layers, width, not cached
        ),
        "One pass too many: the prompt's pass makes the first new token, so there are as many passes as new tokens.": _work(
            *inputs, passes=1
        ),
        "One pass too few: the prompt's pass makes the first new token, and every other takes one more.": _work(
            *inputs, passes=-1
        ),
        "Only scores are counted: the values are weighted and summed too, another `width` for each pair.": _work(
            *inputs, products=1
        ),
        "Every token of a pass is paired with every other: a token sees itself and those before it.": _work(
            *inputs, causal=False
        ),
        "A token sees itself too, not only those before it.": _work(*inputs, itself=0),
        "A token that runs alone still sees all that the cache holds: a cache saves no attention of new tokens.": _work(
            *inputs, keys=False
        ),
        "Attention is counted for one layer: there are `layers` of them.": _work(
            prompt, new, weights, 1, width, cached
        ),
        "The weights are counted once for each pass: every token that runs meets all of them.": new * weights
        + _work(prompt, new, 0, layers, width, cached),
        "Attention is missing.": _work(prompt, new, weights, 0, width, cached),
        "The weights are missing.": _work(prompt, new, 0, layers, width, cached),
    }


# ---- positions under left padding ---------------------------------------------------------------------------------


def random_mask(rng: Random, *, past: bool) -> tuple[torch.Tensor, int]:
    """Draw a mask of left-padded rows, int64 ``[batch, past + length]``, of which one row is full, and `past`."""
    held, length, batch = rng.randint(7, 9) if past else 0, rng.randint(3, 8), rng.randint(3, 4)
    # With a past, padding lies in it; else in front of the new tokens.
    padding = [0, *(rng.randint(1, (held or length) - 1) for _ in range(batch - 1))]
    rng.shuffle(padding)
    columns = torch.arange(held + length)
    return (columns >= torch.tensor(padding)[:, None]).long(), held


def positions(mask: torch.Tensor, past: int) -> torch.Tensor:
    """Return the new tokens' positions, int64 ``[batch, length]``, 0 for padding."""
    return (mask.cumsum(-1) - 1).clamp(min=0)[:, past:]


def position_mistakes(mask: torch.Tensor, past: int) -> dict[str, torch.Tensor]:
    """Return what mistakes about positions under left padding lead to."""
    counted, new = mask.cumsum(-1), mask[:, past:]
    columns = torch.arange(mask.shape[1]).expand_as(mask)
    return {
        "Columns are counted, padding included: a row's first real token stands at 0.": columns[:, past:],
        "Every row counts from 0, as if nothing came before: the past has real tokens too.": (new.cumsum(-1) - 1).clamp(
            min=0
        ),
        "The first real token stands at 0, not at 1: subtract one from the count.": counted[:, past:],
        "Padding stands at -1, which is no position: clamp it.": (counted - 1)[:, past:],
        "Padding stands at 1 here; the task wants 0.": (counted - 1).masked_fill(mask == 0, 1)[:, past:],
        "The past is counted over the whole batch: each row has its own number of real tokens.": (
            new.cumsum(-1) - 1 + mask[:, :past].sum()
        ).clamp(min=0),
        "Real tokens are counted down the batch: each row is a text of its own, so count along it.": (
            (mask.cumsum(0) - 1).clamp(min=0)[:, past:]
        ),
        "The past is counted with its padding: only real tokens take a position.": (new.cumsum(-1) - 1 + past).clamp(
            min=0
        ),
        "Positions of all columns: return those of the new tokens, behind the past.": (counted - 1).clamp(min=0),
    }


# ---- a cache that grows -------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What came of appending chunk after chunk: the rows held, the buffer's rows, and rows that moved to another buffer."""

    rows: Any
    capacity: int
    moved: int


Append = Callable[[torch.Tensor, int, torch.Tensor], Any]


def appended(append: Append, chunks: Sequence[torch.Tensor], capacity: int) -> Run:
    """Append chunks ``[rows, dim]`` one after the other to a buffer of `capacity` rows with a function under test."""
    buffer, held, moved = chunks[0].new_full((capacity, chunks[0].shape[1]), UNUSED), 0, 0
    for chunk in chunks:
        address = buffer.data_ptr()
        answer = append(buffer, held, chunk.clone())
        if not (isinstance(answer, torch.Tensor) and answer.ndim == 2 and len(answer) >= held + len(chunk)):
            return Run(answer, 0, 0)
        moved += held if answer.data_ptr() != address else 0
        buffer, held = answer, held + len(chunk)
    return Run(buffer[:held], len(buffer), moved)


def random_chunks(rng: Random) -> tuple[list[torch.Tensor], int]:
    """Draw chunks, most of them of one row, and a first capacity, so that a buffer is filled to its last row and then grows."""
    capacity = rng.randint(2, 4)
    sizes = [capacity - 1, 1, 1, *rng.choices([1, 1, 1, 2, 9], k=rng.randint(10, 16))]
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    return [torch.rand(size, 3, generator=draw) for size in sizes], capacity


GROWTH_FAULTS = {
    "all of them move each time: write into the free rows, and take a larger buffer only where those do not suffice.": "always",
    "the buffer grows by no more than it needs, and so must grow again at once: double it.": "just",
    "the buffer grows by a few rows at a time, so that the work stays quadratic: double it.": "step",
    "the buffer grows too early: rows that fill it to its last one still fit.": "early",
    "the rows needed are doubled: the task doubles those that the buffer has.": "more",
}


def growing(buffer: torch.Tensor, held: int, new: torch.Tensor, fault: str = "") -> torch.Tensor:
    """Append to a buffer as it should be done, or with a fault."""
    needed = held + len(new)
    if fault == "behind":
        return torch.cat((buffer, new))
    if fault == "always":
        return torch.cat((buffer[:held], new))
    if needed >= len(buffer) if fault == "early" else needed > len(buffer):
        room = {"just": needed, "more": 2 * needed, "step": needed + 1}.get(fault, max(2 * len(buffer), needed))
        larger = buffer.new_zeros(room, buffer.shape[1])
        larger[:held] = 0 if fault == "lost" else buffer[:held]
        buffer = larger
    buffer[held:needed] = new
    return buffer


def _faulty(fault: str, chunks: Sequence[torch.Tensor], capacity: int) -> Run:
    return appended(lambda buffer, held, new: growing(buffer, held, new, fault), chunks, capacity)


def row_mistakes(chunks: Sequence[torch.Tensor], capacity: int) -> dict[str, torch.Tensor]:
    """Return the rows that mistakes in a growing buffer lead to."""
    return {
        "The rows held before are lost when the buffer grows: move them into the larger one.": _faulty(
            "lost", chunks, capacity
        ).rows,
        "New rows are put behind the buffer's end, not behind the rows that it holds.": _faulty(
            "behind", chunks, capacity
        ).rows,
    }


def move_mistakes(chunks: Sequence[torch.Tensor], capacity: int) -> dict[str, float]:
    """Return how many rows move to another buffer where a buffer grows too often, or more than the task says."""
    return {
        f"The rows are right, but {why}": _faulty(fault, chunks, capacity).moved for why, fault in GROWTH_FAULTS.items()
    }


def capacity_mistakes(chunks: Sequence[torch.Tensor], capacity: int) -> dict[str, float]:
    """Return the last buffer's rows, for the same mistakes."""
    return {
        f"The rows are right, but {why}": _faulty(fault, chunks, capacity).capacity
        for why, fault in GROWTH_FAULTS.items()
    }


# ---- what a chat turn can reuse -----------------------------------------------------------------------------------


def random_turn(rng: Random, *, changed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the ids that a cache holds, ``[batch, held]``, and those of a new prompt, ``[batch, length]``, for the same rows.

    In a `changed` history each row differs at two places, and agrees between and behind them; else the prompt goes on, or is held whole.
    """
    held, length, batch = rng.randint(8, 14), rng.randint(8, 14), rng.randint(2, 3)
    cached = torch.tensor([[rng.randrange(50) for _ in range(held)] for _ in range(batch)])
    prompt = torch.tensor([[rng.randrange(50) for _ in range(length)] for _ in range(batch)])
    shorter = min(held, length)
    prompt[:, :shorter] = cached[:, :shorter]
    if changed:
        columns = torch.tensor([rng.randint(2, shorter - 3) for _ in range(batch)])
        for column in (columns, columns + 2):
            prompt[torch.arange(batch), column] = (cached[torch.arange(batch), column] + 1) % 50
    return cached, prompt


def reusable(cached: torch.Tensor, prompt: torch.Tensor) -> int:
    """Return how many tokens of the cache a new prompt can keep in all of its rows, with one left to run."""
    return min(min(_prefixes(cached, prompt)), prompt.shape[1] - 1)


def _prefixes(cached: torch.Tensor, prompt: torch.Tensor) -> list[int]:
    shorter = min(cached.shape[1], prompt.shape[1])
    equal = (cached[:, :shorter] == prompt[:, :shorter]).long()
    return [int(row) for row in equal.cumprod(-1).sum(-1)]


def reuse_mistakes(cached: torch.Tensor, prompt: torch.Tensor) -> dict[str, float]:
    """Return what mistakes about the reusable part of a cache lead to."""
    rows, (held, length) = _prefixes(cached, prompt), (cached.shape[1], prompt.shape[1])
    shorter = min(held, length)
    equal = cached[:, :shorter] == prompt[:, :shorter]
    before_last = equal[:, : length - 1]
    return {
        "No token is left to run: without one there are no logits, so keep at most all but the prompt's last.": min(rows),
        "One token too few: only where the cache holds the whole prompt must one of them run again.": max(0, min(rows) - 1),
        "Lengths are compared: the ids must be equal too.": min(held, length - 1),
        "Equal ids behind the first that differs are counted: what was computed there has seen another text.": int(
            before_last.sum(-1).min()
        ),
        "All or nothing: where the history has changed, what stands before the change is still good.": (
            before_last.shape[1] * bool(before_last.all())
        ),
        "The first row speaks for all: a cache has one length, so the row that differs first decides.": min(
            rows[0], length - 1
        ),
        "The row that agrees longest decides: a cache has one length, and the others need theirs to be right.": min(
            max(rows), length - 1
        ),
        "The rows are added up: a cache has one length for all of them.": sum(min(row, length - 1) for row in rows),
        "These are the tokens left to run; the task wants those that are kept.": length - reusable(cached, prompt),
    }  # fmt: skip
