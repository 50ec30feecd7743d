"""What a quantised cache holds is what its codes say: written once, within a step, to the byte, through everything a cache goes through."""

import copy
import math
from pathlib import Path

import pytest
import torch
import transformers
from cache_cases import SMALL, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from course_lib.attention import attention
from course_lib.kv_cache import DynamicCache, QuantizedCache, RoundedCache
from course_lib.kv_cache.codes import channel_group, decode, encode
from course_lib.kv_cache.quantized import QuantizedLayer
from course_lib.kv_cache.rounded import RoundedLayer
from course_lib.memory import kv_cache_bytes
from course_lib.memory.meta import cache_argument
from course_lib.models import load
from course_lib.quantization import kl_divergence

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def steps(codes, head_dim: int) -> torch.Tensor:
    """Return the step of each value's group, ``[..., tokens, head_dim]``."""
    spread = codes.scale.double().repeat_interleave(codes.group, -2 if codes.axis == "channel" else -1)
    return spread[..., :head_dim]


def decoded(codes, like: torch.Tensor) -> torch.Tensor:
    return decode(codes, torch.full_like(like, math.nan))


def tokens(length: int, dim: int = 8, *, batch: int = 1, heads: int = 2, dtype: torch.dtype = torch.float32):
    return torch.randn(batch, heads, length, dim).to(dtype), torch.randn(batch, heads, length, dim).to(dtype)


# ---- codes


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from([4, 8]),
    axis=st.sampled_from(["channel", "token"]),
    head_dim=st.sampled_from([1, 8, 33, 59, 64, 80, 111]),
    size=st.floats(-30, 30),
    shift=st.floats(-4, 4),
)
def test_a_value_moves_by_at_most_half_a_step_of_its_group_and_none_is_clipped(
    seed, dtype, bits, axis, head_dim, size, shift
):
    torch.manual_seed(seed)
    tensor = torch.randn(2, 3, 24, head_dim, dtype=torch.float64)
    tensor = ((tensor + shift * torch.randn(head_dim)) * 10.0 ** min(size, 4 if dtype == torch.float16 else 30)).to(
        dtype
    )
    tensor = tensor.where(tensor.isfinite(), 0)
    codes = encode(tensor, bits, 8 if axis == "channel" else channel_group(head_dim, bits, 64), axis)
    assert codes.scale.dtype == codes.offset.dtype == torch.bfloat16
    back = decoded(codes, tensor.double())
    moved, step = (back - tensor.double()).abs(), steps(codes, head_dim)
    rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * tensor.double().abs()
    inside = back.abs() < 0.99 * torch.finfo(dtype).max - step
    assert (moved <= torch.where(inside, 0.5001, 1.0) * step + rounding).all()
    assert decoded(codes, tensor).isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_is_what_arithmetic_on_single_numbers_makes_it(bits):
    """The reference: one group after another, in Python's own numbers."""
    keys = torch.randn(1, 1, 8, 3) * 5
    found = decoded(encode(keys, bits, 4, "channel"), keys)
    for first in (0, 4):
        for channel in range(3):
            group = [float(value) for value in keys[0, 0, first : first + 4, channel]]
            offset = brief(min(group), math.floor)
            scale = brief((max(group) - offset) / (2**bits - 1), math.ceil)
            for at, value in enumerate(group):
                expected = offset + scale * round((value - offset) / scale)
                assert float(found[0, 0, first + at, channel]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def brief(value: float, towards) -> float:
    """Return a number with the eight significant bits of bfloat16."""
    _, exponent = math.frexp(value)
    return math.ldexp(towards(math.ldexp(value, 8 - exponent)), exponent - 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 0.1, -3.14159, 1e-7, 6e4, 1e-40, 1e38])
