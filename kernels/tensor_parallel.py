"""A model of which every process holds a part of each layer: bytes held, bytes exchanged, time, and the same tokens as from one.

    torchrun --nproc-per-node 3 kernels/tensor_parallel.py [--tokens 32] [--model smollm2-135m] [--json FOLDER]

With as many CUDA cards as processes each takes one, over NCCL; elsewhere the processes share the CPU, over gloo. Started with Python
alone, the study starts ``--processes`` itself. Chapter 12 explains what the numbers mean.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from course_lib import machine
from course_lib.integrations.parallel import launch, tensor_parallel

PROMPT = "The capital of France is"


def study(options: argparse.Namespace) -> Any:
    """Return what the first process found; in the others, None.

    Raises
    ------
    SystemExit
        If the processes cannot share the heads, with the reason from one of them.
    """
    arguments: dict[str, Any] = {"prompt": PROMPT, "new_tokens": options.tokens, "model": options.model}
    if "RANK" not in os.environ:
        try:
            return launch("course_lib.integrations.parallel:tensor_parallel", options.processes, **arguments)
        except RuntimeError as error:
            raise SystemExit(str(error)) from None
    first = os.environ["RANK"] == "0"
    try:
        found = tensor_parallel(**arguments)
    except ValueError as error:
        if first:
            print(error, file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    return found if first else None


def show(found: dict[str, Any]) -> None:
    """Print what each process holds, what a step exchanges, and times."""
    alone, ranks = found["alone"], found["ranks"]
    print(f"{len(ranks)} processes on {found['device']} over {found['backend']}, in float32: {found['text']!r}")
    print(f"{'':16}{'MiB of weights':>16}{'KiB of cache':>16}{'ms a token':>16}")
    for name, one in [("one alone", alone), *((f"process {rank}", one) for rank, one in enumerate(ranks))]:
        weights, cache = one["weight_bytes"] / 2**20, one["cache_bytes"] / 2**10
        print(f"{name:16}{weights:16.1f}{cache:16.0f}{1e3 * one['token_seconds']:16.1f}")
    for kind, one in found["exchanged"].items():
        print(f"{kind}: {one['count']} a token, {one['bytes'] / 2**10:.1f} KiB of results")
    print(f"An all-reduce of a hidden state takes {1e3 * found['all_reduce_seconds']:.3f} ms.")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--processes", type=int, default=3, help="how many to start, without torchrun")
    arguments.add_argument("--tokens", type=int, default=32, help="new tokens")
    arguments.add_argument("--model", default="smollm2-135m", help="a name that course_lib.models.load knows")
    arguments.add_argument("--json", type=Path, help="folder that gets the raw results")
    options = arguments.parse_args()
    if options.tokens < 2:
        arguments.error(f"--tokens is {options.tokens}; at least 2 are needed to time a decode")
    found = study(options)
    if found is None:
        return
    show(found)
    if options.json:
        run = {"model": options.model, "dtype": "float32", "prompt": PROMPT, "processes": len(found["ranks"]), **found}
        print(machine.record("tensor_parallel", [run], options.json))


if __name__ == "__main__":
    main()
