"""How well arithmetic predicts the peak of a real run: SmolLM2 from a short prompt to a long one.

    python kernels/memory_peak.py [--json FOLDER]

On a CUDA card it measures the card's allocator, elsewhere PyTorch's allocations on the CPU. Chapter 01 explains the parts.
"""

import argparse
from pathlib import Path

import torch

from course_lib import machine
from course_lib.memory import bytes_to_giga_bytes, estimate, flush, peak_memory
from course_lib.models import load

PROMPT_TOKENS = (16, 256, 1024)
NEW_TOKENS = 8


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--json", type=Path, help="folder that gets the raw results")
    options = arguments.parse_args()

    print(machine.choose())
    model, _ = load("smollm2-135m")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    runs = []
    for prompt_tokens in PROMPT_TOKENS:
        tokens = torch.randint(100, model.config.vocab_size, (1, prompt_tokens), device=model.device)
        flush()
        with peak_memory() as peak:
            model.generate(tokens, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        predicted = estimate(model.config, dtype=model.dtype, prompt_tokens=prompt_tokens, new_tokens=NEW_TOKENS)
        measured = weights + peak.bytes
        runs.append(
            {
                "model": "smollm2-135m",
                "dtype": str(model.dtype).removeprefix("torch."),
                "prompt_tokens": prompt_tokens,
                "new_tokens": NEW_TOKENS,
                "predicted_bytes": predicted.total,
                "measured_bytes": measured,
            }
        )
        print(
            f"{prompt_tokens:6} prompt tokens: predicted {bytes_to_giga_bytes(predicted.total):.3f} GiB, "
            f"measured {bytes_to_giga_bytes(measured):.3f} GiB, {100 * (measured / predicted.total - 1):+.1f} %"
        )
    if options.json:
        print(machine.record("memory_peak", runs, options.json))


if __name__ == "__main__":
    main()