def test_a_constant_group_is_kept_within_its_step_and_zeros_are_zero(dtype, value):
    tensor = torch.full((1, 1, 8, 8), value, dtype=torch.float64).to(dtype)
    if not tensor.isfinite().all():
        tensor.fill_(6e4)
    for bits in (4, 8):
        codes = encode(tensor, bits, 8, "channel")
        moved = decoded(codes, tensor.double()) - tensor.double()
        assert (moved.abs() <= 0.5001 * steps(codes, 8) + 1e-7 * tensor.double().abs()).all()
        assert value or not moved.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_of_a_dtype_stay_finite(dtype):
    most = min(torch.finfo(dtype).max, 1.6e38)
    tensor = (most * torch.linspace(-1, 1, 128, dtype=torch.float64)).to(dtype).view(1, 1, 16, 8)
    for bits in (4, 8):
        codes = encode(tensor, bits, 16, "channel")
        back = decoded(codes, tensor)
        assert back.isfinite().all()
        assert ((back.double() - tensor.double()).abs() <= 1.001 * steps(codes, 8)).all()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, "span"])
def test_a_group_with_what_is_no_number_is_nan_and_the_others_are_untouched(odd):
    tensor = torch.randn(1, 1, 8, 8)
    clean = decoded(encode(tensor, 4, 4, "channel"), tensor)
    if odd == "span":
        tensor[0, 0, 1, 3], tensor[0, 0, 2, 3] = 3.3e38, -3.3e38
    else:
        tensor[0, 0, 1, 3] = odd
    found = decoded(encode(tensor, 4, 4, "channel"), tensor)
    assert found[0, 0, :4, 3].isnan().all()
    found[0, 0, :4, 3] = clean[0, 0, :4, 3]
    assert torch.equal(found, clean)


@pytest.mark.parametrize(
    ("head_dim", "bits", "size"),
    [(128, 4, 64), (80, 4, 40), (96, 8, 48), (111, 8, 37), (111, 4, 56), (8, 4, 8), (1, 8, 1)],
)
def test_channels_share_a_scale_in_groups_of_their_largest_divisor(head_dim, bits, size):
    assert channel_group(head_dim, bits, 64) == size


# ---- the cache against the same rounding, kept in full


