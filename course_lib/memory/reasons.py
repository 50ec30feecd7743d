"""Why a row of the decision table applies to a workload or does not, in words with the numbers that decide."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from course_lib.memory.scenario import FEW_ROWS, Run, Step, Workload, duration
from course_lib.memory.units import bytes_to_giga_bytes, format_gib

if TYPE_CHECKING:
    from course_lib.memory.advice import Advice


def sequences(count: int) -> str:
    """Return a number of sequences in words."""
    return f"{count:,} sequence{'s' * (count != 1)}"


def cache(work: Workload, run: Run, cached: Run) -> str:
    """Say what keeping keys and values costs and saves."""
    if work.new_tokens < 2:
        return f"{work.new_tokens} new tokens are one pass over the prompt, in which nothing would be read again."
    without, kept = work.cost(run, work.batch), work.cost(cached, work.batch)
    what = "The cache" if work.has_attention else "The state, which does not grow,"
    return (
        f"{what} takes {format_gib(work.parts(cached)[1])}; without it every new token computes all {work.context:,} again: "
        f"{without.flops:,} operations instead of {kept.flops:,}."
    )


def heads(work: Workload) -> tuple[str, list[tuple[int, Fraction]]]:
    """Say how the query heads share keys and values, and list what fewer heads would leave of the cache."""
    text = work.counted.text
    if not work.caches:
        return "No formula says how its heads share the cache." * work.has_attention, []
    latent = text.get("kv_lora_rank") is not None
    if latent:
        widths = (text.whole(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        own = work.heads * sum(widths)
    stored = full = 0
    for cached, layers in work.caches.items():
        kept = cached.elements(work.context)
        stored += layers * kept
        full += layers * kept // cached.per_token * (own if latent else cached.products)
    share = Fraction(stored, full)
    if share < 1:
        whose = "grouped heads" if share > Fraction(1, work.heads) else "one key-value head"
        whose = "latent attention" if latent else whose
        held, full_bytes = (values * work.size * work.batch for values in (stored, full))
        return (
            f"The model has {whose} already: its {work.heads} query heads' own keys and values would take {full:,} values × {work.size} bytes "
            f"× {sequences(work.batch)} = {full_bytes:,} bytes = {format_gib(full_bytes)}; it holds {share} of that, {held:,} bytes = "
            f"{format_gib(held)}."
        ), []
    if text.get("new_decoder_architecture"):
        return (
            "The model has grouped heads, but Transformers repeats them before it stores them, so this cache is full.",
            [],
        )
    groups = [g for g in (8, 1) if work.heads % g == 0 and g < work.heads]
    told = f"The model gives each of its {work.heads} query heads keys and values of its own."
    return told + " Fewer would take a model trained or uptrained with them.", [
        (g, Fraction(g, work.heads)) for g in groups
    ]


def coded_cache(work: Workload, run: Run) -> str:
    """Say what the guide's rows leave out: a cache of codes, where the cache counts."""
    held, peak = work.parts(run)[1], work.memory(run)
    if not work.has_attention or held < peak / 20:
        return ""
    codes = work.counted.cache_bytes(work.context, work.batch, "int4")
    return f"Beyond the guide's rows: a cache of 4-bit codes would take {format_gib(codes)} instead of {format_gib(held)} (chapter 9)."


def flash(work: Workload, run: Run, saved: int) -> str:
    """Say what scores take that are written out, in the prompt's pass and in a decode step."""
    if not work.has_attention:
        return "The model has no attention, so there are no scores."
    tokens = min(work.prompt, work.chunk) if run.cache else work.context
    one = work.batch * work.heads * work.context * work.size
    told = f"A decode step has one query: its scores are {work.batch:,} × {work.heads} heads × {work.context:,} × {work.size} bytes = {one:,} bytes a layer"
    told += ", with flash attention or without, so memory and bandwidth of decoding do not change"
    if not saved:
        return f"At {tokens:,} tokens the peak is elsewhere, so it saves no memory. {told}."
    scores = work.batch * work.heads * tokens**2 * (2 * work.size + 4)
    share = saved / work.memory(run)
    return (
        f"One layer's scores of the prompt, before and after a softmax in float32, take {work.batch:,} × {work.heads} heads × {tokens:,}^2 "
        f"× (2 × {work.size} + 4) bytes = {format_gib(scores)}; not writing them saves {format_gib(saved)}, {100 * share:.1f} % of the peak. {told}."
    )


def positions(work: Workload, kind: str, trained: int | None) -> str:
    """Say how the model knows positions and how far."""
    if kind == "none":
        return "The model reads its tokens one after the other and needs no positions."
    how = {"learned": "a learned vector for each position", "rotary": "rotary positions", "ALiBi": "ALiBi's distances"}[
        kind
    ]
    if trained is None:
        return f"The model has {how}; its configuration names no length."
    if work.context <= trained:
        return f"The model has {how}, for {trained:,} tokens; {work.context:,} are within."
    if kind == "learned":
        return (
            f"The model has {how}, and only {trained:,} of them: it cannot run {work.context:,} tokens at all. "
            "A model with RoPE or ALiBi can. The predictions here count memory and time as if it could."
        )
    factor = work.context / trained
    return (
        f"The model has {how} and its configuration names {trained:,} tokens; {work.context:,} are {factor:.2f} times as many. "
        + (
            "Stretch its positions by that factor (YaRN), and measure the quality."
            if kind == "rotary"
            else "Measure the quality."
        )
    )


