"""Exercises of chapter 05: streams of scores, splits and blocks to test with, and the answers that common mistakes lead to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

from course_lib.attention.cost import STATISTIC_BYTES, flash_cost

Pair = tuple[float, float]
Part = tuple[float, float]
HIDDEN = -math.inf


class Stream:
    """Blocks of ``(score, value)`` pairs that arrive in one buffer: each block overwrites the one before, as on a chip."""

    def __init__(self, blocks: Sequence[Sequence[Pair]]) -> None:
        self.blocks = [list(block) for block in blocks]

    def __iter__(self) -> Iterator[list[Pair]]:
        buffer: list[Pair] = []
        for block in self.blocks:
            buffer[:] = block
            yield buffer

    def __repr__(self) -> str:
        return f"Stream({self.blocks})"


def random_blocks(rng: Random, *, largest: float = 3.0, first_hidden: bool = False) -> list[list[Pair]]:
    """Draw two to five blocks of two to four pairs; with `first_hidden`, all scores of the first are minus infinity."""
    blocks = [
        [(rng.uniform(-largest, largest), rng.uniform(1, 9)) for _ in range(rng.randint(2, 4))]
        for _ in range(rng.randint(2, 5))
    ]
    if first_hidden:
        blocks[0] = [(HIDDEN, value) for _, value in blocks[0]]
    return blocks


def random_parts(rng: Random, *, shift: float = 0.0, empty: int = 0) -> tuple[list[Part], float]:
    """Draw two to four splits of one row of scores near `shift`, and `empty` more; return their parts and the whole row's output."""
    splits = [[(score + shift, value) for score, value in block] for block in random_blocks(rng, largest=2.0)[:4]]
    splits += [[] for _ in range(empty)]
    rng.shuffle(splits)
    whole = [pair for split in splits for pair in split]
    return [(weighted_mean(split), log_sum_exp(split)) for split in splits], weighted_mean(whole)


def weighted_mean(pairs: Sequence[Pair]) -> float:
    """Return the values' mean with softmax of the scores as weights, all at once; 0 where all are hidden."""
    highest = max((score for score, _ in pairs), default=HIDDEN)
    if highest == HIDDEN:
        return 0.0
    weights = [math.exp(score - highest) for score, _ in pairs]
    return sum(weight * value for weight, (_, value) in zip(weights, pairs, strict=True)) / sum(weights)


def log_sum_exp(pairs: Sequence[Pair]) -> float:
    """Return the logarithm of the sum of the scores' exponentials."""
    highest = max((score for score, _ in pairs), default=HIDDEN)
    return highest if highest == HIDDEN else highest + math.log(sum(math.exp(s - highest) for s, _ in pairs))


def stream_mistakes(blocks: Sequence[Sequence[Pair]]) -> dict[str, float]:
    """Return what mistakes in streaming softmax over `blocks` lead to."""

    def streamed(fix_sum: bool = True, fix_output: bool = True, sign: int = 1, quotient: bool = True) -> float:
        highest, total, output = HIDDEN, 0.0, 0.0
        for block in blocks:
            new = max(highest, *(score for score, _ in block))
            if new == HIDDEN:
                continue
            correction = _exp(sign * (highest - new)) if highest > HIDDEN else 0.0
            weights = [math.exp(score - new) for score, _ in block]
            total = total * (correction if fix_sum else 1) + sum(weights)
            output = output * (correction if fix_output else 1)
            output += sum(weight * value for weight, (_, value) in zip(weights, block, strict=True))
            highest = new
        return output / total if quotient else output

    means = [weighted_mean(block) for block in blocks]
    return {
        "The sum is not corrected: when the maximum rises, what was summed before must shrink with it.": streamed(
            fix_sum=False
        ),
        "The output is not corrected: when the maximum rises, what was accumulated before must shrink with it.": streamed(
            fix_output=False
        ),
        "Neither sum nor output is corrected: both were computed with the old maximum.": streamed(False, False),
        "The correction is upside down: it is exp(old maximum - new maximum), which is at most 1.": streamed(sign=-1),
        "The quotient is missing: at the end, the output is divided by the sum.": streamed(quotient=False),
        "Each block is normalised by itself: a block whose scores are higher must count more.": sum(means) / len(means),
        "Blocks were kept, but all arrive in one buffer: keep three numbers and let the block go.": means[-1],
        "Not a number: an exponential overflows without the maximum, and -inf minus -inf has no value.": math.nan,
    }


