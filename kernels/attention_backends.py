"""How attention block by block compares with PyTorch's own: error, time and memory on this machine's CPU.

    python kernels/attention_backends.py [--tokens 4096] [--json FOLDER]

Each backend is checked against float64 and only then timed, in turns with the others. Memory is PyTorch's allocations beyond the
inputs, for one head, fitted by a + b N + c N^2. Chapter 05 explains what the numbers mean.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from course_lib import benchmark, machine
from course_lib.attention import attention
from course_lib.memory import peak_memory

HEADS, HEAD_DIM = 9, 64
ROUNDS = 7
LENGTHS = (1024, 2048, 4096, 8192, 16384)
TIMED = ("sdpa", "blockwise")
MEASURED = ("reference", "blockwise")


def check(causal: bool) -> dict[str, float]:
    """Return each backend's largest error against float64; one above a float32 rounding times 16 ends the study."""
    q, k, v = (torch.randn(1, HEADS, 700, HEAD_DIM) for _ in range(3))
    exact = attention(q.double(), k.double(), v.double(), causal=causal, backend="reference")
    errors = {}
    for backend in TIMED:
        errors[backend] = (attention(q, k, v, causal=causal, backend=backend) - exact).abs().max().item()
        if not errors[backend] <= 16 * torch.finfo(torch.float32).eps * exact.abs().max().item():
            raise ArithmeticError(f"{backend}, causal={causal}: error {errors[backend]:.1e}; nothing was timed")
    return errors


def seconds(tokens: int, causal: bool, backward: bool) -> dict[str, float]:
    """Return the median time of each backend, which take turns so that a busy moment favours none."""
    q, k, v, upstream = (torch.randn(1, HEADS, tokens, HEAD_DIM) for _ in range(4))
    for one in (q, k, v):
        one.requires_grad_(backward)
    times: dict[str, list[float]] = {backend: [] for backend in TIMED}
    for _ in range(ROUNDS):
        for backend, taken in times.items():
            start = time.perf_counter()
            output = attention(q, k, v, causal=causal, backend=backend)
            if backward:
                start = time.perf_counter()
                torch.autograd.grad(output, (q, k, v), upstream)
            taken.append(time.perf_counter() - start)
    return {backend: statistics.median(taken) for backend, taken in times.items()}


def memory(backend: str) -> dict[str, Any]:
    """Return peaks over length for one head, the exponent, and the share of the quadratic term there."""
    peaks = {}
    for tokens in LENGTHS:
        q, k, v = (torch.randn(1, 1, tokens, HEAD_DIM) for _ in range(3))
        with peak_memory("cpu") as peak:
            attention(q, k, v, backend=backend)
        peaks[tokens] = peak.bytes
    return {
        "tokens": list(peaks),
        "bytes": list(peaks.values()),
        "exponent": benchmark.exponent(peaks),
        "quadratic_share": benchmark.terms(peaks).quadratic_share,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--tokens", type=int, default=4096, help="length of the timed sequences")
    arguments.add_argument("--json", type=Path, help="folder that gets the raw results")
    options = arguments.parse_args()

    print(f"{machine.cpu_name()}, {torch.get_num_threads()} threads, float32, {HEADS} heads of {HEAD_DIM}")
    runs: list[dict[str, Any]] = []
    for causal in (False, True):
        errors = check(causal)
        for backward in (False, True):
            medians = seconds(options.tokens, causal, backward)
            what = f"{'backward' if backward else 'forward'}{', causal' if causal else ''}"
            ratio = medians["blockwise"] / medians["sdpa"]
            print(
                f"{options.tokens} tokens, {what:16}  sdpa {medians['sdpa']:.3f} s  blockwise {medians['blockwise']:.3f} s  ratio {ratio:.2f}"
            )
            sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "tokens": options.tokens, "causal": causal}
            for backend, taken in medians.items():
                run = {"backend": backend, "pass": "backward" if backward else "forward", **sizes, "dtype": "float32"}
                runs.append({**run, "threads": torch.get_num_threads(), "seconds": taken, "error": errors[backend]})
    for backend in MEASURED:
        found = memory(backend)
        mib = ", ".join(f"{peak / 2**20:.1f}" for peak in found["bytes"])
        print(
            f"{backend:10} extra MiB at {LENGTHS[0]} to {LENGTHS[-1]} tokens, one head: {mib}; exponent "
            f"{found['exponent']:.2f}, quadratic share {100 * found['quadratic_share']:.2f} %"
        )
        runs.append({"backend": backend, "heads": 1, "head_dim": HEAD_DIM, "dtype": "float32", **found})
    if options.json:
        print(machine.record("attention_backends", runs, options.json))


if __name__ == "__main__":
    main()
