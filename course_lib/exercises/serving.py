"""Exercises of chapter 12: pipelines, shares of weights and drafts to test with, right answers, and what common mistakes lead to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal

import torch
from torch.nn import functional

from course_lib.exercises import checks


def _draw(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


# ---- the idle share of a pipeline ---------------------------------------------------------------------------------


def random_pipeline(rng: Random, *, equal: bool = False) -> tuple[list[float], int]:
    """Draw the seconds that each stage takes for a micro-batch, and how many micro-batches there are."""
    stages = rng.randint(3, 8)
    seconds = [rng.uniform(0.1, 0.9) for _ in range(stages)]
    return [seconds[0]] * stages if equal else seconds, rng.randint(2, 20)


def idle_share(seconds: Sequence[float], micro_batches: int) -> float:
    """Return the share of all stages' time in which they wait, by playing the schedule."""
    ends = [0.0] * len(seconds)
    for _ in range(micro_batches):
        ready = 0.0
        for stage, needed in enumerate(seconds):
            ready = ends[stage] = max(ready, ends[stage]) + needed
    return 1 - micro_batches * sum(seconds) / (len(seconds) * ends[-1])


def idle_mistakes(seconds: Sequence[float], micro_batches: int) -> dict[str, float]:
    """Return what mistakes about the idle share of a pipeline lead to."""
    stages, work, slowest = len(seconds), micro_batches * sum(seconds), max(seconds)

    def idle(total: float) -> float:
        return 1 - work / (stages * total)

    total = sum(seconds) + (micro_batches - 1) * slowest
    return {
        "This is the busy share; the task wants the rest.": 1 - idle(total),
        "These are seconds; the task wants their share of the stages' time.": stages * total - work,
        "One micro-batch at a time: while one is in a stage, the next may be in the stage before it.": idle(
            micro_batches * sum(seconds)
        ),
        "The time in which the pipeline fills and empties is missing: the last micro-batch must go through all stages.": idle(
            micro_batches * slowest
        ),
        "Stages are taken to be equally fast, as their mean: the slowest sets the pace.": idle(
            sum(seconds) + (micro_batches - 1) * sum(seconds) / stages
        ),
        "The last stage is taken to set the pace: the slowest does, wherever it stands.": idle(
            sum(seconds) + (micro_batches - 1) * seconds[-1]
        ),
        "Every stage is taken to be as slow as the slowest: a micro-batch goes on as soon as the next stage is free.": idle(
            (stages + micro_batches - 1) * slowest
        ),
        "One micro-batch too many: the first is through after the sum of all stages, then comes one each time the slowest is done.": idle(
            total + slowest
        ),
        "Every stage is busy all the time but while the first micro-batch fills the pipeline: it empties, too.": idle(
            total - seconds[-1]
        ),
    }  # fmt: skip


# ---- a network cut between ranks ----------------------------------------------------------------------------------

Network = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_network(rng: Random) -> tuple[Network, int]:
    """Draw states ``[tokens, hidden]``, weights of a gated network in float64, its last bias, and a number of ranks."""
    ranks, draw = rng.randint(2, 4), _draw(rng)
    hidden, inner = ranks * rng.randint(2, 4), ranks * rng.randint(5, 7)
    shapes = ((rng.randint(2, 4), hidden), (inner, hidden), (inner, hidden), (hidden, inner), (hidden,))
    x, gate, up, down, bias = (torch.randn(shape, generator=draw, dtype=torch.float64) / 2 for shape in shapes)
    return (x, gate, up, down, bias), ranks


