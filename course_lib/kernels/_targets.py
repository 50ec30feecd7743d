"""The cards that kernels are compiled for: their limits per block and per processor, and the occupancy that follows."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
CUDA_GUIDE = "CUDA C++ Programming Guide 13, table of technical specifications per compute capability"
CDNA_GUIDE = "AMD Instinct MI300 instruction set architecture guide; LLVM AMDGPU backend, code object metadata"


@dataclass(frozen=True)
class Target:
    """One generation of cards, as Triton names it, with what a kernel may use of it.

    A processor is NVIDIA's streaming multiprocessor or AMD's compute unit; a warp is AMD's wavefront. Both share their
    registers among four partitions of 512 registers a lane, handed out to a warp eight at a time.

    Attributes
    ----------
    name : str
        ``"sm_90"`` or ``"gfx942"``.
    cards : str
        Cards of this kind that people meet.
    backend, arch, warp_size : str, int or str, int
        What ``triton.backends.compiler.GPUTarget`` takes.
    shared_per_block, shared_per_processor, shared_reserved : int
        Bytes of shared memory: the most that one block may use, what a processor has, what the system takes a block.
    registers_per_thread : int
        The most that one thread may use.
    warps, blocks : int
        The most that are resident on a processor.
    instruction : str
        The matrix instruction that this generation is built around, as PTX or AMD's assembler spells it.
    source : str
        Where the limits come from.
    tensor_memory : int
        Columns of tensor memory a processor has (Blackwell; PTX ISA, section on tensor memory).
    """

    name: str
    cards: str
    backend: str
    arch: int | str
    warp_size: int
    shared_per_block: int
    shared_per_processor: int
    shared_reserved: int
    registers_per_thread: int
    warps: int
    blocks: int
    instruction: str
    source: str
    tensor_memory: int = 0


def _cuda(
    arch: int, cards: str, shared: int, reserved: int, warps: int, blocks: int, instruction: str, columns: int = 0
) -> Target:
    """Return an NVIDIA target; sizes in KiB."""
    sizes = (shared * KIB, (shared + reserved) * KIB, reserved * KIB)
    limits = (*sizes, 255, warps, blocks)
    return Target(f"sm_{arch}", cards, "cuda", arch, 32, *limits, instruction, CUDA_GUIDE, columns)


TARGETS = {
    target.name: target
    for target in (
        _cuda(75, "T4", 64, 0, 32, 16, "mma.sync"),
        _cuda(80, "A100", 163, 1, 64, 32, "mma.sync"),
        _cuda(89, "L4, RTX 4090", 99, 1, 48, 24, "mma.sync"),
        _cuda(90, "H100, H200", 227, 1, 64, 32, "wgmma"),
        _cuda(100, "B200", 227, 1, 64, 32, "tcgen05", columns=512),
        Target("gfx942", "MI300X", "hip", "gfx942", 64, 64 * KIB, 64 * KIB, 0, 512, 32, 16, "v_mfma", CDNA_GUIDE),
    )
}

PARTITIONS, REGISTERS_PER_LANE, REGISTER_UNIT, SHARED_UNIT = 4, 512, 8, 128


@dataclass(frozen=True)
class Occupancy:
    """How many blocks and warps a processor holds at once, and which resource allows no more."""

    blocks: int
    warps: int
    limited_by: str


def occupancy(target: Target, *, registers: int, shared_bytes: int, warps: int, tensor_memory: int = 0) -> Occupancy:
    """Compute how many blocks of a kernel one processor holds.

    Parameters
    ----------
    target : Target
        The card.
    registers : int
        Registers per thread, from the compiled object.
    shared_bytes : int
        Shared memory per block.
    warps : int
        Warps per block.
    tensor_memory : int
        Columns of tensor memory per block.

    Returns
    -------
    Occupancy
        Zero blocks where the kernel does not fit at all.

    Notes
    -----
    The rules are those of ``cuda_occupancy.h``, which NVIDIA ships with CUDA; AMD's register file follows the same ones.
    Used in the report of compiled kernels (book/compiled-kernels.md).
    """
    per_lane = max(1, -(-registers // REGISTER_UNIT)) * REGISTER_UNIT
    fits = per_lane * -(-warps // PARTITIONS) <= REGISTERS_PER_LANE and registers <= target.registers_per_thread
    shared = -(-(shared_bytes + target.shared_reserved) // SHARED_UNIT) * SHARED_UNIT
    limits = {
        "registers": REGISTERS_PER_LANE // per_lane * PARTITIONS // warps if fits else 0,
        "warps": target.warps // warps,
        "blocks": target.blocks,
    }
    if shared:
        limits["shared memory"] = (
            target.shared_per_processor // shared if shared_bytes <= target.shared_per_block else 0
        )
    if tensor_memory:
        limits["tensor memory"] = target.tensor_memory // tensor_memory
    limited_by = min(limits, key=lambda resource: limits[resource])
    blocks = limits[limited_by]
    return Occupancy(blocks, blocks * warps, limited_by)
