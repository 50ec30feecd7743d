"""Which technique to reach for: the decision table of the optimisation guide, computed for a model, a card and a workload.

The guide's table has five rows. `advise` says of each whether it applies, puts those that do in an order, and predicts memory
and time after each from `estimate` and `step_cost`, with its arithmetic. Chapter 12 (notebooks/12-beyond-one-gpu.ipynb) uses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from course_lib.memory import reasons
from course_lib.memory.cards import Card, find_card
from course_lib.memory.scenario import Run, Step, Workload, duration
from course_lib.memory.units import bytes_to_giga_bytes, whole

Goal = Literal["memory", "latency", "throughput"]
Verdict = Literal["use", "already so", "not needed", "no help", "change the model"]
GOALS = ("memory", "latency", "throughput")
#: A remedy is worth its price if it improves what the goal asks for by this share.
WORTH = 0.05
NEW_TOKENS = 256
_ORDER = {"use": 0, "change the model": 1}


@dataclass(frozen=True)
class Row:
    """One row of the guide's table, judged for a workload.

    Attributes
    ----------
    number : int
        Its place in the guide's table, from 1.
    situation, remedy : str
        What the row is for, and what it says to use.
    verdict : {"use", "already so", "not needed", "no help", "change the model"}
        ``"change the model"``: it would help, and no switch of a program does it.
    reason : str
        Why, with the numbers that decide.
    costs : str
        What it costs.
    chapter : int
        The chapter that measured it.
    steps : tuple of Step
        What the row's measures lead to, each on top of all before; none where it changes neither memory nor time.
    what_if : tuple of Step
        What measures that are not taken would lead to.
    """

    number: int
    situation: str
    remedy: str
    verdict: Verdict
    reason: str
    costs: str
    chapter: int
    steps: tuple[Step, ...] = ()
    what_if: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Advice:
    """What to do, in order, and what comes of it.

    Attributes
    ----------
    model : str
        What the model is called.
    card : Card
        The card, whose datasheet gives memory, bandwidth and arithmetic.
    context, new_tokens, batch_size : int
        The workload.
    goal : {"memory", "latency", "throughput"}
        What was asked for.
    start : Step
        The plainest run: nothing cached, scores written out, weights as the checkpoint has them.
    rows : tuple of Row
        The guide's five rows: first those to use, in order, then the others.
    """

    model: str
    card: Card
    context: int
    new_tokens: int
    batch_size: int
    goal: Goal
    start: Step
    rows: tuple[Row, ...]

    def row(self, number: int) -> Row:
        """Return a row by its place in the guide's table."""
        return next(row for row in self.rows if row.number == number)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The start and what each measure to use leads to, each on top of those before."""
        return (self.start, *(step for row in self.rows for step in row.steps))

    @property
    def result(self) -> Step:
        """Where all measures lead."""
        return self.steps[-1]

    @property
    def enough(self) -> Step | None:
        """The first step from which on everything fits; None if nothing does."""
        found = None
        for step in reversed(self.steps):
            if not step.fits:
                break
            found = step
        return found

    @property
    def summary(self) -> str:
        """The conclusion in a few sentences."""
        return reasons.summary(self)

    @property
    def arithmetic(self) -> dict[str, tuple[str, ...]]:
        """Every number of every step as an expression with its inputs."""
        return {step.name: step.arithmetic for step in self.steps}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and a row for each step; times are lower bounds, and tokens a second an upper one."""
        headers = ["after", "GiB a card", "fits", "first token", "a token"]
        headers += ["sequences", "tokens/s"] * (self.goal == "throughput")
        rows = []
        for step in self.steps:
            cells = [step.name, f"{bytes_to_giga_bytes(step.memory):,.2f}", "yes" if step.fits else "no"]
            cells += [duration(step.first_seconds), duration(step.seconds)]
            if step.sequences is not None:
                cells += [f"{step.sequences:,}", f"{step.tokens_per_second:,.0f}"]
            rows.append(cells)
        return headers, rows

    def __str__(self) -> str:
        lines = [f"{self.model} on {self.card.name}: {self.summary}"]
        for row in self.rows:
            lines.append(f"\n{row.number}. {row.situation}: {row.remedy} -> {row.verdict}\n   {row.reason}")
            lines += [f"   {step.name}: {step.told}" for step in row.steps]
            lines += [f"   ({step.name}: {step.told})" for step in row.what_if]
        return "\n".join(lines)


