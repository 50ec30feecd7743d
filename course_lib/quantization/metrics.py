"""How much quantisation costs: errors of a tensor, and of a model's next-token distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class TensorError:
    """What a tensor lost.

    Attributes
    ----------
    snr_db : float
        Signal-to-noise ratio, ``10 log10(sum of squares / sum of squared errors)``; infinite if nothing was lost. 6 dB more is
        half the error.
    max_abs, mean_abs : float
        Of the absolute errors, in the tensor's own unit; 0 for an empty tensor.
    """

    snr_db: float
    max_abs: float
    mean_abs: float


def tensor_error(original: torch.Tensor, restored: torch.Tensor) -> TensorError:
    """Compare a tensor with what quantisation left of it.

    Parameters
    ----------
    original, restored : Tensor
        Floating point, of one shape. Computed in float64.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    if original.shape != restored.shape:
        raise ValueError(
            f"restored has shape {list(restored.shape)}; {list(original.shape)}, that of original, is needed"
        )
    if not original.numel():
        return TensorError(math.inf, 0.0, 0.0)
    signal = original.detach().double()
    error = (restored.detach().double() - signal).abs()
    noise = float(error.square().sum())
    power = float(signal.square().sum())
    snr = math.inf if noise == 0 else -math.inf if power == 0 else 10 * math.log10(power / noise)
    return TensorError(snr, float(error.max()), float(error.mean()))


def kl_divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of each position's next-token distribution from the reference's, in nats.

    Parameters
    ----------
    reference, logits : Tensor
        ``[..., vocab_size]`` of the unquantised and of the quantised model on the same tokens.

    Returns
    -------
    Tensor
        float32 ``[...]``, sum over the vocabulary of p log(p / q), p the reference's; at least 0.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    _same_shape(reference, logits)
    p, q = functional.log_softmax(reference.float(), -1), functional.log_softmax(logits.float(), -1)
    return functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).clamp(min=0)


def top1_agreement(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the share of positions whose most likely token is the reference's.

    Parameters
    ----------
    reference, logits : Tensor
        As for `kl_divergence`.

    Returns
    -------
    float
        0 to 1.

    Raises
    ------
    ValueError
        If the shapes differ, or there is no position.
    """
    _same_shape(reference, logits)
    agree = reference.argmax(-1) == logits.argmax(-1)
    if not agree.numel():
        raise ValueError(f"logits has shape {list(logits.shape)}; at least one position is needed")
    return float(agree.double().mean())


def perplexity(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the exponential of the mean negative log likelihood of the targets.

    Parameters
    ----------
    logits : Tensor
        ``[..., vocab_size]``; those at a position are judged against the target of the same position, so a caller moves one
        of the two by a token.
    targets : Tensor
        Token ids ``[...]``; -100 marks positions that do not count.

    Raises
    ------
    ValueError
        If the shapes do not fit, or no position counts.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {list(targets.shape)}; {list(logits.shape[:-1])}, that of logits, is needed"
        )
    counted = targets != -100
    if not counted.any():
        raise ValueError("targets has no position that counts; at least one other than -100 is needed")
    losses = functional.cross_entropy(logits[counted].float(), targets[counted], reduction="none")
    return math.exp(float(losses.double().mean()))


def _same_shape(reference: torch.Tensor, logits: torch.Tensor) -> None:
    if reference.shape != logits.shape:
        raise ValueError(
            f"logits has shape {list(logits.shape)}; {list(reference.shape)}, that of reference, is needed"
        )
