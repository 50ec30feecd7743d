"""Absolute positions: the paper's formula, its relative property, and a clear end to learned ones."""

import math

import pytest
import torch

from course_lib.positions import LearnedPositions, sinusoidal_embedding


def test_sinusoidal_embedding_is_the_papers_formula():
    encoded = sinusoidal_embedding(torch.tensor([0, 1, 7, 1000]), 6)
    for row, position in enumerate((0, 1, 7, 1000)):
        for pair in range(3):
            angle = position / 10000 ** (2 * pair / 6)
            expected = torch.tensor([math.sin(angle), math.cos(angle)])
            torch.testing.assert_close(encoded[row, 2 * pair : 2 * pair + 2], expected, rtol=0, atol=1e-6)


def test_a_shift_is_the_same_rotation_at_every_position():
    """One matrix takes the encoding of any position to that of the position five later."""
    encoded = sinusoidal_embedding(torch.arange(400), 32)
    angles = 5 * 10000.0 ** (-torch.arange(0, 32, 2) / 32)
    turns = [torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]]) for a in angles.tolist()]
    torch.testing.assert_close(encoded[:-5] @ torch.block_diag(*turns), encoded[5:], rtol=0, atol=1e-5)


def test_sinusoidal_embedding_keeps_its_precision_far_out():
    far = 1_000_003
    expected = math.sin(far), math.cos(far)
    torch.testing.assert_close(sinusoidal_embedding(torch.tensor(far), 2), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 7, -2, True, 4.0])
def test_an_odd_width_is_refused(dim):
    with pytest.raises(ValueError, match=r"^dim is .*; an even number of at least 2 is needed$"):
        sinusoidal_embedding(torch.arange(3), dim)


@pytest.mark.parametrize("position", [16, 99, -1])
def test_a_position_past_the_learned_ones_is_refused_by_name(position):
    learned = LearnedPositions(16, 8)
    assert learned(torch.arange(16)).shape == (16, 8)
    assert learned(torch.arange(0)).shape == (0, 8)
    with pytest.raises(ValueError, match=rf"^positions holds {position}; this model has learned positions 0 to 15$"):
        learned(torch.tensor([[3, position]]))