def advise(
    model: Any,
    *,
    gpu: str | Card,
    context: int,
    batch_size: int = 1,
    goal: Goal = "memory",
    new_tokens: int | None = None,
    dtype: Any = None,
    prefill_chunk: int | None = None,
) -> Advice:
    """Say which rows of the optimisation guide's decision table apply to a workload, in which order, and what they bring.

    Parameters
    ----------
    model : str, path, dict or transformers.PretrainedConfig
        See `count_parameters`.
    gpu : str or Card
        A card, or its name (see `find_card`).
    context : int
        Tokens of each sequence, prompt and output together.
    batch_size : int
        Sequences at a time.
    goal : {"memory", "latency", "throughput"}
        What to improve: bytes on the card; seconds until an answer is complete; tokens per second with as many sequences as fit.
    new_tokens : int, optional
        How many of the context are generated; 256 by default, or half of a context that is shorter than that.
    dtype : str or torch.dtype, optional
        Data type of weights and activations; the configuration's own by default, bfloat16 if it names none.
    prefill_chunk : int, optional
        The most tokens of a prompt that run at a time, which bounds the activations; all by default.

    Returns
    -------
    Advice

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        As for `estimate`; if no card has the name, the goal is none of the three, or `new_tokens` leaves no token of a prompt.

    Notes
    -----
    The measures come in the order of their price: what changes no result (a cache, flash attention), what changes numbers (fewer
    bits), more hardware, another model. The cache is used always and flash attention wherever it saves anything, as neither
    changes a result; another measure if it improves the goal by a twentieth or the model needs fewer cards with it. Times are
    what the roofline of `StepCost.seconds` gives with the rates of the card's datasheet: lower bounds, not yet measured on a
    card. What a time leaves out is listed at `step_cost`; between cards nothing is counted for communication, and the cache
    counts as split evenly: tensor parallelism copies a head, or a latent cache, that it cannot divide. A card whose sheet states
    no arithmetic rate is bound by bytes alone.
    """
    if goal not in GOALS:
        raise ValueError(f"goal must be one of {', '.join(GOALS)}, got {goal!r}")
    tokens = whole(context, "context", least=2)
    new = min(NEW_TOKENS, tokens // 2) if new_tokens is None else whole(new_tokens, "new_tokens", most=tokens - 1)
    batch = whole(batch_size, "batch_size", least=1)
    card = gpu if isinstance(gpu, Card) else find_card(gpu, "gpu")
    work = Workload(model, card, tokens, new, batch, dtype, prefill_chunk, rooms=goal == "throughput")
    run = Run(quantization=work.own_quantization)
    start = work.step("nothing but the model", run)
    rows: list[Row] = []
    for judge in (_cache, _flash, _positions, _quantise, _cards):
        row, run = judge(work, run, goal)
        rows.append(row)
    rows[0] = _heads(work, run, rows[0])
    ordered = sorted(rows, key=lambda row: _ORDER.get(row.verdict, len(_ORDER)))  # stable: equals keep their order
    return Advice(work.label, card, tokens, new, batch, goal, start, tuple(ordered))


def _cache(work: Workload, run: Run, goal: Goal) -> tuple[Row, Run]:
    """Row 5: keep keys and values; and the heads, of which `_heads` speaks at the end."""
    cached = run.but(cache=True)
    step = work.step("a KV cache", cached)
    verdict: Verdict = "use" if work.new_tokens > 1 else "not needed"
    reason = reasons.cache(work, run, cached)
    row = Row(
        5,
        "decoding token by token, chat over several turns",
        "always a KV cache; grouped or shared key-value heads",
        verdict,
        reason,
        "memory for every token kept; heads have to be grouped before training, or uptrained",
        8,
        (step,) if verdict == "use" else (),
    )
    return row, cached if verdict == "use" else run


def _flash(work: Workload, run: Run, goal: Goal) -> tuple[Row, Run]:
    """Row 3: never write the scores out."""
    flash = run.but(attention="flash")
    saved = work.memory(run) - work.memory(flash)
    helps = work.has_attention and (saved > 0 or work.gain(run, flash, goal) > WORTH)
    verdict: Verdict = "use" if helps else "no help" if work.has_attention else "not needed"
    row = Row(
        3,
        "a long context, from about 16,000 tokens",
        "flash attention",
        verdict,
        reasons.flash(work, run, saved),
        "nothing in results but rounding; it cannot give the attention weights, and needs a kernel for the card",
        5,
        (work.step("flash attention", flash),) if helps else (),
    )
    return row, flash


def _positions(work: Workload, run: Run, goal: Goal) -> tuple[Row, Run]:
    """Row 4: positions beyond the trained length."""
    kind, trained = work.positions
    beyond = trained is not None and work.context > trained
    verdict: Verdict = "already so" if kind in ("rotary", "ALiBi") else "not needed"
    if beyond and kind in ("rotary", "learned"):
        verdict = "use" if kind == "rotary" else "change the model"
    row = Row(
        4,
        "long texts: summaries, retrieval, chat",
        "relative positions: RoPE or ALiBi",
        verdict,
        reasons.positions(work, kind, trained),
        "no memory; beyond the trained length a rule for stretching, and some quality",
        7,
    )
    return row, run


def _quantise(work: Workload, run: Run, goal: Goal) -> tuple[Row, Run]:
    """Row 1: weights in 8 and in 4 bits, each kept if it brings the goal nearer."""
    steps: list[Step] = []
    best, tried = run, []
    for scheme, name in (("int8", "8-bit weights (int8)"), ("nf4", "4-bit weights (nf4)")):
        if run.quantization:
            break
        now = run.but(quantization=scheme)
        tried.append(work.step(name, now))
        fewer_cards = (work.cards_needed(now) or math.inf) < (work.cards_needed(best) or math.inf)
        if fewer_cards or work.gain(best, now, goal) > WORTH:
            steps.append(tried[-1])
            best = now
    verdict: Verdict = "use" if steps else "already so" if run.quantization else "no help"
    row = Row(
        1,
        "the model does not fit in memory",
        "8-bit or 4-bit weights",
        verdict,
        reasons.quantise(work, run, best, goal),
        "some quality, little at 8 bits and more at 4; time where turning weights back is a pass of its own",
        4,
        tuple(steps),
        tuple(step for step in tried if step not in steps),
    )
    return row, best


def _cards(work: Workload, run: Run, goal: Goal) -> tuple[Row, Run]:
    """Row 2: as many cards as it takes, if one is too few."""
    needed = work.cards_needed(run)
    verdict: Verdict = "not needed" if needed == 1 else "use" if needed else "no help"
    steps = () if needed in (None, 1) else (work.step(f"{needed} cards", run.but(cards=needed)),)
    row = Row(
        2,
        "a model too large for one card",
        'several cards: device_map="auto" (a pipeline of layers) or tensor parallelism',
        verdict,
        reasons.more_cards(work, run, needed),
        "the cards; layers in a pipeline wait for one another, tensor parallelism talks in every layer",
        12,
        steps,
    )
    return row, run.but(cards=needed) if steps and needed else run


def _heads(work: Workload, run: Run, row: Row) -> Row:
    """Say in row 5 what grouped heads do to the cache that all measures leave, or would do."""
    if row.verdict != "use":
        return row
    told, shares = reasons.heads(work)
    whole_reason = f"{row.reason} {told} {reasons.coded_cache(work, run)}"
    what_if = (
        work.step(f"{heads} key-value head{'s' * (heads > 1)} instead of {work.heads}", run.but(cache_share=share))
        for heads, share in shares
    )
    return replace(row, reason=" ".join(whole_reason.split()), what_if=tuple(what_if))