def quantise(work: Workload, run: Run, best: Run, goal: str) -> str:
    """Say what fewer bits save, and when they cost time instead."""
    if run.quantization:
        return f"The checkpoint is stored as {run.quantization} already."
    weights = work.counted.weights
    experts = sum(w.size * n for w, n in weights.items() if w.kind == "experts")
    eight, four = (work.parts(run.but(quantization=scheme))[0] for scheme in ("int8", "nf4"))
    told = (
        f"Weights take {format_gib(work.parts(run)[0])}, in 8 bits {format_gib(eight)}, in 4 bits {format_gib(four)}."
    )
    if experts:
        told += f" {100 * experts / work.counted.parameters:.0f} % of them are stacked experts, which these schemes leave as they are."
    if goal == "memory":
        told += f" {'It fits without: this frees room.' if work.fits(run) else 'It does not fit without.'}" * (
            best != run
        )
    else:
        told += " " + quantised_time(work, run, best)
    four_bits = run.but(quantization="nf4")
    copies = work.copies(four_bits, work.batch) or work.copies(four_bits, FEW_ROWS + 1)
    counted = "is counted here" if work.batch > FEW_ROWS else "would come with more"
    return told + (
        f" Kernels multiply up to {FEW_ROWS} rows by 4-bit codes as they are; turning weights back first, which {counted}, writes and reads "
        f"{work.size}-byte copies: 2 × {work.size} × {work.converted('nf4'):,} bytes / {work.card.bandwidth_bytes_per_second:,} bytes/s = "
        f"{duration(copies / work.card.bandwidth_bytes_per_second)} a pass."
    )


def quantised_time(work: Workload, run: Run, best: Run) -> str:
    """Say what fewer bits do to a token's time."""
    four = run.but(quantization="nf4")
    before, after = work.seconds(run), work.seconds(four)
    cost = work.cost(run, work.batch)
    computing = cost.flops / (work.flop_rate * run.cards)
    reading = cost.bytes / (work.card.bandwidth_bytes_per_second * run.cards)
    if computing > reading:
        return (
            f"With {sequences(work.batch)} a token's arithmetic, {duration(computing)}, takes longer than reading, {duration(reading)}: "
            "fewer bytes do not shorten it."
        )
    text = f"With {sequences(work.batch)} a token takes {duration(before)}, read with 4-bit weights {duration(after)}."
    if best != run and not work.fits(run):
        text += " And without fewer bits it does not fit."
    return text


def more_cards(work: Workload, run: Run, needed: int | None) -> str:
    """Say how many cards it takes, and what more of them would do for the time."""
    weights, held, besides = work.parts(run)
    if needed is None:
        return (
            f"Activations and workspace, {format_gib(besides)}, are needed on every card and exceed its {format_gib(work.card.memory_bytes)}: "
            "run the prompt in pieces (prefill_chunk), or fewer sequences at a time."
        )
    if needed == 1:
        two = work.seconds(run.but(cards=2))
        return (
            f"One card is enough. Two with tensor parallelism would read half each: at least {duration(two)} a token instead of "
            f"{duration(work.seconds(run))}; as a pipeline they would take turns and not be faster for one request."
        )
    room = work.card.memory_bytes - besides
    divisor = next((n for n in range(needed, work.heads + 1) if work.heads % n == 0), None)
    told = (
        f"At an even split it needs {needed} cards: ({format_gib(weights)} + {format_gib(held)}) / {format_gib(room)} "
        f"= {(weights + held) / room:.2f}, rounded up; layers that do not divide may ask for one more. "
        f"As a pipeline a request keeps one of {needed} cards busy at a time, and a token takes at least {duration(work.seconds(run))}"
    )
    if divisor:
        parallel = work.seconds(run.but(cards=divisor))
        told += f"; with tensor parallelism on {divisor}, which divide its {work.heads} heads, {duration(parallel)}"
    told += "."
    if run.quantization:
        as_it_is = work.cards_needed(run.but(quantization=None))
        told += f" With weights in {work.dtype}: {as_it_is} cards." * bool(as_it_is)
    return told


def summary(advice: Advice) -> str:
    """Return the conclusion in a few sentences."""
    use = [row for row in advice.rows if row.verdict == "use"]
    result: Step = advice.result
    has = format_gib(advice.card.memory_bytes)
    if advice.enough is None:
        told = f"nothing here makes it fit in {has}"
        told += f"; of {sequences(advice.batch_size)}, {result.sequences:,} do." if result.sequences else "."
    elif advice.enough.cards > 1:
        told = f"needs {advice.enough.cards} cards of {has}."
    elif advice.enough is advice.start:
        told = f"fits as it is in {has}."
    else:
        told = f"fits in {has} after this step: {advice.enough.name}."
    told += f" Rows to use, in this order: {', '.join(str(row.number) for row in use) or 'none'}."
    told += (
        f" From {bytes_to_giga_bytes(advice.start.memory):,.2f} to {format_gib(result.memory)} a card, and from "
        f"{duration(advice.start.seconds)} to {duration(result.seconds)} a token, at least."
    )
    changed = [row for row in advice.rows if row.verdict == "change the model"]
    return told + "".join(f" {row.reason}" for row in changed)
