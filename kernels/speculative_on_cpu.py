"""What drafts save on a CPU: a look-up in the text, a model of fewer bits, a model's first layers, and a smaller model.

    python kernels/speculative_on_cpu.py [--tokens 64] [--draft-tokens 4] [--prompts 10] [--models smollm2-135m,course/native] [--json FOLDER]

Greedy tokens must be those of the target alone, for every prompt, or the study ends. For each prompt all ways take turns, and a speed-up
is the time of all prompts alone by that with a draft. Beside it stands what `expected_speedup` makes of acceptance and costs: a draft's
token and the check of a draft, each in units of the time in which the target writes a token. Chapter 12 explains what the numbers mean.
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from course_lib import machine
from course_lib.benchmark import numbers
from course_lib.generation import (
    PromptLookup,
    SpeculativeResult,
    expected_speedup,
    first_layers,
    generate,
    speculative_generate,
)
from course_lib.models import load
from course_lib.quantization import cpu, quantize, quantize_model
from course_lib.training.corpus import load_corpus

NEW, DRAFT_TOKENS, PROMPTS = 64, 4, 10
MODELS = ["smollm2-135m", "course/native"]
#: Layers of SmolLM2's 30 that draft for all of them.
FIRST_LAYERS = (6, 20)
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in three sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "How do I make pancakes?",
    "List five countries of South America.",
    "What is the difference between a virus and a bacterium?",
    "Give me three tips for sleeping better.",
    "Translate into French: The cat sleeps on the chair.",
    "Why do leaves change their colour in autumn?",
    "Write a poem about the sea.",
)
#: Of a file of Python source: what is skipped, and what is read; the second for models whose tokens are bytes and whose context is short.
SKIPPED, READ, READ_BYTES = 1500, 1200, 64


@dataclass(frozen=True)
class Pair:
    """A target, what drafts for it, and what both continue: by kind, prompts ``[1, length]``."""

    target: Any
    drafts: dict[str, Any]
    prompts: dict[str, list[torch.Tensor]]


def source(count: int) -> list[str]:
    """Return beginnings of Python files on which no model of the course was trained."""
    files = [one for one in load_corpus().held_out if len(one) > SKIPPED + READ][:count]
    return [bytes(one[SKIPPED : SKIPPED + READ].tolist()).decode(errors="ignore") for one in files]


def smollm2(name: str, count: int) -> Pair:
    """Return SmolLM2 with itself in 4 bits, its first layers, and a look-up, for questions and for Python source."""
    target, tokenizer = load(name, dtype="float32", device="cpu", as_decoder=True)
    drafts: dict[str, Any] = {"look-up": PromptLookup()}
    drafts |= {f"first {layers} layers": first_layers(target, layers) for layers in FIRST_LAYERS}
    if cpu.takes(quantize(torch.randn(64, 64), "int4")):
        small, _ = load(name, dtype="float32", device="cpu", as_decoder=True)
        drafts["int4"] = quantize_model(small, "int4", embedding="bfloat16")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]
    asked = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True) for one in chats]
    code = [tokenizer(text) for text in source(count)]
    kinds = {"questions": asked, "source": code}
    return Pair(
        target, drafts, {kind: [torch.tensor([one["input_ids"]]) for one in all_] for kind, all_ in kinds.items()}
    )


def course(name: str, count: int) -> Pair:
    """Return the course's larger model of bytes with the smaller one and a look-up, for Python source."""
    target, tokenizer = load(name, device="cpu")
    drafts = {"look-up": PromptLookup(), "course/rope": load("course/rope", device="cpu")[0]}
    prompts = [tokenizer(text, return_tensors="pt")["input_ids"][:, :READ_BYTES] for text in source(2 * count)]
    return Pair(target.optimize_for_decoding(), drafts, {"source": prompts})


def measure(pair: Pair, prompts: list[torch.Tensor], new: int, draft_tokens: int) -> dict[str, dict[str, Any]]:
    """Return what each draft saves over these prompts.

    Raises
    ------
    ArithmeticError
        If other tokens are written than without a draft.
    """
    alone: list[float] = []
    found: dict[str, list[SpeculativeResult]] = {name: [] for name in pair.drafts}
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first twice, to warm up
        plain = generate(pair.target, prompt, max_new_tokens=new)
        alone.append(plain.decode_seconds)
        for name, draft in pair.drafts.items():
            result = speculative_generate(pair.target, draft, prompt, max_new_tokens=new, draft_tokens=draft_tokens)
            if not torch.equal(result.sequences, plain.sequences):
                raise ArithmeticError(f"{name} writes other tokens than the target alone after prompt {number}")
            found[name].append(result)
    return {name: summary(alone[1:], results[1:], new, draft_tokens) for name, results in found.items()}


