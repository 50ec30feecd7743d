"""What sharing each pass among texts gains on a CPU: requests one at a time, padded into a batch, and batched continuously.

    python kernels/batching_on_cpu.py [--requests 24] [--prompt 16,128] [--new 8,64] [--model smollm2-135m] [--json FOLDER]

Lengths of prompts and texts are drawn between the two numbers. Texts of the batcher are compared with those that each request gets
alone before anything is timed; all take turns. Only tokens that were asked for count: a padded batch runs until its longest text is
done. The last runner has a pool of blocks too small for all. Chapter 11 explains the numbers.
"""

import argparse
import random
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from course_lib import machine
from course_lib.benchmark import in_turns, numbers
from course_lib.generation import BatchStats, ContinuousBatcher, generate
from course_lib.models import load

ROUNDS = 3
#: The share that the small pool has of the blocks that all requests together take.
SMALL_POOL = 0.3


class Job(NamedTuple):
    """A request: its prompt ``[1, length]``, and how many tokens follow."""

    prompt: torch.Tensor
    new: int


def draw(vocab_size: int, requests: int, prompt: list[int], new: list[int], seed: int = 0) -> list[Job]:
    """Return requests of random tokens, and of lengths between two numbers each."""
    chosen = random.Random(seed)
    lengths = [(chosen.randint(*prompt), chosen.randint(*new)) for _ in range(requests)]
    generator = torch.Generator().manual_seed(seed)
    return [Job(torch.randint(vocab_size, (1, length), generator=generator), count) for length, count in lengths]


def alone(model: Any, jobs: list[Job]) -> list[list[int]]:
    """Serve one request after the other."""
    found = (generate(model, job.prompt, max_new_tokens=job.new).sequences for job in jobs)
    return [row[0, job.prompt.shape[1] :].tolist() for row, job in zip(found, jobs, strict=True)]


def padded(model: Any, jobs: list[Job]) -> list[list[int]]:
    """Serve all in one batch of Transformers, prompts filled up on the left, until the longest text is done."""
    longest = max(job.prompt.shape[1] for job in jobs)
    ids = torch.zeros(len(jobs), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        length = job.prompt.shape[1]
        ids[row, longest - length :], mask[row, longest - length :] = job.prompt[0], 1
    new = max(job.new for job in jobs)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=mask, **options)
    return [row[longest : longest + job.new].tolist() for row, job in zip(found, jobs, strict=True)]


def batched(
    model: Any, jobs: list[Job], seen: dict[str, BatchStats], name: str, num_blocks: int | None
) -> list[list[int]]:
    """Serve all by the batcher, and note what it did."""
    batcher = ContinuousBatcher(model, num_blocks=num_blocks, max_batch=len(jobs), token_budget=max(128, len(jobs)))
    requests = [batcher.submit(job.prompt, max_new_tokens=job.new) for job in jobs]
    batcher.run()
    seen[name] = batcher.stats
    if batcher.cache.pool.used:
        raise ArithmeticError(
            f"{name}: {batcher.cache.pool.used} blocks are in use after all requests; nothing was timed"
        )
    return [request.tokens for request in requests]


def study(name: str, count: int, prompt: list[int], new: list[int]) -> list[dict[str, Any]]:
    """Check and time every way to serve the requests.

    Raises
    ------
    ArithmeticError
        If the batcher writes anything that a request does not get alone, or keeps a block.
    """
    ours, _ = load(name, dtype="float32", device="cpu", as_decoder=True)
    theirs, _ = load(name, dtype="float32", device="cpu")
    jobs = draw(theirs.config.vocab_size, count, prompt, new)
    seen: dict[str, BatchStats] = {}
    expected = alone(ours, jobs)
    first = "batched continuously"
    if batched(ours, jobs, seen, first, None) != expected:
        raise ArithmeticError(f"{first}: other texts than alone; nothing was timed")
    few = max(1, int(SMALL_POOL * seen[first].blocks_peak), *(-(-(j.prompt.shape[1] + j.new) // 16) for j in jobs))
    small = f"in {few} of {seen[first].blocks_peak} blocks"
    if batched(ours, jobs, seen, small, few) != expected:
        raise ArithmeticError(f"{small}: other texts than alone; nothing was timed")
    same = sum(a == b for a, b in zip(padded(theirs, jobs), expected, strict=True))
    calls = {
        "one at a time": partial(alone, ours, jobs),
        "transformers, padded": partial(padded, theirs, jobs),
        first: partial(batched, ours, jobs, seen, first, None),
        small: partial(batched, ours, jobs, seen, small, few),
    }
    tokens = sum(job.new for job in jobs)
    runs = []
    for runner, seconds in in_turns(calls, ROUNDS).items():
        run = {"model": name, "runner": runner, "requests": len(jobs), "tokens": tokens, "seconds": seconds}
        run |= {"prompt_tokens": sum(job.prompt.shape[1] for job in jobs), "tokens_per_second": tokens / seconds}
        run["same_texts"] = same if runner == "transformers, padded" else len(jobs)
        if runner in seen:
            stats = seen[runner]
            run |= {"steps": stats.steps, "preemptions": stats.preemptions, "blocks_peak": stats.blocks_peak}
            run |= {"prefill_tokens": stats.prefill_tokens, "occupancy": stats.occupancy}
        runs.append(run)
    return runs


def table(runs: list[dict[str, Any]]) -> str:
    """Return the runs as text."""
    lines = [
        f"{'':24}{'seconds':>8}{'tokens/s':>10}{'times':>7}{'same texts':>12}{'steps':>7}{'preempted':>11}{'blocks':>8}"
    ]
    for run in runs:
        line = f"{run['runner']:24}{run['seconds']:8.1f}{run['tokens_per_second']:10.1f}"
        line += f"{run['tokens_per_second'] / runs[0]['tokens_per_second']:7.2f}"
        line += f"{run['same_texts']:7} of {run['requests']:2}"
        if "steps" in run:
            line += f"{run['steps']:7}{run['preemptions']:11}{run['blocks_peak']:8}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--requests", type=int, default=24)
    arguments.add_argument("--prompt", type=numbers, default=[16, 128], help="shortest and longest prompt, in tokens")
    arguments.add_argument("--new", type=numbers, default=[8, 64], help="shortest and longest text, in tokens")
    arguments.add_argument("--model", default="smollm2-135m", help="a name that course_lib.models.load knows")
    arguments.add_argument("--json", type=Path, help="folder that gets the raw results")
    options = arguments.parse_args()
    if options.requests < 1:
        arguments.error(f"--requests is {options.requests}; at least 1 is needed")
    for name, bounds in (("--prompt", options.prompt), ("--new", options.new)):
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            arguments.error(f"{name} is {bounds}; two numbers are needed, the smaller one first")

    threads = torch.get_num_threads()
    print(f"{machine.cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads")
    runs = study(options.model, options.requests, options.prompt, options.new)
    print(
        f"{options.requests} requests: {runs[0]['prompt_tokens']} tokens of prompts, and {runs[0]['tokens']} that follow"
    )
    print(table(runs))
    if options.json:
        print(machine.record("batching_on_cpu", [{**run, "threads": threads} for run in runs], options.json))


if __name__ == "__main__":
    main()
