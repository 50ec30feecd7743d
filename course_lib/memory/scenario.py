"""One way to run a model on one kind of card: what it takes in memory and, at least, in time, with the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from typing import Any, Literal

from course_lib.memory.architecture import Cached
from course_lib.memory.cards import Card
from course_lib.memory.counting import Model
from course_lib.memory.estimate import (
    PUBLISHED,
    MemoryEstimate,
    converted_kinds,
    estimate,
    layer_widths,
    own_storage,
    query_heads,
)
from course_lib.memory.step_cost import StepCost, step_cost
from course_lib.memory.units import DTYPE_BITS, format_gib, whole

SCORE_PASSES = 4  # ordinary attention writes scores, reads them for the softmax, writes probabilities and reads those
_TRAINED = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
MOST_SEQUENCES = 2**20
#: The most rows that kernels for cards multiply by 4-bit codes (course_lib.quantization); more take a pass that turns weights back.
FEW_ROWS = 16


@dataclass(frozen=True)
class Run:
    """How a model is run: with which of the measures."""

    cache: bool = False
    attention: Literal["eager", "flash"] = "eager"
    quantization: str | None = None
    cache_share: Fraction = Fraction(1)
    cards: int = 1

    def but(self, **changes: Any) -> Run:
        """Return the run with some things changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Step:
    """What a way of running is predicted to take.

    Attributes
    ----------
    name : str
        What was changed last.
    memory : int
        Bytes on each card, at the peak.
    cards : int
        Number of cards.
    fits : bool
        Whether each has room.
    seconds : float
        For a token of every sequence at the full context: a lower bound.
    first_seconds : float
        To the first token, the prompt's pass: a lower bound.
    answer_seconds : float
        For all new tokens, each counted as one at the full context.
    sequences : int or None
        The most sequences that fit, where throughput was asked for.
    tokens_per_second : float or None
        With so many of them, an upper bound; prompts not counted.
    arithmetic : tuple of str
        Every number as an expression with its inputs.
    """

    name: str
    memory: int
    cards: int
    fits: bool
    seconds: float
    first_seconds: float
    answer_seconds: float
    sequences: int | None
    tokens_per_second: float | None
    arithmetic: tuple[str, ...]

    @property
    def told(self) -> str:
        """The prediction in one line."""
        each = f" on each of {self.cards} cards" if self.cards > 1 else ""
        text = f"{format_gib(self.memory)}{each}, {'fits' if self.fits else 'does not fit'}; "
        text += f"at least {duration(self.first_seconds)} to the first token and {duration(self.seconds)} a token"
        if self.sequences is not None:
            text += f"; room for {self.sequences:,} sequences, at most {self.tokens_per_second:,.0f} tokens/s"
        return text


