"""How a call of `course_lib.kernels.flash_decoding` is cut for a card and launched.

Functions
---------
launch
    Run the kernels on checked tensors.
kernel_refusal
    Why they cannot run on tensors.
configuration, splits, plan
    The blocks, warps and stages of the kernel on a card, among how many programs the keys of a sequence are divided, and both for a call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from course_lib.kernels.flash_attention import capability, laid_out_like, machine_refusal
from course_lib.kernels.flash_decoding_arguments import Codes, Rules, Store, shape
from course_lib.kernels.flash_decoding_kernel import merge_kernel, split_kernel

MAX_DIM = 256
#: Splits that are merged at once, and the most there are. A split takes at least so many blocks of keys.
MERGED, MOST_SPLITS, LEAST_BLOCKS = 16, 128, 2


class Configuration(NamedTuple):
    """How the kernel is cut for a card: keys in a block, warps, and stages of the pipeline."""

    block_n: int
    num_warps: int
    num_stages: int


# By generation, each for head_dim up to 64, 128 and 256. What counts is bytes under way: of the stages ahead of two programs side by
# side, half of what shared memory holds, which is more than bandwidth times latency. More programs at once would gain nothing.
_CONFIGURATIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "sm_80": ((128, 4, 2), (64, 4, 2), (32, 4, 2)),
    "sm_89": ((64, 4, 2), (32, 4, 2), (16, 4, 2)),
    "sm_90": ((128, 4, 3), (64, 4, 3), (32, 4, 3)),
    "sm_100": ((128, 4, 3), (64, 4, 3), (32, 4, 3)),
    "gfx942": ((64, 4, 2), (32, 4, 2), (16, 4, 2)),
    "small": ((32, 4, 1), (16, 4, 1), (16, 4, 1)),
}
_GENERATIONS = {"sm_103": "sm_100", "gfx950": "gfx942"}
#: Programs that a processor runs side by side.
RESIDENT = 2


def configuration(dim: int, block_m: int, dtype: torch.dtype, card: str) -> Configuration:
    """Return how the kernel is cut for a card. It is looked up in a table picked by hand: no launch waits for tuning.

    Parameters
    ----------
    dim : int
        The larger of head_dim and value_dim.
    block_m : int
        Rows of a program's tile.
    dtype : torch.dtype
        That of the queries.
    card : str
        ``"sm_90"``, ``"gfx942"``, ..., or ``"interpreter"``.
    """
    if card == "interpreter":
        return Configuration(16, 4, 1)
    newer = card.startswith("sm_") and int(card[3:].rstrip("af")) >= 80
    generation = card if card in _CONFIGURATIONS else _GENERATIONS.get(card, "sm_89" if newer else "small")
    cut = Configuration(*_CONFIGURATIONS[generation][(dim > 64) + (dim > 128)])
    if dtype == torch.float32:
        return cut._replace(block_n=max(16, cut.block_n // 2), num_warps=8)
    return cut._replace(num_warps=8) if block_m > 32 else cut


def splits(programs: int, blocks: int, slots: int) -> int:
    """Return among how many programs the keys of each sequence are divided.

    Parameters
    ----------
    programs : int
        What there is to do without: one program for each sequence and key head.
    blocks : int
        Blocks of keys of the longest sequence.
    slots : int
        Programs that the card runs at once.

    Notes
    -----
    Programs run in waves, each as long as a program's share of the blocks. It is the fewest splits that come within a twentieth
    of the shortest time, since each writes a part that must be merged.
    """
    most = max(1, min(MOST_SPLITS, blocks // LEAST_BLOCKS))
    times = [-(-programs * count // slots) * -(-blocks // count) for count in range(1, most + 1)]
    return next(count for count, time in enumerate(times, 1) if time <= 1.05 * min(times))


def kernel_refusal(q: torch.Tensor, k: Store, v: Store, paged: bool) -> str | None:
    """Return why the kernel cannot run on tensors, as the end of a sentence, or None."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernel computes in float16, bfloat16 or float32, and q is {q.dtype}"
    needed = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v) if isinstance(x, torch.Tensor))
    if needed:
        return "q, k or v requires a gradient, which the kernel does not compute"
    for name, dim in (("head_dim", q.shape[-1]), ("value_dim", shape(v)[-1])):
        if dim > MAX_DIM:
            return f"the kernel takes a {name} of at most {MAX_DIM}, and it is {dim}"
    for name, store, axis in (("k", k, "channel"), ("v", v, "token")):
        if isinstance(store, Codes):
            if paged:
                return f"the kernel takes no codes with a block table, and {name} is codes"
            if store.axis != axis:
                return f'the kernel takes codes of {name} by {axis}, and their axis is "{store.axis}"'
            if axis == "channel" and store.group % 16:
                return f"the kernel takes groups of multiples of 16 tokens, and those of {name} have {store.group}"
    if (k.bits if isinstance(k, Codes) else 0) != (v.bits if isinstance(v, Codes) else 0):
        return "the kernel takes keys and values that are both codes of as many bits, or neither is"
    return None if q.device.type == "meta" else machine_refusal(q, "q")


