"""What fewer bits save on a CPU: products of few and of many rows, and a model that writes token by token.

    python kernels/decode_on_cpu.py [--tokens 128] [--context 64,2000] [--model smollm2-135m] [--json FOLDER]

Products are compared with float64 before they are timed. The table over rows is where `course_lib.quantization.cpu.FEW_ROWS` comes
from; ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2 in the environment show it for a processor without newer instructions.
Models take turns, Transformers' own loop in float32 among them, whose tokens `DecoderLM` in float32 must write too. Chapter 04 explains
what the numbers mean, and `course_lib.models.layout` how float32 is read.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers.generation.streamers import BaseStreamer

from course_lib import machine
from course_lib.benchmark import in_turns, numbers
from course_lib.generation import generate
from course_lib.models import load
from course_lib.quantization import QuantizedTensor, cpu, model_bytes, quantize, quantize_model

SCHEMES = ("bfloat16", "int8", "int4")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
SHAPE = (1536, 576)
#: Matrices, so that together they do not fit into a cache.
MATRICES = 40
ROUNDS = 5
CONTEXTS, PREFILL = [64], 512


def packed(scheme: str) -> list[tuple[Any, ...]]:
    """Return arguments of products with weights of their own, without the inputs."""
    found = []
    for _ in range(MATRICES):
        weight = torch.randn(SHAPE) * SHAPE[1] ** -0.5
        block = "row" if scheme == "int8" else 64
        kept = (
            QuantizedTensor.in_bfloat16(weight) if scheme == "bfloat16" else quantize(weight, scheme, block_size=block)
        )
        if not cpu.takes(kept):
            raise SystemExit(f"PyTorch {torch.__version__} has no product for {scheme} on this processor")
        check(kept)
        found.append((*cpu.pack(kept), scheme, kept.block_size))
    return found


def check(weight: QuantizedTensor) -> None:
    """End the study if a product errs more than twice as much as PyTorch's in bfloat16 or float32, but for float32's rounding."""
    inputs = torch.randn(3, weight.shape[1])
    exact = inputs.double() @ weight.dequantize(torch.float64).T
    # Sums in another order differ by about this much.
    rounding = torch.finfo(torch.float32).eps * (inputs.abs() @ weight.dequantize().abs().T).norm().item()
    arguments = (*cpu.pack(weight), weight.scheme, weight.block_size)
    for product, dtype in ((cpu.fused, torch.bfloat16), (cpu.dense, torch.float32)):
        plain = functional.linear(inputs.to(dtype), weight.dequantize(dtype))
        error, limit = ((found.double() - exact).norm().item() for found in (product(inputs, *arguments), plain))
        if not error <= 2 * limit + rounding:
            raise ArithmeticError(f"{weight.scheme}, {product.__name__}: error {error:.1e}; nothing was timed")


def products() -> list[dict[str, Any]]:
    """Time products over rows, all in turns; return the median seconds of a product."""
    weights = {scheme: packed(scheme) for scheme in SCHEMES}
    plain = [torch.randn(SHAPE) for _ in range(MATRICES)]
    runs: list[dict[str, Any]] = []
    for rows in ROWS:
        inputs = torch.randn(rows, SHAPE[1])
        calls: dict[tuple[str, str], Any] = {
            ("float32", "plain"): lambda x=inputs: [functional.linear(x, weight) for weight in plain]
        }
        for scheme, arguments in weights.items():
            for product in (cpu.fused, cpu.dense):
                calls[scheme, product.__name__] = lambda x=inputs, a=arguments, p=product: [p(x, *one) for one in a]
        for (scheme, product_name), seconds in in_turns(calls, ROUNDS).items():
            sizes = {"rows": rows, "shape": list(SHAPE), "scheme": scheme, "product": product_name}
            runs.append({**sizes, "seconds": seconds / MATRICES})
    return runs


class Watch(BaseStreamer):  # type: ignore[misc]
    """Notes when Transformers' loop hands over a token; the first time is the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass


def models(name: str, new: int, contexts: list[int]) -> list[dict[str, Any]]:
    """Time decode after each context, and prefill, of a model in each scheme and of Transformers in float32, all in turns."""
    theirs, _ = load(name, dtype="float32", device="cpu")
    ours: dict[str, Any] = {"float32": load(name, dtype="float32", device="cpu", as_decoder=True)[0]}
    for scheme in SCHEMES:
        model, _ = load(name, dtype="float32", device="cpu", as_decoder=True)
        ours[scheme] = quantize_model(model, scheme, embedding="bfloat16")
    rows = {"transformers": {"runner": "transformers", "scheme": "float32", "bytes": model_bytes(theirs)}}
    for key, model in ours.items():
        rows[key] = {"runner": "course_lib", "scheme": key, "bytes": model_bytes(model)}
    long = torch.randint(theirs.config.vocab_size, (1, PREFILL))

    def prefill() -> None:
        with torch.no_grad():
            theirs(long, logits_to_keep=1, use_cache=True)

    calls: dict[str, Any] = {key: lambda m=model: generate(m, long, max_new_tokens=1) for key, model in ours.items()}
    calls = {"transformers": prefill} | calls
    in_turns(calls, 1)  # to warm up
    taken = in_turns(calls, ROUNDS)
    runs = []
    for context in contexts:
        speeds = decode(theirs, ours, torch.randint(theirs.config.vocab_size, (1, context)), new)
        for key, row in rows.items():
            sizes = {"model": name, "prompt_tokens": context, "new_tokens": new, "prefill_tokens": PREFILL}
            runs.append({**sizes, **row, "decode_tokens_per_second": speeds[key], "prefill_seconds": taken[key]})
    return runs


def decode(theirs: Any, ours: dict[str, Any], prompt: torch.Tensor, new: int) -> dict[str, float]:
    """Return the median tokens per second that models write after a prompt, in turns.

    Raises
    ------
    ArithmeticError
        If ours in float32 writes other tokens than Transformers.
    """
    options: dict[str, Any] = {"min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    speeds: dict[str, list[float]] = {key: [] for key in ("transformers", *ours)}
    for turn in range(ROUNDS + 1):
        watch = Watch()
        expected = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, streamer=watch, **options
        )
        speeds["transformers"].append((new - 1) / (watch.moments[-1] - watch.moments[1]))
        for key, model in ours.items():
            found = generate(model, prompt, max_new_tokens=new)
            speeds[key].append((new - 1) / found.decode_seconds)
            if key == "float32" and not torch.equal(found.sequences, expected):
                raise ArithmeticError(f"float32 writes other tokens than Transformers after {prompt.shape[1]} tokens")
        if turn == 0:  # which warmed up
            for one in speeds.values():
                one.clear()
    return {key: statistics.median(one) for key, one in speeds.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--tokens", type=int, default=128, help="new tokens of each text")
    arguments.add_argument("--context", type=numbers, default=CONTEXTS, help="tokens of the prompts that are continued")
    arguments.add_argument("--model", default="smollm2-135m", help="a name that course_lib.models.load knows")
    arguments.add_argument("--json", type=Path, help="folder that gets the raw results")
    options = arguments.parse_args()
    if options.tokens < 2:
        arguments.error(f"--tokens is {options.tokens}; at least 2 are needed to time a decode")

    threads = torch.get_num_threads()
    print(f"{machine.cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads")
    print(f"Microseconds for a product with a weight of {SHAPE[0]} x {SHAPE[1]}:")
    with torch.no_grad():
        runs = products()
    names = list(dict.fromkeys((run["scheme"], run["product"]) for run in runs))
    print("rows", *(f"{scheme} {product}".rjust(15) for scheme, product in names))
    for rows in ROWS:
        print(f"{rows:4}", *(f"{1e6 * run['seconds']:15.0f}" for run in runs if run["rows"] == rows))
    print(f"Up to so many rows are multiplied by the codes: {cpu.FEW_ROWS}")

    timed = models(options.model, options.tokens, options.context)
    for start in range(0, len(timed), len(SCHEMES) + 2):
        base = timed[start]
        print(f"{options.model}: {base['prompt_tokens']} tokens and {options.tokens} new ones; prefill of {PREFILL}")
        for run in timed[start : start + len(SCHEMES) + 2]:
            speed, seconds = run["decode_tokens_per_second"], run["prefill_seconds"]
            print(
                f"{run['runner']:13} {run['scheme']:9} {speed:6.1f} tokens/s  "
                f"{speed / base['decode_tokens_per_second']:.2f} times  "
                f"prefill {seconds:.2f} s  {seconds / base['prefill_seconds']:.2f} times  "
                f"{run['bytes'] / 2**20:6.1f} MiB  {run['bytes'] / base['bytes']:.3f}"
            )
    if options.json:
        runs = [{**run, "threads": threads} for run in (*runs, *timed)]
        print(machine.record("decode_on_cpu", runs, options.json))


if __name__ == "__main__":
    main()