class Operations(RuleBasedStateMachine):
    """A layer of codes goes the way of a layer of rounded numbers, and of a list of the tokens that have passed."""

    @initialize(
        bits=st.sampled_from([4, 8]),
        group=st.integers(1, 5),
        residual=st.integers(0, 6),
        window=st.sampled_from([None, None, 2, 9, 20]),
        dims=st.sampled_from([(4, 4), (5, 3), (6, 4)]),
        seed=st.integers(0, 2**32),
    )
    def begin(self, bits, group, residual, window, dims, seed):
        torch.manual_seed(seed)
        options = {"bits": bits, "group_size": group, "residual_length": residual}
        self.codes = QuantizedLayer(window, **options)
        self.rounded = RoundedLayer(window, **options, keys="channel", values="token", again=False)
        self.options, self.window, self.dims, self.batch = options, window, dims, 2
        self.exact, self.cuts, self.cropped = None, 0, False

    def both(self, call):
        call(self.codes)
        call(self.rounded)

    @rule(length=st.integers(0, 23))
    def update(self, length):
        keys, values = (torch.randn(self.batch, 2, length, dim) for dim in self.dims)
        sizes = self.codes.get_mask_sizes(length)
        found, expected = self.codes.update(keys, values), self.rounded.update(keys, values)
        for one, other, new in zip(found, expected, (keys, values), strict=True):
            assert torch.equal(one, other)
            assert one.shape[2] == sizes[0]
            assert torch.equal(one[:, :, one.shape[2] - length :], new)
        self.exact = keys if self.exact is None else torch.cat((self.exact, keys), 2)
        copies = [tensor.clone() for tensor in found]
        self.after = [(tensor, copy) for tensor, copy in zip(found, copies, strict=True)]

    @rule(share=st.floats(0, 1))
    def crop(self, share):
        count = round(share * self.codes.seen)
        back = self.codes.seen - count
        needed = back if self.window is None else min(back, self.window - 1)
        if count and self.codes.held - count < needed:
            for layer in (self.codes, self.rounded):
                with pytest.raises(ValueError, match="tokens_to_remove"):
                    layer.crop(-count)
            return
        if count:
            self.cuts += count > self.codes.tensors()["keys.newest"].shape[2]
            self.cropped = True
        self.both(lambda layer: layer.crop(-count))
        if self.exact is not None:
            self.exact = self.exact[:, :, :back]

    @precondition(lambda self: self.exact is not None)
    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=3)) if self.batch else []
        rows = torch.tensor(rows, dtype=torch.int64)
        self.both(lambda layer: layer.reorder_cache(rows))
        self.exact, self.batch = self.exact[rows], len(rows)

    @rule()
    def record(self):
        self.both(lambda layer: layer.activate_past_recording())

    @rule()
    def fork(self):
        fork = copy.deepcopy(self.codes)
        self.codes.reset()
        self.codes = fork

    @rule()
    def file(self):
        if self.codes.is_initialized:
            tensors, plain = self.codes.state()
            fresh = QuantizedLayer(self.window, **self.options)
            fresh.restore({name: tensor.clone() for name, tensor in tensors.items()}, plain)
            fresh.record_past = self.codes.record_past
            self.codes = fresh

    @rule()
    def reset(self):
        self.both(lambda layer: layer.reset())
        self.exact, self.cuts, self.cropped = None, 0, False

    @invariant()
    def same(self):
        if not hasattr(self, "codes") or not self.codes.is_initialized:
            return
        assert (self.codes.seen, self.codes.held) == (self.rounded.seen, self.rounded.held)
        assert torch.equal(self.codes.keys, self.rounded.keys)
        assert torch.equal(self.codes.values, self.rounded.values)
        exact = self.exact[:, :, self.exact.shape[2] - self.codes.held :]
        # Half a step for the first time, and half a step of its new group for each crop that cut the group of a token.
        largest = 1 + float(self.exact.abs().max()) if self.exact.numel() else 1.0
        step = 2.05 * largest / (2 ** self.options["bits"] - 1)
        assert ((self.codes.keys - exact).abs() <= (1 + self.cuts) * step / 2).all()
        newest = self.codes.tensors()["keys.newest"]
        length = newest.shape[2]
        assert length < self.options["residual_length"] + self.options["group_size"] or self.codes.record_past
        assert self.cropped or length >= min(self.codes.held, self.options["residual_length"])
        if not self.cuts:
            assert torch.equal(newest, exact[:, :, exact.shape[2] - length :])
        if hasattr(self, "after"):
            assert all(torch.equal(tensor, copy) for tensor, copy in self.after)
            del self.after


TestOperations = Operations.TestCase
TestOperations.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)


def small(**options) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**SMALL | options)


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_what_is_stored_is_never_touched_again(scheme):
    cache = QuantizedCache(small(), scheme=scheme, group_size=16, residual_length=8)
    cache.update(*tokens(70), 0)
    layer, before = cache.layers[0], {name: t.clone() for name, t in cache.layers[0].state()[0].items()}
    for _ in range(100):
        cache.update(*tokens(1), 0)
    after = layer.state()[0]
    for name in before.keys() - {"keys.newest", "values.newest"}:
        assert after[name].shape[2] > before[name].shape[2] > 0
        assert torch.equal(after[name][:, :, : before[name].shape[2]], before[name])


def test_new_tokens_are_seen_in_full_however_many_they_are():
    cache, (keys, values) = QuantizedCache(small(), residual_length=0), tokens(500)
    found = cache.update(keys, values, 0)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)
    assert cache.layers[0].tensors()["keys.newest"].shape[2] == 500 % 64
    assert not torch.equal(cache.layers[0].keys, keys)


