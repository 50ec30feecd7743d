"""Where `device_map="auto"` puts layers, and how long the stages of a pipeline wait for one another: simulated, and measured.

    torchrun --nproc-per-node 2 kernels/pipeline_parallel.py [--tokens 32] [--in-flight 1,2,4] [--model smollm2-135m] [--json FOLDER]

With as many CUDA cards as processes each takes one, over NCCL; elsewhere the processes share the CPU, over gloo. Started with Python
alone, the study starts ``--processes`` itself. The stages must write the tokens of one process. Chapter 12 explains the numbers.
"""

import argparse
import os
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from course_lib import machine
from course_lib.benchmark import numbers
from course_lib.integrations.parallel import auto_device_map, launch
from course_lib.integrations.pipeline import Slot, idle, pipeline, simulate
from course_lib.memory import count_parameters

PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time",
    "The sum of two and two is",
    "A pipeline is",
    "In the morning",
    "Light travels",
    "The first prime number is",
)
MODELS = ("smollm2-135m", "llama-3.1-8b", "octocoder")
#: Free memory of cards that are not there, as shares of what the model needs.
CARDS = ((1.0, 1.0, 1.0, 1.0), (0.8, 0.4), (0.25, 0.9))


def maps() -> list[dict[str, Any]]:
    """Ask for the device map of models without memory."""
    runs = []
    for name in MODELS:
        size = 2 * count_parameters(name)
        for free in CARDS:
            shares = auto_device_map(name, [int(share * size) for share in free])
            runs.append({"model": name, "free": list(free), "shares": [vars(share) for share in shares]})
    return runs


def schedules(found: dict[str, Any], new_tokens: int) -> list[dict[str, Any]]:
    """Add to each measured run what the schedule of its stages predicts, from their medians in the first run alone."""
    first = [Slot(*slot) for slot in found["runs"][0]["slots"]]
    stages = [
        statistics.median(slot.end - slot.start for slot in first if slot.stage == stage)
        for stage in range(len(found["layers"]))
    ]
    transfer = statistics.median(max(0.0, after.start - before.end) for before, after in pairwise(first))
    runs = []
    for run in found["runs"]:
        slots = simulate(stages, requests=run["in_flight"], tokens=new_tokens - 1, transfer=transfer)
        measured = [Slot(*slot) for slot in run["slots"]]
        lasted = [max(slot.end for slot in some) - min(slot.start for slot in some) for some in (measured, slots)]
        sizes = {"stage_seconds": stages, "transfer_seconds": transfer, "seconds": lasted[0]}
        runs.append({**run, **sizes, "predicted_seconds": lasted[1], "predicted_idle": idle(slots)})
    return runs


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--processes", type=int, default=2, help="how many stages to start, without torchrun")
    arguments.add_argument("--tokens", type=int, default=32, help="new tokens of each request")
    arguments.add_argument("--in-flight", type=numbers, default=[1, 2, 4], help="requests at the same time, 1 first")
    arguments.add_argument("--model", default="smollm2-135m", help="a name that course_lib.models.load knows")
    arguments.add_argument("--json", type=Path, help="folder that gets the raw results")
    options = arguments.parse_args()
    if options.tokens < 2:
        arguments.error(f"--tokens is {options.tokens}; at least 2 are needed to time a decode")
    if options.in_flight[0] != 1 or max(options.in_flight) > len(PROMPTS):
        arguments.error(f"--in-flight is {options.in_flight}; 1 comes first, and {len(PROMPTS)} are the most")

    work: dict[str, Any] = {"prompts": PROMPTS, "new_tokens": options.tokens, "in_flight": options.in_flight}
    work["model"] = options.model
    if "RANK" in os.environ:
        found = pipeline(**work)
        if os.environ["RANK"] != "0":
            return
    else:
        found = launch("course_lib.integrations.pipeline:pipeline", options.processes, **work)

    print("device_map='auto': layers and share of the weights on each card, then on the CPU")
    placed = maps()
    for run in placed:
        total = sum(share["bytes"] for share in run["shares"])
        parts = [f"{share['device']}: {share['layers']}, {share['bytes'] / total:.0%}" for share in run["shares"]]
        print(f"{run['model']:14} free {', '.join(f'{one:.2f}' for one in run['free']):24} {'; '.join(parts)}")
    runs = schedules(found, options.tokens)
    sizes = ", ".join(f"{size / 2**20:.0f} MiB" for size in found["weight_bytes"])
    print(f"{options.model} in {len(found['layers'])} stages of {sizes}, on {found['device']} over {found['backend']}")
    print(f"{'in flight':>10}{'tokens/s':>10}{'seconds':>10}{'predicted':>10}  idle, and predicted")
    for run in runs:
        count = run["in_flight"]
        pairs = [f"{one:.2f} {two:.2f}" for one, two in zip(run["idle"], run["predicted_idle"], strict=True)]
        speed = count * (options.tokens - 1) / run["seconds"]
        print(f"{count:10}{speed:10.1f}{run['seconds']:10.2f}{run['predicted_seconds']:10.2f}  {'; '.join(pairs)}")
    if options.json:
        kept = {key: found[key] for key in ("device", "backend", "layers", "weight_bytes")}
        recorded = [{"model": options.model, "dtype": "float32", **kept, **run} for run in runs]
        print(machine.record("pipeline_parallel", placed + recorded, options.json))


if __name__ == "__main__":
    main()