def whole(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return what the network gives in one piece, ``[tokens, hidden]``."""
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T + bias


def partial(network: Network, rank: int, ranks: int) -> torch.Tensor:
    """Return what one rank computes, ``[tokens, hidden]``; the ranks' results add up to the whole."""
    x, gate, up, down, bias = network
    share = slice(rank * len(gate) // ranks, (rank + 1) * len(gate) // ranks)
    return whole(x, gate[share], up[share], down[:, share], bias if rank == 0 else 0 * bias)


#: Said where a student's matrices do not meet. A dict, so that feedback knows the sentence.
MEET = {
    "PyTorch stops your function with an error, most often for shapes that do not match. If you cut `down` by its rows, it still "
    "wants all numbers in between: cut its columns, which are its inputs.": None
}


def answered(partial: Callable[..., Any], network: Network, rank: int, ranks: int, case: str | None = None) -> Any:
    """Return what a function under test computes for one rank.

    Raises
    ------
    WrongAnswer
        If PyTorch stops it, as where shapes do not match.
    """
    try:
        return partial(*network, rank, ranks)
    except RuntimeError as error:
        if isinstance(error, (NotImplementedError, RecursionError)):
            raise
        raise checks.WrongAnswer(f"For {case or checks.CASE_YOU_CANNOT_SEE} {next(iter(MEET))}") from error


def partial_mistakes(network: Network, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return what mistakes in cutting a network lead to."""
    x, gate, up, down, bias = network
    right = partial(network, rank, ranks)
    inner, hidden = len(gate) // ranks, len(bias) // ranks
    share, inputs, apart = slice(rank * inner, (rank + 1) * inner), slice(rank * hidden, (rank + 1) * hidden), slice(rank, None, ranks)  # fmt: skip
    once = bias if rank == 0 else 0 * bias
    first = whole(x, gate[:inner], up[:inner], down[:, :inner], once)
    return {
        "Every rank adds the bias, so the sum has it once a rank: one of them adds it.": whole(
            x, gate[share], up[share], down[:, share], bias
        ),
        "Every rank adds its part of the bias: the sum is right, but the task leaves all of it to rank 0.": whole(
            x, gate[share], up[share], down[:, share], bias / ranks
        ),
        "The bias is missing: rank 0 adds it.": whole(x, gate[share], up[share], down[:, share], 0 * bias),
        "Every rank computes the whole, so the sum is too large by as many times as there are ranks.": whole(*network),
        "All matrices are cut by outputs, so each rank needs what the others have in between: cut `down` by its inputs.": whole(
            *network
        )[:, inputs],
        "Inputs of `gate` and `up` are cut: SiLU would be taken before the sum is complete, and it is not linear.": whole(
            x[:, inputs], gate[:, inputs], up[:, inputs], down, once
        ),
        "Only `down` is cut right: each rank uses the shares of `gate` and `up` that meet its share of `down`.": whole(
            x, gate[:inner], up[:inner], down[:, share], once
        ),
        "The result is divided by the number of ranks: shares are added, not averaged.": right / ranks,
        "The share is made of every `ranks`-th row: the task wants neighbouring rows.": whole(
            x, gate[apart], up[apart], down[:, apart], once
        ),
        "All ranks compute the first share.": first,
    }  # fmt: skip


# ---- a round of speculative sampling ------------------------------------------------------------------------------

Round = tuple[list[int], torch.Tensor, torch.Tensor, list[float]]
VerifyFault = Literal[
    "", "chance", "ratio", "greedy", "likeliest", "target", "absolute", "raw", "turned", "draft", "on", "no bonus",
    "bonus", "next", "first",
]  # fmt: skip
VERIFY_FAULTS: dict[str, VerifyFault] = {
    "A token is kept with the target's probability: what counts is the target's divided by the draft's.": "chance",
    "The quotient is upside down: the target's probability is divided by the draft's.": "ratio",
    "A token is kept only where the target likes it at least as well: else it is kept with the quotient's chance.": "greedy",
    "Only the target's likeliest token is kept: that is for greedy decoding; here the quotient decides.": "likeliest",
    "After a rejection the target's own distribution is taken: what the draft proposes too often must be taken off first.": "target",
    "After a rejection the draft's distribution is taken: it is what was just rejected.": "draft",
    "The difference's absolute value is taken: where the draft is the larger, nothing is left.": "absolute",
    "What is left of the target does not sum to 1: divide by the sum.": "raw",
    "The difference is upside down: the draft's probability is taken off the target's.": "turned",
    "The round goes on after a rejection: what comes behind was drafted for another text.": "on",
    "All drafted tokens are kept and none comes behind them: the target's last row gives one for free.": "no bonus",
    "The free token is taken from the last drafted token's row: the target has one row more.": "bonus",
    "After a rejection the next place's row is read: the token takes the rejected one's place.": "next",
    "The first draw decides about every token: each has its own.": "first",
}


def random_round(rng: Random, *, kept: bool) -> Round:
    """Draw drafted tokens, the draft's probabilities ``[drafted, vocab]``, the target's ``[drafted + 1, vocab]``, and draws from [0, 1).

    No draw is near the quotient that it is compared with. With `kept` all tokens are, else one is rejected.
    """
    count, vocab, draw = rng.randint(3, 5), rng.randint(4, 6), _draw(rng)
    q, p = (
        (3 * torch.rand(rows, vocab, generator=draw, dtype=torch.float64)).softmax(-1) for rows in (count, count + 1)
    )
    quotients = p[:-1] / q
    if (quotients.amin(-1) > 0.9).any():  # where the two agree, hardly anything is rejected
        return random_round(rng, kept=kept)
    rejected = count if kept else rng.randrange(count)
    drafted, draws = list[int](), list[float]()
    for place, row in enumerate(quotients.tolist()):
        token = rng.choice([token for token, quotient in enumerate(row) if quotient < 0.95 or place != rejected])
        low, high = (1.01 * row[token], 1.0) if place == rejected else (0.0, 0.99 * min(1.0, row[token]))
        drafted.append(token)
        draws.append(rng.uniform(low, high))
    return drafted, q, p, draws


def verified(
    drafted: Sequence[int], q: torch.Tensor, p: torch.Tensor, draws: Sequence[float], fault: VerifyFault = ""
) -> torch.Tensor:
    """Return the distribution of every token of the round, ``[kept + 1, vocab]``, right or with a fault."""
    rows = []
    for place, token in enumerate(drafted):
        ours, theirs = p[place], q[place]
        quotient = {
            "chance": ours[token],
            "ratio": theirs[token] / ours[token],
            "greedy": (ours[token] >= theirs[token]).double(),
            "likeliest": (ours.argmax() == token).double(),
        }.get(fault, ours[token] / theirs[token])
        if draws[0 if fault == "first" else place] < quotient:
            rows.append(functional.one_hot(torch.tensor(token), len(ours)).to(p.dtype))
            continue
        ours = p[place + 1] if fault == "next" else ours
        left = {"absolute": (ours - theirs).abs(), "turned": (theirs - ours).clamp(min=0)}.get(
            fault, (ours - theirs).clamp(min=0)
        )
        left = left if fault == "raw" else left / left.sum()
        rows.append({"target": ours, "draft": theirs}.get(fault, left))
        if fault != "on":
            return torch.stack(rows)
    if fault != "no bonus":
        rows.append(p[-2] if fault == "bonus" else p[-1])
    return torch.stack(rows)


def verify_mistakes(
    drafted: Sequence[int], q: torch.Tensor, p: torch.Tensor, draws: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Return what mistakes in a round lead to."""
    return {why: verified(drafted, q, p, draws, fault) for why, fault in VERIFY_FAULTS.items()}


def random_pair(rng: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a draft's and a target's probabilities of one place, float64 ``[vocab]``, in twelfths, and not the same."""
    while True:
        drafted = rng.choice([[1, 2, 3, 6], [2, 4, 6], [1, 1, 4, 6], [3, 4, 5], [2, 2, 3, 5]])
        rng.shuffle(drafted)
        cuts = sorted(rng.choices(range(13), k=len(drafted) - 1))
        target = [end - start for start, end in zip([0, *cuts], [*cuts, 12], strict=True)]
        if target != drafted:
            q, p = (torch.tensor(counts, dtype=torch.float64) / 12 for counts in (drafted, target))
            return q, p


def law(verify: Callable[..., Any], q: torch.Tensor, p: torch.Tensor) -> Any:
    """Return how a round's first token is distributed, ``[vocab]``, with a function under test that decides about one drafted token.

    Nothing is drawn: every token that may be drafted meets 60 draws that lie evenly, and between those at which a decision changes.
    """
    total = torch.zeros_like(p)
    rows = torch.stack((p, p))
    for token in range(len(q)):
        for number in range(60):
            answer = verify([token], q[None], rows, [(number + 0.5) / 60])
            if not (isinstance(answer, torch.Tensor) and answer.ndim == 2 and answer.shape[1] == len(p)):
                return answer
            total += q[token] / 60 * answer[0]
    return total


def law_mistakes(q: torch.Tensor, p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the distributions of a round's first token that mistakes lead to."""

    def faulty(fault: VerifyFault) -> Callable[..., torch.Tensor]:
        return lambda drafted, q, p, draws: verified(drafted, q, p, draws, fault)

    return {why: law(faulty(fault), q, p) for why, fault in VERIFY_FAULTS.items()}


# ---- what drafting is worth ---------------------------------------------------------------------------------------


def random_draft(rng: Random) -> tuple[list[float], float]:
    """Draw the chances that drafted tokens are kept, each if those before it are, and what a draft's step costs, in target's steps."""
    return [rng.uniform(0.4, 0.95) for _ in range(rng.randint(3, 8))], rng.uniform(0.02, 0.4)


def speedup(kept: Sequence[float], cost: float) -> float:
    """Return how many times as many tokens a second come with drafts as without."""
    return _tokens(kept) / (1 + len(kept) * cost)


def _tokens(kept: Sequence[float]) -> float:
    return 1 + sum(math.prod(kept[: place + 1]) for place in range(len(kept)))


def speedup_mistakes(kept: Sequence[float], cost: float) -> dict[str, float]:
    """Return what mistakes about the worth of drafting lead to."""
    count, tokens = len(kept), _tokens(kept)
    seconds, mean = 1 + count * cost, sum(kept) / count
    return {
        "The chances are added up: a token is kept only if all before it are, so multiply along the draft.": (1 + sum(kept))
        / seconds,
        "The target's own token is missing: every round ends with one, whatever is kept.": (tokens - 1) / seconds,
        "The mean of the chances goes into the geometric series: they differ from place to place, so multiply them as they come.": sum(
            mean**place for place in range(count + 1)
        ) / seconds,
        "All or nothing: a draft is kept up to its first rejection.": (1 + count * math.prod(kept)) / seconds,
        "Every drafted token is taken to be kept.": (1 + count) / seconds,
        "The target's step is missing in the time: a round takes one, besides the draft's.": tokens / (count * cost),
        "One step of the draft is counted: it takes one for each token that it drafts.": tokens / (1 + cost),
        "The draft's time is counted for tokens that are kept: it drafts the others too.": tokens
        / (1 + (tokens - 1) * cost),
        "The target is taken to check one token after the other: it checks all of them in one step.": tokens
        / (count + 1 + count * cost),
        "The draft is taken to cost nothing.": tokens,
        "This is the time for a token, in target's steps; the task wants tokens for the same time.": seconds / tokens,
    }  # fmt: skip


# ---- a draft out of the text --------------------------------------------------------------------------------------

Text = tuple[list[int], int, int]
LOOKUP_FAULTS = {
    "The first place where the tokens stood is taken: the latest says more about what comes now.": "earliest",
    "The text's end finds itself, with nothing behind it: look for an earlier place.": "itself",
    "A shorter end is tried first: the longest that was there before says most.": "short",
    "Only the longest end is tried: where it is new, a shorter one may not be.": "exact",
    "The end's own tokens are drafted again: the draft begins behind them.": "match",
    "The draft begins one token too late.": "late",
    "The draft is longer than `most`.": "long",
    "An earlier place may share tokens with the text's end.": "apart",
    "Where too few tokens follow, there is a shorter draft, not none.": "full",
}


def random_text(rng: Random, finds: Literal["whole", "part", "near", "nothing"]) -> Text:
    """Draw ids, the longest end to look for, and the longest draft.

    The whole end was there before, at two places or more; or a part of it; or just before, so that the text ends within the draft;
    or not even its last token.
    """
    while True:
        ngram, most = rng.randint(2, 4), rng.randint(3, 5)
        letters = rng.sample(range(100), rng.randint(3, 6))
        ids = rng.choices(letters, k=rng.randint(14, 40))
        if finds == "near":
            ids += ids[-rng.randint(1, 2) :] * rng.randint(2, 4)
        elif finds == "nothing":
            ids.append(200 + rng.randrange(100))
        found = [place for place in range(len(ids) - ngram) if ids[place : place + ngram] == ids[-ngram:]]
        right = looked_up(ids, ngram, most)
        fits = {
            "whole": len(found) > 1 and len(right) == most,
            "part": not found and len(right) == most,
            "near": bool(found) and 0 < len(right) < most,
            "nothing": not len(right),
        }
        if fits[finds]:
            return ids, ngram, most


def looked_up(ids: Sequence[int], ngram: int, most: int, fault: str = "") -> torch.Tensor:
    """Return the ids drafted, int64 ``[drafted]``, right or with a fault."""
    text = list(ids)
    sizes = [ngram] if fault == "exact" else range(1, ngram + 1) if fault == "short" else range(ngram, 0, -1)
    for size in sizes:
        end = text[-size:]
        last = len(text) - size - {"apart": size - 1, "full": most - 1}.get(fault, 0)
        starts = [start for start in range(last + (fault == "itself")) if text[start : start + size] == end]
        if starts:
            start = starts[0] if fault == "earliest" else starts[-1]
            begin = start + {"match": 0, "late": size + 1}.get(fault, size)
            draft = text[begin:] if fault == "long" else text[begin : begin + most]
            return torch.tensor(draft, dtype=torch.long)
    return torch.tensor([], dtype=torch.long)


def lookup_mistakes(ids: Sequence[int], ngram: int, most: int) -> dict[str, torch.Tensor]:
    """Return what mistakes about a draft out of the text lead to."""
    faulty = {why: looked_up(ids, ngram, most, fault) for why, fault in LOOKUP_FAULTS.items()}
    floats = torch.tensor([])  # what `torch.tensor` makes of an empty list
    if not len(looked_up(ids, ngram, most)):
        return faulty | {
            "An empty tensor of integers is needed, `torch.tensor([], dtype=torch.long)`: without dtype it holds floats.": floats
        }
    none = " Or: ".join(why for why, draft in faulty.items() if not len(draft))
    return faulty | {f"Nothing is drafted here. {none}": floats}