def test_a_crop_of_the_residual_touches_no_code_and_a_deeper_one_leaves_what_stays_as_it_was():
    cache = QuantizedCache(small(), group_size=16, residual_length=8)
    cache.update(*tokens(100), 0)
    layer = cache.layers[0]
    codes, held = layer.tensors()["keys.codes"], layer.keys.clone()
    layer.crop(-8)
    assert layer.tensors()["keys.codes"] is codes
    layer.crop(-37)
    assert layer.held == layer.get_seq_length() == 55
    assert torch.equal(layer.keys, held[:, :, :55])
    new = tokens(3)
    assert torch.equal(layer.update(*new)[0], torch.cat((held[:, :, :55], new[0]), 2))
    # Whole groups stay as they are; only what was left of the one that was cut may move, by half a step of its new group.
    layer.update(*tokens(40))
    assert torch.equal(layer.keys[:, :, :48], held[:, :, :48])
    step = decode_steps(layer)[:, :, 48:55]
    assert ((layer.keys[:, :, 48:55] - held[:, :, 48:55]).abs() <= 0.5001 * step).all()


def decode_steps(layer: QuantizedLayer) -> torch.Tensor:
    return steps(layer._codes[0], layer.head_dim)


def test_a_window_gives_whole_groups_back():
    layer = QuantizedLayer(20, bits=4, group_size=4, residual_length=2)
    for _ in range(300):
        layer.update(*tokens(1))
        assert layer.tensors()["keys.codes"].shape[2] <= 32
    assert (layer.held, layer.seen) == (19, 300)
    short = QuantizedLayer(5, bits=4, group_size=4, residual_length=2)
    short.update(*tokens(200))
    assert short.held == 4
    assert sum(t.untyped_storage().nbytes() for t in short.tensors().values()) < 1000


# ---- bytes


def test_bytes_are_those_of_codes_constants_and_the_newest():
    config = small(num_hidden_layers=2)
    cache = QuantizedCache(config, scheme="int4", group_size=16, residual_length=10)
    assert cache.nbytes == cache.used_nbytes == 0
    for layer in range(2):
        cache.update(*tokens(100, batch=3), layer)
    # 100 - 10 = 5 groups of 16, and 20 tokens in full; 4 bits a value and 4 bytes a group of 16 tokens or of 8 channels.
    heads = 2 * 3 * 2
    expected = heads * (80 * 8 // 2 * 2 + 5 * 8 * 4 + 80 * 4 + 20 * 8 * 4 * 2)
    assert cache.used_nbytes == expected
    room = sum(layer.tensors()["keys.codes"].shape[2] - 80 for layer in cache.layers) // 2
    assert 0 <= room <= 80 / 32 + 16
    assert cache.nbytes == expected + heads * (room * 8 // 2 * 2 + room // 16 * 8 * 4 + room * 4)
    cache.reset()
    assert cache.nbytes == 0


@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.58), ("int4", 0.34)])
@pytest.mark.parametrize("piece", [4096, 61])
def test_smollm2_at_4096_tokens_takes_a_third_or_little_more_than_half_of_float16(scheme, most, piece):
    """The model in float32, room to grow and constants included, however the tokens came."""
    config = small(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    cache, layers = QuantizedCache(config, scheme=scheme), 30 if piece == 4096 else 1
    keys, values = tokens(4096, 64, heads=3)
    for layer in range(layers):
        for first in range(0, 4096, piece):
            cache.update(keys[:, :, first : first + piece], values[:, :, first : first + piece], layer)
            if piece < 4096 and first > 1000:
                assert cache.nbytes <= (most + 0.08) * kv_cache_bytes(config, first + piece, dtype="float16") / 30
    assert cache.nbytes <= most * kv_cache_bytes(config, 4096, dtype="float16") * layers / 30


# ---- models


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, SMALL["vocab_size"], (4, 14))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :11] = 0, 0
    return ids.masked_fill(mask == 0, 0), mask


def twins(config: transformers.PretrainedConfig) -> tuple[QuantizedCache, RoundedCache]:
    options = {
        "scheme": ("int4", "int8")[int(torch.randint(2, ()))],
        "group_size": int(torch.randint(2, 6, ())),
        "residual_length": int(torch.randint(0, 5, ())),
    }
    return QuantizedCache(config, **options), RoundedCache(config, **options)


