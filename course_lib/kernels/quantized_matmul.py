"""Products with quantised weights in Triton: codes are read once, and become numbers in registers.

Functions
---------
quantized_matmul
    ``x @ weight.T + bias`` with a weight of int8, int4, NF4 or FP4.
quantized_matmul_refusal
    Why it cannot run on a tensor.
configuration, plan
    How a product is cut for a card, and how it is launched.

A product with few rows of x is bound by memory, so loads must never wait: each thread asks for 16 bytes of codes of several rows of
the weight at once. Nor may arithmetic be long. At 4 bits and the full 4.8 TB/s of an H200 each of its 132 processors gets some 40
codes a clock, and can begin 128 instructions of one lane: three a code. Hence:

- An integer code is masked where it stands in its word and put into the mantissa of 2**23, by one instruction; 2**23 and the code of
  zero are subtracted, which is exact; a multiply-add follows. That is three. Shifting a code into place and converting it takes more.
- A level of NF4 or FP4 is looked up by a shuffle: lanes hold the levels. A table in memory goes through the same unit and needs an
  address for each code; choosing one of 16 by comparisons takes 15 instructions. A shuffle serves 32 lanes a clock, which leaves
  these schemes short of an H200's bandwidth, and of no smaller NVIDIA card's.
- Codes stay in the layout in which they were loaded; x is brought to it instead, and serves several rows of the weight there.

More rows take tensor cores, for which values pass through shared memory once. How many are few is reckoned, and not yet measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from course_lib.kernels.flash_attention import capability, machine_refusal
from course_lib.kernels.quantized_matmul_kernels import matmul_kernel, matvec_kernel, sum_kernel

#: Bits of a code, by scheme.
BITS = {"int8": 8, "int4": 4, "nf4": 4, "fp4": 4}
TABLE_SCHEMES = ("nf4", "fp4")

#: Up to so many rows of x are multiplied without tensor cores: four multiply-adds a code cost about as much as bringing values into
#: the layout that tensor cores take.
MATVEC_ROWS = 4

#: So many scales share a scale under double quantisation, as bitsandbytes has it.
_SCALE_BLOCK = 256
_MAGIC = 0x4B000000  # 2**23 in float32, as bits

#: Elements of the result that a program adds up the shares of.
SUM_BLOCK = 256


class Configuration(NamedTuple):
    """How a kernel is cut: rows of x and of the weight in a program, runs side by side, codes in a run, warps, pipeline stages."""

    block_m: int
    block_n: int
    lanes: int
    run: int
    num_warps: int
    num_stages: int


# By generation, for up to 16, 32 and 64 rows of x and for more: rows of x, rows of the weight, warps, stages. Hopper's and Blackwell's own
# instructions take 64 or 128 rows of the left factor, which is the weight.
_CONFIGURATIONS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "sm_80": ((16, 64, 4, 3), (32, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)),
    "sm_89": ((16, 64, 4, 2), (32, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2)),
    "sm_90": ((16, 64, 4, 4), (32, 64, 4, 4), (64, 64, 4, 4), (128, 128, 8, 3)),
    "sm_100": ((16, 64, 4, 4), (32, 64, 4, 4), (64, 64, 4, 4), (128, 128, 8, 3)),
    "gfx942": ((16, 64, 4, 2), (32, 64, 4, 2), (64, 64, 4, 1), (64, 64, 4, 1)),
    "float32": ((16, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
}
_GENERATIONS = {name: name for name in _CONFIGURATIONS} | {"sm_103": "sm_100", "gfx950": "gfx942"}


def configuration(rows: int, in_features: int, bits: int, dtype: torch.dtype, capability: str) -> Configuration:
    """Return how a product is cut for a card. It is looked up in a table picked by hand: no launch waits for tuning.

    Parameters
    ----------
    rows, in_features : int
        Of x.
    bits : int
        Of a code.
    dtype : torch.dtype
        Of x.
    capability : str
        ``"sm_90"``, ``"gfx942"``, ..., or ``"interpreter"``.
    """
    if rows <= MATVEC_ROWS:
        run = (128 if rows < 3 else 64) // bits  # 16 or 8 bytes
        # As many warps to a row of the weight as leave less than a quarter of them idle.
        width = 32 * run
        warps = next(
            one
            for one in (4, 2, 1)
            if one == 1 or 3 * triton.cdiv(in_features, one * width) * one * width <= 4 * in_features
        )
        return Configuration(triton.next_power_of_2(max(1, rows)), 8 if rows == 1 else 4, 32, run, warps, 1)
    column = (rows > 16) + (rows > 32) + (rows > 64)
    generation = "float32" if dtype == torch.float32 else _GENERATIONS.get(capability, "sm_89")
    block_m, block_n, num_warps, num_stages = _CONFIGURATIONS[generation][column]
    return Configuration(block_m, block_n, 16, 8, num_warps, num_stages)


def quantized_matmul_refusal(x: torch.Tensor, scheme: str, bias: torch.Tensor | None = None) -> str | None:
    """Return why `quantized_matmul` cannot run, as the end of a sentence, or None.

    Parameters
    ----------
    x : Tensor
        ``[..., in_features]``.
    scheme : str
        Of the weight.
    bias : Tensor, optional
        ``[out_features]``.
    """
    if scheme not in BITS:
        return f"the kernel multiplies by {', '.join(BITS)}, and the weight is {scheme}"
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernel computes in float16, bfloat16 or float32, and x is {x.dtype}"
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return "the kernel computes no gradients, and x or bias requires one; dequantise the weight, or use torch.no_grad()"
    older = torch.version.hip is None and x.is_cuda and torch.cuda.get_device_capability(x.device)[0] < 8
    if older and x.numel() > MATVEC_ROWS * x.shape[-1]:
        return f"more than {MATVEC_ROWS} rows need tensor cores, which Triton uses from compute capability 8.0 on"
    return machine_refusal(x, "x")


def quantized_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    scheme: str,
    shape: tuple[int, ...] | torch.Size,
    block_size: int,
    zero_point: torch.Tensor | None = None,
    scale_absmax: torch.Tensor | None = None,
    scale_offset: torch.Tensor | None = None,
    levels: torch.Tensor | None = None,
    scale_levels: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` for a quantised weight, without ever storing the weight's values.

    Parameters
    ----------
    x : Tensor
        ``[..., in_features]``, float16, bfloat16 or float32, in any strides; it is copied only if its rows are not evenly spaced or not
        contiguous.
    codes, scale, zero_point, scale_absmax, scale_offset : Tensor
        As a `course_lib.quantization.QuantizedTensor` holds them; bitsandbytes' packed weight and ``absmax`` are the first two.
    scheme : {"int8", "int4", "nf4", "fp4"}
        What the codes are.
    shape : tuple of int
        Of the weight: ``(out_features, in_features)``.
    block_size : int
        How many neighbours share a scale. Blocks of integers end with each row, or are the whole weight; those of NF4 and FP4 run on
        over the flattened weight.
    levels : Tensor, optional
        float32 ``[16]``, for NF4 and FP4: what a code means.
    scale_levels : Tensor, optional
        float32 ``[256]``, under double quantisation: what the code of a scale means.
    bias : Tensor, optional
        ``[out_features]``, floating.

    Returns
    -------
    Tensor
        ``[..., out_features]`` in the dtype of ``x``, contiguous. Up to `MATVEC_ROWS` rows are multiplied in float32; more by tensor
        cores, for which the weight's values are rounded to the dtype of ``x``, once. Float32 is multiplied in float32, never in TF32.
        Sums are in float32, in the same order in every run.

    Raises
    ------
    ValueError
        If tensors do not fit the scheme, the shape or one another, or the kernel cannot run here (`quantized_matmul_refusal`).

    Notes
    -----
    Derived in chapter 04. A row of codes that is not a whole number of 32-bit words, or a block that ends within one, is read code by
    code: right, and slow.
    """
    out_features, in_features = _check_weight(
        codes, scale, scheme, shape, block_size, zero_point, scale_absmax, scale_offset, levels, scale_levels
    )
    _check_inputs(x, codes, scheme, in_features, out_features, bias)
    flat = x.reshape(-1, in_features) if in_features else x.new_empty(x.shape[:-1].numel(), 0)
    flat = flat if in_features <= 1 or flat.stride(-1) == 1 else flat.contiguous()
    out = x.new_empty(len(flat), out_features)
    if out.numel():
        tensors = {"zero_ptr": zero_point, "levels_ptr": levels, "absmax_ptr": scale_absmax, "offset_ptr": scale_offset}
        tensors |= {"codes_ptr": codes, "scale_ptr": scale, "scale_levels_ptr": scale_levels}
        arguments = {name: None if one is None else one.contiguous() for name, one in tensors.items()}
        _launch(flat, out, None if bias is None else bias.contiguous(), scheme, block_size, arguments)
    return out.view(*x.shape[:-1], out_features)


