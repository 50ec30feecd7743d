"""Run by test_compile.py in a process without Triton's interpreter: compiles a few kernels, some with planted faults.

Prints JSON: everything there is to compile; a few entries of the report, compiled anew; and what is found wrong with kernels
that were made wrong on purpose.
"""

import json
from dataclasses import asdict

import torch
import triton
import triton.language as tl

from course_lib.kernels import _compile
from course_lib.kernels._cases import CompileCase
from course_lib.kernels._targets import TARGETS

SAMPLE = {
    ("attention bfloat16 64 causal", "forward_kernel", "sm_80"),
    ("attention bfloat16 64 causal", "forward_kernel", "sm_90"),
    ("attention bfloat16 128 causal", "forward_kernel", "sm_80"),
    ("attention bfloat16 128 causal", "forward_kernel", "sm_90"),
    ("attention bfloat16 128 causal", "forward_kernel", "gfx942"),
    # What the oldest supported Triton cannot compile, the interpreter may run all the same.
    ("quantised nf4 64 double bfloat16, rows 1", "matvec_kernel", "sm_90"),
    ("quantised int4 128 bfloat16, rows 16", "matmul_kernel", "sm_80"),
    ("decoding bfloat16 128, paged", "split_kernel", "sm_90"),
    ("decoding bfloat16 128, int4", "split_kernel", "sm_80"),
}


@triton.jit
def product(x_ptr, y_ptr, out_ptr, depth, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, depth, SIZE):
        x = tl.load(x_ptr + rows * depth + start + columns)
        y = tl.load(y_ptr + (start + rows) * SIZE + columns)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    tl.store(out_ptr + rows * SIZE + columns, total)


@triton.jit
def share(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + tile)
    tl.store(out_ptr + tile, x / tl.sum(x, 1)[:, None])


def wrong(kernel, tensors, *sizes, dtype=torch.float16, num_warps=4, num_stages=1, **constants):
    """Compile a launch with so many tensors, and sizes, for an A100; return what is found, faults included."""
    x = torch.empty(1024, dtype=dtype, device="meta")
    options = constants | {"num_warps": num_warps, "num_stages": num_stages}
    case = CompileCase("wrong", lambda: kernel[(1,)](*(x,) * tensors, *sizes, **options))
    (launch,) = _compile.launches(TARGETS["sm_80"], case)
    found = _compile.compiled(TARGETS["sm_80"], launch)
    return {"faults": found.faults(), **asdict(found)}


if __name__ == "__main__":
    todo = _compile.jobs(list(TARGETS))
    named = {(job[1], kernel, job[0]): job for job, kernel in todo.items()}
    shown = {
        "triton": triton.__version__,
        "todo": [[name, kernel, target] for (target, name, _), kernel in todo.items()],
        "compiled": [asdict(_compile.work(named[key])) for key in sorted(SAMPLE)],
        "greedy": wrong(product, 3, 4096, SIZE=128, PRECISION="tf32", num_stages=5, num_warps=8),
        "exact": wrong(product, 3, 64, SIZE=16, PRECISION="ieee", dtype=torch.float32),
        "modest": wrong(product, 3, 64, SIZE=16, PRECISION="tf32", dtype=torch.float32),
        "spilling": wrong(share, 2, ROWS=64, COLUMNS=256, dtype=torch.float32, num_warps=1),
    }
    print(json.dumps(shown))
