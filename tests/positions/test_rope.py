"""Rotary positions: equal to Transformers' frequencies and rotations, relative, and convertible between layouts."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_as_gptj
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_as_llama

from course_lib.positions import ROPE_TYPES, apply_rope, convert_rope_layout, rope_cos_sin, rope_frequencies


def random_parameters(rope_type: str, rng: random.Random) -> dict:
    """Return rope_parameters of a type, with what is optional given or left out, and the head_dim they fit."""
    head_dim = rng.choice([16, 32, 64, 80, 96, 128])
    original = rng.choice([64, 2048, 4096, 8192])
    parameters = {"rope_type": rope_type, "rope_theta": rng.choice([500.0, 1e4, 1e5, 5e5])}
    parameters["partial_rotary_factor"] = rng.choice([0.25, 0.5, 1.0])
    dim = int(head_dim * parameters["partial_rotary_factor"])
    parameters["factor"] = rng.choice([1.0, 2.0, 8.0, 32.0])
    if rope_type == "llama3":
        low = rng.choice([1.0, 2.0])
        parameters |= {"low_freq_factor": low, "high_freq_factor": low * rng.choice([2.0, 4.0])}
    if rope_type in ("yarn", "longrope", "llama3"):
        parameters["original_max_position_embeddings"] = original
    if rope_type == "yarn":
        optional = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.3}
        optional |= {"mscale": 0.7, "mscale_all_dim": 1.1}
        parameters |= {name: value for name, value in optional.items() if rng.random() < 0.5}
    if rope_type == "longrope":
        for name in ("short_factor", "long_factor"):
            parameters[name] = [rng.uniform(1, 20) for _ in range(dim // 2)]
        if rng.random() < 0.3:
            parameters["attention_factor"] = 1.19
    return {"head_dim": head_dim, "parameters": parameters, "max_position_embeddings": 4 * original}


@pytest.mark.parametrize("rope_type", sorted(ROPE_INIT_FUNCTIONS))
def test_frequencies_are_those_of_transformers(rope_type):
    rng = random.Random()
    for _ in range(50):
        one = random_parameters(rope_type, rng)
        config = LlamaConfig(
            hidden_size=4 * one["head_dim"],
            num_attention_heads=4,
            head_dim=one["head_dim"],
            max_position_embeddings=one["max_position_embeddings"],
            rope_parameters=dict(one["parameters"]),
        )
        for seq_len in (None, 10, 5 * one["max_position_embeddings"]):
            theirs, their_factor = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=seq_len)
            ours, our_factor = rope_frequencies(
                one["head_dim"],
                scaling=config.rope_parameters,
                max_position_embeddings=one["max_position_embeddings"],
                seq_len=seq_len,
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12, msg=str(one))
            assert our_factor == pytest.approx(their_factor, rel=1e-6), one
            assert ours.dtype == torch.float32


def test_every_type_of_transformers_is_known():
    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPE_TYPES)


def test_yarn_and_longrope_take_their_factor_from_the_lengths():
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 512}
    for left_out, given_factor in ((yarn, yarn | {"factor": 4.0}), (yarn | {"factor": None}, yarn | {"factor": 4.0})):
        ours = rope_frequencies(64, scaling=left_out, max_position_embeddings=2048)
        torch.testing.assert_close(ours[0], rope_frequencies(64, scaling=given_factor)[0])
        assert ours[1] == pytest.approx(0.1 * math.log(4) + 1)


def test_ntk_slows_the_slowest_pair_by_the_factor_and_leaves_the_fastest():
    plain, _ = rope_frequencies(64)
    slowed, factor = rope_frequencies(64, scaling={"rope_type": "ntk", "factor": 8.0})
    assert factor == 1.0
    assert slowed[0] == plain[0]
    assert (plain[-1] / slowed[-1]).item() == pytest.approx(8, rel=1e-5)
    at_twice, _ = rope_frequencies(
        64, scaling={"rope_type": "dynamic", "factor": 1.0}, max_position_embeddings=100, seq_len=800
    )
    torch.testing.assert_close(at_twice, slowed)  # dynamic NTK is NTK with the factor that the length asks for


def test_dynamic_leaves_sequences_of_the_trained_length_alone():
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    short, _ = rope_frequencies(64, scaling=scaling, max_position_embeddings=100, seq_len=100)
    assert torch.equal(short, rope_frequencies(64)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scaling": {"rope_type": "turbo"}}, "rope_type is 'turbo'; accepted are default, linear"),
        ({"scaling": {"rope_type": "linear"}}, "scaling lacks 'factor', which rope_type 'linear' needs"),
        ({"scaling": {"rope_type": "llama3", "factor": 8}}, "scaling lacks 'low_freq_factor'"),
        ({"scaling": {"rope_type": "dynamic", "factor": 2}}, "max_position_embeddings is None"),
        (
            {"scaling": {"rope_type": "yarn", "original_max_position_embeddings": 9}},
            "scaling lacks 'factor' and max_position_embeddings is None",
        ),
        ({"head_dim": 5}, "head_dim is 5, of which 5 coordinates turn"),
        ({"head_dim": 64, "scaling": {"partial_rotary_factor": 0.0}}, "partial_rotary_factor is 0.0"),
        ({"base": -1.0}, "base is -1.0; a positive number"),
        (
            {
                "scaling": {
                    "rope_type": "longrope",
                    "factor": 2,
                    "original_max_position_embeddings": 9,
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                }
            },
            "need 4 values, one for each pair; 1 are given",
        ),
    ],
)
def test_a_bad_scaling_gets_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as caught:
        rope_frequencies(**{"head_dim": 8} | arguments)
    assert "\n" not in str(caught.value)


@given(
    head_dim=st.sampled_from([2, 8, 64, 80]),
    part=st.sampled_from([0.5, 1.0]),
    length=st.integers(1, 9),
    batch=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_rotations_are_llamas_and_gptjs(head_dim, part, length, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, length, head_dim, generator=generator)
    positions = torch.randint(0, 5000, (batch, length), generator=generator)
    pairs = max(1, int(head_dim * part) // 2)
    inv_freq, _ = rope_frequencies(2 * pairs)
    cos, sin = rope_cos_sin(positions, inv_freq)
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]

    theirs, _ = rotate_as_llama(turned, turned, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    torch.testing.assert_close(apply_rope(x, cos, sin), torch.cat((theirs, rest), -1), rtol=1e-5, atol=1e-6)
    by_token = rotate_as_gptj(turned.transpose(1, 2), sin, cos).transpose(1, 2)
    torch.testing.assert_close(
        apply_rope(x, cos, sin, layout="interleaved"), torch.cat((by_token, rest), -1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_distance_alone(layout):
    q, k = torch.randn(2, 1, 64, dtype=torch.float64)
    inv_freq, _ = rope_frequencies(64)

    def score(at: int, other: int) -> float:
        turned = (
            apply_rope(
                one, *(table.double() for table in rope_cos_sin(torch.tensor([place]), inv_freq.double())), layout
            )
            for one, place in ((q, at), (k, other))
        )
        first, second = turned
        return (first * second).sum().item()

    for at, other in ((0, 0), (7, 3), (40, 9)):
        assert score(at, other) == pytest.approx(score(at + 1000, other + 1000), abs=1e-2)
    assert abs(score(7, 3) - score(8, 3)) > 1e-3


@pytest.mark.parametrize(("source", "target"), [("half", "interleaved"), ("interleaved", "half"), ("half", "half")])
@pytest.mark.parametrize("rotary_dim", [None, 8, 0])
def test_a_converted_checkpoint_has_the_same_scores(source, target, rotary_dim):
    query_heads, kv_heads, head_dim, hidden, length = 4, 2, 16, 12, 5
    turned = head_dim if rotary_dim is None else rotary_dim
    x = torch.randn(length, hidden, dtype=torch.float64)
    cos, sin = rope_cos_sin(torch.arange(length), rope_frequencies(turned)[0]) if turned else torch.ones(2, length, 0)

    def scores(layout: str, *projections: torch.Tensor) -> torch.Tensor:
        q, k = (
            apply_rope((x @ weight.T).view(length, -1, head_dim).transpose(0, 1), cos, sin, layout)
            for weight in projections
        )
        return q @ k.repeat_interleave(query_heads // kv_heads, 0).transpose(1, 2)

    weights = [torch.randn(heads * head_dim, hidden, dtype=torch.float64) for heads in (query_heads, kv_heads)]
    converted = [
        convert_rope_layout(weight, heads, source, target, rotary_dim=rotary_dim)
        for weight, heads in zip(weights, (query_heads, kv_heads), strict=True)
    ]
    torch.testing.assert_close(scores(target, *converted), scores(source, *weights))
    bias = torch.randn(query_heads * head_dim)
    back = convert_rope_layout(
        convert_rope_layout(bias, query_heads, source, target, rotary_dim=rotary_dim),
        query_heads,
        target,
        source,
        rotary_dim=rotary_dim,
    )
    assert torch.equal(back, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_loses_one_rounding_only(dtype):
    """Angles far out are computed in float32 and the product rounded once, whatever the model's dtype."""
    x = torch.randn(1, 2, 6, 64).to(dtype)
    cos, sin = rope_cos_sin(torch.arange(60000, 60006), rope_frequencies(64)[0])
    exact = apply_rope(x.double(), cos, sin)
    assert apply_rope(x, cos, sin).dtype == dtype
    error = (apply_rope(x, cos, sin).double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-6).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "spiral"}, "layout is 'spiral'; accepted are half, interleaved"),
        ({"cos": torch.ones(5, 9)}, "cos has shape"),
        ({"cos": torch.ones(5, 9), "sin": torch.ones(5, 9)}, "cos has 9 columns and x a head_dim of 16; .* at most 8"),
        ({"cos": torch.ones(4, 8), "sin": torch.ones(4, 8)}, "cos has 4 positions and x 5; they must be equal"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    arguments = {"x": torch.ones(1, 2, 5, 16), "cos": torch.ones(5, 8), "sin": torch.ones(5, 8)}
    with pytest.raises(ValueError, match=message):
        apply_rope(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "x"}, "source is 'x'"),
        ({"num_heads": 3}, "num_heads is 3, which does not divide the 32 rows"),
        ({"rotary_dim": 17}, "rotary_dim is 17; an even number from 0 to head_dim, 16"),
    ],
)
def test_a_conversion_that_cannot_be_is_refused(change, message):
    arguments = {"weight": torch.ones(32, 4), "num_heads": 2, "source": "half", "target": "interleaved"}
    with pytest.raises(ValueError, match=message):
        convert_rope_layout(**arguments | change)
