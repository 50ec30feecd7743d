"""Metrics, against their definitions in float64."""

import math

import pytest
import torch

from course_lib.quantization import kl_divergence, perplexity, tensor_error, top1_agreement


def test_tensor_error_is_what_its_names_say():
    original = torch.randn(30, 7)
    noise = torch.randn(30, 7) * 0.01
    error = tensor_error(original, original + noise)
    ratio = original.double().square().sum() / (original + noise - original).double().square().sum()
    assert error.snr_db == pytest.approx(10 * math.log10(ratio), rel=1e-9)
    assert error.max_abs == pytest.approx(float(noise.abs().max()), rel=1e-4)
    assert error.mean_abs == pytest.approx(float(noise.abs().mean()), rel=1e-4)
    assert tensor_error(original, original).snr_db == math.inf
    assert tensor_error(torch.zeros(0), torch.zeros(0)).max_abs == 0
    assert tensor_error(torch.zeros(2), torch.ones(2)).snr_db == -math.inf


def test_kl_divergence_is_the_sum_over_the_vocabulary():
    reference, logits = torch.randn(2, 5, 11) * 3, torch.randn(2, 5, 11) * 3
    p, q = reference.double().softmax(-1), logits.double().softmax(-1)
    divergence = kl_divergence(reference, logits)
    torch.testing.assert_close(divergence.double(), (p * (p / q).log()).sum(-1), rtol=1e-5, atol=1e-6)
    assert divergence.shape == (2, 5)
    assert (kl_divergence(reference, reference + 7) < 1e-5).all()


def test_top1_agreement_counts_positions():
    reference = torch.eye(4)
    logits = reference.clone()
    logits[0] = torch.tensor([0.0, 5.0, 0.0, 0.0])
    assert top1_agreement(reference, logits) == 0.75
    assert top1_agreement(reference, reference * 9) == 1


def test_perplexity_of_even_odds_is_the_vocabulary_and_ignores_masked_targets():
    assert perplexity(torch.zeros(2, 6, 17), torch.randint(0, 17, (2, 6))) == pytest.approx(17)
    logits, targets = torch.randn(9, 5), torch.randint(0, 5, (9,))
    expected = math.exp(-float(logits.double().log_softmax(-1)[torch.arange(9), targets][:6].mean()))
    targets[6:] = -100
    assert perplexity(logits, targets) == pytest.approx(expected, rel=1e-6)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"restored has shape \[3\]; \[2\], that of original"):
        tensor_error(torch.ones(2), torch.ones(3))
    for metric in (kl_divergence, top1_agreement):
        with pytest.raises(ValueError, match=r"logits has shape \[3, 4\]; \[2, 4\], that of reference"):
            metric(torch.ones(2, 4), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"targets has shape \[3\]; \[2\], that of logits"):
        perplexity(torch.ones(2, 4), torch.ones(3).long())
    with pytest.raises(ValueError, match="targets has no position that counts"):
        perplexity(torch.ones(2, 4), torch.full((2,), -100))
    with pytest.raises(ValueError, match="at least one position"):
        top1_agreement(torch.ones(0, 4), torch.ones(0, 4))