def same(model, ids, caches, new, **options):
    """Write with both caches; assert that tokens and their scores are the same to the last bit."""
    options |= {"output_scores": True, "return_dict_in_generate": True}
    one, other = (written(model, ids, cache, new, **options) for cache in caches)
    assert torch.equal(one.sequences, other.sequences)
    assert all(torch.equal(a, b) for a, b in zip(one.scores, other.scores, strict=True))
    return one.sequences


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_models_write_what_they_would_with_rounded_numbers(theirs, options):
    ids, mask = prompts()
    found = same(theirs, ids, twins(theirs.config), 40, attention_mask=mask, **options)
    assert found.shape[1] == 54


def test_candidates_are_taken_back(theirs):
    same(theirs, torch.randint(1, 6, (1, 20)), twins(theirs.config), 30, prompt_lookup_num_tokens=3)


def test_a_returned_cache_a_copy_and_a_file_continue(theirs, tmp_path):
    ids = torch.randint(1, SMALL["vocab_size"], (2, 11))
    codes, rounded = twins(theirs.config)
    first = same(theirs, ids, (codes, rounded), 12)
    codes.save(tmp_path / "cache.safetensors")
    rounded.save(tmp_path / "rounded.safetensors")
    back = QuantizedCache.load(tmp_path / "cache.safetensors", theirs.config)
    assert back.options == codes.options
    assert back.used_nbytes == codes.used_nbytes
    same(theirs, first, (back, RoundedCache.load(tmp_path / "rounded.safetensors", theirs.config)), 18)
    same(theirs, first, (copy.deepcopy(codes), rounded), 18)
    with pytest.raises(ValueError, match="QuantizedCache"):
        DynamicCache.load(tmp_path / "cache.safetensors", theirs.config)


def test_a_file_holds_the_codes(tmp_path):
    cache = QuantizedCache(small(num_hidden_layers=1))
    cache.update(*tokens(2000), 0)
    cache.save(tmp_path / "cache.safetensors")
    assert cache.used_nbytes <= (tmp_path / "cache.safetensors").stat().st_size <= cache.used_nbytes + 2000


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_values_of_another_size_than_keys(dtype):
    """As in multi-head latent attention, whose keys have more channels than its values."""
    layer = QuantizedLayer(bits=4, group_size=16, residual_length=4)
    keys, values = torch.randn(2, 2, 60, 25).to(dtype), torch.randn(2, 2, 60, 17).to(dtype)
    layer.update(keys, values)
    assert layer.keys.dtype == layer.values.dtype == dtype
    assert (layer.keys - keys).abs().max() < 0.3
    assert (layer.values - values).abs().max() < 0.3
    assert torch.equal(layer.values[:, :, 48:], values[:, :, 48:])


def test_a_latent_model_writes_what_it_would_with_rounded_numbers():
    config = transformers.DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4, "head_dim": 8},
        q_lora_rank=8,
        kv_lora_rank=10,
        qk_rope_head_dim=8,
        qk_nope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=3,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids, mask = prompts()
    caches = twins(config)
    same(model, ids, caches, 20, attention_mask=mask)
    assert caches[0].layers[0].head_dim != caches[0].layers[0].value_dim