class Plan(NamedTuple):
    """A product's launch: how it is cut, codes in a run and whether those are loaded together, runs or else codes in a stored row of
    the weight, tiles of the result (of rows of x, of the weight), runs of a program, and how many programs share a tile.
    """

    cut: Configuration
    run: int
    aligned: bool
    row_codes: int
    tiles: tuple[int, int]
    span: int
    shares: int


def plan(
    x: torch.Tensor,
    scheme: str,
    out_features: int,
    block_size: int,
    *,
    words: bool = True,
    capability: str,
    processors: int,
) -> Plan:
    """Return how a product is launched.

    Parameters
    ----------
    x : Tensor
        ``[rows, in_features]``.
    scheme, out_features, block_size
        Of the weight.
    words : bool
        Whether codes begin where a word of 32 bits may.
    capability : str
        ``"sm_90"``, ``"gfx942"``, ..., or ``"interpreter"``.
    processors : int
        Of the card. Columns are divided among programs only where half of them would have nothing to do.
    """
    (rows, in_features), bits = x.shape, BITS[scheme]
    cut, runs_on = (
        configuration(rows, in_features, bits, x.dtype, capability),
        _runs_on(scheme, block_size, in_features),
    )
    row_codes = in_features if runs_on or bits == 8 else in_features + in_features % 2
    run, in_one_block = cut.run, block_size >= in_features and not runs_on
    while run * bits >= 32 and (row_codes % run or not (in_one_block or block_size % run == 0)):
        run //= 2
    aligned = words and run * bits >= 32
    run = run if aligned else 4
    few = rows <= MATVEC_ROWS
    tiles = (1 if few else triton.cdiv(rows, cut.block_m), triton.cdiv(out_features, cut.block_n))
    step = cut.lanes * (cut.num_warps if few else 1)
    steps, programs = max(1, triton.cdiv(in_features, step * run)), tiles[0] * tiles[1]
    wanted = min(steps, 2 * processors // programs) if 2 * programs <= processors else 1
    each = triton.cdiv(steps, wanted)
    return Plan(
        cut, run, aligned, row_codes // run if aligned else row_codes, tiles, each * step, triton.cdiv(steps, each)
    )


def _launch(
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    scheme: str,
    block_size: int,
    arguments: dict[str, Any],
) -> None:
    """Launch a product, and where columns were divided among programs, the sum of their shares."""
    (rows, in_features), out_features = x.shape, out.shape[1]
    found = plan(
        x,
        scheme,
        out_features,
        block_size,
        words=arguments["codes_ptr"].data_ptr() % 4 == 0,
        capability=capability(),
        processors=_processors(x),
    )
    cut, runs_on = found.cut, _runs_on(scheme, block_size, in_features)
    if found.aligned:
        arguments["codes_ptr"] = arguments["codes_ptr"].view(-1).view(torch.int32)
    partial = out if found.shares == 1 else out.new_empty(found.shares, *out.shape, dtype=torch.float32)
    arguments |= {
        "x_ptr": x,
        "out_ptr": partial,
        "bias_ptr": bias if found.shares == 1 else None,
        "stride_x": x.stride(0),
        "rows": rows,
        "out_features": out_features,
        "in_features": in_features,
        "row_codes": found.row_codes,
        "row_blocks": None if runs_on else triton.cdiv(in_features, block_size),
        "span": found.span,
        "magic": _MAGIC,
        "BITS": BITS[scheme],
        # With one block to a row, one kernel for rows of any width.
        "BLOCK": block_size if runs_on or block_size < in_features else 2**30,
        "ALIGNED": found.aligned,
        "SHIFTED": found.aligned and arguments["levels_ptr"] is None and arguments["zero_ptr"] is None,
        "BLOCK_N": cut.block_n,
        "LANES": cut.lanes,
        "RUN": found.run,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
    }
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        if rows <= MATVEC_ROWS:
            matvec_kernel[(found.tiles[1], found.shares)](**arguments, BLOCK_M=cut.block_m, WARPS=cut.num_warps)
        else:
            matmul_kernel[(*found.tiles, found.shares)](**arguments, BLOCK_M=cut.block_m)
        if found.shares > 1:
            blocks = triton.cdiv(out.numel(), SUM_BLOCK)
            sum_kernel[(blocks,)](partial, bias, out, out_features, out.numel(), found.shares, BLOCK=SUM_BLOCK)


def _runs_on(scheme: str, block_size: int, in_features: int) -> bool:
    """Return whether blocks run on over the rows of the weight; of integers only a block of the whole weight does."""
    return scheme in TABLE_SCHEMES or block_size > in_features


def _processors(x: torch.Tensor) -> int:
    """Return the number of processors of a tensor's card, or where there is none an A100's."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 108


def _check_inputs(
    x: torch.Tensor, codes: torch.Tensor, scheme: str, in_features: int, out_features: int, bias: torch.Tensor | None
) -> None:
    """Raise a ValueError unless x and bias fit the weight and the kernel can run on them."""
    if x.ndim < 1 or x.shape[-1] != in_features:
        raise ValueError(f"x has shape {list(x.shape)}; [..., {in_features}] is needed, the weight's in_features last")
    if bias is not None and (bias.shape != (out_features,) or not bias.is_floating_point()):
        raise ValueError(f"bias is {bias.dtype} of shape {list(bias.shape)}; floating [{out_features}] is needed")
    for name, other in (("codes", codes), ("bias", bias)):
        if other is not None and other.device != x.device:
            raise ValueError(f"x is on {x.device} and {name} on {other.device}; they must be on one device")
    # Tensors without memory pass, so that a launch can be recorded instead of run.
    if x.device.type != "meta" and (reason := quantized_matmul_refusal(x, scheme, bias)):
        raise ValueError(f"x cannot be multiplied by the kernel: {reason}")


def _check_weight(
    codes: torch.Tensor,
    scale: torch.Tensor,
    scheme: str,
    shape: tuple[int, ...],
    block_size: int,
    zero_point: torch.Tensor | None,
    scale_absmax: torch.Tensor | None,
    scale_offset: torch.Tensor | None,
    levels: torch.Tensor | None,
    scale_levels: torch.Tensor | None,
) -> tuple[int, int]:
    """Return the weight's two sizes; raise a ValueError unless its tensors fit the scheme, the shape and one another."""
    if scheme not in BITS:
        raise ValueError(f"scheme is {scheme!r}; accepted are {', '.join(BITS)}")
    if len(shape) != 2:
        raise ValueError(f"shape is {tuple(shape)}; (out_features, in_features) is needed")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    (out_features, in_features), bits = shape, BITS[scheme]
    tables, runs_on = scheme in TABLE_SCHEMES, _runs_on(scheme, block_size, in_features)
    rows, columns = (1, out_features * in_features) if runs_on else (out_features, in_features)
    blocks = rows * -(-columns // block_size)
    double = scale_absmax is not None
    integer = torch.int8 if bits == 8 else torch.uint8
    absmaxes = -(-blocks // _SCALE_BLOCK) if double else None
    wanted: dict[str, tuple[torch.Tensor | None, torch.dtype, int | None]] = {
        "codes": (codes, integer, rows * -(-columns * bits // 8)),
        "scale": (scale, torch.uint8 if double else torch.float32, blocks),
        "zero_point": (zero_point, integer, blocks if zero_point is not None and not tables else None),
        "levels": (levels, torch.float32, 16 if tables else None),
        "scale_absmax": (scale_absmax, torch.float32, absmaxes if tables else None),
        "scale_offset": (scale_offset, torch.float32, 1 if double and tables else None),
        "scale_levels": (scale_levels, torch.float32, 256 if double and tables else None),
    }
    for name, (tensor, dtype, size) in wanted.items():
        found = "None" if tensor is None else f"{tensor.dtype} with {tensor.numel()} elements"
        if (None if tensor is None else (tensor.dtype, tensor.numel())) != (None if size is None else (dtype, size)):
            needed = "it must be None" if size is None else f"{dtype} with {size} is needed"
            raise ValueError(f"{name} is {found}; {needed} for {scheme} {list(shape)} in blocks of {block_size}")
        if tensor is not None and tensor.device != codes.device:
            raise ValueError(f"{name} is on {tensor.device} and codes on {codes.device}; they must be on one device")
    return out_features, in_features
