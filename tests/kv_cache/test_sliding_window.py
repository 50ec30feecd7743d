"""A window with sinks shows a model exactly the shorter text that it promises, with every token at its place in that text."""

import copy
import warnings

import pytest
import torch
import transformers
from cache_cases import CONFIGURATIONS, SMALL, WINDOW
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from course_lib.kv_cache import DynamicCache, SlidingWindowCache
from course_lib.kv_cache.dynamic import GrowingLayer
from course_lib.kv_cache.sliding_window import SinkLayer
from course_lib.memory.meta import cache_argument

EXACT = {"atol": 1e-4, "rtol": 1e-4}


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def llama():
    return build(CONFIGURATIONS["llama"]())


def logits(model, ids, cache, **options):
    with torch.no_grad():
        return model(ids, **{cache_argument(model): cache}, **options).logits


def one_by_one(model, ids, cache):
    return torch.cat([logits(model, token, cache) for token in ids.split(1, dim=1)], 1)


def from_scratch(model, ids: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """Run a Llama over a text ``[length]``, keys unturned: at each token, those in sight are turned by their places among these."""
    config, layers = model.config, model.model.layers
    pairs = config.head_dim // 2
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(pairs) / pairs)
    groups = config.num_attention_heads // config.num_key_value_heads

    def turned(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Multiply complex numbers, ``[heads, length, head_dim]``."""
        numbers = torch.complex(x[..., :pairs], x[..., pairs:]) * torch.polar(
            torch.ones(len(places), pairs), places[:, None] * frequencies
        )
        return torch.cat((numbers.real, numbers.imag), -1)

    past = [[] for _ in layers]
    found = []
    for at, token in enumerate(ids):
        hidden = model.model.embed_tokens(token)
        sight = sorted({*range(min(sinks, at + 1)), *range(max(0, at - window + 1), at + 1)})
        places = torch.arange(len(sight))
        for layer, kept in zip(layers, past, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            q, k, v = (
                project(normed).view(-1, config.head_dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            kept.append((k, v))
            keys = torch.stack([kept[i][0] for i in sight], 1).repeat_interleave(groups, 0)
            values = torch.stack([kept[i][1] for i in sight], 1).repeat_interleave(groups, 0)
            scores = turned(q[:, None], places[-1:]) @ turned(keys, places).mT / config.head_dim**0.5
            hidden = hidden + attention.o_proj((scores.softmax(-1) @ values).reshape(-1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        found.append(model.lm_head(model.model.norm(hidden)))
    return torch.stack(found)[None]


@pytest.mark.parametrize(("window", "sinks"), [(6, 4), (6, 1), (6, 0), (1, 2), (9, 12)])
def test_each_token_stands_where_it_stands_in_the_shorter_text(llama, window, sinks):
    ids = torch.randint(1, 60, (1, 40))
    found = one_by_one(llama, ids, SlidingWindowCache(llama.config, window=window, sinks=sinks))
    with torch.no_grad():
        torch.testing.assert_close(found, from_scratch(llama, ids[0], window, sinks), **EXACT)


def test_turning_never_adds_up(llama):
    """After 2,000 turns a sink is as exact as after one."""
    cache = SlidingWindowCache(llama.config, window=4, sinks=2)
    first = torch.randn(2, 1, 2, 2, 8)
    cache.update(*first, 0)
    for _ in range(2000):
        cache.update(*torch.randn(2, 1, 2, 1, 8), 0)
    layer = cache.layers[0]
    assert torch.equal(layer._sink_keys, first[0])
    keys, values = cache.update(*torch.randn(2, 1, 2, 1, 8), 0)
    assert torch.equal(values[:, :, :2], first[1])
    # Turned by 2003 - 2 - 3 tokens, of which the norms know nothing and the products of the two sinks neither.
    torch.testing.assert_close(keys[:, :, 0].norm(dim=-1), first[0][:, :, 0].norm(dim=-1))
    torch.testing.assert_close(
        (keys[:, :, 0] * keys[:, :, 1]).sum(-1), (first[0][:, :, 0] * first[0][:, :, 1]).sum(-1), **EXACT
    )


def test_without_sinks_it_is_the_window_of_a_model_that_has_one(llama):
    config = transformers.MistralConfig(**SMALL, sliding_window=7)
    mistral = AutoModelForCausalLM.from_config(config).eval()
    mistral.load_state_dict(llama.state_dict())
    ids = torch.randint(1, 60, (2, 40))
    found = one_by_one(llama, ids, SlidingWindowCache(llama.config, window=7, sinks=0))
    expected = one_by_one(mistral, ids, transformers.DynamicCache(config=config))
    torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(found, logits(mistral, ids, None), **EXACT)


def test_padded_rows_keep_their_own_first_tokens(llama):
    """Every row of a padded batch says what it says alone, however much of it is padding."""
    length, window, sinks = 14, 5, 3
    first = torch.tensor([0, 9, 4, 12, 13])
    ids = torch.randint(1, 60, (len(first), length + 25))
    mask = (torch.arange(ids.shape[1]) >= first[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = SlidingWindowCache(llama.config, window=window, sinks=sinks)
    cache.first_tokens = first

    def together(begin, end):
        return logits(
            llama, ids[:, begin:end], cache, attention_mask=mask[:, :end], position_ids=positions[:, begin:end]
        )

    found = torch.cat([together(0, length)] + [together(i, i + 1) for i in range(length, ids.shape[1])], 1)
    for row, begin in enumerate(first.tolist()):
        alone = SlidingWindowCache(llama.config, window=window, sinks=sinks)
        text = ids[row : row + 1]
        expected = torch.cat(
            (logits(llama, text[:, begin:length], alone), one_by_one(llama, text[:, length:], alone)), 1
        )
        torch.testing.assert_close(found[row : row + 1, begin:], expected, **EXACT)


def test_a_call_of_several_tokens_sees_all_that_was_kept_and_itself(llama):
    cache = SlidingWindowCache(llama.config, window=6, sinks=2)
    for new, size, offset in ((20, 20, 0), (5, 2 + 5 + 5, 20 - 5 - 2), (1, 2 + 5 + 1, 25 - 5 - 2)):
        assert cache.get_mask_sizes(new, 0) == (size, offset)
        keys, _ = cache.update(*torch.randn(2, 1, 2, new, 8), 0)
        assert keys.shape[2] == size
    ids = torch.randint(1, 60, (1, 30))
    fresh = SlidingWindowCache(llama.config, window=6, sinks=2)
    torch.testing.assert_close(logits(llama, ids, fresh), logits(llama, ids, None), **EXACT)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 6), st.integers(0, 5))
def test_what_update_returns_in_calls_of_any_lengths(lengths, window, sinks):
    """Against a list of the tokens: first the sinks, then the window, values as they came, nothing twice."""
    cache = SlidingWindowCache(transformers.LlamaConfig(**SMALL), window=window, sinks=sinks)
    values = torch.empty(1, 2, 0, 8)
    for length in lengths:
        before = values.shape[2]
        new = torch.randn(1, 2, length, 8)
        values = torch.cat((values, new), 2)
        begin = max(0, before - (window - 1))
        sight = [*range(min(sinks, begin)), *range(begin, before + length)]
        assert cache.get_mask_sizes(length, 0) == (len(sight), begin - min(sinks, begin))
        _, found = cache.update(torch.randn(1, 2, length, 8), new, 0)
        assert torch.equal(found, values[:, :, sight])


def test_memory_does_not_grow_with_the_text(llama):
    cache = SlidingWindowCache(llama.config, window=64, sinks=4)
    sizes = set()
    for _ in range(1500):
        cache.update(*torch.randn(2, 1, 2, 1, 8), 0)
        sizes.add(cache.nbytes)
    per_token = 2 * (8 + 8) * 4
    assert max(sizes) <= (2 * 64 + 4) * per_token + 8 + 4 * 4
    assert cache.used_nbytes == (63 + 4) * per_token


def test_a_crop_within_reach_leaves_no_trace(llama):
    ids = torch.randint(1, 60, (1, 40))
    plain = SlidingWindowCache(llama.config, window=6, sinks=3)
    expected = one_by_one(llama, ids, plain)
    cache = SlidingWindowCache(llama.config, window=6, sinks=3)
    cache.activate_past_recording()
    for at in range(0, 40, 2):
        guessed = 1 + at % 9
        logits(llama, torch.randint(1, 60, (1, guessed)), cache)
        cache.crop(-guessed)
        found = one_by_one(llama, ids[:, at : at + 2], cache)
        torch.testing.assert_close(found, expected[:, at : at + 2], **EXACT)


def test_crop_to_zero_then_other_sinks(llama):
    ids = torch.randint(1, 60, (1, 20))
    cache = SlidingWindowCache(llama.config, window=6, sinks=3)
    cache.activate_past_recording()
    one_by_one(llama, torch.randint(1, 60, (1, 15)), cache)
    cache.crop(-15)
    expected = one_by_one(llama, ids, SlidingWindowCache(llama.config, window=6, sinks=3))
    torch.testing.assert_close(one_by_one(llama, ids, cache), expected, **EXACT)
    with pytest.raises(ValueError, match="no more tokens"):
        cache.crop(-21)


def test_what_was_dropped_cannot_come_back(llama):
    cache = SlidingWindowCache(llama.config, window=6, sinks=3)
    one_by_one(llama, torch.randint(1, 60, (1, 15)), cache)
    with pytest.raises(ValueError, match="window of 6 has dropped"):
        cache.crop(-1)


def test_copies_files_and_rows_take_their_sinks_along(llama, tmp_path):
    ids = torch.randint(1, 60, (3, 30))
    cache = SlidingWindowCache(llama.config, window=5, sinks=3)
    cache.first_tokens = torch.tensor([0, 4, 2])
    one_by_one(llama, ids[:, :20], cache)
    cache.save(tmp_path / "cache")
    loaded = SlidingWindowCache.load(tmp_path / "cache", llama.config)
    fork, rows = copy.deepcopy(cache), copy.deepcopy(cache)
    rows.reorder_cache(torch.tensor([2, 0, 0]))
    rows.batch_select_indices(torch.tensor([0, 2]))
    rows.batch_repeat_interleave(2)
    assert rows.first_tokens.tolist() == [2, 2, 0, 0]
    expected = one_by_one(llama, ids[:, 20:], cache)
    for other in (loaded, fork):
        assert torch.equal(one_by_one(llama, ids[:, 20:], other), expected)
    found = one_by_one(llama, ids[[2, 2, 0, 0], 20:], rows)
    torch.testing.assert_close(found, expected[[2, 2, 0, 0]], **EXACT)


def test_first_tokens_that_do_not_fit(llama):
    cache = SlidingWindowCache(llama.config, window=5)
    for wrong in (torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([-1])):
        with pytest.raises(ValueError, match="first_tokens is"):
            cache.first_tokens = wrong
    cache.first_tokens = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="first_tokens has 2 entries and the batch 3 rows"):
        cache.update(*torch.randn(2, 3, 2, 4, 8), 0)
    cache.update(*torch.randn(2, 2, 2, 4, 8), 0)
    cache.first_tokens = torch.tensor([0, 1])
    for other in (torch.tensor([0, 2]), torch.tensor([0]), None):
        with pytest.raises(ValueError, match="cannot change while the cache holds tokens"):
            cache.first_tokens = other
    cache.reset()
    assert cache.first_tokens is None
    cache.update(*torch.randn(2, 3, 2, 4, 8), 0)


def test_no_row_no_token_another_dtype(llama):
    cache = SlidingWindowCache(llama.config, window=3, sinks=2)
    for length in (0, 2, 7, 0, 1):
        keys, _ = cache.update(*torch.randn(2, 0, 2, length, 8), 0)
        assert keys.shape[0] == 0
    with pytest.raises(TypeError, match="reset"):
        cache.update(*torch.randn(2, 0, 2, 1, 8).bfloat16(), 0)
    cache.reset()
    for _ in range(9):
        keys, _ = cache.update(*torch.randn(2, 1, 2, 1, 8).bfloat16(), 0)
    assert keys.dtype == torch.bfloat16


def test_gradients_reach_the_keys_of_earlier_tokens(llama):
    cache = SlidingWindowCache(llama.config, window=4, sinks=2)
    earlier = torch.randn(1, 2, 6, 8, requires_grad=True)
    cache.update(earlier, earlier, 0)
    keys, _ = cache.update(*torch.randn(2, 1, 2, 1, 8), 0)
    keys.sum().backward()
    assert earlier.grad[:, :, 3:].eq(1).all()


def test_layers_keep_a_smaller_window_of_the_model():
    config = CONFIGURATIONS["gemma3"]()
    wide = SlidingWindowCache(config, window=20)
    assert [type(layer) for layer in wide.layers] == [GrowingLayer, SinkLayer, GrowingLayer]
    assert [layer.window for layer in wide.layers] == [WINDOW, 20, WINDOW]
    narrow = SlidingWindowCache(config, window=4, sinks=2)
    assert [layer.window for layer in narrow.layers] == [4, 4, 4]
    assert wide.is_sliding == narrow.is_sliding == [True, False, True]
    nearly = SlidingWindowCache(config, window=WINDOW - 1, sinks=1)
    assert [layer.window for layer in nearly.layers] == [WINDOW, WINDOW - 1, WINDOW]


def test_a_model_with_larger_windows_runs_in_smaller_ones():
    large, small = (build(transformers.MistralConfig(**SMALL, sliding_window=window)) for window in (12, 5))
    ids = torch.randint(1, 60, (1, 30))
    found = one_by_one(large, ids, SlidingWindowCache(large.config, window=5, sinks=0))
    torch.testing.assert_close(found, one_by_one(small, ids, DynamicCache(small.config)), **EXACT)
    sinks = one_by_one(large, ids, SlidingWindowCache(large.config, window=5, sinks=3))
    with torch.no_grad():
        torch.testing.assert_close(sinks, from_scratch(large, ids[0], 5, 3), **EXACT)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.LlamaConfig(
                **SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "dynamic",
        ),
        (
            transformers.Phi3Config(
                **SMALL,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 64,
                },
            ),
            "longrope",
        ),
        (transformers.DeepseekV2Config(num_hidden_layers=2), "compressed"),
    ],
)
def test_keys_that_cannot_be_moved_are_refused_unless_there_are_no_sinks(config, reason):
    with pytest.raises(ValueError, match=f"sinks must be 0 .*{reason}"):
        SlidingWindowCache(config)
    SlidingWindowCache(config, sinks=0)


@pytest.mark.parametrize(
    "config",
    [
        transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4),
        transformers.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
    ],
)
def test_models_that_reckon_with_every_key_are_refused(config):
    with pytest.raises(ValueError, match="no window can be imposed"):
        SlidingWindowCache(config, sinks=0)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MptConfig(d_model=32, n_layers=1, n_heads=4, vocab_size=60),
        transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 1}),
    ],
)
def test_one_layer_says_what_it_says_to_the_shorter_text(config):
    """With one layer a token's keys and values are its own, so that a text of the sinks and the window alone has the same end."""
    model = build(config)
    ids = torch.randint(1, 60, (2, 30))
    found = one_by_one(model, ids, SlidingWindowCache(config, window=7, sinks=3))
    shorter = torch.cat((ids[:, :3], ids[:, -7:]), 1)
    torch.testing.assert_close(found[:, -1], logits(model, shorter, None)[:, -1], **EXACT)


@pytest.mark.parametrize("options", [{"window": 0}, {"window": 1.5}, {"sinks": -1}, {"sinks": True}])
def test_numbers_out_of_range(llama, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SlidingWindowCache(llama.config, **options)


# ---- How each family of Transformers turns its keys

TINY = SMALL | {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 5),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    "num_experts_per_tok": 2,
    "rotary_dim": 4,
    "moe_intermediate_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COMMON = [
    "llama",
    "gemma3_text",
    "gpt_neox",
    "phi",
    "glm4",
    "cohere2",
    "gptj",
    "codegen",
    "smollm3",
    "exaone4",
    "gpt2",
    "opt",
]


def tiny(config_class):
    """Return a tiny model of a family, or None if this is not how it is made."""
    for names in (set(), {"rotary_dim", "n_embd", "n_layer", "n_head", "d_model", "n_heads", "n_layers"}):
        try:
            config = config_class(**{name: value for name, value in TINY.items() if name not in names})
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            with torch.device("meta"):
                if sum(p.numel() for p in model_class._from_config(config).parameters()) > 3e6:
                    return None
            return model_class._from_config(config).eval()
        except Exception:
            continue
    return None


def keys_at(model, position: int, cache) -> bool:
    """Run one token, which sees itself alone, so that only its position changes its keys."""
    try:
        logits(model, torch.tensor([[5]]), cache, position_ids=torch.tensor([[position]]), use_cache=True)
    except Exception:
        return False
    return True


def judge(config_class) -> str:
    """Say whether a sink that the cache moves by seven tokens has the keys that the model gives it there."""
    model = tiny(config_class)
    if model is None:
        return "not built"
    try:
        cache = SlidingWindowCache(model.config, window=1, sinks=1)
    except ValueError as error:
        refused = "sinks must be 0" in str(error) or "no window can be imposed" in str(error)
        return "refused" if refused else f"wrong: {error}"
    there = DynamicCache(model.config)
    if not (keys_at(model, 0, cache) and keys_at(model, 7, there)):
        return "not run"
    layers = [pair for pair in zip(cache.layers, there.layers, strict=True) if isinstance(pair[0], SinkLayer)]
    layers = [(ours, other) for ours, other in layers if ours.seen]
    if any(ours.seen > 1 for ours, _ in layers):
        return "not judged: a token is not alone"
    for ours, other in layers:
        moved, values = ours._placed(7, 1)
        if not torch.allclose(values, other.values, atol=1e-4):
            # The position is in what the layer reads: it is learned, and nothing is to be turned, or a recurrent layer's.
            if ours._turn is not None:
                return "not judged: values differ"
            if not torch.equal(moved, ours._sink_keys):
                return "wrong: turned without a turn"
        elif not torch.allclose(moved, other.keys, atol=1e-4):
            return "wrong: elsewhere than the model"
    return "right" if layers else "no layer"


@pytest.mark.parametrize("name", COMMON)
def test_common_families(name):
    assert judge(transformers.CONFIG_MAPPING[name]) == "right"


@pytest.mark.slow
def test_every_family_that_can_be_built_small_is_right_or_refused(capsys):
    verdicts: dict[str, list[str]] = {}
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
            verdicts.setdefault(judge(config_class), []).append(config_class.model_type)
    with capsys.disabled():
        for verdict, names in verdicts.items():
            print(f"\n{verdict}: {', '.join(names)}")
    assert not [verdict for verdict in verdicts if verdict.startswith("wrong")]
    assert len(verdicts["right"]) >= 60


@settings(max_examples=20)
@given(st.sampled_from(["yarn", "linear", "llama3", "default"]), st.sampled_from([1.0, 0.5]), st.integers(20, 60))
def test_scaled_and_partial_rotary_embeddings(kind, part, length):
    scaling = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "partial_rotary_factor": part,
    }
    config = transformers.PhiConfig(**SMALL, rope_parameters=scaling)
    model, cache = build(config), SlidingWindowCache(config, window=1, sinks=1)
    there = DynamicCache(config)
    assert keys_at(model, 0, cache)
    assert keys_at(model, length, there)
    for ours, other in zip(cache.layers, there.layers, strict=True):
        torch.testing.assert_close(ours._placed(length, 1)[0], other.keys, **EXACT)
