"""Error-compensated rounding: each column's rounding error is made up for by the columns not yet rounded.

GPTQ (Frantar et al., arXiv:2210.17323), derived in chapter 04.
"""

from __future__ import annotations

import torch

from course_lib.quantization import integer
from course_lib.quantization.functional import check_options, check_tensor
from course_lib.quantization.packing import split
from course_lib.quantization.tensor import INTEGER_BITS, QuantizedTensor

#: Share of the Hessian's mean diagonal that is added to all of it, as in the paper.
DAMPING = 0.01

#: Columns after which the rest of a matrix is brought up to date in one product.
_CHUNK = 128


class Hessian:
    """The sum of outer products of a layer's inputs: how much an error in one column of its weight disturbs its outputs.

    Parameters
    ----------
    features : int
        Of the inputs.
    device : torch.device or str
        Where it is kept, in float64: ``8 * features**2`` bytes.

    Attributes
    ----------
    matrix : Tensor
        float64 ``[features, features]``.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.zeros(features, features, dtype=torch.float64, device=device)

    def add(self, inputs: torch.Tensor) -> None:
        """Count inputs ``[..., features]``.

        Raises
        ------
        ValueError
            If some are NaN or infinite.
        """
        check_tensor(inputs, "inputs")
        rows = inputs.detach().reshape(-1, len(self.matrix)).double()
        self.matrix.addmm_(rows.T, rows)


def quantize_compensated(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scheme: str,
    *,
    block_size: int | str = 64,
    zero_point: bool = False,
    damping: float = DAMPING,
) -> QuantizedTensor:
    """Quantise a linear layer's weight so that its outputs change little on inputs like those of the Hessian.

    Parameters
    ----------
    weight : Tensor
        float32, float16 or bfloat16 ``[out_features, in_features]``, finite.
    hessian : Tensor
        ``[in_features, in_features]``, of `Hessian` or any multiple of it.
    scheme : {"int8", "int4", "int3", "int2"}
        As for `quantize`.
    block_size : int or "row"
        Columns of a row that share a scale.
    zero_point : bool
        As for `quantize`.
    damping : float
        Share of the mean of the Hessian's diagonal that is added to its diagonal: more trusts the calibration less.

    Returns
    -------
    QuantizedTensor
        Stored as `quantize` stores it, of the same size. Computed in float64, with the same result every time.

    Raises
    ------
    TypeError, ValueError
        As `quantize` raises them; ValueError also if a shape does not fit, the Hessian is not finite or not positive definite, or the damping is not
        positive.

    Notes
    -----
    Where inputs are uncorrelated the result is plain rounding. Columns are rounded from the largest inputs to the smallest, on
    the grids of plain rounding, so that no order of columns needs to be stored; on the course's models this loses less than
    the order of the columns with grids fitted on the way.
    """
    check_options(scheme, block_size, zero_point, False, tuple(INTEGER_BITS))
    check_tensor(weight, "weight")
    if weight.ndim != 2 or hessian.shape != (weight.shape[1], weight.shape[1]):
        raise ValueError(
            f"weight has shape {list(weight.shape)} and hessian {list(hessian.shape)}; "
            "[out_features, in_features] and [in_features, in_features] are needed"
        )
    if block_size == "tensor":
        raise ValueError("block_size is 'tensor'; with calibration a whole number and 'row' are accepted")
    if not damping > 0:
        raise ValueError(f"damping is {damping}; a positive number is needed")
    with torch.no_grad():
        if not weight.numel():
            return integer.quantize(weight, scheme, block_size, zero_point)
        # The columns that matter most go first, while all others can still make up for them.
        order = hessian.diagonal().argsort(descending=True, stable=True)
        factor = _inverse_factor(hessian[order][:, order], damping)
        size = weight.shape[1] if isinstance(block_size, str) else min(block_size, weight.shape[1])
        return round_columns(weight, order, factor, scheme, size, zero_point)


def _inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper triangular U with ``U.T @ U`` the inverse of the damped Hessian, in float64.

    Row i of U, divided by its diagonal, says how the columns after i make up for an error in column i.
    """
    matrix = hessian.double()
    if not matrix.isfinite().all():
        raise ValueError("hessian has values that are NaN or infinite; all must be finite")
    mean = float(matrix.diagonal().mean())
    # Inputs that were always zero make no difference; the identity leaves plain rounding.
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    damped = matrix + damping * mean * identity if mean > 0 else identity
    # With both axes reversed, Cholesky's lower factor is the upper R with H = R R^T, and U = 1/R needs no inverse of H.
    lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if failed:
        raise ValueError("hessian is not positive definite, as every sum of outer products is once damped")
    factor: torch.Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    return factor


def round_columns(
    weight: torch.Tensor, order: torch.Tensor, factor: torch.Tensor, scheme: str, size: int, zero_point: bool
) -> QuantizedTensor:
    """Round column by column in the order given, each block of `size` columns on the grids that plain rounding has."""
    grid = integer.fit(split(weight.float(), size), INTEGER_BITS[scheme], zero_point)
    left = weight.double()[:, order]
    codes = torch.empty_like(left)
    columns = len(order)
    blocks = (order // size).tolist()
    for first in range(0, columns, _CHUNK):
        last = min(first + _CHUNK, columns)
        errors = torch.empty_like(left[:, first:last])
        for column in range(first, last):
            own = grid.block(blocks[column])
            chosen = own.codes(left[:, column])
            error = (left[:, column] - own.values(chosen)) / factor[column, column]
            left[:, column + 1 : last] -= error[:, None] * factor[column, column + 1 : last]
            codes[:, column], errors[:, column - first] = chosen, error
        left[:, last:] -= errors @ factor[first:last, last:]
    return integer.store(codes[:, order.argsort()], grid, weight.shape, weight.dtype, scheme, size, zero_point)