def merge_mistakes(parts: Sequence[Part]) -> dict[str, float]:
    """Return what mistakes in merging ``(output, log-sum-exp)`` parts lead to."""
    seen = [(output, lse) for output, lse in parts if lse > HIDDEN]

    def weighted(weights: Sequence[float]) -> float:
        return sum(weight * output for weight, (output, _) in zip(weights, seen, strict=True)) / (
            sum(weights) or math.nan
        )

    return {
        "A plain mean: a split with more to say must count more.": sum(o for o, _ in parts) / len(parts),
        "A plain mean of the splits that saw something: a split with more to say must count more.": sum(
            o for o, _ in seen
        )
        / (len(seen) or math.nan),
        "The sum of weighted outputs is not divided by the sum of the weights.": sum(o * _exp(lse) for o, lse in seen),
        "A log-sum-exp is a logarithm: its exponential is the weight.": weighted([lse for _, lse in seen]),
        "The logarithm is natural, so the weight is exp(lse), not 2**lse.": weighted([_exp(lse * math.log(2)) for _, lse in seen]),
        "The sign is wrong: a larger log-sum-exp means a larger weight.": weighted([_exp(-lse) for _, lse in seen]),
        "Not a number: exp(lse) overflows without the maximum, and -inf minus -inf has no value.": math.nan,
        "Infinite: exp(lse) overflows unless the largest log-sum-exp is subtracted first.": math.inf,
    }  # fmt: skip


