"""The uses of the kernels that are compiled for every card: each calls a kernel module as production does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from course_lib.kernels._targets import TARGETS
from course_lib.kernels.rope_arguments import LAYOUTS, Layout

NEWER = tuple(name for name in TARGETS if name != "sm_75")


@dataclass(frozen=True)
class CompileCase:
    """One use of a kernel module.

    Attributes
    ----------
    name : str
        For people and for the report, for example ``"attention bfloat16 128 causal"``.
    launch : callable
        Calls the module as production does, with tensors on the device ``"meta"``. It may launch several kernels; each is
        compiled.
    matrix : str
        Which matrix instruction every kernel of it that multiplies must use: the card's ``"own"``, ``"any"`` that it has, or
        ``"none"``. TF32 takes so much room that its tiles can be smaller than Hopper's own instruction needs.
    targets : tuple of str
        The cards it is compiled for.
    """

    name: str
    launch: Callable[[], object]
    matrix: str = "own"
    targets: tuple[str, ...] = NEWER


def compile_cases() -> Iterator[CompileCase]:
    """Yield the cases of every kernel module."""
    yield from _flash_attention()
    yield from _rope()
    yield from _quantized_matmul()
    yield from _flash_decoding()


def _flash_attention() -> Iterator[CompileCase]:
    half, full = torch.bfloat16, torch.float32
    for head_dim in (64, 128, 256):
        attend = partial(_attend, head_dim=head_dim)
        yield CompileCase(f"attention bfloat16 {head_dim} causal", partial(attend, half, causal=True))
        yield CompileCase(f"attention bfloat16 {head_dim} full", partial(attend, half, backward=False))
        yield CompileCase(f"attention bfloat16 {head_dim} additive mask", partial(attend, half, mask=half))
        # float16 is cut as bfloat16 is.
        yield CompileCase(
            f"attention float16 {head_dim} causal", partial(attend, torch.float16, causal=True, backward=False)
        )
        yield CompileCase(f"attention float32 {head_dim} causal", partial(attend, full, causal=True), matrix="none")
        tf32 = partial(attend, full, causal=True, tf32=True)
        yield CompileCase(f"attention float32 {head_dim} causal TF32", tf32, matrix="any")
    window, softcap, alibi = {"sliding_window": 1024}, {"softcap": 50.0}, {"alibi": True}
    features: dict[str, dict[str, Any]] = {
        "window": window | {"backward": False},
        "softcap": softcap | {"backward": False},
        "ALiBi": alibi | {"backward": False},
        "boolean mask": {"mask": torch.bool, "backward": False},
        "packed": {"packed": True, "backward": False},
        "packed, window, softcap, ALiBi": {"packed": True} | window | softcap | alibi,
    }
    for feature, options in features.items():
        yield CompileCase(
            f"attention bfloat16 128 causal, {feature}", partial(_attend, half, head_dim=128, causal=True, **options)
        )
    for head_dim in (64, 128):
        launch = partial(_attend, torch.float16, head_dim=head_dim, causal=True, backward=False)
        yield CompileCase(f"attention float16 {head_dim} causal, T4", launch, matrix="none", targets=("sm_75",))


def _rope() -> Iterator[CompileCase]:
    uses: dict[str, dict[str, Any]] = {
        "bfloat16": {"dtype": torch.bfloat16},
        "bfloat16, gradient": {"dtype": torch.bfloat16, "gradient": True},
        "float32, in place": {"dtype": torch.float32, "inplace": True},
        "float16, partial": {"dtype": torch.float16, "pairs": 16},
    }
    for layout in LAYOUTS:
        for use, options in uses.items():
            targets = NEWER if options["dtype"] == torch.bfloat16 else tuple(TARGETS)
            yield CompileCase(f"rope {layout} {use}", partial(_turn, layout, **options), "none", targets)


def _quantized_matmul() -> Iterator[CompileCase]:
    half = torch.bfloat16
    schemes: dict[str, dict[str, Any]] = {
        "int8 rows": {"scheme": "int8", "block_size": 4096},
        "int4 128": {"scheme": "int4", "block_size": 128},
        "int4 64 zero-point": {"scheme": "int4", "block_size": 64, "zero_point": True},
        "nf4 64": {"scheme": "nf4", "block_size": 64},
        "nf4 64 double": {"scheme": "nf4", "block_size": 64, "double_quant": True},
    }
    for name, options in schemes.items():
        for rows, matrix in ((1, "none"), (16, "own"), (512, "own")):
            launch = partial(_multiply, rows, half, **options)
            yield CompileCase(f"quantised {name} bfloat16, rows {rows}", launch, matrix)
    nf4 = schemes["nf4 64"]
    for rows in (2, 4):
        yield CompileCase(f"quantised nf4 64 bfloat16, rows {rows}", partial(_multiply, rows, half, **nf4), "none")
    few, many = (partial(_multiply, rows, torch.float16, **nf4) for rows in (1, 512))
    yield CompileCase("quantised nf4 64 float16, rows 1", few, "none", tuple(TARGETS))
    yield CompileCase("quantised nf4 64 float16, rows 512", many)
    for rows in (1, 512):
        launch = partial(_multiply, rows, torch.float32, **nf4)
        yield CompileCase(f"quantised nf4 64 float32, rows {rows}", launch, "none")
    divided = partial(_multiply, 16, half, out_features=1024, **nf4)
    yield CompileCase("quantised nf4 64 bfloat16, rows 16, columns divided", divided)
    # Neither rows of codes nor blocks end where words do.
    uneven = partial(_multiply, 1, half, in_features=4097, **nf4)
    yield CompileCase("quantised nf4 64 bfloat16, rows 1, uneven", uneven, "none")


def _flash_decoding() -> Iterator[CompileCase]:
    half, full = torch.bfloat16, torch.float32
    paged = {"paged": True}
    uses: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        **{f"bfloat16 {head_dim}": (half, {"head_dim": head_dim}) for head_dim in (64, 128, 256)},
        **{f"float32 {head_dim}": (full, {"head_dim": head_dim}) for head_dim in (64, 128, 256)},
        "bfloat16 128, paged": (half, paged),
        "bfloat16 128, 16 rows": (half, {"rows": 16}),
        "bfloat16 128, window, sinks": (half, {"sliding_window": 1024, "sinks": 4}),
        "bfloat16 128, paged, window, softcap, ALiBi": (
            half,
            paged | {"sliding_window": 1024, "softcap": 50.0, "alibi": True},
        ),
        **{
            f"bfloat16 {head_dim}, int{bits}": (half, {"head_dim": head_dim, "bits": bits})
            for head_dim in (64, 128)
            for bits in (8, 4)
        },
        "float32 64, int8": (full, {"head_dim": 64, "bits": 8}),
    }
    for use, (dtype, options) in uses.items():
        # With 16 rows of the tensor cores' own smallest size a Hopper or Blackwell card uses those of its predecessors.
        yield CompileCase(f"decoding {use}", partial(_decode, dtype, **options), "any" if dtype == half else "none")
    yield CompileCase("decoding float16 64", partial(_decode, torch.float16, head_dim=64), "none", ("sm_75",))


def _decode(
    dtype: torch.dtype,
    *,
    head_dim: int = 128,
    rows: int = 1,
    bits: int = 0,
    paged: bool = False,
    alibi: bool = False,
    **rules: Any,
) -> None:
    """Attend with new tokens of one sequence to 4,096 stored ones, 32 query heads on 8 key heads: split, and merged."""
    from course_lib.kernels.flash_decoding import Codes, flash_decoding

    kv_heads, tokens, group = 8, 4096, 64
    codes = (1, kv_heads, tokens, head_dim * bits // 8)
    constants = {"channel": (1, kv_heads, tokens // group, head_dim), "token": (1, kv_heads, tokens, head_dim // group)}

    def store(axis: Literal["channel", "token"]) -> torch.Tensor | Codes:
        if bits:
            scale, offset = (_meta(*constants[axis], dtype=torch.bfloat16) for _ in range(2))
            return Codes(_meta(*codes, dtype=torch.uint8), scale, offset, bits, group, axis)
        return _meta(*((tokens // 16, kv_heads, 16) if paged else (1, kv_heads, tokens)), head_dim, dtype=dtype)

    with torch.no_grad():
        flash_decoding(
            _meta(1, 32, rows, head_dim, dtype=dtype),
            store("channel"),
            store("token"),
            lengths=_meta(1, dtype=torch.int32),
            block_table=_meta(1, tokens // 16, dtype=torch.int32) if paged else None,
            alibi_slopes=_meta(32) if alibi else None,
            backend="triton",
            **rules,
        )


def _multiply(
    rows: int,
    dtype: torch.dtype,
    *,
    scheme: str,
    block_size: int,
    zero_point: bool = False,
    double_quant: bool = False,
    out_features: int = 4096,
    in_features: int = 4096,
) -> None:
    """Multiply rows of x by a weight as large as that of the queries of Llama 3 8B, or with so few rows that columns are divided."""
    from course_lib.kernels.quantized_matmul import BITS, TABLE_SCHEMES, quantized_matmul

    shape = (out_features, in_features)
    count = -(-shape[0] * in_features // block_size)
    integer = torch.int8 if scheme == "int8" else torch.uint8
    absmax = {"scale_absmax": _meta(-(-count // 256)), "scale_offset": _meta(1), "scale_levels": _meta(256)}
    quantized_matmul(
        _meta(rows, in_features, dtype=dtype),
        _meta(-(-shape[0] * in_features * BITS[scheme] // 8), dtype=integer),
        _meta(count, dtype=torch.uint8 if double_quant else torch.float32),
        scheme=scheme,
        shape=shape,
        block_size=block_size,
        zero_point=_meta(count, dtype=integer) if zero_point else None,
        levels=_meta(16) if scheme in TABLE_SCHEMES else None,
        **(absmax if double_quant else {}),
    )


def _turn(
    layout: Layout, dtype: torch.dtype, *, pairs: int = 64, inplace: bool = False, gradient: bool = False
) -> None:
    """Turn 32 query heads and 8 key heads of 128 over 4,096 tokens, laid out as projections leave them, or their gradients."""
    from course_lib.kernels import rope

    batch, length, head_dim = 2, 4096, 128
    q, k = (_meta(batch, length, heads, head_dim, dtype=dtype).detach().transpose(1, 2) for heads in (32, 8))
    cos, sin = (_meta(length, pairs).detach() for _ in range(2))
    if gradient:
        rope.Rotation.apply(cos, sin, layout, True, q, k)  # type: ignore[no-untyped-call]
    else:
        rope.rope_qk(q, k, cos, sin, layout=layout, inplace=inplace)


def _attend(
    dtype: torch.dtype,
    *,
    head_dim: int,
    causal: bool = False,
    mask: torch.dtype | None = None,
    alibi: bool = False,
    packed: bool = False,
    tf32: bool = False,
    backward: bool = True,
    **rules: Any,
) -> None:
    """Attend with 8 query heads on 2 key heads over 4,096 tokens, there and back."""
    from course_lib.kernels import flash_attention

    batch, heads, length = 2, 8, 4096
    rules |= {"causal": causal, "scale": head_dim**-0.5}
    rules["alibi_slopes"] = _meta(1, heads) if alibi else None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        if packed:
            q, k, v = (_meta(batch * length, count, head_dim, dtype=dtype) for count in (heads, 2, 2))
            starts = _meta(batch + 1, dtype=torch.int32)
            lengths: dict[str, Any] = {
                "cu_seqlens_q": starts,
                "cu_seqlens_k": starts,
                "max_seqlen_q": length,
                "max_seqlen_k": length,
            }
            output, _ = flash_attention.flash_attention_varlen(q, k, v, **lengths, **rules)
        else:
            q, k, v = (_meta(batch, count, length, head_dim, dtype=dtype) for count in (heads, 2, 2))
            attention_mask = None if mask is None else _meta(batch, 1, length, length, dtype=mask)
            output, _ = flash_attention.flash_attention(q, k, v, attention_mask=attention_mask, **rules)
        if backward:
            torch.autograd.backward(output, torch.empty_like(output))
    finally:
        torch.set_float32_matmul_precision(before)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