def test_nothing_and_what_is_of_another_kind():
    layer = QuantizedLayer(bits=4, group_size=4, residual_length=0)
    assert layer.update(*tokens(0))[0].shape == (1, 2, 0, 8)
    layer.crop(0)
    layer.update(*tokens(9))
    layer.crop(-9)
    assert (layer.held, layer.seen, layer.keys.shape[2]) == (0, 0, 0)
    layer.update(*tokens(9))
    with pytest.raises(TypeError, match="float16"):
        layer.update(*tokens(1, dtype=torch.float16))
    with pytest.raises(ValueError, match="batch"):
        layer.update(*tokens(1, batch=2))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([], dtype=torch.int64))
    assert layer.update(*tokens(9, batch=0))[0].shape == (0, 2, 18, 8)
    layer.reset()
    assert layer.update(*tokens(5, batch=3, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_tensors_of_inference_mode_are_continued_outside_and_gradients_stop():
    layer = QuantizedLayer(bits=4, group_size=4, residual_length=1)
    with torch.inference_mode():
        layer.update(*tokens(30))
    keys, values = tokens(30)
    layer.update(keys.requires_grad_(), values)
    assert not layer.update(*tokens(1))[0].requires_grad
    assert layer.held == 61


@pytest.mark.parametrize(
    ("argument", "value"),
    [("scheme", "nf4"), ("scheme", 4), ("group_size", 0), ("group_size", 2.5), ("residual_length", -1)],
)
def test_an_option_that_is_not_accepted_is_named(argument, value):
    for kind in (QuantizedCache, RoundedCache):
        with pytest.raises(ValueError, match=argument):
            kind(small(), **{argument: value})


# ---- attention to codes


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("options", [{}, {"scale": 0.4, "softcap": 2.0}, {"alibi_slopes": torch.rand(6)}])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_attention_to_codes_is_that_to_what_they_stand_for(window, options, rows, bits):
    layer = QuantizedLayer(window, bits=bits, group_size=8, residual_length=3)
    assert layer.attend(torch.randn(2, 6, 1, 8), *tokens(1, batch=2)) is None
    assert not layer.is_initialized
    layer.update(*tokens(45, batch=2))
    for _ in range(4):
        new, q = tokens(rows, batch=2), torch.randn(2, 6, rows, 8)
        other = copy.deepcopy(layer)
        assert layer.attend(q, *new, **options) is None  # there is no kernel on a CPU
        assert layer.seen == other.seen
        expected = attention(q, *other.update(*new), causal=True, sliding_window=window, **options)
        torch.testing.assert_close(layer._attend(q, *new, **options), expected, rtol=1e-4, atol=1e-5)
        assert (layer.seen, layer.held) == (other.seen, other.held)
        assert torch.equal(layer.keys, other.keys)


# ---- damage


def test_one_grid_for_a_whole_tensor_loses_more_than_groups_and_rounding_it_again_loses_more_each_time():
    keys, values = tokens(400, 16)
    keys, values = keys * torch.logspace(-1, 1, 16), values * torch.linspace(0.2, 2, 400)[:, None]
    errors = {}
    for name, options in {
        "groups": {},
        "tensor": {"keys": "tensor"},
        "again": {"keys": "tensor", "again": True},
    }.items():
        cache = RoundedCache(small(num_hidden_layers=1), group_size=16, residual_length=0, **options)
        early = []
        for first in range(0, 400, 16):
            cache.update(keys[:, :, first : first + 16], values[:, :, first : first + 16], 0)
            early.append((cache.layers[0].keys[:, :, :16] - keys[:, :, :16]).square().mean())
        assert (early[0] == early[-1]) == (name != "again")
        errors[name] = float((cache.layers[0].keys - keys).square().mean())
    assert 10 * errors["groups"] < errors["tensor"]
    assert early[-1] > early[0]


def test_ways_of_rounding_that_are_not_accepted_are_named():
    for argument in ("keys", "values"):
        with pytest.raises(ValueError, match=argument):
            RoundedCache(small(), **{argument: "row"})
    with pytest.raises(ValueError, match="window of 9"):
        RoundedCache(transformers.MistralConfig(**SMALL, sliding_window=9), again=True)


def test_smollm2_keeps_its_distributions():
    """600 tokens in calls of 40, each read in full precision within its call; limits are three times and more what was measured."""
    model, tokenizer = load("smollm2-135m", device="cpu", dtype="float32")
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :600]
    assert ids.shape[1] == 600

    @torch.no_grad()
    def logits(cache: transformers.Cache) -> torch.Tensor:
        pieces = ids.split(40, 1)
        return torch.cat([model(piece, **{cache_argument(model): cache}).logits for piece in pieces], 1)

    expected = logits(DynamicCache(model.config))
    eight, four = (
        float(kl_divergence(expected, logits(QuantizedCache(model.config, scheme=scheme))).mean())
        for scheme in ("int8", "int4")
    )
    assert 0 < eight < 2e-4
    assert 10 * eight < four < 0.02