def summary(alone: list[float], results: list[SpeculativeResult], new: int, draft_tokens: int) -> dict[str, Any]:
    """Return acceptance, costs and speed-up over prompts, of which each was continued alone in so many seconds."""

    def total(name: str) -> float:
        return sum(getattr(one, name) for one in results)

    places = range(max(len(one.tried_at) for one in results))
    tried = [sum(one.tried_at[place] for one in results if place < len(one.tried_at)) for place in places]
    kept = [sum(one.accepted_at[place] for one in results if place < len(one.accepted_at)) for place in places]
    acceptance = total("accepted") / max(sum(tried), 1)
    token = sum(alone) / (len(alone) * (new - 1))
    draft_cost = total("draft_seconds") / max(total("drafted"), 1) / token
    verify_cost = (total("decode_seconds") - total("draft_seconds")) / total("rounds") / token
    drafted = total("drafted") / total("rounds")
    return {
        "prompts": len(results),
        "new_tokens": new,
        "draft_tokens": draft_tokens,
        "rounds": total("rounds"),
        "drafted": total("drafted"),
        "accepted": total("accepted"),
        "acceptance": acceptance,
        "acceptance_at": [one / all_ for one, all_ in zip(kept, tried, strict=True)],
        "tokens_per_round": len(results) * (new - 1) / total("rounds"),
        "alone_seconds": sum(alone),
        "seconds": total("decode_seconds"),
        "draft_cost": draft_cost,
        "verify_cost": verify_cost,
        "speedup": sum(alone) / total("decode_seconds"),
        "median_speedup": statistics.median(
            one / result.decode_seconds for one, result in zip(alone, results, strict=True)
        ),
        # A look-up may find fewer tokens, or none, which the formula knows as a shorter draft.
        "expected_speedup": expected_speedup(acceptance, round(drafted), draft_cost, verify_cost),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--tokens", type=int, default=NEW, help="new tokens of each text")
    arguments.add_argument("--draft-tokens", type=numbers, default=[DRAFT_TOKENS], help="lengths of drafts")
    arguments.add_argument(
        "--prompts", type=int, default=PROMPTS, help="of each kind, for models of bytes twice as many"
    )
    arguments.add_argument("--models", type=lambda text: text.split(","), default=MODELS, help="the targets")
    arguments.add_argument("--json", type=Path, help="folder that gets the raw results")
    options = arguments.parse_args()
    if options.tokens < 2:
        arguments.error(f"--tokens is {options.tokens}; at least 2 are needed to time a decode")
    if not 1 <= options.prompts <= len(QUESTIONS):
        arguments.error(f"--prompts is {options.prompts}; 1 to {len(QUESTIONS)} are accepted")

    threads = torch.get_num_threads()
    print(f"{machine.cpu_name()}, {threads} threads")
    runs: list[dict[str, Any]] = []
    for name in options.models:
        pair = (course if name.startswith("course/") else smollm2)(name, options.prompts)
        for kind, prompts in pair.prompts.items():
            for draft_tokens in options.draft_tokens:
                print(f"{name}, {kind}: {len(prompts)} prompts, {options.tokens} new tokens, drafts of {draft_tokens}")
                print(f"{'':16}accepted  tokens/round  a draft's token  a check  speed-up  by the formula")
                for draft, run in measure(pair, prompts, options.tokens, draft_tokens).items():
                    print(
                        f"{draft:16}{run['acceptance']:8.1%}{run['tokens_per_round']:14.2f}{run['draft_cost']:17.3f}"
                        f"{run['verify_cost']:9.2f}{run['speedup']:10.2f}{run['expected_speedup']:16.2f}",
                        flush=True,
                    )
                    runs.append({"model": name, "kind": kind, "draft": draft, "threads": threads, **run})
    print("The tokens are those of the target alone, for every prompt and draft.")
    if options.json:
        print(machine.record("speculative_on_cpu", runs, options.json))


if __name__ == "__main__":
    main()