def needed_blocks(query_len: int, kv_len: int, block_q: int, block_k: int, window: int | None) -> int:
    """Count pairs of blocks in which some query sees some key, by looking at every pair of query and key."""
    first = kv_len - query_len
    return len(
        {
            (row // block_q, key // block_k)
            for row in range(query_len)
            for key in range(kv_len)
            if key <= first + row and (window is None or key > first + row - window)
        }
    )


def block_mistakes(query_len: int, kv_len: int, block_q: int, block_k: int, window: int | None) -> dict[str, float]:
    """Return what mistakes in skipping blocks of keys lead to."""

    def visited(
        aligned: bool = True,
        through: int = 1,
        far: bool = True,
        from_first: bool = True,
        last: bool = True,
        up: int = 0,
    ) -> int:
        count = 0
        for top in range(0, query_len, block_q):
            bottom = min(top + block_q, query_len) - 1
            shift = kv_len - query_len if aligned else 0
            stop = min(kv_len, (bottom if last else top) + shift + through)
            start = 0
            if window is not None and far:
                start = max(0, (top if from_first else bottom) + shift - window + 1 - up)
            count += max(0, -(-stop // block_k) - start // block_k) if stop > start else 0
        return count

    return {
        "Queries stand at the end of the keys: row r is at position kv_len - query_len + r, not at r.": visited(
            aligned=False
        ),
        "A query sees its own position: the block that begins there is needed.": visited(through=0),
        "One block too many: keys after the last query are hidden, even the very next.": visited(through=2),
        "The window is ignored: blocks that every query has left behind are skipped.": visited(far=False),
        "The window begins at the first query of the block, which looks back furthest, not at the last.": visited(
            from_first=False
        ),
        "The last query of the block looks furthest ahead, not the first.": visited(last=False),
        "The window is one key too wide: it holds the query's own position and W - 1 before it.": visited(up=1),
        "Nothing is skipped: blocks that no query sees need no visit.": -(-query_len // block_q)
        * -(-kv_len // block_k),
    }


def flash_bytes(query_len: int, kv_len: int, head_dim: int, block_q: int, itemsize: int) -> int:
    """Return the bytes that flash attention moves without a cache, by the library's count."""
    return flash_cost(query_len, kv_len, head_dim, block_q=block_q, itemsize=itemsize).bytes


def traffic_mistakes(query_len: int, kv_len: int, head_dim: int, block_q: int, itemsize: int) -> dict[str, float]:
    """Return what mistakes in counting flash attention's traffic lead to."""
    right = flash_bytes(query_len, kv_len, head_dim, block_q, itemsize)
    one_pass = 2 * kv_len * head_dim * itemsize
    passes, queries = -(-query_len // block_q), query_len * head_dim * itemsize
    lse = STATISTIC_BYTES * query_len
    return {
        "Keys and values are counted once: every block of queries asks for all of them again.": right
        - (passes - 1) * one_pass,
        "Keys are counted and values are not: both pass through the chip.": right - passes * one_pass // 2,
        "The last, shorter block of queries asks for keys and values too: round up.": right
        - passes * one_pass
        + query_len // block_q * one_pass,
        "A part of a block is counted as a part of a pass: a short block asks for all keys too.": right
        - passes * one_pass
        + query_len / block_q * one_pass,
        "The output is missing: it is written once.": right - queries,
        "The queries are missing: they are read once.": right - queries,
        "The log-sum-exp is missing: one float32 for each query.": right - lse,
        "The log-sum-exp is float32, four bytes for each query, whatever itemsize is.": right
        - lse
        + itemsize * query_len,
        "These are numbers, not bytes.": (right - lse) // itemsize + query_len,
        "The scores travel: that is what flash attention avoids.": right + 2 * query_len * kv_len * itemsize,
        "Every query asks for all keys: a block of queries shares what it fetches.": right
        + (query_len - passes) * one_pass,
    }


def random_row(rng: Random, *, shift: float = 0.0) -> tuple[float, float, list[float], list[float], list[float]]:
    """Draw a row of attention and return what is known of one of its keys: score, log-sum-exp, value, output, gradient."""
    size, keys = rng.randint(2, 4), rng.randint(3, 6)
    scores = [rng.uniform(-2, 2) + shift for _ in range(keys)]
    values = [[rng.uniform(1, 3) for _ in range(size)] for _ in range(keys)]
    output = [weighted_mean(list(zip(scores, column, strict=True))) for column in zip(*values, strict=True)]
    gradient = [rng.uniform(1, 3) for _ in range(size)]
    lse = log_sum_exp([(score, 0.0) for score in scores])
    return scores[0], lse, values[0], output, gradient


def score_gradient(score: float, lse: float, value: list[float], output: list[float], gradient: list[float]) -> float:
    """Return the gradient of one score: its weight times what its value would change."""
    change = (g * (v - o) for g, v, o in zip(gradient, value, output, strict=True))
    return math.exp(score - lse) * math.fsum(change)


def gradient_mistakes(
    score: float, lse: float, value: list[float], output: list[float], gradient: list[float]
) -> dict[str, float]:
    """Return what mistakes about the gradient of a score lead to."""

    def dot(one: list[float], other: list[float]) -> float:
        return math.fsum(a * b for a, b in zip(one, other, strict=True))

    weight, ahead, delta = math.exp(score - lse), dot(gradient, value), dot(gradient, output)
    return {
        "Delta is missing: when one weight grows, the others shrink.": weight * ahead,
        "Delta is added: it is subtracted, because the other weights shrink.": weight * (ahead + delta),
        "The signs are swapped: a key whose value serves better than the average has a positive gradient.": weight
        * (delta - ahead),
        "Delta comes from the output, not from this key's value: they cancel.": 0.0,
        "This is the gradient of the weight: times the weight it is that of the score.": ahead - delta,
        "Delta must be multiplied by the weight as well.": weight * ahead - delta,
        "The weight is exp(score - lse): exp(score) alone is not divided by the row's sum.": _exp(score)
        * (ahead - delta),
        "The log-sum-exp is a logarithm: subtract it in the exponent, do not divide by it.": _exp(score)
        / lse
        * (ahead - delta),
        "Delta is the gradient times the output, not times itself or a sum of the output alone.": weight
        * (ahead - math.fsum(output)),
        "The weight is applied twice.": weight * weight * (ahead - delta),
    }


def _exp(exponent: float) -> float:
    """Return the exponential; infinity where Python raises an error."""
    return math.exp(exponent) if exponent < 709 else math.inf
