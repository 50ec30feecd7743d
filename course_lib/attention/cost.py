"""What attention costs: operations, bytes that travel between main memory and chip, and room on the chip.

Everything is for one head of one sequence and is arithmetic; no tensor is touched. Chapter 05
(notebooks/05-flash-attention.ipynb) derives the counts and compares them with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.memory.units import whole

STATISTIC_BYTES = 4  # maxima, sums and accumulators are float32


@dataclass(frozen=True)
class Cost:
    """Operations and traffic of a piece of work; costs add up with ``+``.

    Attributes
    ----------
    flops : int
        Floating-point operations. A multiplication and the addition after it are two; an exponential, a comparison and a
        division are one each.
    bytes : int
        What is read from and written to main memory.
    """

    flops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in operations per byte."""
        return self.flops / self.bytes

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Return the least time that a machine needs: arithmetic and traffic overlap at best (the roofline).

        Notes
        -----
        S. Williams, A. Waterman, D. Patterson, "Roofline", Communications of the ACM 52(4), 2009.
        """
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


def standard_steps(query_len: int, kv_len: int, head_dim: int, *, itemsize: int = 2) -> dict[str, Cost]:
    """Count ordinary attention in three steps, each of which reads its inputs from memory and writes its result back.

    Parameters
    ----------
    query_len, kv_len, head_dim : int
        Lengths and size of the head; values are as wide as keys.
    itemsize : int
        Bytes of one number, scores included.

    Returns
    -------
    dict of str to Cost
        ``"scores"``, ``"softmax"`` and ``"output"``, in this order; ``sum(..., Cost(0, 0))`` is the whole. Softmax takes
        six operations a score: scaling, maximum, difference, exponential, sum, quotient. That is the least traffic of an unfused
        program; one that scales, masks or converts in passes of its own moves more.

    Raises
    ------
    ValueError
        If a size is not a whole number of at least 1.

    Notes
    -----
    Algorithm 0 of T. Dao et al., "FlashAttention", 2022.
    """
    _check(query_len=query_len, kv_len=kv_len, head_dim=head_dim, itemsize=itemsize)
    matrix, queries, keys = query_len * kv_len, query_len * head_dim, kv_len * head_dim
    return {
        "scores": Cost(2 * matrix * head_dim, (queries + keys + matrix) * itemsize),
        "softmax": Cost(6 * matrix, 2 * matrix * itemsize),
        "output": Cost(2 * matrix * head_dim, (matrix + keys + queries) * itemsize),
    }


def standard_cost(query_len: int, kv_len: int, head_dim: int, *, itemsize: int = 2) -> Cost:
    """Count ordinary attention: the sum of :func:`standard_steps`, whose parameters and errors it has."""
    return sum(standard_steps(query_len, kv_len, head_dim, itemsize=itemsize).values(), Cost(0, 0))


def flash_cost(
    query_len: int,
    kv_len: int,
    head_dim: int,
    *,
    block_q: int = 128,
    block_k: int = 64,
    itemsize: int = 2,
    causal: bool = False,
    keys_once: bool = False,
) -> Cost:
    """Count flash attention: for each block of queries, all blocks of keys that it may see pass through the chip.

    Parameters
    ----------
    query_len, kv_len, head_dim, itemsize : int
        As for :func:`standard_steps`.
    block_q, block_k : int
        Queries and keys of a block.
    causal : bool
        Whether blocks that lie wholly in the future are skipped. The blocks on the diagonal are computed whole.
    keys_once : bool
        Count each key and value once, as if a cache kept them for all blocks of queries: the least possible traffic. Otherwise
        they are counted as often as they are asked for, which is what a machine without such a cache moves.

    Returns
    -------
    Cost
        Beside the two products, five operations a score (scaling, maximum, difference, exponential, sum), ``head_dim + 5`` for each
        query and block of keys (the correction of sum and accumulator), and ``head_dim + 3`` for each query at the end (quotients
        and log-sum-exp).

    Raises
    ------
    ValueError
        If a size is not a whole number of at least 1.

    Notes
    -----
    The order of loops, and the quotient taken once at the end, are those of T. Dao, "FlashAttention-2", 2023.
    """
    _check(query_len=query_len, kv_len=kv_len, head_dim=head_dim, itemsize=itemsize, block_q=block_q, block_k=block_k)
    flops = fetched = most = 0
    for first in range(0, query_len, block_q):
        rows = min(block_q, query_len - first)
        visible = max(0, min(kv_len, kv_len - query_len + first + rows)) if causal else kv_len
        blocks = -(-visible // block_k)
        keys = min(kv_len, blocks * block_k)
        flops += rows * keys * (4 * head_dim + 5) + rows * blocks * (head_dim + 5) + rows * (head_dim + 3)
        fetched += keys
        most = max(most, keys)
    keys_and_values = 2 * (most if keys_once else fetched) * head_dim * itemsize
    queries_and_output = 2 * query_len * head_dim * itemsize
    return Cost(flops, keys_and_values + queries_and_output + query_len * STATISTIC_BYTES)


def on_chip_bytes(
    head_dim: int, *, block_q: int = 128, block_k: int = 64, itemsize: int = 2, stages: int = 1
) -> tuple[int, int]:
    """Return what one block of queries occupies on the chip while keys pass: in shared memory and in registers.

    Parameters
    ----------
    head_dim, block_q, block_k, itemsize : int
        As for :func:`flash_cost`.
    stages : int
        Blocks of keys and values in flight: one is used while others arrive.

    Returns
    -------
    shared : int
        Bytes of the queries and of ``stages`` blocks of keys and of values.
    registers : int
        Bytes of accumulator, scores, maximum and sum, in float32.

    Raises
    ------
    ValueError
        If a size is not a whole number of at least 1.
    """
    _check(head_dim=head_dim, block_q=block_q, block_k=block_k, itemsize=itemsize, stages=stages)
    shared = (block_q + 2 * stages * block_k) * head_dim * itemsize
    return shared, block_q * (head_dim + block_k + 2) * STATISTIC_BYTES


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        whole(size, name, least=1)