def multiprocessors(device: torch.device) -> int:
    """Return how many processors a card has; for tensors without memory as many as an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class Plan(NamedTuple):
    """How a call is launched.

    Attributes
    ----------
    cut : Configuration
        How the kernel is cut.
    block_m, blocks : int
        Rows in a program's tile, and tiles of the rows of a group.
    splits : int
        Among how many programs the keys of a sequence are divided.
    window : int or None
        The window, if it hides anything.
    """

    cut: Configuration
    block_m: int
    blocks: int
    splits: int
    window: int | None


def plan(q: torch.Tensor, k: Store, v: Store, capacity: int, paged: bool, rules: Rules) -> Plan:
    """Return how a call is launched on the card of its tensors, whose sequences have at most ``capacity`` keys."""
    batch, query_heads, rows, head_dim = q.shape
    kv_heads, dim = shape(k)[1], max(head_dim, shape(v)[3])
    # So many rows that keys are read once, or few times; accumulators must stay in registers.
    together = query_heads // kv_heads * rows
    block_m = min(max(16, triton.next_power_of_2(together)), 32 if dim > 128 else 64)
    blocks = triton.cdiv(together, block_m)
    cut = configuration(dim, block_m, q.dtype, capability())
    if isinstance(k, Codes):
        # A block has one row of scales: its keys are the largest power of two in a group of keys, at most.
        cut = cut._replace(block_n=min(cut.block_n, k.group & -k.group), num_stages=1)
    if paged:
        # Each block waits for its entry of the table: Triton's pipeline takes twice the stages to be as many blocks ahead.
        cut = cut._replace(num_stages=2 * cut.num_stages - 1)
    window = None if rules.window is None or rules.window >= capacity + rules.ahead else rules.window
    visited = capacity if window is None else min(capacity, window + rows + rules.sinks + 2 * cut.block_n)
    programs, slots = batch * kv_heads * blocks, multiprocessors(q.device) * RESIDENT
    return Plan(cut, block_m, blocks, splits(programs, triton.cdiv(visited, cut.block_n), slots), window)


def launch(
    q: torch.Tensor,
    k: Store,
    v: Store,
    lengths: torch.Tensor | None,
    table: torch.Tensor | None,
    rules: Rules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels. Arguments are taken as `course_lib.kernels.flash_decoding.flash_decoding` checks them."""
    batch, query_heads, rows, head_dim = q.shape
    _, kv_heads, tokens, value_dim = shape(v)
    capacity = tokens if table is None else tokens * table.shape[1]
    output = laid_out_like(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if not output.numel():
        return output, lse
    cut, block_m, blocks, parts, window = plan(q, k, v, capacity, table is not None, rules)
    size = batch * query_heads * rows
    found, sums = output, lse
    if parts > 1:
        found = q.new_empty(parts, batch, query_heads, rows, value_dim, dtype=torch.float32)
        sums = q.new_empty(parts, batch, query_heads, rows, dtype=torch.float32)
    bits = k.bits if isinstance(k, Codes) else 0
    careful = q.dtype == torch.float32
    unit = 1.0 if careful else 1.4426950408889634  # log2(e)
    slopes = None if rules.slopes is None else rules.slopes.float().contiguous()
    words = all(isinstance(store, Codes) and _in_words(store.codes) for store in (k, v))
    arguments: dict[str, Any] = {
        "q_ptr": q,
        **_store("k", k, words),
        **_store("v", v, words),
        "lengths_ptr": None if lengths is None else lengths.contiguous(),
        "table_ptr": table,
        "slopes_ptr": slopes,
        "out_ptr": found,
        "lse_ptr": sums,
        **_strides("q", "bhmd", q.stride()),
        **_strides("o", "bhm", found.stride()[-4:-1]),
        "stride_os": found.stride(0) if parts > 1 else 0,
        **_strides("l", "bh", sums.stride()[-3:-1]),
        "stride_ls": sums.stride(0) if parts > 1 else 0,
        **_strides("t", "bn", (0, 0) if table is None else table.stride()),
        "stride_ab": 0 if slopes is None or len(slopes) == 1 else slopes.stride(0),
        "blocks": blocks,
        "kv_heads": kv_heads,
        "splits": parts,
        "group": query_heads // kv_heads,
        "rows": rows,
        "capacity": capacity,
        "ahead": rules.ahead,
        "window": window or 0,
        "sinks": min(rules.sinks, capacity),
        "inner": rules.scale / rules.softcap if rules.softcap else rules.scale * unit,
        "outer": rules.softcap * unit if rules.softcap else 1.0,
        "magic": 127 + bits << 23,
        "WINDOW": window is not None,
        "SOFTCAP": rules.softcap is not None,
        "ALIBI": slopes is not None,
        "CAREFUL": careful,
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        "BITS": bits,
        "WORD": 4 if words else 1,
        "V_GROUPS": _groups(v),
        "PAGE": 0 if table is None else tokens,
        "WIDE": max(_reach(one, cut.block_n) for one in (k, v)) >= 2**31,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": _width(head_dim),
        "BLOCK_DV": _width(value_dim),
        "BLOCK_M": block_m,
        "BLOCK_N": cut.block_n,
    }
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        split_kernel[(blocks * parts * kv_heads * batch,)](
            **arguments, num_warps=cut.num_warps, num_stages=cut.num_stages
        )
        if parts > 1:
            merge_kernel[(size,)](
                found, sums, output, lse, *output.stride()[:3], query_heads, rows, parts, size,
                VALUE_DIM=value_dim, BLOCK_DV=triton.next_power_of_2(value_dim),
                BLOCK_S=min(MERGED, triton.next_power_of_2(parts)), num_warps=4,
            )  # fmt: skip
    return output, lse


def _store(name: str, store: Store, words: bool) -> dict[str, Any]:
    """Return what the kernel takes of keys or values."""
    tensor, scale, offset, group = store, None, None, 0
    if isinstance(store, Codes):
        tensor, scale, offset, group = store.codes, store.scale, store.offset, store.group
        if scale.stride() != offset.stride():
            scale, offset = scale.contiguous(), offset.contiguous()
    assert isinstance(tensor, torch.Tensor)
    if words:
        tensor = tensor.view(torch.int32)
    return {
        f"{name}_ptr": tensor,
        f"{name}_scale_ptr": scale,
        f"{name}_offset_ptr": offset,
        **_strides(name, "bhnd", tensor.stride()),
        **_strides(f"{name}s", "bhnd", (0,) * 4 if scale is None else scale.stride()),
        f"{name.upper()}_GROUP": group,
    }


def _groups(store: Store) -> int:
    """Return how many constants of a row of values the kernel loads, a power of two: if it can those of the padding too."""
    if not isinstance(store, Codes):
        return 0
    dim = shape(store)[3]
    power = store.group & (store.group - 1) == 0
    return _width(dim) // store.group if power else int(triton.next_power_of_2(dim // store.group))


def _width(dim: int) -> int:
    """Return a head's size in the kernel: tensor cores take at least 16."""
    return max(16, int(triton.next_power_of_2(dim)))


def _in_words(codes: torch.Tensor) -> bool:
    """Tell whether codes can be loaded four bytes at a time."""
    whole = all(number % 4 == 0 for number in (codes.shape[3], codes.storage_offset(), *codes.stride()[:3]))
    return whole and codes.stride(3) == 1


def _reach(store: Store, block_n: int) -> int:
    """Return how many elements a tile spans."""
    tensor = store.codes if isinstance(store, Codes) else store
    return tensor.stride(2) * block_n + tensor.stride(3) * tensor.shape[3]


def _strides(name: str, axes: str, strides: tuple[int, ...]) -> dict[str, int]:
    """Return strides as arguments of the kernel."""
    return {f"stride_{name}{axis}": stride for axis, stride in zip(axes, strides, strict=True)}
