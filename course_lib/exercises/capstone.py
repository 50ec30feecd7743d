"""The capstone: situations to plan for, what plans lose and serve, and what common mistakes lead to.

``python -m course_lib.exercises.capstone`` measures what rounding loses and writes ``capstone.json``, from which plans are judged.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from course_lib.exercises import checks
from course_lib.memory import published_config
from course_lib.memory.architecture import Weight
from course_lib.memory.chats import Chat, Statistics
from course_lib.memory.counting import Model
from course_lib.memory.plans import Plan
from course_lib.memory.rates import Calibration
from course_lib.memory.serving import Bound, most_users
from course_lib.memory.step_cost import StepCost, step_cost

PLAN = dict[str, Any]
MEASURED = Path(__file__).with_suffix(".json")
CONTEXT = 4096  # most tokens of a chat
NAME = "llama-2-13b"
BLOCK = 16
CHATS = 60  # in a trace
#: Bits of a weight and of a number in the cache, a scale for 64 weights and scale and offset for 64 numbers included.
WEIGHT_BITS = {"float16": 16.0, "int8": 8.0, "nf4": 4.5}
CACHE_BITS = {"float16": 16.0, "int8": 8.5, "int4": 4.5}


# ---- the model and what plans lose --------------------------------------------------------------------------------


@cache
def described() -> dict[str, int]:
    """Return the sizes of the model to serve: numbers of weights of its matrices, of its output head, and its layout."""
    config = published_config(NAME)
    counted = Model(NAME).weights
    return {
        "linear": sum(w.size * n for w, n in counted.items() if w.kind == "linear"),
        "head": _of_kind(counted, "head"),
        "embedding": _of_kind(counted, "embedding"),
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
    }


def _of_kind(weights: Mapping[Weight, int], kind: str) -> int:
    return sum(w.size * n for w, n in weights.items() if w.kind == kind)


def losses() -> dict[str, dict[Any, float]]:
    """Return what each choice of weights, cache and heads costs: percent more bits per byte of Python, 0 where the mean is not above it.

    Rounding was measured on SmolLM2. Heads are those of ``course/rope`` merged to half and to a quarter, beside the model with all of
    them, each trained for five percent of the steps after; they stand for the same shares of the heads of the model to serve.
    """
    from course_lib.models.checkpoints import training_log

    found = json.loads(MEASURED.read_text(encoding="utf-8"))["bits"]
    runs = [run for seed in range(3) for run in training_log("uptraining", seed)["runs"]]
    merged = {heads: [bits for run in runs if _counts(run, heads) for bits in run["after"]] for heads in (4, 2, 1)}

    def percent(bits: Sequence[float], exact: Sequence[float]) -> float:
        return max(0.0, 100 * (sum(bits) / sum(exact) - 1))

    return {
        "weights": {name: percent(found[name], found["float16"]) for name in WEIGHT_BITS},
        "cache": {
            name: percent(found[name if name == "float16" else f"{name} cache"], found["float16"])
            for name in CACHE_BITS
        },
        "kv_heads": {described()["heads"] * heads // 4: percent(bits, merged[4]) for heads, bits in merged.items()},
    }


def _counts(run: Mapping[str, Any], heads: int) -> bool:
    return run["kv_heads"] == heads and run["recipe"]["steps"] == 50 and run["init"] in ("mean", None)


def measure() -> dict[str, Any]:
    """Measure bits of the last 192 of 384 tokens of 12 held-out files, under each rounding of SmolLM2."""
    import copy
    import datetime

    from torch.nn import functional

    from course_lib import machine
    from course_lib.kv_cache import DynamicCache, QuantizedCache
    from course_lib.models import load
    from course_lib.quantization import quantize_model
    from course_lib.training import evaluation_texts, load_corpus

    model, tokenizer = load("smollm2-135m", dtype="float32", device="cpu", as_decoder=True)
    files = [bytes(text.tolist()).decode(errors="replace") for text in evaluation_texts(load_corpus())[:12]]
    texts = [
        tokens[:, :385] for file in files if (tokens := tokenizer(file, return_tensors="pt").input_ids).shape[1] > 384
    ]

    @torch.no_grad()
    def bits(model: Any, **options: Any) -> list[float]:
        found = []
        for text in texts:
            cache = QuantizedCache(model.config, **options) if options else DynamicCache(model.config)
            logits = torch.cat([model(chunk, cache=cache).logits for chunk in text[:, :-1].split(64, 1)], 1)
            found.append(
                functional.cross_entropy(logits[0, -192:], text[0, -192:], reduction="sum").item() / math.log(2)
            )
        return [round(each, 2) for each in found]

    rounded = {name: bits(quantize_model(copy.deepcopy(model), name)) for name in WEIGHT_BITS if name != "float16"}
    cached = {f"{name} cache": bits(model, scheme=name) for name in CACHE_BITS if name != "float16"}
    return {
        "model": "smollm2-135m",
        "command": "python -m course_lib.exercises.capstone",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": machine.versions(),
        "bits": {"float16": bits(model)} | rounded | cached,
    }


# ---- does it fit --------------------------------------------------------------------------------------------------


def _linear(model: Mapping[str, int], kv_heads: int) -> int:
    return model["linear"] - 2 * model["layers"] * model["hidden"] * model["head_dim"] * (model["heads"] - kv_heads)


def _weight_bytes(model: Mapping[str, int], plan: PLAN) -> float:
    bits = float(plan["weight_bits"])
    return _linear(model, plan["kv_heads"]) * bits / 8 + 2 * (model["head"] + model["embedding"])


def _token_bytes(model: Mapping[str, int], plan: PLAN) -> float:
    return float(2 * model["layers"] * model["head_dim"] * plan["kv_heads"] * plan["cache_bits"] / 8)


def random_fit(rng: Random, fits: bool = True) -> tuple[dict[str, int], PLAN, int, int]:
    """Draw a model, a plan, a card's bytes and tokens of a chat; of a card that is too small, at least for one chat."""
    layers, kv_heads, head_dim, group = (
        rng.randint(20, 60),
        rng.choice([2, 4, 8]),
        rng.choice([64, 80, 128]),
        rng.choice([2, 4, 5]),
    )
    # Large, so that the two matrices which are not rounded weigh more than a chat.
    hidden, vocab = kv_heads * group * head_dim, rng.choice([128_000, 152_000, 256_000])
    model = {
        "linear": layers * hidden * hidden * 12,
        "head": vocab * hidden,
        "embedding": vocab * hidden,
        "layers": layers,
        "hidden": hidden,
        "heads": kv_heads * group,
        "head_dim": head_dim,
    }  # fmt: skip
    block = rng.choice([16, 32, 64])
    plan = {
        # With 8, rounding embedding and head would weigh as much as leaving one of them out.
        "weight_bits": rng.choice([3.5, 4.5, 5.5]),
        "kv_heads": kv_heads,
        "cache_bits": rng.choice([8.5, 4.5]),
        "block": block,
    }
    tokens = block * rng.randint(10, 60) + rng.randint(1, block // 2)
    chat = -(-tokens // block) * block * _token_bytes(model, plan)
    chats = rng.randint(40, 200) + rng.uniform(0.2, 0.8)
    card = int(_weight_bytes(model, plan) + (chats * chat if fits else -rng.uniform(1, 3) * chat))
    return model, plan, card, tokens


def chats_that_fit(model: dict[str, int], plan: PLAN, card_bytes: int, tokens: int) -> int:
    """Return how many chats of so many tokens a card holds beside the weights."""
    return _fit(model, plan, card_bytes, tokens)


def _fit(
    model: Mapping[str, int],
    plan: PLAN,
    card_bytes: float,
    tokens: float,
    *,
    weights: float | None = None,
    per_token: float | None = None,
    whole: bool = True,
) -> int:
    weights = _weight_bytes(model, plan) if weights is None else weights
    slots = -(-tokens // plan["block"]) * plan["block"] if whole else tokens
    return max(0, math.floor((card_bytes - weights) / (slots * (per_token or _token_bytes(model, plan)))))


def fit_mistakes(model: dict[str, int], plan: PLAN, card_bytes: int, tokens: int) -> dict[str, float]:
    """Return what mistakes about what fits lead to."""
    inputs, right = (model, plan, card_bytes, tokens), _weight_bytes(model, plan)
    every = (_linear(model, plan["kv_heads"]) + model["head"] + model["embedding"]) * plan["weight_bits"] / 8
    all_heads = model["linear"] * plan["weight_bits"] / 8 + 2 * (model["head"] + model["embedding"])
    slots = -(-tokens // plan["block"]) * plan["block"]
    return {
        "Blocks are whole: a chat holds all of its last block.": _fit(*inputs, whole=False),
        "The last block is left out: a chat that fills a part of it holds it.": _fit(
            model, plan, card_bytes, max(1, tokens // plan["block"] * plan["block"])
        ),
        "Embedding and output head are rounded too: they stay in two bytes.": _fit(*inputs, weights=every),
        "Embedding table or output head is left out: both lie on the card, in two bytes.": _fit(
            *inputs, weights=right - 2 * model["embedding"]
        ),
        "Neither embedding table nor output head is counted: both lie on the card, in two bytes.": _fit(
            *inputs, weights=right - 2 * (model["head"] + model["embedding"])
        ),
        "The weights are forgotten: they lie on the card beside the cache.": _fit(*inputs, weights=0.0),
        "The matrices are counted as if every query head had keys and values of its own: fewer heads make two of them smaller.": _fit(
            *inputs, weights=all_heads
        ),
        "Keys and values are both kept; one of the two is counted.": _fit(*inputs, per_token=_token_bytes(model, plan) / 2),
        "The cache holds kv_heads heads, not one for each query head.": _fit(
            *inputs, per_token=_token_bytes(model, plan) * model["heads"] / plan["kv_heads"]
        ),
        "These are bits: a byte has eight.": _fit(
            *inputs, weights=8 * (right - 2 * (model["head"] + model["embedding"])) + 2 * (model["head"] + model["embedding"])
        ),
        "The cache is taken in two bytes a number: the plan rounds it.": _fit(
            *inputs, per_token=_token_bytes(model, plan) * 16 / plan["cache_bits"]
        ),
        "A negative number of chats: where the weights do not fit, there are 0.": math.floor(
            (card_bytes - right) / (slots * _token_bytes(model, plan))
        ),
        "One chat too many: one that fits in part does not fit, so round down.": _fit(*inputs) + 1,
    }  # fmt: skip


# ---- the time of a step -------------------------------------------------------------------------------------------


def random_step(rng: Random, bound_by: str) -> tuple[dict[str, int], PLAN, list[int], dict[str, float]]:
    """Draw a model, a plan, contexts of the requests of a batch, and rates under which reading or computing takes longer."""
    model, plan, _, _ = random_fit(rng)
    contexts = [rng.randint(100, 4000) for _ in range(rng.randint(4, 30))]
    reading, computing = _traffic(model, plan, contexts), _work(model, plan, contexts)
    bandwidth = rng.uniform(3e11, 2e12)
    longer = rng.uniform(1.5, 4.0)
    flops = computing / (reading / bandwidth) * (longer if bound_by == "reading" else 1 / longer)
    return (
        model,
        plan,
        contexts,
        {"bandwidth": bandwidth, "flops": flops, "overhead": rng.uniform(0.1, 0.6) * reading / bandwidth},
    )


def _traffic(model: Mapping[str, int], plan: PLAN, contexts: Sequence[float]) -> float:
    matrices = _linear(model, plan["kv_heads"]) * float(plan["weight_bits"]) / 8 + 2 * model["head"]
    return matrices + sum(contexts) * _token_bytes(model, plan)


def _work(model: Mapping[str, int], plan: PLAN, contexts: Sequence[float]) -> float:
    products = len(contexts) * (_linear(model, plan["kv_heads"]) + model["head"])
    return 2 * products + 4 * model["layers"] * model["heads"] * model["head_dim"] * sum(contexts)


def step_seconds(model: dict[str, int], plan: PLAN, contexts: list[int], rates: dict[str, float]) -> float:
    """Return the seconds of a step in which every request writes a token."""
    return _roofline(_traffic(model, plan, contexts), _work(model, plan, contexts), rates)


def _roofline(reading: float, computing: float, rates: Mapping[str, float]) -> float:
    return rates["overhead"] + max(reading / rates["bandwidth"], computing / rates["flops"])


def step_mistakes(model: dict[str, int], plan: PLAN, contexts: list[int], rates: dict[str, float]) -> dict[str, float]:
    """Return what mistakes about the time of a step lead to."""
    reading, computing = _traffic(model, plan, contexts), _work(model, plan, contexts)
    cache = sum(contexts) * _token_bytes(model, plan)
    attention = 4 * model["layers"] * model["heads"] * model["head_dim"] * sum(contexts)
    once = computing - attention
    spared = model["linear"] - _linear(model, plan["kv_heads"])
    whole = [-(-context // plan["block"]) * plan["block"] for context in contexts]
    return {
        "Reading and arithmetic are added: they overlap, and the longer of the two counts.": rates["overhead"]
        + reading / rates["bandwidth"]
        + computing / rates["flops"],
        "The overhead is forgotten: every step has it.": _roofline(reading, computing, {**rates, "overhead": 0.0}),
        "The weights are read once for each request: the batch shares one reading.": _roofline(
            len(contexts) * (reading - cache) + cache, computing, rates
        ),
        "The embedding table is read whole: a step looks up one row for each request.": _roofline(
            reading + 2 * model["embedding"], computing, rates
        ),
        "A multiplication and the addition after it are two operations; one is counted.": _roofline(
            reading, computing / 2, rates
        ),
        "Attention's work is left out: every query head multiplies with every key, and every probability with every value.": _roofline(
            reading, once, rates
        ),
        "Attention works for every query head: grouped heads save reading, not arithmetic.": _roofline(
            reading, once + attention * plan["kv_heads"] / model["heads"], rates
        ),
        "Attention has two products, scores and the sum of values; one of them is counted.": _roofline(
            reading, once + attention / 2, rates
        ),
        "The matrices are counted as if every query head had keys and values of its own: fewer heads make two of them smaller.": _roofline(
            reading + spared * plan["weight_bits"] / 8, computing + 2 * len(contexts) * spared, rates
        ),
        "Contexts are rounded up to whole blocks: these take room, but a step reads the tokens that are there.": _roofline(
            _traffic(model, plan, whole), _work(model, plan, whole), rates
        ),
        "The weights' operations are counted once: one reading serves the batch, but each request's token meets every weight.": _roofline(
            reading, once / len(contexts) + attention, rates
        ),
        "The cache is not read: every step reads all of it.": _roofline(reading - cache, computing, rates),
        "The arithmetic of one request is counted: each has its own.": _roofline(reading, computing / len(contexts), rates),
        "Arithmetic is left out: where it takes longer than reading, it decides.": _roofline(reading, 0.0, rates),
        "Reading is left out: where it takes longer than the arithmetic, it decides.": _roofline(0.0, computing, rates),
        "The shorter of the two times is taken: the longer one counts.": rates["overhead"]
        + min(reading / rates["bandwidth"], computing / rates["flops"]),
        "The output head is left out: every token's logits need all of it.": _roofline(
            reading - 2 * model["head"], computing - 2 * len(contexts) * model["head"], rates
        ),
    }  # fmt: skip


# ---- calibration --------------------------------------------------------------------------------------------------


def random_timings(rng: Random, negative: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw what steps did, float64 ``[steps, 3]``, and their seconds, ``[steps]``; freely fitted, a term is `negative` or none is."""
    while True:
        count = rng.randint(8, 12)
        rows = [[rng.uniform(0.5, 5.0), rng.uniform(0.1, 4.0), 1.0] for _ in range(count)]
        true = [rng.uniform(0.05, 0.2), rng.uniform(0.02, 0.2), 0.0 if negative else rng.uniform(0.1, 0.4)]
        seconds = [sum(t * x for t, x in zip(true, row, strict=True)) * (1 + rng.uniform(-0.25, 0.25)) for row in rows]
        done, took = torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
        free, kept = _solve(done, took, (0, 1, 2)), calibrated(done, took)
        clipped = free.clamp(min=0)
        far = (clipped - kept).abs().max() > 0.01 if negative else free.min() > 0.01
        if far and (kept - _solve(done, took, (0, 1, 2), relative=False).clamp(min=0)).abs().max() > 0.003:
            return done, took


def _solve(done: torch.Tensor, took: torch.Tensor, terms: Sequence[int], relative: bool = True) -> torch.Tensor:
    weight = 1 / took if relative else torch.ones_like(took)
    found = torch.zeros(3, dtype=torch.float64)
    found[list(terms)] = torch.linalg.lstsq(done[:, list(terms)] * weight[:, None], took * weight).solution
    return found


def calibrated(done: torch.Tensor, took: torch.Tensor, relative: bool = True) -> torch.Tensor:
    """Return the terms, float64 ``[3]``, none negative, with the least sum of squared relative errors."""
    weight = 1 / took if relative else torch.ones_like(took)
    kept = [
        found
        for count in (1, 2, 3)
        for terms in itertools.combinations(range(3), count)
        if (found := _solve(done, took, terms, relative)).min() >= 0
    ]
    return min(kept, key=lambda found: float((((done @ found - took) * weight) ** 2).sum()))


def timing_mistakes(done: torch.Tensor, took: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what mistakes in a calibration lead to."""
    free = _solve(done, took, (0, 1, 2))
    return {
        "A term is negative: no time is less than none, and such a fit predicts nonsense elsewhere.": free,
        "A negative term was set to 0 after the fit: without it, the others fit differently, so fit them again.": free.clamp(min=0),
        "The errors are absolute: short steps then count for nothing. Divide each row by its seconds.": calibrated(done, took, False),
        "The errors are absolute, and a term is negative.": _solve(done, took, (0, 1, 2), relative=False),
        "The errors are absolute, and a negative term was set to 0 after the fit.": _solve(
            done, took, (0, 1, 2), relative=False
        ).clamp(min=0),
        "The overhead is left out.": _solve(done, took, (0, 1)),
        "The arithmetic is left out.": _solve(done, took, (0, 2)),
        "The bytes are left out.": _solve(done, took, (1, 2)),
        "These are rates: the terms are seconds for each unit.": 1 / calibrated(done, took),
    }  # fmt: skip


# ---- users --------------------------------------------------------------------------------------------------------


def random_users(rng: Random) -> tuple[int, float, float, float, float]:
    """Draw a batch, a step's and a prompt's seconds, tokens of an answer and seconds of thought."""
    return rng.randint(8, 64), rng.uniform(0.02, 0.08), rng.uniform(0.05, 0.5), rng.uniform(80, 300), rng.uniform(5, 60)


def users_served(batch: int, step: float, prefill: float, output: float, think: float) -> float:
    """Return how many users keep a batch busy."""
    answer = prefill + output * (step + batch * prefill / output)
    return batch * (answer + think) / answer


def user_mistakes(batch: int, step: float, prefill: float, output: float, think: float) -> dict[str, float]:
    """Return what mistakes about the number of users lead to."""
    token = step + batch * prefill / output
    answer = prefill + output * token

    def users(seconds: float) -> float:
        return batch * (seconds + think) / seconds

    return {
        "These are the requests that run: while a user thinks, another one is served.": float(batch),
        "Prompts stop nobody here: while one is read, all others wait, and in the time of an answer as many are read as run.": users(
            prefill + output * step
        ),
        "The user's own prompt is forgotten: it is read before the first token.": users(output * token),
        "Users who think and users who are served are mixed up: it is the whole round over the part in which a user runs.": batch
        * (answer + think)
        / think,
        "Only those who think are counted.": batch * think / answer,
        "Only one other prompt is read during an answer: as many are as requests run.": users(
            prefill + output * (step + prefill / output)
        ),
        "Every step waits for a prompt: in the time of an answer each request brings one.": users(
            prefill + output * (step + batch * prefill)
        ),
        "A step's time is multiplied by the batch: one step writes a token for all.": users(
            prefill + output * (batch * step + batch * prefill / output)
        ),
    }  # fmt: skip


# ---- the plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """Users, a card and promises; `known` is what a plan is chosen from, the chats to come are drawn from `statistics` and `seed`."""

    card: dict[str, float]
    known: dict[str, float]
    bound: dict[str, float]
    budget: float
    statistics: Statistics
    seed: int

    @property
    def arguments(self) -> tuple[dict[str, float], dict[str, float], dict[str, float], float]:
        """What the function under test is called with, after the model and the menu."""
        return self.card, self.known, self.bound, self.budget


@cache
def menu() -> dict[str, Any]:
    """Return the choices: bits and losses of weights and caches, and losses of head layouts."""
    costs = losses()
    return {
        "weights": {name: (bits, costs["weights"][name]) for name, bits in WEIGHT_BITS.items()},
        "cache": {name: (bits, costs["cache"][name]) for name, bits in CACHE_BITS.items()},
        "kv_heads": costs["kv_heads"],
    }


def lost(plan: PLAN, offered: Mapping[str, Any]) -> float:
    """Return what a plan's choices cost together."""
    return float(
        offered["weights"][plan["weights"]][1]
        + offered["cache"][plan["cache"]][1]
        + offered["kv_heads"][plan["kv_heads"]]
    )


def _priced(plan: PLAN) -> PLAN:
    return {
        **plan,
        "weight_bits": WEIGHT_BITS[plan["weights"]],
        "cache_bits": CACHE_BITS[plan["cache"]],
        "block": BLOCK,
    }


def _room(plan: PLAN, situation: Situation, tokens: float) -> int:
    return _fit(described(), _priced(plan), situation.card["memory"], tokens)


def _prefill(plan: PLAN, prompt: float, situation: Situation) -> float:
    return 2 * _linear(described(), plan["kv_heads"]) * prompt / situation.card["flops"]


def _token(plan: PLAN, batch: int, prompt: float, situation: Situation) -> float:
    """Return the mean seconds of a token where so many requests run and each reads a prompt of so many tokens before its answer."""
    context, output = situation.known["context"], situation.known["output"]
    # As many requests as run, each with the mean context, read and compute what one with the sum of them would, but for the matrices.
    model, priced = described(), _priced(plan)
    reading = _traffic(model, priced, [batch * context])
    computing = _work(model, priced, [batch * context]) + 2 * (batch - 1) * (
        _linear(model, plan["kv_heads"]) + model["head"]
    )
    return _roofline(reading, computing, situation.card) + batch * _prefill(plan, prompt, situation) / output


def promised(plan: PLAN, situation: Situation, most: int = 10**6) -> tuple[int, float]:
    """Return the largest batch up to `most` within memory and bound, and the users that it serves by arithmetic; (0, 0.0) if none.

    Either the cache holds the chats of all users, and a turn reads its question alone; or those that run, and it reads the whole chat.
    """
    known, bound = situation.known, situation.bound["per_token"]
    if not _room(plan, situation, CONTEXT):
        return 0, 0.0
    room, found = _room(plan, situation, known["context"]), (0, 0.0)
    for prompt, keeps in ((known["prompt"], True), (known["context"], False)):
        seconds = partial(_token, plan, prompt=prompt, situation=situation)
        batch = bisect_right(range(1, min(room, most) + 1), bound, key=seconds)
        if not batch:
            continue
        answer = _prefill(plan, prompt, situation) + known["output"] * _token(plan, batch, prompt, situation)
        users = batch * (answer + known["think"]) / answer
        if keeps and users > room:
            batch, users = max(1, math.floor(batch * room / users)), float(room)
        found = max(found, (batch, users), key=lambda pair: pair[1])
    return found


def plans(offered: Mapping[str, Any], situation: Situation) -> list[tuple[float, PLAN]]:
    """Return all plans within the budget with the users that arithmetic promises, most first."""
    found = []
    for weights, cached, kv_heads in itertools.product(offered["weights"], offered["cache"], offered["kv_heads"]):
        plan = {"weights": weights, "cache": cached, "kv_heads": kv_heads}
        if lost(plan, offered) <= situation.budget:
            batch, users = promised(plan, situation)
            found.append((users, {**plan, "max_batch": batch}))
    return sorted(found, key=lambda pair: -pair[0])


def random_situation(rng: Random, kind: str = "any") -> Situation:
    """Draw a situation in which the best plan serves one or two dozen users.

    `kind` says what else holds: that latency limits the batch long before memory does ("latency"), or that much is lost if the budget
    is spent on weights first ("cache") or on heads first ("weights").
    """
    while True:
        situation = _draw(rng, kind)
        found = plans(menu(), situation)
        most = 24 if kind in ("any", "latency") else 90  # few, where crowds are simulated
        if found and 8 <= found[0][0] <= most and found[0][1]["max_batch"] >= 5 and _is(kind, found, situation):
            return situation


def _is(kind: str, found: list[tuple[float, PLAN]], situation: Situation) -> bool:
    users, plan = found[0]
    if kind == "latency":
        room = _room(plan, situation, situation.known["context"])
        return _token(plan, room, situation.known["prompt"], situation) > 1.8 * situation.bound["per_token"]
    return kind == "any" or first_on(found, "weights" if kind == "cache" else "kv_heads")[0] < 0.6 * users


def first_on(found: list[tuple[float, PLAN]], what: str) -> tuple[float, PLAN]:
    """Return the plan that spends the budget on weights or on heads first."""

    def order(pair: tuple[float, PLAN]) -> tuple[float, ...]:
        sizes = WEIGHT_BITS[pair[1]["weights"]], pair[1]["kv_heads"]
        return *(sizes if what == "weights" else sizes[::-1]), CACHE_BITS[pair[1]["cache"]]

    return min(found, key=order)


def _draw(rng: Random, kind: str) -> Situation:
    card = {
        "memory": rng.choice([80, 96] if kind == "cache" else [16, 24, 32, 40, 48, 80]) * 10**9,
        "bandwidth": rng.uniform(3e11, 1.6e12),
        "flops": rng.uniform(6e13, 3e14),
        "overhead": rng.uniform(0.001, 0.004),
    }
    statistics = Statistics(rng.uniform(2, 4), rng.uniform(80, 500), rng.uniform(60, 200), rng.uniform(2, 8), CONTEXT)
    seed, offered = rng.getrandbits(30), menu()
    bound = {"first_token": rng.uniform(2.0, 4.0), "per_token": rng.uniform(0.04, 0.12)}
    sums = sorted(
        a[1] + b[1] + c
        for a, b, c in itertools.product(
            offered["weights"].values(), offered["cache"].values(), offered["kv_heads"].values()
        )
    )
    budget = rng.choice(sums[1:-1]) + 1e-6
    return Situation(card, summary(statistics.draw(60, seed + 1)), bound, budget, statistics, seed)


def summary(chats: Sequence[Chat]) -> dict[str, float]:
    """Return means over the answers of chats: tokens of question and answer, tokens in the context, seconds of thought."""
    turns = [
        (sum(past.prompt + past.output for past in chat.turns[:number]), turn, number)
        for chat in chats
        for number, turn in enumerate(chat.turns)
    ]
    thoughts = [turn.think for _, turn, number in turns if number]
    written = sum(turn.output for _, turn, _ in turns)
    return {
        "prompt": sum(turn.prompt for _, turn, _ in turns) / len(turns),
        "output": written / len(turns),
        "context": sum((past + turn.prompt + turn.output / 2) * turn.output for past, turn, _ in turns) / written,
        "think": sum(thoughts) / max(1, len(thoughts)),
    }


def served(plan: PLAN, situation: Situation, chats: Sequence[Chat] | None = None) -> int:
    """Return how many of the chats to come a plan serves within the bound, by simulation."""
    card, bound = situation.card, situation.bound
    return most_users(
        NAME,
        Plan(
            plan["max_batch"],
            num_key_value_heads=plan["kv_heads"],
            dtype="float16",
            quantization=None if plan["weights"] == "float16" else plan["weights"],
            kv_cache_dtype=plan["cache"],
            block_size=BLOCK,
            token_budget=512,
        ),
        situation.statistics.draw(CHATS, situation.seed) if chats is None else chats,
        Bound(bound["first_token"], bound["per_token"], 0.9),
        memory=int(card["memory"]),
        rates=Calibration(card["bandwidth"], card["flops"], card["overhead"]),
        max_tokens=CONTEXT,
    )


def plan_mistakes(plan: PLAN, situation: Situation) -> dict[str, bool]:
    """Return what can be wrong with a plan, the most telling first, and whether it is."""
    found, known, bits = (
        plans(menu(), situation),
        situation.known,
        (WEIGHT_BITS[plan["weights"]], plan["kv_heads"] * CACHE_BITS[plan["cache"]]),
    )
    (users, best), batch = found[0], plan["max_batch"]
    better = (WEIGHT_BITS[best["weights"]], best["kv_heads"] * CACHE_BITS[best["cache"]])
    few = promised(plan, situation, batch)[1] < 0.65 * users
    return {
        "The losses of weights, cache and heads add up to more than the budget.": lost(plan, menu()) > situation.budget,
        "The plan does not fit: beside the weights, the card needs room for the longest chat.": not _room(plan, situation, CONTEXT),
        "The batch is too large for the bound: every request that runs makes a step longer, and its prompt stops all others.": _token(
            plan, batch, known["prompt"], situation
        )
        > 1.5 * situation.bound["per_token"],
        "The batch is too large for the memory: requests push each other out, and are computed again.": batch
        > 1.5 * _room(plan, situation, known["context"]),
        "The batch is too small: bound and memory leave room for more requests at a time.": few
        and promised(plan, situation)[1] >= 0.7 * users,
        "The budget went into the weights, and here it is the chats that take the room or the time.": few
        and bits[0] < better[0]
        and bits[1] > better[1],
        "The budget went into heads and cache, and here it is the weights that take the room or the time.": few
        and bits[0] > better[0]
        and plan["kv_heads"] < best["kv_heads"],
        "Too little of the budget is spent: fewer bits or heads are allowed, and serve many more.": few
        and bits[0] >= better[0]
        and bits[1] >= better[1],
        "Another plan within the budget serves many more: compare all of them.": few,
    }  # fmt: skip


#: What a plan must be. A dict, so that feedback knows the sentence.
FORM = {
    "A dict is needed: weights, cache and kv_heads, each a choice of the menu, and max_batch, a whole number from 1 to 1,000.": None
}
FEW = {"The plans serve less than 0.4 of the users that the reference serves, on traces that nobody saw.": None}


def check(plan: object, situation: Situation, case: str | None = None) -> None:
    """Accept a plan that keeps budget, bound and memory and by arithmetic serves at least 0.65 of the most that any serves.

    Raises
    ------
    WrongAnswer
        If it does not, with the reason; without `case`, which names a visible test, it holds no values.
    """
    where = case or checks.CASE_YOU_CANNOT_SEE
    if plan is None:
        raise checks.WrongAnswer(f"For {where} your function returns None. {checks.FORGOTTEN_RETURN}")
    if not _formed(plan):
        raise checks.WrongAnswer(f"For {where} your function is wrong. {next(iter(FORM))}")
    assert isinstance(plan, dict)
    for reason, wrong in plan_mistakes(plan, situation).items():
        if wrong:
            found = f"your plan is {plan}" if case else "your plan is wrong"
            raise checks.WrongAnswer(f"For {where} {found}. {reason}")


def _formed(plan: object) -> bool:
    if not isinstance(plan, dict) or set(plan) != {"weights", "cache", "kv_heads", "max_batch"}:
        return False
    try:
        chosen = all(plan[name] in menu()[name] for name in ("weights", "cache", "kv_heads"))
    except TypeError:
        return False
    batch = plan["max_batch"]
    return chosen and isinstance(batch, int) and not isinstance(batch, bool) and 1 <= batch <= 1000


def check_served(choose: Callable[..., PLAN], rng: Random, situations: int = 4) -> float:
    """Serve fresh traces with the plans that a function chooses; return its users as a share of the reference's.

    The reference is the best of a few plans that arithmetic likes most, found by serving the same trace.

    Raises
    ------
    WrongAnswer
        If a plan is wrong, see `check`, or less than 0.4 of the users are served.
    """
    ours = theirs = 0
    for _ in range(situations):
        situation = random_situation(rng)
        plan = choose(described(), menu(), *situation.arguments)
        check(plan, situation)
        chats = situation.statistics.draw(CHATS, situation.seed)
        theirs += reference(situation, chats)
        ours += served(plan, situation, chats)
    if ours < 0.4 * theirs:
        raise checks.WrongAnswer(f"For {checks.CASE_YOU_CANNOT_SEE} your plan is wrong. {next(iter(FEW))}")
    return ours / theirs


def reference(situation: Situation, chats: Sequence[Chat]) -> int:
    """Return the most users that a plan serves, of the three that arithmetic likes most and the first with other batches."""
    first, *others = [plan for users, plan in plans(menu(), situation)[:3] if users]
    batches = [max(1, round(first["max_batch"] * factor)) for factor in (1.0, 0.8, 1.25)]
    return max(
        served(plan, situation, chats) for plan in [*({**first, "max_batch": batch} for batch in batches), *others]
    )


def points(share: float, most: int) -> float:
    """Return the points for a share of the reference's users, in halves: all from 0.6 on."""
    return min(float(most), math.floor(2 * most * share / 0.6) / 2)


# ---- steps of this machine ----------------------------------------------------------------------------------------


def time_steps(rounds: int = 3) -> dict[str, tuple[StepCost, float]]:
    """Time steps of SmolLM2 on this machine: batches and contexts, and prompts.

    Returns
    -------
    dict
        For each kind of step what it reads and computes, and its median seconds.
    """
    from course_lib.benchmark import in_turns
    from course_lib.kv_cache import DynamicCache
    from course_lib.models import load

    model, _ = load("smollm2-135m", dtype="float32", device="cpu", as_decoder=True)
    kinds = [(128, 1, 1), (2048, 1, 1), (512, 4, 1), (2048, 4, 1), (256, 16, 1), (512, 8, 1), (64, 1, 64), (128, 1, 32)]

    def step(context: int, batch: int, queries: int) -> Callable[[], None]:
        tokens = torch.ones(batch, queries, dtype=torch.long)
        cache = DynamicCache(model.config)
        for layer in range(model.config.num_hidden_layers if context > queries else 0):
            shape = batch, model.config.num_key_value_heads, context - queries, model.config.head_dim
            cache.update(torch.rand(shape), torch.rand(shape), layer)

        @torch.no_grad()
        def run() -> None:
            model(tokens, cache=cache, logits_to_keep=1)
            cache.crop(-queries)

        return run

    took = in_turns({kind: step(*kind) for kind in kinds}, rounds)
    return {
        f"{batch} x {queries} of {context} tokens": (
            step_cost(
                "smollm2-135m",
                context=context,
                batch_size=batch,
                query_tokens=queries,
                logits_to_keep=1,
                dtype="float32",
            ),
            took[context, batch, queries],
        )
        for context, batch, queries in kinds
    }


if __name__ == "__main__":
    MEASURED.write_text(json.dumps(measure(), separators=(",", ":")) + "\n", encoding="utf-8")