def duration(seconds: float) -> str:
    """Write out a time for people."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:,.3g} {unit}"
    return f"{seconds * 1e6:,.3g} us"


class Workload:
    """A model, a card, and how many tokens of how many sequences.

    Parameters
    ----------
    rooms : bool
        Whether each step says how many sequences fit.
    model, card, context, new_tokens, batch, dtype, prefill_chunk
        As for `course_lib.memory.advise`.
    """

    def __init__(
        self,
        model: Any,
        card: Card,
        context: int,
        new_tokens: int,
        batch: int,
        dtype: Any,
        prefill_chunk: int | None,
        rooms: bool,
    ) -> None:
        self.card, self.context, self.new_tokens, self.batch = card, context, new_tokens, batch
        self.prompt = context - new_tokens
        self.chunk = context if prefill_chunk is None else whole(prefill_chunk, "prefill_chunk", least=1)
        self.rooms = rooms
        self.counted = Model(model)
        self.label = model if isinstance(model, str) else self.counted.fields.model_type or "the model"
        self.dtype, self.own_quantization = own_storage(self.counted, dtype, None)
        self.size = DTYPE_BITS[self.dtype] // 8
        self.flop_rate = card.tensor_flops_per_second or float("inf")
        self.estimate = cache(self._estimate)

    # ---- facts of the model

    @property
    def has_attention(self) -> bool:
        """Whether the model caches keys and values."""
        return self.counted.has_attention

    @cached_property
    def heads(self) -> int:
        """Query heads of the widest layer."""
        return query_heads(self.counted.text) or 1

    @cached_property
    def caches(self) -> dict[Cached, int]:
        """Cached tensors of keys and values with their number of layers; empty where no formula says."""
        part = self.counted.part
        return {c: n for c, n in part.cache.items() if c.attention and c.per_token} if part else {}

    @cached_property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return sum(self.caches.values()) or self.counted.text.largest("num_hidden_layers") or 0

    @property
    def positions(self) -> tuple[str, int | None]:
        """How the model knows positions, and the length that its configuration says it was trained for."""
        text = self.counted.text
        trained = next((n for name in _TRAINED if (n := text.largest(name)) is not None), None)
        attention = text.get("attn_config") or {}
        if text.model_type == "bloom" or text.get("alibi") or (isinstance(attention, dict) and attention.get("alibi")):
            return "ALiBi", trained
        tables = {w.rows for w in self.counted.weights if w.kind == "embedding"}
        if trained is not None and tables & {trained, trained + 2} - {text.largest("vocab_size")}:
            return "learned", trained
        return ("rotary" if self.has_attention else "none"), trained

    # ---- memory

    def _estimate(self, run: Run, batch: int) -> MemoryEstimate:
        prompt = min(self.prompt, self.chunk) if run.cache else self.context
        return estimate(
            self.counted,
            dtype=self.dtype,
            quantization=run.quantization,
            batch_size=batch,
            prompt_tokens=prompt,
            new_tokens=self.context - prompt,
            attention=run.attention,
        )

    def parts(self, run: Run, batch: int | None = None) -> tuple[int, int, int]:
        """Return the bytes of weights, of the cache, and of what every card needs besides."""
        found = self.estimate(run.but(cards=1, cache_share=Fraction(1)), batch or self.batch)
        held = int(found.kv_cache * run.cache_share) if run.cache else 0
        return found.weights + found.quantization_constants, held, found.activations + found.workspace

    def memory(self, run: Run, batch: int | None = None) -> int:
        """Return the bytes at the peak on each card; weights and cache are spread evenly."""
        weights, held, besides = self.parts(run, batch)
        return -(-(weights + held) // run.cards) + besides

    def fits(self, run: Run, batch: int | None = None) -> bool:
        """Whether each card has room."""
        return self.memory(run, batch) <= self.card.memory_bytes

    def cards_needed(self, run: Run) -> int | None:
        """Return the fewest cards, at an even split, or None where what each needs besides does not fit."""
        weights, held, besides = self.parts(run)
        room = self.card.memory_bytes - besides
        return max(1, -(-(weights + held) // room)) if room > 0 else None

    def room(self, run: Run) -> int:
        """Return the most sequences that fit."""
        if not self.fits(run, 1):
            return 0
        held, too_many = 1, 2
        while self.fits(run, too_many) and too_many < MOST_SEQUENCES:
            held, too_many = too_many, 2 * too_many
        while too_many - held > 1:
            middle = (held + too_many) // 2
            held, too_many = (middle, too_many) if self.fits(run, middle) else (held, middle)
        return held

    # ---- time

    def cost(self, run: Run, batch: int, *, first: bool = False) -> StepCost:
        """Return what the prompt's pass, or that for a token at the full context, reads and computes."""
        whole_pass = first or not run.cache
        context = self.prompt if first else self.context
        cost = step_cost(
            self.counted,
            context=context,
            batch_size=batch,
            query_tokens=self._passing(run, first),
            logits_to_keep=1,
            dtype=self.dtype,
            quantization=run.quantization,
        )
        held = self.scores_traffic(run, batch, context) if whole_pass else int(cost.cache_bytes * run.cache_share)
        return replace(
            cost,
            weight_bytes=cost.weight_bytes + self.copies(run, batch * self._passing(run, first)),
            cache_bytes=held,
        )

    def _passing(self, run: Run, first: bool) -> int:
        """Return the tokens of each sequence that a pass computes."""
        return self.prompt if first else 1 if run.cache else self.context

    def copies(self, run: Run, rows: int) -> int:
        """Return the bytes that a pass moves which turns 4-bit weights back before multiplying many rows."""
        turned_back = run.quantization not in (None, "int8", *PUBLISHED)
        return 2 * self.size * self.converted("nf4") if rows > FEW_ROWS and turned_back else 0

    def converted(self, quantization: str) -> int:
        """Return the number of weights that a scheme converts."""
        return sum(w.size * n for w, n in self.counted.weights.items() if w.kind in converted_kinds(quantization))

    def scores_traffic(self, run: Run, batch: int, tokens: int) -> int:
        """Return the bytes of scores that ordinary attention moves in a pass over `tokens` tokens."""
        if run.attention == "flash" or not self.has_attention:
            return 0
        return SCORE_PASSES * batch * self.heads * tokens**2 * self.size * self.attention_layers

    def seconds(self, run: Run, batch: int | None = None, *, first: bool = False) -> float:
        """Return the least time, of the cards together, between which nothing is counted for communication."""
        cost = self.cost(run, batch or self.batch, first=first)
        return cost.seconds(self.card.bandwidth_bytes_per_second * run.cards, self.flop_rate * run.cards)

    def answer(self, run: Run) -> float:
        """Return the least time until all new tokens are there."""
        return self.seconds(run, first=True) + max(0, self.new_tokens - 1) * self.seconds(run)

    def rate(self, run: Run) -> float:
        """Return the tokens per second with as many sequences as fit."""
        room = self.room(run)
        return room / self.seconds(run, room) if room else 0.0

    def gain(self, before: Run, after: Run, goal: str) -> float:
        """Return by which share a change brings the goal nearer."""
        if goal == "memory":
            return 1 - self.memory(after) / self.memory(before)
        if goal == "latency":
            return 1 - self.answer(after) / self.answer(before)
        reached = self.rate(after)
        return 1 - self.rate(before) / reached if reached else 0.0

    # ---- both

    def step(self, name: str, run: Run) -> Step:
        """Return the prediction for a way of running."""
        sequences = self.room(run) if self.rooms else None
        return Step(
            name,
            self.memory(run),
            run.cards,
            self.fits(run),
            self.seconds(run),
            self.seconds(run, first=True),
            self.answer(run),
            sequences,
            self.rate(run) if self.rooms else None,
            (*self._memory_told(run), *self._time_told(run)),
        )

    def _memory_told(self, run: Run) -> list[str]:
        weights, held, besides = self.parts(run)
        lines = [f"weights: {self.weights_told(run.quantization)} = {weights:,} bytes = {format_gib(weights)}"]
        if held:
            lines.append(f"KV cache: {self.cache_told(run)} = {held:,} bytes = {format_gib(held)}")
        lines += self._activations_told(run)
        split = f"({format_gib(weights)} + {format_gib(held)}) / {run.cards}" if run.cards > 1 else None
        sum_told = split or f"{format_gib(weights)} + {format_gib(held)}"
        total, has = self.memory(run), self.card.memory_bytes
        sign = "<=" if total <= has else ">"
        lines.append(
            f"peak on a card: {sum_told} + {format_gib(besides)} = {format_gib(total)} {sign} {format_gib(has)} "
            f"({has:,} bytes) of the {self.card.name}"
        )
        return lines

    def weights_told(self, quantization: str | None) -> str:
        """Return the weights' bytes as a product of their numbers and bits."""
        bits = 8 * self.size
        if quantization is None:
            return f"{self.counted.parameters:,} values × {bits} bits / 8"
        published, codes = PUBLISHED.get(quantization), self.converted(quantization)
        code = published.bits if published else DTYPE_BITS.get(quantization.removesuffix("-double"), bits)
        scale = published.scale_bytes if published else 4
        stored = f"({codes:,} × {code} bits + {self.counted.parameters - codes:,} × {bits} bits) / 8"
        constants = self.estimate(Run(quantization=quantization), 1).quantization_constants
        return (
            f"{stored} + {scale} bytes × {constants // scale:,} scales"
            if constants % scale == 0
            else f"{stored} + {constants:,} bytes"
        )

    def cache_told(self, run: Run) -> str:
        """Return the cache's bytes as a product, layer kind by layer kind."""
        if not self.caches:
            return f"{self.batch:,} sequences of {self.context:,} tokens, counted on the real class"
        terms = [
            f"{n} layers × {c.per_token:,} values × {c.elements(self.context) // c.per_token:,} tokens"
            for c, n in self.caches.items()
        ]
        share = "" if run.cache_share == 1 else f" × {run.cache_share}"
        return f"({' + '.join(terms)}) × {self.batch:,} sequence{'s' * (self.batch > 1)} × {self.size} bytes{share}"

    def _activations_told(self, run: Run) -> Iterator[str]:
        found = self.estimate(run.but(cards=1, cache_share=Fraction(1)), self.batch)
        tokens = min(self.prompt, self.chunk) if run.cache else self.context
        hidden, width = layer_widths(self.counted)
        told = f"{self.batch:,} × {tokens:,} tokens × (2 × {hidden:,} + {width:,}) × {self.size} bytes"
        if run.attention == "eager" and self.has_attention:
            told += f" + scores {self.batch:,} × {self.heads} heads × {tokens:,}^2 × (2 × {self.size} + 4) bytes"
        vocab = self.counted.text.largest("vocab_size") or 0
        if found.activations == self.batch * vocab * (self.size + 4):
            told = f"logits {self.batch:,} × {vocab:,} × ({self.size} + 4) bytes"
        yield f"activations: {told} = {found.activations:,} bytes = {format_gib(found.activations)}"
        if found.workspace:
            linear = [w for w in self.counted.weights if w.kind == "linear"]
            if run.quantization == "int8":
                told = f"4 bytes × {self.batch * tokens:,} tokens × {max(w.rows for w in linear):,} rows"
            else:
                largest = max(w.size for w in linear)
                told = f"{found.workspace // largest} bytes × {largest:,} values of the largest matrix"
            yield f"workspace: {told} = {found.workspace:,} bytes = {format_gib(found.workspace)}"

    def _time_told(self, run: Run) -> list[str]:
        lines = []
        for first in (True, False):
            cost = self.cost(run, self.batch, first=first)
            name = f"first token, {self.prompt:,} of the prompt" if first else f"a token at {self.context:,}"
            besides = "scores" if first or not run.cache else "cache"
            reading = cost.bytes / (self.card.bandwidth_bytes_per_second * run.cards)
            shared = f" / {run.cards} cards" if run.cards > 1 else ""
            copies = self.copies(run, self.batch * self._passing(run, first))
            parts = [f"{cost.weight_bytes - copies:,} of weights", f"{cost.cache_bytes:,} of {besides}"]
            parts += [f"2 × {copies // 2:,} of weights turned back"] * bool(copies)
            told = f"{name}: ({' + '.join(parts)}) bytes{shared} / "
            told += f"{self.card.bandwidth_bytes_per_second:,} bytes/s = {duration(reading)}"
            if self.card.tensor_flops_per_second:
                computing = cost.flops / (self.flop_rate * run.cards)
                told += f"; ({cost.weight_flops:,} of weights + {cost.attention_flops:,} of attention) operations{shared} / "
                told += f"{self.card.tensor_flops_per_second:,} operations/s = {duration(computing)}; the longer counts"
            else:
                told += "; its sheet states no arithmetic rate, so bytes alone count"
            lines.append(told)
        return lines
